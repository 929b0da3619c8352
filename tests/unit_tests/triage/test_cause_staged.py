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
