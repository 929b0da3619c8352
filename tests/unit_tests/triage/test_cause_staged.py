"""Rules that real failures asked for, each with what such a launch leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
from launches import WAITED, Launch, iterations, table, told, traceback

from pytest_megatron.triage.api import triage


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    return Launch(root=tmp_path)


def test_an_exception_with_torchs_rank_tag_ended_the_rank_whatever_is_printed_after_it(
    tmp_path: Path,
) -> None:
    """Two streams in one file come in any order; only uncaught exceptions have the tag."""
    tagged = "".join(
        f"[default3]:[rank3]: {line}\n" for line in traceback("KeyError: 'labels'").splitlines()
    )
    after = "".join(f"[default3]:{line}\n" for line in iterations(9).splitlines())
    (tmp_path / "output.log").write_text(tagged + after + table({3: 1}, first=3))
    assert told(tmp_path) == ("exception", 3, False)


@pytest.mark.parametrize(
    ("message", "file", "family"),
    [
        ("EOFError", "torch/serialization.py", "ckpt_truncated"),
        ("OSError: [Errno 22] Invalid argument", "torch/serialization.py", "ckpt_truncated"),
        ("OSError: [Errno 22] Invalid argument", "numpy/core.py", "exception"),
        ("TimeoutError: timed out", "http/client.py", "http_read"),
        ("TimeoutError: timed out", "selectors.py", "exception"),
        ("ConnectionResetError: [Errno 104] reset", "http/client.py", "http_read"),
        ("ConnectionResetError: [Errno 104] reset", "torch/utils/data/dataloader.py", "sigkill"),
    ],
)
def test_words_that_say_little_are_told_apart_by_where_they_were_raised(
    launch: Launch, message: str, file: str, family: str
) -> None:
    text = traceback(message).replace("torch/distributed/distributed_c10d.py", file)
    launch.write(1, text)
    launch.ends({0: -15, 1: 1, 2: -15, 3: -15}, first=1)
    assert told(launch.root)[:2] == (family, 1)


def test_a_rank_that_did_not_hear_the_agents_sigterm_was_not_killed_from_outside(
    launch: Launch,
) -> None:
    for rank in (0, 2, 3):
        launch.raises(rank, WAITED)
    forced = (
        "W1121 09:53:46.38 29107 torch/distributed/elastic/multiprocessing/api.py:1047] Unable to "
        "shutdown process 101 via 15, forcefully exiting via 9\n"
    )
    launch.launcher(forced + table({0: 1, 1: -9, 2: 1, 3: 1}, first=0))
    assert told(launch.root) == ("nccl_timeout", 1, False)


def test_an_agent_that_was_stopped_is_a_failure_though_no_rank_says_so(launch: Launch) -> None:
    raised = (
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 9 got signal: 15"
    )
    text = traceback(raised).replace("distributed_c10d.py", "run.py")
    launch.launcher(text)
    assert told(launch.root) == ("preempt", None, False)


@pytest.mark.parametrize(
    "line",
    [
        "GPU health: no GPU has fallen off the bus",
        "0 uncorrectable ECC errors on 8 GPUs",
        "double free or corruption checks: MALLOC_CHECK_ unset",
    ],
)
def test_a_line_that_denies_is_no_cause(line: str, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(f"{line}\n{iterations()}")
    assert triage([tmp_path]).groups == ()


def test_the_rank_whose_fingerprint_is_another_one_is_the_one_to_look_at(launch: Launch) -> None:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL each rank names its own collective and another's."""
    for rank, other in ((0, 2), (1, 2), (2, 0), (3, 2)):
        launch.raises(rank, f"RuntimeError: Detected mismatch {_print(rank)}, but {_print(other)}")
    launch.ends({0: 1, 1: -15, 2: -15, 3: 1}, first=3)
    assert told(launch.root) == ("desync", 2, False)


def _print(rank: int) -> str:
    op = "BROADCAST" if rank == 2 else "ALLREDUCE"
    call = f"SequenceNumber=3, OpType={op}, TensorShape=[68], TensorDtypes=Float, X=1"
    says = f"Rank {rank} is running collective: CollectiveFingerPrint({call})"
    return f"between collectives on ranks. {says}"


WORK = (
    "ProcessGroupNCCL.cpp:607] [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL("
)
WAITS = f"[rank{{0}}]:[E321 02:07:08.4 {WORK}SeqNum=1580, OpType=ALLREDUCE, NumelIn=4)\n"
DETECTED = (
    "[rank{0}]:[E321 02:07:08.4 ProcessGroupNCCL.cpp:1664] [PG 1 Rank {0}] Exception (either an "
    "error or timeout) detected by watchdog at work: 1580, last enqueued NCCL work: 1582\n"
)
DUMPS = (
    "[rank1]:[E901 05:20:03.1 ProcessGroupNCCL.cpp:1746] [PG ID 0 PG GUID 0 Rank 1] Received a "
    "dump signal due to a collective timeout from rank 0. Last enqueued NCCL work: {0}\n"
)
REMOTE = "torch.distributed.DistBackendError: x.hpp:268\nncclRemoteError: remote process exiting"
INTERNAL = "torch.distributed.DistBackendError: NCCL error in: ../x.cpp:1691, internal error"
OF_CUDA = "n:1:2 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'\n"
OOM_KILL = (
    "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some have been OOM Killed.\n"
)
BUILD = "CalledProcessError: Command '['/usr/bin/gcc', 'main.c']' returned non-zero exit status 1."
LOST_GPU = "kernel: NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus.\n"


def of_rank(rank: int, message: str) -> str:
    return "".join(f"[rank{rank}]: {line}\n" for line in traceback(message).splitlines())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # A rank is absent only where nothing shows that it had called the collective.
        (WAITS.format(0) + DETECTED.format(1), ("nccl_timeout", None, False)),
        (WAITS.format(0) + DUMPS.format(1582), ("nccl_timeout", None, False)),
        (WAITS.format(0) + DUMPS.format(1579), ("nccl_timeout", 1, False)),
        (WAITS.format(0) + WAITS.format(2), ("nccl_timeout", 1, False)),
        (of_rank(3, REMOTE), ("nccl_system", None, True)),
        (LOST_GPU + of_rank(3, "RuntimeError: CUDA error: unknown error"), ("off_bus", 3, True)),
        (of_rank(3, "RuntimeError: CUDA error: unknown error"), ("cuda_setup", 3, False)),
        (of_rank(0, f"torch._inductor.exc.InductorError: {BUILD}"), ("exception", 0, False)),
        (OF_CUDA + traceback(INTERNAL), ("cuda_oom", None, False)),
        (OF_CUDA + traceback("KeyError: 3"), ("exception", None, False)),
        (OOM_KILL + WAITS.format(0), ("sigkill", None, False)),
        ("  Last State:  Terminated\n    Reason:   OOMKilled\n", ("sigkill", None, False)),
        ("E   Failed: Timeout (>300.0s) from pytest-timeout.\n", ("time_limit", None, False)),
        ("E   Failed: DID NOT RAISE TimeoutError\n", ("assert", None, False)),
    ],
)
def test_the_cause_is_what_the_lines_of_ranks_machines_and_tools_say_together(
    tmp_path: Path, text: str, expected: tuple[str, int | None, bool]
) -> None:
    (tmp_path / "job.log").write_text(text)
    assert told(tmp_path) == expected


@pytest.mark.parametrize(
    "text",
    [
        "[titan] 2025-03-12 11:10:21,511 - root - INFO - Training completed\n",
        "".join(
            f"[rank0]:{line}\n"
            for line in [
                *traceback("ConnectionResetError: [Errno 104] reset").splitlines(),
                "push failed, kept for later",
                *iterations(20).splitlines(),
                "[after training is done] datetime: 2026-03-02 10:10:10 ",
            ]
        ),
    ],
    ids=["a logger's word", "caught, behind the launcher's prefix"],
)
def test_a_training_that_ended_well_did(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.log").write_text(text)
    found = triage([tmp_path])
    assert (found.groups, found.unclear) == ((), ())


CONVOLUTION = "Input type ({}) and weight type ({}) should be the same"


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("Expected all tensors to be on the same device, but found two", "device"),
        (CONVOLUTION.format("torch.FloatTensor", "torch.cuda.FloatTensor"), "device"),
        (CONVOLUTION.format("torch.cuda.FloatTensor", "torch.cuda.HalfTensor"), "dtype"),
        (CONVOLUTION.format("float", "struct c10::Half"), "dtype"),
        ("Expected query, key, and value to have the same dtype", "dtype"),
        ("expected m1 and m2 to have the same dtype, but got: float", "dtype"),
        ("scatter(): Expected self.dtype to be equal to src.dtype", "dtype"),
        ("the source and destination dtypes match, got Float", "dtype"),
        ("Expected object of scalar type Long but got Float", "dtype"),
        ("Expected tensor for argument #1 to have scalar type Long", "dtype"),
        ("uniform dtype but got torch.bfloat16 and torch.float32", "dtype"),
        ("\"addmm_impl_cpu_\" not implemented for 'Half'", "dtype"),
        ("expected query and key to have the same shape", "shape"),
        ("The size of tensor a (3) must match the size of tensor b (4)", "shape"),
    ],
)
def test_tensors_that_do_not_fit_are_sent_to_look_at_what_differs(
    tmp_path: Path, said: str, kind: str
) -> None:
    (tmp_path / "job.log").write_text(traceback(f"RuntimeError: {said}"))
    (group,) = triage([tmp_path]).groups
    assert (group.first.signature, group.first.family) == (f"{kind}_mismatch", "mismatch")
    assert kind == "shape" or kind in str(group.first.advice)
    assert ("size" in str(group.first.advice)) is (kind == "shape")
