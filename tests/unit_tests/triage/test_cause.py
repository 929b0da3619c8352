"""Which rank and which event a failure began with, from files as launches leave them."""

from __future__ import annotations

from pathlib import Path

import pytest
from launches import (
    GLOO,
    IT,
    LOST,
    PORT_TAKEN,
    WAITED,
    Launch,
    diagnosed,
    iterations,
    table,
    told,
    traceback,
)

from pytest_megatron.triage.api import triage

NO_CHILD = "subprocess.CalledProcessError: Command '['x']' returned non-zero exit status 1."
NO_PIPE = "BrokenPipeError: [Errno 32] Broken pipe"


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    return Launch(root=tmp_path)


def test_a_rank_that_raised_is_the_cause_and_not_those_that_lost_it(launch: Launch) -> None:
    launch.raises(1, LOST)
    launch.raises(2, "ValueError: bad batch")
    launch.raises(3, LOST)
    # gloo aborts a process whose peers are gone, so that the agent sees a signal.
    launch.ends({0: -15, 1: -15, 2: -6, 3: 1}, first=3)
    found = diagnosed(launch.root)
    assert (found.signature, found.root_ranks, found.transient) == ("exception", (2,), False)
    assert found.text == (
        "Rank 2 of 4 raised ValueError: bad batch at train.py:12 in step, after iteration 6 of 20. "
        "Ranks 0-1, 3 only follow from it."
    )
    (line,) = found.evidence
    assert (line.file, line.line, line.rank, line.text) == (
        str(launch.root / "logs/none_x/attempt_0/2/stderr.log"),
        *(8, 2, "ValueError: bad batch"),
    )
    assert found.exits == {"0": "SIGTERM", "1": "SIGTERM", "2": "SIGABRT", "3": "exit code 1"}


@pytest.mark.parametrize(
    ("code", "family"), [(-9, "sigkill"), (-11, "segfault"), (3, "exit"), (2, "config")]
)
def test_a_rank_that_ended_without_a_word_is_known_by_its_exit(
    launch: Launch, code: int, family: str
) -> None:
    launch.raises(1, LOST)
    launch.ends({0: -15, 1: 1, 2: code, 3: -15}, first=2)
    assert told(launch.root) == (family, 2, False)
    assert diagnosed(launch.root).evidence[0].text.startswith(f"exitcode  : {code} (pid: 102)")


def test_a_rank_that_ended_well_too_early_is_the_one_that_the_agent_does_not_list(
    launch: Launch,
) -> None:
    for rank in (0, 1, 3):
        launch.raises(rank, LOST)
    launch.ends({0: -15, 1: 1, 3: 1}, first=1)
    assert told(launch.root) == ("exit", 2, False)


@pytest.mark.parametrize(
    ("message", "family"),
    [
        (NO_CHILD, "exit"),
        (NO_PIPE, "network"),
        ("ray.exceptions.ActorDiedError: The actor died unexpectedly.", "exit"),
    ],
)
@pytest.mark.parametrize(
    ("others", "ends"),
    [(LOST, {0: 1, 1: 1, 2: 1, 3: 1}), (WAITED, {0: 1, 1: 1, 2: 1, 3: 1}), ("", {1: 1}), ("", {})],
    ids=["lost", "waited", "stopped", "no-agent"],
)
def test_a_rank_that_lost_a_child_or_a_pipe_said_why(
    launch: Launch, message: str, family: str, others: str, ends: dict[int, int]
) -> None:
    for rank in (0, 2, 3):
        launch.write(rank, traceback(others) if others else "", iterations())
    launch.raises(1, message)
    if ends:
        launch.ends({0: -15, 2: -15, 3: -15} | ends, first=1)
    found = diagnosed(launch.root)
    assert (found.family, found.root_ranks, found.transient) == (family, (1,), False)
    assert found.text.startswith(f"Rank 1 of 4 raised {message.rstrip('.')} at train.py:12 in step")


@pytest.mark.parametrize("label", ["", "1: "])
@pytest.mark.parametrize("message", [NO_CHILD, NO_PIPE])
def test_a_lost_child_or_pipe_is_found_in_the_log_of_a_step(
    tmp_path: Path, label: str, message: str
) -> None:
    """An srun shows the lines of its tasks with or without labels, and only bad ends."""
    lines = [f"{label}{line}" for line in traceback(message).splitlines()]
    others = ["0: building"] * 4 if label else []
    end = "srun: error: node1: task 1: Exited with exit code 1"
    (tmp_path / "job.log").write_text("\n".join([*others, *lines, end, ""]))
    found = diagnosed(tmp_path)
    assert found.root_ranks == (1,)
    assert f"raised {message.rstrip('.')} at train.py:12 in step" in found.text


def test_a_lost_child_is_found_on_the_terminal_of_torchs_agent(launch: Launch) -> None:
    (launch.root / "job.log").write_text(traceback(NO_CHILD) + table({0: 1, 1: -15}, first=0))
    found = diagnosed(launch.root / "job.log")
    assert (found.signature, found.root_ranks) == ("child_failed", (0,))


def test_what_accelerate_raises_of_its_program_hides_no_traceback(tmp_path: Path) -> None:
    said = (
        "Traceback (most recent call last):\n"
        '  File "/venv/bin/accelerate", line 8, in <module>\n'
        "    sys.exit(main())\n"
        '  File "/venv/lib/python3.11/site-packages/accelerate/commands/launch.py", line 763, in '
        "simple_launcher\n"
        "    raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)\n"
        f"{NO_CHILD}\n"
    )
    (tmp_path / "job.log").write_text(traceback(NO_PIPE) + said)
    assert diagnosed(tmp_path).family == "exit"
    (tmp_path / "job.log").write_text(traceback("ValueError: bad batch") + said)
    assert diagnosed(tmp_path).text.startswith("The program raised ValueError: bad batch at train")


@pytest.mark.parametrize("has_agent", [True, False])
def test_a_pipe_that_breaks_when_another_rank_ends_well_too_early_is_not_the_cause(
    launch: Launch, *, has_agent: bool
) -> None:
    launch.raises(0, LOST)
    launch.raises(1, NO_PIPE)
    launch.raises(3, LOST)
    if has_agent:
        launch.ends({0: -15, 1: 1, 3: 1}, first=1)
    assert told(launch.root) == ("exit", 2, False)


@pytest.mark.parametrize(
    ("error", "family"),
    [
        ("an illegal memory access was encountered", "illegal_access"),
        ("device-side assert triggered", "device_assert"),
        ("unspecified launch failure", "misaligned"),
    ],
)
def test_a_watchdog_that_a_cuda_error_ended_tells_why_its_rank_aborted(
    launch: Launch, error: str, family: str
) -> None:
    said = (
        "[rank2]:[E410 01:50:33.889423318 ProcessGroupNCCL.cpp:1895] [PG ID 0 PG GUID "
        "0(default_pg) Rank 2] Process group watchdog thread terminated with exception: CUDA "
        f"error: {error}\n"
    )
    launch.write(2, said)
    launch.ends({0: -15, 1: -15, 2: -6, 3: -15}, first=2)
    assert told(launch.root) == (family, 2, False)


def test_the_rank_that_missed_a_collective_is_the_one_that_did_not_wait(launch: Launch) -> None:
    for rank in (0, 1, 3):
        launch.raises(rank, WAITED)
    launch.ends({0: 1, 1: -15, 2: -15, 3: -15}, first=0)
    found = diagnosed(launch.root)
    assert (found.family, found.root_rank) == ("nccl_timeout", 2)
    assert "Ranks 0-1, 3 waited in all_reduce." in found.text


def test_the_rank_that_called_another_collective_is_found_by_its_traceback(launch: Launch) -> None:
    for rank in (0, 1, 3):
        launch.raises(rank, WAITED)
    launch.raises(2, WAITED, call="broadcast")
    launch.ends(dict.fromkeys(range(4), 1), first=0)
    assert told(launch.root) == ("desync", 2, False)


def test_the_rank_that_others_name_is_the_one_that_is_missing(launch: Launch) -> None:
    launch.raises(0, "RuntimeError: [Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 9 ms")
    launch.ends({0: 1, 1: -15, 2: -15, 3: -15}, first=0)
    assert diagnosed(launch.root).root_ranks == (1, 3)


WATCHDOG = (
    "[rank{rank}]:[E1121 09:22:33.100000000 ProcessGroupNCCL.cpp:688] [Rank {rank}] Watchdog "
    "caught collective operation timeout: WorkNCCL(SeqNum=5, OpType={op}, NumelIn=4, NumelOut=4, "
    "Timeout(ms)=10000) ran for 10001 milliseconds before timing out.\n"
    "[rank{rank}]:[E1121 09:22:33.200000000 ProcessGroupNCCL.cpp:2277] [PG ID 0 PG GUID "
    "0(default_pg) Rank {rank}] failure detected by watchdog at work sequence id: 5 PG status: "
    "last enqueued work: 5, last completed work: 4\n"
)


def watchdog(rank: int, *, op: str = "ALLREDUCE") -> str:
    return WATCHDOG.format(rank=rank, op=op)


def test_of_ranks_whose_watchdogs_spoke_the_one_in_another_collective_is_the_cause(
    launch: Launch,
) -> None:
    for rank in range(4):
        launch.write(rank, watchdog(rank, op="BROADCAST" if rank == 1 else "ALLREDUCE"))
    launch.ends({0: -6, 1: -6, 2: -6, 3: -6}, first=0)
    found = diagnosed(launch.root)
    assert (found.family, found.root_rank) == ("desync", 1)
    assert "Rank 1 waited in BROADCAST #5 of 4 elements." in found.text


def test_a_rank_whose_watchdog_was_silent_missed_the_collective(launch: Launch) -> None:
    for rank in (0, 2, 3):
        launch.write(rank, watchdog(rank))
    launch.ends({0: -6, 1: -15, 2: -6, 3: -6}, first=0)
    assert told(launch.root) == ("nccl_timeout", 1, False)


def test_how_far_ranks_came_behind_a_collective_that_none_ended_is_no_fault(
    launch: Launch,
) -> None:
    for rank, last in enumerate((6, 7, 7, 5)):
        said = watchdog(rank).replace("last enqueued work: 5", f"last enqueued work: {last}")
        launch.write(rank, said)
    launch.ends({0: -6, 1: -6, 2: -6, 3: -6}, first=0)
    assert told(launch.root) == ("nccl_timeout", None, False)


def test_of_two_failures_the_earlier_one_is_the_cause(launch: Launch) -> None:
    launch.raises(0, "ValueError: later")
    launch.raises(3, "KeyError: 'earlier'")
    launch.error_file(0, "ValueError: later", 1_700_000_010)
    launch.error_file(3, "KeyError: 'earlier'", 1_700_000_001)
    launch.ends({0: 1, 3: 1}, first=0)
    assert diagnosed(launch.root).root_rank == 3


def test_times_within_two_seconds_are_the_same_and_a_genuine_cause_comes_first(
    launch: Launch,
) -> None:
    launch.raises(0, PORT_TAKEN)
    launch.raises(3, "ZeroDivisionError: division by zero")
    launch.error_file(0, PORT_TAKEN, 1_700_000_001)
    launch.error_file(3, "ZeroDivisionError: division by zero", 1_700_000_002)
    launch.ends({0: 1, 3: 1}, first=0)
    assert told(launch.root) == ("exception", 3, False)


def test_what_every_rank_raised_is_told_once(launch: Launch) -> None:
    for rank in range(4):
        launch.raises(rank, "ModuleNotFoundError: No module named 'apex'")
    launch.ends(dict.fromkeys(range(4), 1), first=2)
    found = diagnosed(launch.root)
    assert (found.is_every_rank, found.root_ranks) == (True, (0, 1, 2, 3))
    assert found.text.startswith("Every one of 4 ranks raised ModuleNotFoundError")


def test_a_nan_tells_its_rank_and_iteration(launch: Launch) -> None:
    launch.write(3, stdout=iterations() + " iteration        7/      20 | lm loss: NAN |\n")
    launch.launcher()
    found = diagnosed(launch.root)
    assert (found.family, found.root_rank) == ("nonfinite_loss", 3)
    assert (found.iteration, found.last_iteration) == (7, 20)


@pytest.mark.parametrize(
    ("port", "signature", "transient"),
    [
        pytest.param(45123, "port_in_use", True, id="handed-out"),
        pytest.param(29500, "port_chosen", False, id="always-the-same"),
    ],
)
def test_a_port_in_use_is_only_in_the_launchers_log(
    tmp_path: Path, port: int, signature: str, *, transient: bool
) -> None:
    """A port that a launcher always takes is taken again; one from the kernel is another one."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "launcher.log").write_text(
        traceback(
            "torch.distributed.DistNetworkError: The server socket has failed to listen on any "
            f"local network address. port: {port}, useIpv6: false, code: -98, name: EADDRINUSE"
        )
    )
    found = diagnosed(tmp_path)
    assert (found.signature, found.root_rank) == (signature, None)
    assert found.transient is transient


def test_ranks_with_different_tensors_are_a_desync(launch: Launch) -> None:
    """Real: gloo ends the rank that receives too much; it raises nothing in Python."""
    launch.write(
        1,
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
        f"  what():  [enforce fail at {GLOO[1:]}/pair.cc] op.preamble.length <= op.nbytes. "
        "32 vs 4. Received data size doesn't match expected size. \n",
    )
    for rank in (0, 2):
        launch.raises(rank, f"RuntimeError: {GLOO}/pair.cc:537] Connection reset by peer")
    launch.ends({0: -15, 1: -6, 2: -15, 3: -15}, first=1)
    assert told(launch.root) == ("desync", 1, False)


@pytest.mark.parametrize(
    ("line", "family", "transient"),
    [
        pytest.param("79, pid=1, GPU has fallen off the bus.", "off_bus", True, id="79"),
        pytest.param("48, pid=1, DBE", "ecc_dbe", True, id="48"),
        pytest.param("45, pid=1, Ch 8", "illegal_access", False, id="45"),
        pytest.param("31, pid=1, MMU fault", "illegal_access", False, id="31"),
    ],
)
def test_a_gpu_that_failed_explains_the_error_that_cuda_reports(
    launch: Launch, line: str, family: str, *, transient: bool
) -> None:
    """Xid 43 and 45 only say that a process ended; 31 is the program's own fault."""
    launch.raises(2, "RuntimeError: CUDA error: an illegal memory access was encountered")
    launch.ends({0: -15, 1: -15, 2: 1, 3: -15}, first=2)
    (launch.root / "dmesg.txt").write_text(f"[  12.3] NVRM: Xid (PCI:0000:3b:00): {line}\n")
    assert told(launch.root) == (family, 2, transient)


WAITS = (
    "Fatal Python error: Aborted\n\n"
    "Current thread 0x00007ff81be70b80 (most recent call first):\n"
    '  File "/usr/lib/python3.11/threading.py", line 331 in wait\n'
    '  File "/job/train.py", line 12 in step\n'
    '  File "/job/train.py", line 31 in <module>\n\n'
)
WORKER = (  # of the rank's data loader, with the frames that it was forked from
    "Fatal Python error: Aborted\n\n"
    "Thread 0x00007ff7f65716c0 (most recent call first):\n"
    '  File "/usr/lib/python3.11/multiprocessing/queues.py", line 231 in _feed\n\n'
    "Current thread 0x00007ff81be70b80 (most recent call first):\n"
    '  File "/job/data.py", line 5 in __getitem__\n'
    '  File "/venv/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 334 in '
    "_worker_loop\n"
    '  File "/job/data.py", line 9 in __iter__\n'
    '  File "/job/train.py", line 31 in <module>\n\n'
)
TORN = (  # two workers that write at once
    "Fatal Python error: Fatal Python error: Aborted\n\n"
    "Current thread 0xCurrent thread 0x00007fab6ee6ab80 (most recent call first):\n"
    "00007fab6ee6ab80 (most recent call first):\n"
    '  File   File "/job/data.py"/job/data.py, line ", line 55 in __getitem__\n'
    "5 in __getitem__\n"
)


@pytest.mark.parametrize("others", [(), (WORKER,), (WORKER, WORKER), (TORN,)])
def test_a_rank_is_where_it_was_and_not_where_workers_of_its_loader_were(
    launch: Launch, others: tuple[str, ...]
) -> None:
    launch.write(1, WAITS + "".join(others))
    launch.ends({0: -15, 1: -6, 2: -15, 3: -15}, first=1)
    assert " at train.py:12 in step" in diagnosed(launch.root).text


def test_the_kernels_record_explains_a_killed_rank(launch: Launch) -> None:
    launch.ends({0: -15, 1: -9, 2: -15, 3: -15}, first=1)
    with (launch.root / "launcher.log").open("a") as file:
        file.write("slurmstepd: error: Detected 1 oom_kill event in StepId=41.0.\n")
    found = diagnosed(launch.root)
    assert (found.signature, found.root_rank) == ("host_oom_kill", 1)


def test_a_jobs_time_limit_explains_what_its_ranks_end_with(launch: Launch) -> None:
    launch.ends(dict.fromkeys(range(4), -15), first=0)
    with (launch.root / "launcher.log").open("a") as file:
        file.write(
            "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-21T09:00:00 "
            "DUE TO TIME LIMIT ***\n"
        )
    assert told(launch.root) == ("time_limit", None, False)


def test_a_failed_import_under_a_failed_assertion_is_not_the_cause(launch: Launch) -> None:
    launch.write(
        1,
        traceback("ModuleNotFoundError: No module named 'fast'")
        + "\nDuring handling of the above exception, another exception occurred:\n\n"
        + traceback("AssertionError: shapes differ"),
    )
    launch.ends({1: 1}, first=1)
    assert told(launch.root) == ("assert", 1, False)


def test_what_a_vague_exception_was_raised_from_is_the_cause(launch: Launch) -> None:
    launch.write(
        1,
        traceback("OSError: [Errno 28] No space left on device")
        + "\nThe above exception was the direct cause of the following exception:\n\n"
        + traceback("RuntimeError: cannot save"),
    )
    launch.ends({1: 1}, first=1)
    assert told(launch.root) == ("disk", 1, False)


def test_what_a_clean_up_raises_after_the_cause_is_not_the_cause(launch: Launch) -> None:
    launch.write(
        1,
        traceback("TypeError: no")
        + "\nDuring handling of the above exception, another exception occurred:\n\n"
        + traceback(LOST),
    )
    launch.ends({1: 1}, first=1)
    assert diagnosed(launch.root).text.startswith("Rank 1 of 4 raised TypeError: no")


ALARMING = """\
INFO: CUDA out of memory was avoided by a smaller batch
0 uncorrectable ECC errors on 8 GPUs
retrying after Connection reset by peer (1/3)... ok
tests/test_comm.py::test_nccl_timeout[Watchdog] PASSED
Segmentation fault handler installed
NaN check passed: loss nan check passed
docs: raises torch.OutOfMemoryError: CUDA out of memory if the batch is too large
UserWarning: EADDRINUSE: Address already in use; took another port
node1:1:1 [0] NCCL WARN Call to connect returned Connection refused, retrying
this run may be CANCELLED DUE TO TIME LIMIT
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
"""


@pytest.mark.parametrize("has_launcher", [True, False])
def test_a_sound_run_with_alarming_words_is_sound(launch: Launch, *, has_launcher: bool) -> None:
    for rank in range(4):
        caught = "ERROR:root:caught\n" + traceback("RuntimeError: Connection refused")
        launch.write(rank, ALARMING + caught + ALARMING, stdout=ALARMING + iterations(20))
    if has_launcher:
        launch.launcher("W1121 09:00:00 Setting OMP_NUM_THREADS environment variable\n")
    assert triage([launch.root]).groups == ()


VERBS = "n7:88:120 [0] misc/ibvwrap.cc:244 NCCL WARN Call to ibv_modify_qp failed with "
BROKEN = "n7:88:120 [0] NCCL WARN NET/IB : Got completion with status=12 opcode=0 vendor err 129\n"
COMPLETE = "n7:88:120 [0] NCCL INFO comm 0x55 rank 0 nranks 4 cudaDev 0 - Init COMPLETE\n"
XID = "kernel: NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus.\n"
OF_NCCL = "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled system error\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (VERBS + "error Cannot allocate memory\n", ("ib_memlock", False)),
        (VERBS + "error Cannot allocate memory\n" + traceback(OF_NCCL), ("ib_memlock", False)),
        (VERBS + "error Invalid argument\n" + traceback(OF_NCCL), ("ib_refused", False)),
        (VERBS + "22 Invalid argument, on dev mlx5_0:1\n", ("ib_refused", False)),
        (VERBS + "error Operation not permitted\n", ("ib_refused", False)),
        (VERBS + "110 Connection timed out, on dev mlx5_0:1\n", ("ib_link", True)),
        (iterations(6) + BROKEN + IT.format(n=7) + watchdog(0), ("ib_link", True)),
        (iterations(6) + XID + IT.format(n=7) + watchdog(0), ("gpu_lost", True)),
        # What ranks went on after explains nothing.
        (VERBS + "error Bad address\n" + watchdog(0), ("nccl_timeout", False)),
        (VERBS + "110 Connection timed out\n" + COMPLETE + watchdog(0), ("nccl_timeout", False)),
        (BROKEN + iterations(6) + watchdog(0), ("nccl_timeout", False)),
        (XID + iterations(6) + watchdog(0), ("nccl_timeout", False)),
    ],
)
def test_what_a_call_of_infiniband_gave_says_whether_its_link_is_broken(
    tmp_path: Path, text: str, expected: tuple[str, bool]
) -> None:
    (tmp_path / "job.log").write_text(text)
    found = diagnosed(tmp_path)
    assert (found.signature, found.transient) == expected


NAMED = (
    "n7:88:120 [0] NCCL WARN NET/IB: Got completion from peer 10.0.0.2<41912> with "
    "status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_RDMA_WRITE(1) reqSize=0 vendor_err=129 hca m4\n"
)
PEER = "NCCL error: remote process exited or there was a network error, NCCL version 2.26.2"
ENDED = f"Process group watchdog thread terminated with exception: {PEER}"
OF_RANK = "[PG ID 0 PG GUID 0(default_pg) Rank 1]"
SPOKE = "[rank1]:[E804 09:18:02.118203311 ProcessGroupNCCL.cpp:1895] "
STUCK = "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress"
THROWN = "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  "


@pytest.mark.parametrize(
    ("said", "code", "expected"),
    [
        (f"{NAMED}{SPOKE}{OF_RANK} {ENDED}\n{THROWN}{OF_RANK} {ENDED}\n", -6, ("ib_link", True)),
        (f"{BROKEN}{SPOKE}{OF_RANK} {ENDED}\n", -6, ("ib_link", True)),
        (f"{NAMED}{THROWN}{OF_RANK} {ENDED}\n", -6, ("ib_link", True)),
        (f"{NAMED}{THROWN}[Rank 1] NCCL {ENDED[14:]}\n", -6, ("ib_link", True)),
        (f"{NAMED}{THROWN}{PEER}\n", -6, ("ib_link", True)),
        (f"{NAMED}{SPOKE}{OF_RANK} {STUCK}\n", -6, ("ib_link", True)),
        # The link is not why.
        (f"{NAMED}{THROWN}vector::_M_range_check\n", -6, ("exception", False)),
        (f"{NAMED}{SPOKE}{OF_RANK} {ENDED}\n", -11, ("native_crash", False)),
        (f"{NAMED}{SPOKE}{OF_RANK} {ENDED}\n{traceback('KeyError: 3')}", 1, ("exception", False)),
        (NAMED, -6, ("native_crash", False)),
        (f"{NAMED.replace('129', '81').replace('(12)', '(4)')}{THROWN}{PEER}\n", -6, (None, False)),
        (f"{THROWN}CUDA error: misaligned address\n", -6, ("kernel_fault", False)),
    ],
)
def test_a_rank_that_its_watchdog_aborted_failed_by_what_its_log_says_of_the_network(
    tmp_path: Path, said: str, code: int, expected: tuple[str | None, bool]
) -> None:
    text = iterations(6) + said + table({1: code}, first=1)
    (tmp_path / "job.log").write_text(text)
    found = diagnosed(tmp_path)
    assert (expected[0] and found.signature, found.transient) == expected


def test_a_warning_of_a_rank_is_no_failure_where_another_ends_well(launch: Launch) -> None:
    for rank in range(4):
        launch.write(rank, (VERBS + "error Connection timed out\n") * (rank == 1), iterations(20))
    launch.write(0, "[after training is done] datetime: 2026-11-21 09:00:00 \n")
    assert (triage([launch.root]).groups, triage([launch.root]).unclear) == ((), ())


@pytest.mark.parametrize(
    ("last", "said", "is_clear"),
    [
        (18, "[after training is done] datetime: 2026-11-21 09:00:00 ", True),
        (9, "[after training is done] datetime: 2026-11-21 09:00:00 ", False),
        (9, "exiting program at iteration 9", True),
    ],
)
def test_a_rank_whose_training_stops_short_shows_that_no_good_end_is_the_whole(
    launch: Launch, last: int, said: str, *, is_clear: bool
) -> None:
    """Of every third iteration the 18th is the last that is logged of 20."""
    for rank in range(4):
        logged = "".join(IT.format(n=n) for n in range(3, last + 1, 3))
        launch.write(rank, stdout=logged if rank == 1 else "")
    launch.write(0, f"{said}\n")
    found = triage([launch.root])
    assert (found.groups, found.unclear == ()) == ((), is_clear)


def test_what_srun_says_of_a_task_is_no_line_of_its_program(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("srun: error: n1: task 0: Exited with exit code 1\n")
    assert "Rank 0 ended with exit code 1" in diagnosed(tmp_path).text


def test_a_rank_that_failed_without_a_traceback_is_known_by_its_own_error_line(
    tmp_path: Path,
) -> None:
    said = "error: the vocabulary file has 3 columns, expected 2\n"
    (tmp_path / "job.log").write_text(
        VERBS + f"error Bad address\n{COMPLETE}{iterations(6)}{said}" + table({1: 1}, first=1)
    )
    assert told(tmp_path) == ("exit", 1, False)
    assert "wrote error: the vocabulary file" in diagnosed(tmp_path).text


def test_alarming_words_of_others_do_not_hide_the_cause(launch: Launch) -> None:
    """An assertion after a retry that helped is an assertion."""
    launch.write(0, ALARMING)
    launch.write(1, ALARMING + traceback("AssertionError: TimeoutError was not raised"))
    launch.ends({0: -15, 1: 1}, first=1)
    assert told(launch.root) == ("assert", 1, False)


def test_every_ranks_log_counts_not_only_that_of_teed_ones(launch: Launch) -> None:
    """A message of rank 2 is found, which no terminal shows."""
    launch.write(2, watchdog(2))
    launch.launcher("[default0]: iteration 3/20 |\n[default3]: iteration 3/20 |\n")
    launch.ends({2: -6}, first=2)
    assert diagnosed(launch.root).family == "nccl_timeout"


def test_an_earlier_attempt_is_no_evidence_for_a_later_one(tmp_path: Path) -> None:
    """Each is judged from its own files."""
    first = Launch(root=tmp_path, directory="logs/none_x/attempt_0")
    first.raises(1, PORT_TAKEN)
    second = Launch(root=tmp_path, directory="logs/none_x/attempt_1")
    second.raises(3, "ValueError: bad batch")
    second.ends({3: 1}, first=3)
    found = {g.first.signature: g.first for g in triage([tmp_path]).groups}
    assert found["exception"].root_rank == 3
    assert not found["exception"].transient
    assert found["port_in_use"].unit.endswith("attempt_0")


STACK = (
    "Fatal Python error: Aborted\n\nCurrent thread 0x00007f37 (most recent call first):\n"
    '  File "/usr/lib/python3.11/threading.py", line 1590 in _shutdown\n'
)
LIMIT = (
    "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-21T09:00:00 DUE TO TIME LIMIT ***"
)
RAISED = "rank 1 of 4 raised ValueError: shard 1 is empty at train.py:12 in step, after iteration 6"


@pytest.mark.parametrize(("code", "stack"), [(-6, STACK), (-9, "")])
def test_what_a_rank_raised_before_it_hung_in_its_clean_up_is_the_cause(
    launch: Launch, code: int, stack: str
) -> None:
    """The signal that ended all of them at the time limit is not."""
    launch.write(1, traceback("ValueError: shard 1 is empty") + stack)
    launch.ends(dict.fromkeys(range(4), code), first=0)
    found = diagnosed(launch.root)
    assert found.headline.startswith(RAISED)
    assert "; did not exit afterwards" in found.headline
    assert ("it was at threading.py:1590 in _shutdown" in found.headline) is bool(stack)


def test_a_signal_of_one_rank_is_the_cause_whatever_was_caught_before(launch: Launch) -> None:
    launch.write(1, traceback("ValueError: shard 1 is empty"))
    launch.ends({0: -15, 1: -9, 2: -15, 3: -15}, first=1)
    assert told(launch.root) == ("sigkill", 1, False)


def test_a_time_limit_after_an_exception_only_follows(launch: Launch) -> None:
    tagged = "".join(
        f"[rank1]: {line}\n" for line in traceback("ValueError: shard 1 is empty").splitlines()
    )
    log = launch.root / "slurm-7.out"
    log.write_text(f"{iterations()}{tagged}{LIMIT}\n")
    (group,) = triage([log]).groups
    assert (group.first.family, group.first.root_rank) == ("exception", 1)
    assert "; did not exit afterwards" in group.first.headline
    assert "DUE TO TIME LIMIT" in group.first.text
    log.write_text(f"{iterations()}{LIMIT}\n{tagged.replace('ValueError', 'SignalException')}")
    (group,) = triage([log]).groups
    assert group.first.family == "time_limit"
