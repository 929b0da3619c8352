"""The Slurm engine on a pretended cluster: what is hard to bring about on a real one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from pretend_slurm import PretendSlurm
from slurm_orders import Run

from pytest_megatron.engines.slurm.engine import SlurmEngine
from pytest_megatron.engines.slurm.states import JobFiles
from pytest_megatron.engines.slurm.submit import (
    RealSlurm,
    SlurmAwayError,
    SlurmRefusedError,
    SlurmSettings,
)
from pytest_megatron.errors import LaunchError
from pytest_megatron.runs.environment import gather_facts
from pytest_megatron.workloads.engine.api import (
    EngineError,
    Submission,
    SubmissionOutcome,
    SubmissionPhase,
    TroubleKind,
)
from pytest_megatron.workloads.engine.records import JobRecord, write_record

ITERATION = " iteration        {}/      10 | lm loss: 2.500000E+00 |\n"
AWAY = "Socket timed out on send/recv operation"


def engine_on(run: Run, slurm: PretendSlurm, settings: SlurmSettings | None = None) -> SlurmEngine:
    """Return an engine that lives by the pretended cluster's clock."""
    clock = (lambda: slurm.now, slurm.wait)
    return run.engine(slurm, {}, settings or SlurmSettings(timers_s=60.0), clock)


def ends(engine: SlurmEngine) -> dict[str, SubmissionOutcome]:
    """Poll once; return what ended."""
    return {
        update.key.split("/")[0]: update.outcome
        for update in engine.poll()
        if update.outcome is not None
    }


def kinds(found: dict[str, SubmissionOutcome]) -> dict[str, TroubleKind | None]:
    return {item: None if o.trouble is None else o.trouble.kind for item, o in found.items()}


def text_of(found: dict[str, SubmissionOutcome], item: str) -> str:
    trouble = found[item].trouble
    assert trouble is not None
    return trouble.text


def leave_record(run: Run, order: Submission, batch: int = 1, *, told: bool = False) -> None:
    """Write the shortest record of a job: its training was not planned, or was told to end."""
    trouble = EngineError(kind=TroubleKind.CANCELLED, text="it was told to end")
    record = JobRecord(
        key=order.key,
        ends=(),
        health=None,
        facts=gather_facts(run.root),
        hosts=("node1",),
        trouble=trouble if told else None,
    )
    write_record(JobFiles.of(run.run_dir / "engine", batch).record, record)


def test_a_submission_that_arrived_unanswered_is_found_by_its_name(tmp_path: Path) -> None:
    run, slurm = Run(tmp_path), PretendSlurm(answers=[SlurmAwayError(AWAY)])
    engine = engine_on(run, slurm)
    engine.submit([run.order("a")])
    assert ends(engine) == {}
    slurm.wait(100)
    assert (ends(engine), len(slurm.submissions)) == ({}, 1)
    leave_record(run, run.order("a"))
    slurm.set(41, "COMPLETED", nodes="node1")
    assert kinds(ends(engine)) == {"a": None}


def test_one_that_did_not_arrive_is_submitted_again_and_never_runs_twice(tmp_path: Path) -> None:
    run, slurm = Run(tmp_path), PretendSlurm(answers=[SlurmAwayError(AWAY)], loses=True)
    engine = engine_on(run, slurm)
    engine.submit([run.order("a")])
    assert (ends(engine), len(slurm.submissions)) == ({}, 1)
    slurm.wait(16)
    assert (ends(engine), len(slurm.submissions)) == ({}, 2)
    slurm.submit(slurm.submissions[0])  # it was on its way all the time
    ends(engine)
    assert slurm.cancelled == [42]
    assert not JobFiles.of(run.run_dir / "engine", 1).spec.exists()


def test_a_controller_of_slurm_that_is_away_is_waited_for(tmp_path: Path) -> None:
    run, slurm = Run(tmp_path), PretendSlurm()
    engine = engine_on(run, slurm)
    engine.submit([run.order("a")])
    engine.poll()
    slurm.is_away = True
    (said,) = engine.poll()
    slurm.wait(10_000)
    assert (said.phase, said.detail) == (
        SubmissionPhase.WAITING,
        "Slurm does not answer: Unable to contact slurm controller",
    )
    assert list(engine.poll()) == []
    slurm.is_away = False
    (said,) = engine.poll()
    assert said.detail == "job 41 waits"


def test_no_more_than_the_limit_are_in_the_queue_and_the_first_come_first(tmp_path: Path) -> None:
    run, slurm = Run(tmp_path), PretendSlurm()
    engine = engine_on(run, slurm, SlurmSettings(max_jobs=2))
    engine.submit([run.order(item) for item in "abc"])
    assert len(slurm.table) == 2
    leave_record(run, run.order("a"))
    slurm.set(41, "COMPLETED", nodes="node1")
    ends(engine)
    assert sorted(slurm.table) == [41, 42, 43]


def test_a_limit_on_submissions_is_waited_for(tmp_path: Path) -> None:
    run = Run(tmp_path)
    full = SlurmRefusedError("QOSMaxSubmitJobPerUserLimit", is_full=True)
    slurm = PretendSlurm(answers=[None, full, None, full])
    engine = engine_on(run, slurm)
    engine.submit([run.order("wide", nodes=2)])
    engine.submit([run.order(item) for item in "abcd"])
    assert ends(engine) == {}
    assert ends(engine) == {}
    assert len(slurm.submissions) == 2  # nothing ended, so there is no more room than before
    leave_record(run, run.order("wide"))
    slurm.set(41, "COMPLETED", nodes="node[1-2]")
    assert list(ends(engine)) == ["wide"]
    ends(engine)
    assert sorted(slurm.table) == [41, 42]  # of the four, one had room


def test_a_limit_that_never_goes_by_is_a_refusal(tmp_path: Path) -> None:
    full = SlurmRefusedError("AssocMaxSubmitJobLimit", is_full=True)
    run, slurm = Run(tmp_path), PretendSlurm(answers=[full])
    engine = engine_on(run, slurm)
    engine.submit([run.order("a")])
    assert text_of(ends(engine), "a") == "Slurm refused it: AssocMaxSubmitJobLimit"


def test_hosts_that_failed_are_excluded_unless_nothing_else_is_left(tmp_path: Path) -> None:
    run = Run(tmp_path)
    slurm = PretendSlurm(answers=[None, SlurmRefusedError("not available")])
    engine = engine_on(run, slurm)
    engine.submit([run.order("a", avoid_hosts=["node2", "node1"])])
    engine.submit([run.order("b", avoid_hosts=["node1"])])
    excluded = [[w for w in words if "exclude" in w] for words in slurm.submissions]
    assert excluded == [["--exclude=node1,node2"], ["--exclude=node1"], []]
    said = {update.key[0]: update.detail for update in engine.poll()}
    assert "also on node1, since Slurm said: not available" in said["b"]


def test_a_record_may_be_late_but_not_for_ever(tmp_path: Path) -> None:
    run, slurm = Run(tmp_path), PretendSlurm()
    engine = engine_on(run, slurm)
    engine.submit([run.order(item) for item in ("late", "never", "failed")])
    for job_id in (41, 42):
        slurm.set(job_id, "COMPLETED", nodes="node1")
    slurm.set(43, "FAILED", nodes="node1", exit_status=256)
    assert ends(engine) == {}
    slurm.wait(11)
    assert kinds(ends(engine)) == {"failed": TroubleKind.LOST}
    slurm.wait(40)
    leave_record(run, run.order("late"), 1)
    assert kinds(ends(engine)) == {"late": None}
    slurm.wait(10)
    found = ends(engine)
    assert text_of(found, "never") == (
        "job 42 on node1 ended as COMPLETED, exit code 0, and left no record"
    )


def test_a_job_that_was_started_again_is_taken_back(tmp_path: Path) -> None:
    run, slurm = Run(tmp_path), PretendSlurm()
    engine = engine_on(run, slurm)
    engine.submit([run.order("a")])
    slurm.set(41, "PENDING", num_restarts=1, reason="BeginTime")
    assert kinds(ends(engine)) == {"a": TroubleKind.REQUEUED}
    assert slurm.cancelled == [41]


def test_a_job_that_can_never_start_is_taken_back_and_others_wait(tmp_path: Path) -> None:
    run, slurm = Run(tmp_path), PretendSlurm()
    engine = engine_on(run, slurm)
    engine.submit([run.order("a"), run.order("b")])
    slurm.set(41, "PENDING", reason="PartitionTimeLimit")
    slurm.set(42, "PENDING", reason="QOSMaxJobsPerUserLimit")
    found = ends(engine)
    assert text_of(found, "a") == "job 41 can never start: Slurm says PartitionTimeLimit"
    assert (kinds(found), slurm.cancelled) == ({"a": TroubleKind.NOT_STARTED}, [41])


def test_what_slurm_has_forgotten_has_left_a_record_or_is_lost(tmp_path: Path) -> None:
    run, slurm = Run(tmp_path), PretendSlurm()
    engine = engine_on(run, slurm)
    orders = [run.order(item) for item in ("recorded", "unknown")]
    engine.submit(orders)
    leave_record(run, orders[0])
    slurm.table.clear()
    assert kinds(ends(engine)) == {"recorded": None}
    slurm.wait(61)
    found = ends(engine)
    assert kinds(found) == {"unknown": TroubleKind.LOST}
    assert "Slurm knows nothing of the job" in text_of(found, "unknown")


@pytest.mark.parametrize(
    ("state", "line", "text"),
    [
        (
            "NODE_FAIL",
            "Node failure on node3",
            "job 41 on node[1-4] ended as NODE_FAIL: a node of it failed",
        ),
        (
            "FAILED",
            "node3: task 2: Killed",
            "job 41 on node[1-4]: srun ended its tasks, as one was killed or a node was lost",
        ),
    ],
)
def test_the_node_that_srun_names_first_is_the_bad_one(
    tmp_path: Path, state: str, line: str, text: str
) -> None:
    run, slurm = Run(tmp_path), PretendSlurm()
    engine = engine_on(run, slurm)
    order = run.order("a", nodes=4)
    engine.submit([order])
    leave_record(run, order, told=True)
    log = JobFiles.of(run.run_dir / "engine", 1).log
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(f"srun: error: {line}\nsrun: error: node1: task 0: Killed\n")
    slurm.set(41, state, nodes="node[1-4]", exit_status=256)
    outcome = ends(engine)["a"]
    trouble = outcome.trouble
    assert trouble is not None
    assert (trouble.text, trouble.is_transient) == (f"{text}: node3", None)
    assert outcome.suspects == ("node3",)


def test_what_somebody_cancelled_is_not_submitted_again(tmp_path: Path) -> None:
    run, slurm = Run(tmp_path), PretendSlurm()
    engine = engine_on(run, slurm)
    engine.submit([run.order("a")])
    slurm.set(41, "CANCELLED")
    trouble = ends(engine)["a"].trouble
    assert trouble is not None
    assert (trouble.kind, trouble.is_transient) == (TroubleKind.CANCELLED, False)
    assert trouble.text == "job 41 ended as CANCELLED: it was cancelled"


@pytest.mark.parametrize("copies", [False, True])
def test_the_logs_of_a_running_job_are_followed(tmp_path: Path, *, copies: bool) -> None:
    run, slurm = Run(tmp_path, copies_lines=copies), PretendSlurm()
    engine = engine_on(run, slurm)
    order = run.order("a")
    engine.submit([order])
    dirs = order.dirs.phase(1)
    (dirs.logs / "job" / "attempt_0" / "0").mkdir(parents=True)
    log = dirs.logs / "job" / "attempt_0" / "0" / "stdout.log"
    log.write_text(ITERATION.format(1))
    dirs.launcher_log.write_text("[default0]:epoch 1\n")
    assert (ends(engine), run.heard.iterations) == ({}, [])  # it waits
    slurm.set(41, "RUNNING", nodes="node1")
    assert (ends(engine), run.heard.iterations) == ({}, [1])
    with log.open("a") as file:
        file.write(ITERATION.format(2))
    leave_record(run, order)
    slurm.set(41, "COMPLETED", nodes="node1")
    assert kinds(ends(engine)) == {"a": None}
    assert run.heard.iterations == [1, 2]
    assert run.heard.lines == (["[rank0]: epoch 1"] if copies else [])


def test_ctrl_c_within_sbatch_loses_no_job(tmp_path: Path) -> None:
    run, slurm = Run(tmp_path), PretendSlurm(answers=[None])
    engine = engine_on(run, slurm)

    def submit_and_be_interrupted(words: Sequence[str]) -> int:
        PretendSlurm.submit(slurm, words)
        raise KeyboardInterrupt

    slurm.submit = submit_and_be_interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.submit([run.order("a")])
    engine.cancel([run.order("a").key])
    assert slurm.cancelled == [41]
    assert text_of(ends(engine), "a") == "it was cancelled by this run (job 41)"


def test_a_second_ctrl_c_leaves_at_once_and_says_what_is_left(tmp_path: Path) -> None:
    run, slurm = Run(tmp_path), PretendSlurm(ends_what_is_cancelled=False)
    engine = engine_on(run, slurm)
    orders = [run.order(item) for item in "abc"]
    engine.submit(orders)
    engine.poll()

    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    engine._pause = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.cancel([order.key for order in orders[:2]])
    assert slurm.cancelled == [41, 42]
    assert run.heard.lines == [
        "waiting for 2 cancelled jobs to end; Ctrl-C leaves at once",
        "jobs may be left in Slurm's queue; to end them: scancel 41 42",
    ]


def test_who_cancels_while_slurm_is_away_is_told_at_once_how_to_end_the_jobs(
    tmp_path: Path,
) -> None:
    run, slurm = Run(tmp_path), PretendSlurm(ends_what_is_cancelled=False)
    engine = engine_on(run, slurm)
    engine.submit([run.order("a")])
    engine.poll()

    def refuse(ids: Sequence[int]) -> None:
        del ids
        raise SlurmAwayError(AWAY)

    slurm.cancel = refuse  # type: ignore[method-assign]
    engine.cancel([run.order("a").key])
    assert run.heard.lines == [
        f"Slurm does not answer: {AWAY}; jobs go on until it is back; to end them then: scancel 41",
        "jobs may be left in Slurm's queue; to end them: scancel 41",
    ]


def test_a_machine_without_slurm_is_told_so(tmp_path: Path) -> None:
    run = Run(tmp_path)
    engine = run.engine(RealSlurm({"PATH": "/nonexistent"}, tmp_path), {})
    with pytest.raises(LaunchError, match="sbatch cannot be run: No such file or directory"):
        engine.submit([run.order("a")])
    assert list(engine.poll()) == []  # it was not taken
    engine.close()
