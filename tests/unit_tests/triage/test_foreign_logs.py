"""Logs that no launcher of ours wrote: of runners, of other launchers, cut, with holes in them.

No evidence of success is no success: such a log is a failure, or unknown, but never fine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from launches import iterations, told, traceback

from pytest_megatron.triage.api import Triage, triage
from pytest_megatron.triage.logs.unwrap import learn


def of_log(tmp_path: Path, text: str) -> Triage:
    (tmp_path / "job.log").write_text(text, encoding="utf-8")
    return triage([tmp_path / "job.log"])


def family(found: Triage) -> str | None:
    said = found.as_json()["family"]
    return None if said is None else str(said)


@pytest.mark.parametrize(
    "holes",
    [
        pytest.param("loading\n\0" + "x" * 40 + "\n", id="one"),  # torch's DataLoader handler
        pytest.param("\0" * 9000, id="hole"),  # cut while it was written without O_APPEND
    ],
)
def test_a_nul_hides_no_log(tmp_path: Path, holes: str) -> None:
    (tmp_path / "job.log").write_text(holes + traceback("ValueError: bad batch"))
    for path in (tmp_path, tmp_path / "job.log"):
        (group,) = triage([path]).groups
        assert group.first.text.startswith("The program raised ValueError: bad batch")


def test_an_exception_without_a_text_is_named_by_its_class(tmp_path: Path) -> None:
    """And not by what its `__str__` raised in a handler, such as torch's of error files."""
    mute = traceback("job.Bad: <exception str() failed>")
    during = "\nDuring handling of the above exception, another exception occurred:\n\n"
    broken = traceback("RuntimeError: no text", call="__str__")
    (group,) = of_log(tmp_path, f"{mute}{during}{broken}").groups
    assert "raised job.Bad: <exception str() failed>" in group.first.text
    own = traceback("RuntimeError: no batch")
    (group,) = of_log(tmp_path, f"{mute}{during}{own}").groups
    assert "raised RuntimeError: no batch" in group.first.text


def test_what_is_no_text_is_noted_and_not_dropped(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("1 passed in 0.10s\n")
    (tmp_path / "core.out").write_bytes(bytes(range(256)) * 64)
    found = triage([tmp_path])
    assert found.notes == (f"{tmp_path / 'core.out'}: is no text, not read",)
    assert found.groups == ()


@pytest.mark.parametrize(
    "before",
    ["INFO:train:loading", "ERROR:train:giving up", "2026-11-21 09:00:00 WARNING slow disk"],
)
def test_a_traceback_that_ends_a_log_was_not_caught(tmp_path: Path, before: str) -> None:
    found = of_log(tmp_path, f"{before}\n{traceback('KeyError: 3')}")
    assert family(found) == "exception"


def test_a_traceback_after_which_the_program_went_on_was_caught(tmp_path: Path) -> None:
    caught = f"ERROR:train:no metrics\n{traceback('KeyError: 3')}going on\n"
    assert family(of_log(tmp_path, caught)) == "unknown"
    assert family(of_log(tmp_path, caught + iterations(20))) is None


@pytest.mark.parametrize(
    "line",
    [
        "[after training is done] datetime: 2026-11-21 09:00:00 ",
        "===== 3 passed, 1 warning in 0.12s =====",
        "3 passed in 0.12s",
        "OK (skipped=1)",
        "{'train_runtime': 1.2, 'train_samples_per_second': 3.4, 'epoch': 1.0}",
        "`Trainer.fit` stopped: `max_epochs=3` reached.",
        "\x1b[32;1mJob succeeded\x1b[0;m",
        " iteration       20/      20 | lm loss: 1.9E+00 |",
    ],
)
def test_a_good_end_is_known_by_what_programs_and_runners_write_then(
    tmp_path: Path, line: str
) -> None:
    found = of_log(tmp_path, f"loading\n{line}\n")
    assert (family(found), found.unclear) == (None, ())


PASSED = "===== 5 passed in 1.20s ====="


@pytest.mark.parametrize(
    ("behind", "expected"),
    [
        ("Aborted (core dumped)", "segfault"),
        ("run.sh: line 4: 12345 Aborted                 (core dumped) python train.py", "segfault"),
        ("Illegal instruction (core dumped)", "segfault"),
        ("Fatal Python error: Aborted", "segfault"),
        ("make: *** [Makefile:12: test] Error 2", "exit"),
        ("make[1]: *** [test] Error 137", "sigkill"),
        ("ERROR: script returned exit code 1\nFinished: FAILURE", "exit"),
        ("Build step 'Execute shell' marked build as failure", "unknown"),
        ("ninja: build stopped: subcommand failed.", "unknown"),
        ('The command "pytest" exited with 1.', "unknown"),
        ("npm ERR! code ELIFECYCLE", "unknown"),
        ("FAILED (errors=1)", "unknown"),
        ("terminate called without an active exception", "unknown"),
        ("JobState=FAILED Reason=NonZeroExitCode", "unknown"),
        (" iteration       60/     100 | lm loss: 9.1E+00 |", "unknown"),
        ("Epoch 1/3", "unknown"),
        (" 60%|######    | 60/100 [00:10<00:05, 5.9it/s]", "unknown"),
        ("slurmstepd: error: *** STEP 40.0 ON n1 CANCELLED AT 2023-12-05T07:16:01 ***", "unknown"),
        ("Fatal Python error: _enter_buffered_busy: could not acquire lock", "segfault"),
        ("+ torchrun resume.py", "unknown"),
        ("===== test session starts =====\ncollected 3 items\n\ntests/test_b.py ..", "unknown"),
        (traceback("KeyError: 3") + "going on\n" * 9, "unknown"),
    ],
)
def test_a_good_end_after_which_something_failed_or_began_is_none(
    tmp_path: Path, behind: str, expected: str
) -> None:
    """In place of a build step's own end it may be the last thing that a person reads."""
    for end in (PASSED, "[after training is done] datetime: 2026-03-02 10:10:10 "):
        assert family(of_log(tmp_path, f"{end}\n{behind}\n")) == expected
        assert family(of_log(tmp_path, f"{end}\n{behind}\n{PASSED}\nJob succeeded\n")) is None


@pytest.mark.parametrize(
    "behind",
    [
        "0 failed, 0 errors",
        "tests failed: 0",
        '{"errors": [], "failed": false}',
        "mean error: 0.003",
        "no test failures",
        "exit code: 0",
        "JobState=COMPLETED ExitCode=0:0",
        "Epoch 3/3",
        "Evaluating iter 1/2\nEvaluating iter 2/2",
        "WARNING: failed to remove /tmp/x",
        "+ rm -rf /tmp/x",
        "Cleaning up project directory\nFinished: SUCCESS",
        "n:1:2 [0] NCCL INFO comm 0x55 rank 0 nranks 4 - Abort COMPLETE",
        "[rank1]:[W1121 09:00:01.1 TCPStore.cpp:125] [c10d] recvValue failed: Connection reset",
        "Terminate orphan process: pid (2143) (python)",
        "Error rate: 0.02 %",
        "Exception ignored in: <function A.__del__ at 0x7>\n" + traceback("TypeError: None"),
        "Exception in thread Thread-3 (_pin):\n" + traceback("ConnectionResetError: reset"),
        "/lib/python3.12/tempfile.py:10: ResourceWarning: cleaning up <Directory '/tmp/failed'>",
        "sys:1: RuntimeWarning: coroutine 'aborted' was never awaited",
        "Number of failed ranks: 0",
        *(
            f"{traceback('KeyError: 3').partition(chr(10))[0]}\n"
            f'  File "/usr/lib/python3.12/multiprocessing/{place}\n    done()\n{error}'
            for place, error in (
                ('resource_tracker.py", line 239, in main', "KeyError: '/psm_c33ddd4f'"),
                ('queues.py", line 264, in _feed', "BrokenPipeError: [Errno 32] Broken pipe"),
            )
        ),
    ],
)
def test_what_may_stand_behind_a_good_end_spoils_it_not(tmp_path: Path, behind: str) -> None:
    before = "WARNING: disk is slow\nERROR:train:no metrics\n" + traceback("KeyError: 3")
    found = of_log(tmp_path, f"{before}{iterations(20)}{PASSED}\n{behind}\n")
    assert (family(found), found.unclear) == (None, ())


@pytest.mark.parametrize(
    "line",
    [
        "loading",
        "1 failed, 3 passed in 0.12s",
        "FAILED (failures=1)",
        " iteration        7/      20 | lm loss: 1.9E+00 |",
        "Job succeeded? nobody knows",
    ],
)
def test_anything_else_is_no_good_end(tmp_path: Path, line: str) -> None:
    assert family(of_log(tmp_path, f"{line}\n")) is not None


@pytest.mark.parametrize(
    ("line", "expected", "signature"),
    [
        ("##[error]Process completed with exit code 1.", "exit", "step_failed"),
        ("Error: Process completed with exit code 137.", "sigkill", "sigkill"),
        ("##[error]fetch failed", "exit", "step_failed"),
        ("##[error]Command '['p']' died with <Signals.SIGSEGV: 11>.", "segfault", "native_crash"),
        ("command terminated with exit code 137", "sigkill", "sigkill"),
        ("\x1b[31;1mERROR: Job failed: exit code 1\x1b[0;m", "exit", "step_failed"),
        ("ERROR: Job failed (system failure): prepare environment", "exit", "step_failed"),
        (
            "\x1b[0K\x1b[31;1mERROR: Job failed: execution took longer than 1h0m0s seconds",
            *("time_limit", "ci_time_limit"),
        ),
        (
            "ERROR: Job failed (system failure): timed out waiting for pod to start",
            *("container", "ci_container"),
        ),
        ("ERROR: Job failed: command terminated with exit code 1", "exit", "step_failed"),
        ("[launch.py:321:sigkill_handler] ['p'] exits with return code = -9", "sigkill", "sigkill"),
        ("[launch.py:321:sigkill_handler] ['p'] exits with return code = 1", "exit", "step_failed"),
        ("Command '['p']' died with <Signals.SIGSEGV: 11>.", "segfault", "native_crash"),
        ("==== 2 failed, 5 passed in 3.10s ====", "exit", "tests_failed"),
        (
            "a.sh: line 28:  8156 Killed                  python3 main.py",
            *("sigkill",),
            "killed_in_shell",
        ),
    ],
)
def test_what_a_runner_says_of_a_step_is_a_failure(
    tmp_path: Path, line: str, expected: str, signature: str
) -> None:
    (group,) = of_log(tmp_path, f"2023-02-09T20:11:49.9484027Z {line}\n").groups
    first = group.first
    assert (first.family, first.signature) == (expected, signature)
    assert not first.transient


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "slurmstepd: error: *** JOB 608 ON n1 CANCELLED AT 2022-08-12T02:06:12 DUE TO JOB "
            "REQUEUE ***\nslurmstepd: error: Failed to send MESSAGE_TASK_EXIT: Connection refused\n"
            "srun: error: n1: tasks 2-3: Exited with exit code 1",
            ("slurm_preempted", True),
            id="a requeue, and what follows from it",
        ),
        pytest.param(
            "slurmstepd: error: pyxis: container start failed with error code: 1\n"
            "slurmstepd: error: pyxis: couldn't start container\n"
            "srun: error: n1: task 0: Exited with exit code 1",
            ("pyxis_failed", False),
            id="a container of Slurm, and its task",
        ),
        pytest.param(
            "[train] [nvidia-smi(stdout)] Failed to initialize NVML: Driver/library version "
            "mismatch\n[train] No GPUs were found available on this machine.\n"
            "Error: Process completed with exit code 75.",
            ("nvml_mismatch", False),
            id="a driver that was replaced",
        ),
        pytest.param(
            "Status:         Failed\nReason:         Evicted\n"
            "Message:        The node was low on resource: memory.",
            ("pod_evicted", False),
            id="a pod that took too much memory",
        ),
        pytest.param(
            "E: Failed to fetch http://archive.ubuntu.com/x.deb  Could not connect to "
            "archive.ubuntu.com:80 (40.1.1.2), connection timed out\n"
            "E: Unable to fetch some archives, maybe run apt-get update?\n"
            "Error: Process completed with exit code 100.",
            ("fetch_failed", True),
            id="a mirror that does not answer",
        ),
        pytest.param(
            "E: Failed to fetch http://archive.ubuntu.com/x.deb  404  Not Found [IP: 1.2.3.4 80]\n"
            "Error: Process completed with exit code 100.",
            ("package_missing", False),
            id="a mirror that has no such package",
        ),
        pytest.param(
            "ssh: Could not resolve hostname github.com: Temporary failure in name resolution\n"
            "fatal: Could not read from remote repository.\n\nPlease make sure you have the "
            "correct access rights\nand the repository exists.",
            ("name_not_resolved", True),
            id="a name, and what git makes of it",
        ),
        pytest.param(
            "fatal: unable to connect to github.com:\ngithub.com[0: 1.2.3.4]: errno=Connection "
            "timed out\n\nfatal: clone of 'git://github.com/a/b.git' into submodule path 'b' "
            "failed",
            ("git_protocol", False),
            id="a protocol that is gone",
        ),
    ],
)
def test_what_tools_say_of_a_step_tells_why_it_failed(
    tmp_path: Path, text: str, expected: tuple[str, bool]
) -> None:
    (group,) = of_log(tmp_path, f"{text}\n").groups
    assert (group.first.signature, group.first.transient) == expected


def test_a_traceback_that_is_cut_off_is_that_of_the_rank_whose_lines_it_has(
    tmp_path: Path,
) -> None:
    lines = traceback("torch.OutOfMemoryError: CUDA out of memory. Tried").splitlines()[1:]
    found = of_log(tmp_path, "".join(f"[rank2]: {line}\n" for line in lines))
    first = found.groups[0].first
    assert (first.family, first.root_rank) == ("cuda_oom", 2)


@pytest.mark.parametrize(
    "failed",
    [
        "================= 1 failed, 1107 deselected, 2 rerun in 1.66s ==================",
        "!!!!!!!!!!!!!!!!!!!!!!!!!!!!!! KeyboardInterrupt !!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!",
    ],
)
def test_tests_that_passed_say_nothing_of_others_that_failed_before_them(
    tmp_path: Path, failed: str
) -> None:
    passed = "====================== 1 passed, 3020 deselected in 8.94s ======================"
    assert family(of_log(tmp_path, f"{failed}\n{passed}\n")) == "unknown"
    assert family(of_log(tmp_path, f"{failed}\n{passed}\nJob succeeded\n")) is None


ECC = "CUDA error: uncorrectable ECC error encountered"
XID = "NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus."


def raised(said: str, code: str = "check(log)") -> str:
    """The traceback of a program of one module."""
    head = 'Traceback (most recent call last):\n  File "/w/t.py", line 3, in check\n'
    return f"{head}    {code}\n{said}\n"


def grouped(said: str, other: str) -> str:
    """What Python 3.11 prints of a group of two exceptions."""
    part = textwrap.indent(raised(said), "    | ")
    return (
        "  + Exception Group Traceback (most recent call last):\n"
        '  |   File "/w/t.py", line 9, in <module>\n'
        "  | ExceptionGroup: two (2 sub-exceptions)\n"
        f"  +-+---------------- 1 ----------------\n{part}"
        f"    +---------------- 2 ----------------\n    | {other}\n"
        "    +------------------------------------\n"
    )


def by_pytest(said: str, printed: str = "") -> str:
    return (
        f">       check(log)\n\nE       {said}\n\nt.py:3: error\n"
        f"------------- Captured stdout call -------------\n{printed}\n"
        "=========== short test summary info ============\n"
        f"FAILED t.py::test_x - {said}\n============ 1 failed in 0.06s ============\n"
    )


FOLLOWED = "\nDuring handling of the above exception, another exception occurred:\n\n"
FORMS: dict[str, Callable[[str], str]] = {
    "plain": raised,
    "code": lambda said: raised(said.partition(":")[0], f"raise Bad(log, {said!r})"),
    "lines": lambda said: raised(said.replace(": ", ": of this log:\nfirst\n", 1) + "\nlast"),
    "long": lambda said: raised(said.replace(": ", ": log:\n" + "a\n" * 30, 1)) + "b\n" * 20,
    "chain": lambda said: raised(said) + FOLLOWED + raised(f"RuntimeError: {said}"),
    "again": lambda said: raised(f"RuntimeError: a worker failed: {said}"),
    "text": lambda said: raised("RuntimeError: a worker failed:\n") + raised(said),
    "group": lambda said: grouped(said, f"RuntimeError: {ECC}"),
    "pytest": lambda said: by_pytest(said, f"fatal: the remote end hung up unexpectedly\n{ECC}"),
    "ranks": lambda said: textwrap.indent(by_pytest(said, ECC), "[rank1]: "),
    "label": lambda said: textwrap.indent(by_pytest(said, ECC), "1: ", lambda _: True),
    "assert": lambda said: by_pytest("assert 'x' in log", said.partition(": ")[2]),
    "test id": lambda said: by_pytest("RuntimeError: boom") + f"t.py::test_x[{said}] PASSED\n",
    "json": lambda said: json.dumps({"level": "error", "message": said}) + "\n",
    "logger": lambda said: f"2026-03-02 10:10:10,123 ERROR check: {said}\n",
}


@pytest.mark.parametrize("form", FORMS)
def test_an_exception_of_the_programs_own_is_never_transient_whatever_it_quotes(
    tmp_path: Path, form: str
) -> None:
    for name in ("AssertionError", "ValueError", "checks.KeyError"):
        for quoted in (
            ECC,
            XID,
            "slurmstepd: error: *** JOB 3 ON n CANCELLED AT 2021-06-18T13:05:36 DUE TO PREEMPTION",
            "socket.gaierror: [Errno -3] Temporary failure in name resolution",
        ):
            said = of_log(tmp_path, f"loading\n{FORMS[form](f'{name}: {quoted}')}").as_json()
            assert said["transient"] is False, (name, quoted, said["signature"])
            families = ("assert", "exception", "unknown")  # the last one where it may be caught
            assert said["family"] in families, (name, quoted, said["signature"])


@pytest.mark.parametrize(
    "said",
    [
        f"CheckFailed: {ECC}",
        f"CheckFailed: {XID}",
        "CheckFailed: Temporary failure in name resolution",
        "CheckFailed: EADDRINUSE",
        f"RuntimeError: the log has {ECC!r}",
        f"RuntimeError: expected no line such as {XID!r}",
    ],
)
def test_an_exception_that_the_program_defines_or_that_quotes_is_its_own(
    tmp_path: Path, said: str
) -> None:
    """Python names the module of a type, but of its own and of the program's."""
    first = of_log(tmp_path, raised(said)).groups[0].first
    assert (first.family, first.transient) == ("exception", False)


@pytest.mark.parametrize(
    "text",
    [
        raised(f"RuntimeError: {ECC}"),
        by_pytest(f"RuntimeError: {ECC}"),
        grouped(f"RuntimeError: {ECC}", "OSError: closed"),
        raised("ValueError: caught") + "going on\n" + iterations(20) + f"what():  {ECC}\n",
        json.dumps({"level": "error", "message": ECC}) + "\n",
        "n:1:2 [3] NCCL WARN Cuda failure 'uncorrectable ECC error encountered'\n",
        raised(f"torch.AcceleratorError: {ECC}"),
        raised(f"jaxlib.xla_extension.XlaRuntimeError: INTERNAL: {ECC}"),
    ],
    ids=["raised", "pytest", "group", "after a caught one", "json", "nccl", "torch", "jax"],
)
def test_what_a_machine_says_itself_is_no_quotation(tmp_path: Path, text: str) -> None:
    first = of_log(tmp_path, text).groups[0].first
    assert (first.signature, first.transient) == ("ecc_dbe", True)


def test_a_step_that_failed_says_less_than_what_failed_in_it(tmp_path: Path) -> None:
    stamp = "2023-02-09T20:11:49.9484027Z "
    lines = [
        *traceback("ValueError: bad").splitlines(),
        "##[error]Process completed with exit code 1.",
    ]
    found = of_log(tmp_path, "".join(f"{stamp}{line}\n" for line in lines))
    assert "raised ValueError: bad" in found.groups[0].first.text


OF_STATE = "RuntimeError: Error(s) in loading state_dict for GPT:\n\tsize mismatch for embedding"
SAID_OF_STATE = "RuntimeError: Error(s) in loading state_dict for GPT: size mismatch for embedding"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (f"{OF_STATE}\n\tsize mismatch for output", SAID_OF_STATE),
        (
            "RuntimeError: \n        Start it in main.\n        See docs.",
            "RuntimeError: Start it in main",
        ),
        (
            'ScannerError: not allowed\n  in "c.yaml", line 3\nbye',
            'not allowed in "c.yaml", line 3',
        ),
        (
            "config.Invalid: 1 error for Train\noptim.lr\n  Field required\n    See docs.",
            "config.Invalid: 1 error for Train optim.lr Field required",
        ),
        ("ValueError: failed:\n=======\nno batch", "ValueError: failed: no batch"),
        # What another program may have written is no part of it.
        ("ValueError: no batch\nbye\n", "ValueError: no batch"),
        ("ValueError: no batch\n(min, max) time (ms):\n    setup: 3\n", "ValueError: no batch"),
        ("RuntimeError: CUDA error: x\nFor debugging consider y\n", "RuntimeError: CUDA error: x"),
    ],
)
def test_a_headline_has_what_a_message_of_several_lines_says(
    tmp_path: Path, message: str, said: str
) -> None:
    (group,) = of_log(tmp_path, traceback(message)).groups
    assert f"{said} at train.py:12 in step" in group.first.text


@pytest.mark.parametrize(
    "prefix",
    [
        "09:34:27 ",
        "May 07 08:33:15 ",
        "[2024-05-22T12:12:46.601Z] ",
        "2024-05-22T12:12:46.601511Z 01O ",
        "build\tRun tests\t2024-05-22T12:12:46.6015110Z ",
        "(RayWorkerWrapper pid=4009) ",
        "(Worker pid=4009, ip=10.0.0.1) ",
        "trainer-1    | ",
        "#12 47.38 ",
        "[1,3]<stderr>:",
        "[2026-02-17T08:12:14Z] ",
        "\x1b_bk;t=1771315934000\x07",
        "finetune/0 [default2]:[rank2]:",
        "(APIServer pid=1) (EngineCore_DP0 pid=68) ERROR 02-06 16:34:06 [core.py:936] ",
        "(VllmWorker rank=0 pid=281) ERROR 07-15 08:54:44 [multiproc_executor.py:522] ",
        "[pod/train-0/pytorch] ",
        "Aug 19 18:34:30 node1 vllm[8707]: ",
        "2025-05-30 18:26:22.906 | ",
        "172.27.221.56: ",
        "\x1b[32mtrain-0\x1b[0m \x1b[32;1mpytorch\x1b[0m ",
        "2026-03-02T10:15:20.123456789+08:00 stderr F ",
        "2026-03-02T10:15:20+0000 node-a train.sh[4711]: ",
        "<14>1 2026-03-02T10:15:20.123Z gpu7 train 4711 - - ",
        "1772446520.123456 ",
        "INFO:train:",
        "2026-03-02 10:15:20,123 - train - INFO - ",
        "[2026-03-02 10:15:20,123][train][INFO] - ",
        "2026-03-02 10:15:20.123 | INFO     | runner:pump:31 - ",
        "[2026-03-02, 10:15:20 UTC] {subprocess.py:93} INFO - ",
        "[prterun-gpu7-4711@1,0]<stdout>: ",
        "(head, rank=0, pid=3721) ",
        "2026-03-02T10:15:20Z\tINFO\trunner\t",
        "13:33:50  ",  # Jenkins' Timestamper
    ],
)
def test_what_stands_before_every_line_hides_no_traceback(tmp_path: Path, prefix: str) -> None:
    lines = ["loading", *traceback(OF_STATE).splitlines()]
    found = of_log(tmp_path, "".join(f"{prefix}{line}\n" for line in lines))
    assert f"raised {SAID_OF_STATE} at train.py:12 in step" in found.groups[0].first.text


def test_evidence_names_the_line_of_the_log_as_it_is(tmp_path: Path) -> None:
    lines = ["loading it", *traceback("ValueError: bad batch").splitlines(), "bye"]
    found = of_log(tmp_path, "".join(f"2026-03-02 10:15:20 {line}\n" for line in lines))
    (evidence,) = found.groups[0].first.evidence
    assert (evidence.line, evidence.text) == (len(lines) - 1, "ValueError: bad batch")


@pytest.mark.parametrize(
    ("prefix", "rank"),
    [
        ("[1,3]<stderr>:", 3),
        ("[1,mpirank:3,algo-1]<stdout>:", 3),
        ("3: ", 3),
        ("[3] ", 3),
        ("[trainer3]:", 3),
        ("(head, rank=3, pid=3721) ", 3),
        ("10:15:20 ", None),
        ("[pod/train-3/pytorch] ", None),
        ("(RayTrainWorker pid=3) ", None),
        ("[node3]: ", None),
    ],
)
def test_the_rank_that_a_prefix_names_is_kept(
    tmp_path: Path, prefix: str, rank: int | None
) -> None:
    lines = ["loading the data", *traceback("ValueError: bad batch").splitlines()]
    found = of_log(tmp_path, "".join(f"{prefix}{line}\n" for line in lines))
    assert found.groups[0].first.root_rank == rank


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param([f" iteration {n:8d}/      20 | loss: 1 |" for n in range(1, 21)], id="steps"),
        pytest.param([f"iteration {n}/20 | loss: 1 |" for n in range(1, 21)], id="bare steps"),
        pytest.param([f"srun: error: n{n}: task {n}: Killed" for n in range(4)], id="srun"),
        pytest.param([f"FAILED t.py::test_{n} - KeyError: {n}" for n in range(4)], id="pytest"),
        pytest.param([f"E       KeyError: {n}" for n in range(4)], id="lines of a report"),
        pytest.param([f"[gw{n}] node down: Not properly terminated" for n in range(4)], id="xdist"),
        pytest.param(
            [f"2026-03-02 10:15:20 INFO train: step {n}" for n in range(9)]
            + [
                "2026-03-02 10:15:20 ERROR train: kept for later",
                *traceback("OSError").split("\n"),
            ],
            id="a logger, whose tracebacks are bare",
        ),
        pytest.param([json.dumps({"step": n, "loss": n / 7}) for n in range(9)], id="metrics"),
        pytest.param([f"step={n} loss={n / 7}" for n in range(9)], id="pairs"),
    ],
)
def test_what_lines_of_a_program_share_is_no_wrapping(lines: list[str]) -> None:
    assert learn(lines) == ()


def test_what_a_logger_caught_is_no_failure(tmp_path: Path) -> None:
    caught = "ERROR:train:upload failed\n" + traceback("OSError: torn").rstrip()
    first, last = (f"INFO:train:{say}\nINFO:train:step {n}" for n, say in enumerate(("up", "on")))
    assert family(of_log(tmp_path, f"{first}\n{caught}\n{last}")) == "unknown"


def test_a_program_that_torchs_agent_saw_fail_is_known_by_its_untagged_traceback(
    tmp_path: Path,
) -> None:
    """The logs of one node go to one terminal, without names of ranks."""
    agent = (
        "E1121 09:35:01.854000 99 torch/distributed/elastic/multiprocessing/api.py:1002] failed "
        "(exitcode: 1) local_rank: 0 (pid: 100) of binary: python\n"
    )
    (tmp_path / "job.log").write_text(traceback("ValueError: bad batch") + agent)
    assert told(tmp_path) == ("exception", 0, False)


def test_the_traceback_of_a_worker_of_ray_is_what_was_raised(tmp_path: Path) -> None:
    """`ray.get` raises `RayTaskError`, whose text is the worker's traceback."""
    text = (
        "Traceback (most recent call last):\n"
        '  File "/job/main.py", line 9, in <module>\n'
        "    ray.get(runner.run.remote())\n"
        '  File "/venv/lib/python3.11/site-packages/ray/_private/worker.py", line 2755, in get\n'
        "    raise value.as_instanceof_cause()\n"
        "ray.exceptions.RayTaskError(RuntimeError): ray::Runner.run() (pid=881, ip=10.0.0.1)\n"
        '  File "/job/trainer.py", line 12, in step\n'
        "    loss.backward()\n"
        "RuntimeError: CUDA error: an illegal memory access was encountered\n"
    )
    (group,) = of_log(tmp_path, text).groups
    assert group.first.family == "illegal_access"
    assert "was encountered at trainer.py:12 in step" in group.first.text


def test_what_a_worker_of_vllm_raised_is_the_cause_of_its_engines_end(tmp_path: Path) -> None:
    """The engine logs it, raises it again, and the server only says that the engine failed."""
    engine, server = "(EngineCore_DP0 pid=68) ", "(APIServer pid=1) "
    cause = traceback("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB.")
    wrapped = traceback(
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core "
        "proc(s): {'EngineCore_DP0': 1}"
    )
    error = f"{engine}ERROR 02-06 16:34:06 [core.py:936] "
    lines = [
        f"{error}EngineCore failed to start.",
        *(f"{error}{line}" for line in cause.splitlines()),
        f"{engine}Process EngineCore_DP0:",
        *(f"{engine}{line}" for line in cause.splitlines()),
        *(f"{server}{line}" for line in wrapped.splitlines()),
    ]
    (group,) = of_log(tmp_path, "\n".join(lines)).groups
    assert group.first.family == "cuda_oom"
    (group,) = of_log(tmp_path, wrapped).groups
    assert group.first.signature == "vllm_engine_failed"


def test_the_traceback_with_values_that_loguru_writes_is_read(tmp_path: Path) -> None:
    text = (
        "2021-12-06 12:28:05 | ERROR    | yolox.core.launch:98 - An error has been caught:\n"
        "Traceback (most recent call last):\n\n"
        '  File "tools/train.py", line 125, in <module>\n'
        "    launch(\n    \N{BOX DRAWINGS LIGHT UP AND RIGHT} <function launch at 0x7f2a>\n\n"
        '> File "/venv/lib/python3.8/site-packages/yolox/core/launch.py", line 98, in launch\n'
        "    main_func(*args)\n\n"
        '  File "tools/train.py", line 110, in main\n'
        "    trainer.train()\n\n"
        "RuntimeError: CUDA error: invalid device ordinal\n"
    )
    (group,) = of_log(tmp_path, text).groups
    assert (group.first.signature, group.first.transient) == ("cuda_ordinal", False)
    assert "at train.py:110 in main" in group.first.text


def test_a_pull_that_was_limited_and_overcome_is_not_why_tests_failed(tmp_path: Path) -> None:
    limited = (
        "Error response from daemon: toomanyrequests: You have reached your pull rate limit.\n"
    )
    (group,) = of_log(tmp_path, limited).groups
    assert (group.first.signature, group.first.transient) == ("pull_limit", True)
    built = "[1274/3874] Building CXX object c10/PeerToPeerAccess.cpp.o\n" * 400
    for went_on in ("==== 2 failed, 5 passed in 3.10s ====\n", iterations(7), built):
        failed = "##[error]Process completed with exit code 1.\n"
        (group,) = of_log(tmp_path, limited + went_on + failed).groups
        assert not group.first.transient


# What a program does itself is not the network's, whatever its last exception is called.
CHAINED = """\
Traceback (most recent call last):
  File "/job/train.py", line 3, in connect
    return HOSTS[name]
{first}

{link}

Traceback (most recent call last):
  File "/job/train.py", line 9, in <module>
    main()
{last}
"""
DIRECT = "The above exception was the direct cause of the following exception:"
DURING = "During handling of the above exception, another exception occurred:"


REFUSED = (
    "requests.exceptions.ConnectionError: HTTPConnectionPool(host='10.0.0.7', port=80): "
    "Max retries exceeded (Caused by NewConnectionError('[Errno 111] Connection refused'))"
)
OFFLINE = (
    "huggingface_hub.errors.OfflineModeIsEnabled: Cannot reach https://huggingface.co/gpt2: "
    "offline mode is enabled."
)
NO_HUB = (
    "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find "
    "them in the cached files."
)
NO_REDIS = (
    "redis.exceptions.ConnectionError: Error 111 connecting to localhost:6379. Connection refused."
)
FIXED_PORT = (
    "OSError: [Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address "
    "already in use"
)


@pytest.mark.parametrize("link", [DIRECT, DURING])
@pytest.mark.parametrize(
    ("first", "last"),
    [
        ("KeyError: 'store'", "ConnectionError: no store"),
        ("KeyError: 'store'", REFUSED),
        (OFFLINE, NO_HUB),
    ],
)
def test_a_chain_is_judged_by_what_it_began_with(
    tmp_path: Path, first: str, last: str, link: str
) -> None:
    (group,) = of_log(tmp_path, CHAINED.format(first=first, link=link, last=last)).groups
    assert not group.first.transient
    assert any(text.partition(":")[0] in group.first.text for text in (first, last))


@pytest.mark.parametrize(
    "message",
    [
        "DatabaseConnectionError: schema version 3 is not supported",
        "ConnectionError",
        NO_REDIS,
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "OSError: [Errno 98] Address already in use",
        FIXED_PORT,
    ],
)
def test_a_name_alone_is_no_networks_failure(tmp_path: Path, message: str) -> None:
    (group,) = of_log(tmp_path, traceback(message)).groups
    assert not group.first.transient


SERVER = """
import http.server, threading, urllib.request
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        {}["model"]
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/")
"""


def test_a_connection_to_an_own_server_that_died_is_no_networks_failure(tmp_path: Path) -> None:
    """Real: the client only sees that the remote end closed the connection."""
    done = subprocess.run(
        [sys.executable, "-c", SERVER], capture_output=True, text=True, check=False
    )
    assert "RemoteDisconnected" in done.stderr
    (group,) = of_log(tmp_path, done.stderr).groups
    assert (group.first.signature, group.first.transient) == ("exception", False)
    assert "raised KeyError: 'model'" in group.first.text


def test_another_hosts_failure_is_not_blamed_on_an_exception_before_it(tmp_path: Path) -> None:
    lost = (
        "requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='huggingface.co', port=443): "
        "Read timed out. (read timeout=10)"
    )
    earlier = "WARNING:train:no such key\n" + traceback("KeyError: 'x'") + "going on\n"
    (group,) = of_log(tmp_path, earlier + traceback(lost)).groups
    assert group.first.transient


@pytest.mark.parametrize("unit", ["a", "port ", "://", "connect to ", "localhost ", "\u0000"])
def test_a_message_of_a_megabyte_is_judged_all_the_same(tmp_path: Path, unit: str) -> None:
    """Patterns that look ahead from every place would take minutes for it."""
    found = of_log(tmp_path, traceback(f"OSError: host='{unit * 50_000}"))
    assert family(found) == "exception"


# What error files and records may hold, as anybody may have written them.
@pytest.mark.parametrize(
    "content",
    [
        pytest.param("[" * 100_000, id="nested"),
        pytest.param('{"message": ' + "9" * 5000, id="torn"),
        pytest.param("NaN", id="nan"),
        pytest.param('"\\ud800"', id="text"),
    ],
)
def test_an_error_file_that_means_nothing_hides_no_cause(tmp_path: Path, content: str) -> None:
    rank = tmp_path / "attempt_0" / "0"
    rank.mkdir(parents=True)
    (rank / "error.json").write_text(content)
    (rank / "stderr.log").write_text(traceback("KeyError: 'labels'"))
    assert told(tmp_path)[:2] == ("exception", 0)


def test_an_error_file_with_odd_values_keeps_its_cause(tmp_path: Path) -> None:
    rank = tmp_path / "attempt_0" / "0"
    rank.mkdir(parents=True)
    (rank / "error.json").write_text(
        '{"message": {"message": "KeyError: \'\\ud800\'", "extraInfo": {"timestamp": "NaN", '
        f'"size": {"9" * 5000}, "ratio": NaN, "huge": 1e999, "py_callstack": ""}}}}}}'
    )
    (rank / "stderr.log").write_text("loading\n")
    (group,) = triage([tmp_path]).groups
    assert group.first.text.startswith("Rank 0 raised KeyError: '\N{REPLACEMENT CHARACTER}'")
    json.dumps(asdict(group.first), allow_nan=False)


def test_an_error_file_that_cannot_be_read_is_noted(tmp_path: Path) -> None:
    rank = tmp_path / "attempt_0" / "0"
    rank.mkdir(parents=True)
    (rank / "error.json").write_text("{")
    (rank / "stderr.log").write_text(textwrap.dedent(traceback("KeyError: 'labels'")))
    assert any("error.json: is no JSON" in note for note in triage([tmp_path]).notes)


@pytest.mark.parametrize(
    "report",
    [
        "time limit of 12 s reached after iteration 4 of 10; rank 2 was at train.py:121 in wait",
        "ranks 0, 2-3 did not end in 5 s",
    ],
)
def test_a_report_of_ours_in_the_log_of_a_job_is_known(tmp_path: Path, report: str) -> None:
    (group,) = of_log(tmp_path, f"{report}\n===== 1 failed in 13.50s =====\n").groups
    assert group.first.family == "time_limit"
