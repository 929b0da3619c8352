"""A job's own process: what it is told, what it leaves, how it ends."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_project import Project, wait_until
from worker_engine import AlwaysAgain, Silent, WorkerEngine, context_of, job_of

from pytest_megatron.errors import LaunchError
from pytest_megatron.workloads.engine.api import (
    EngineError,
    LocalEngine,
    Submission,
    SubmissionOutcome,
    TroubleKind,
    open_engine,
)
from pytest_megatron.workloads.engine.records import read_record, read_spec
from pytest_megatron.workloads.verdict.attempt import Verdict
from pytest_megatron.workloads.verdict.driver import begin, train
from pytest_megatron.workloads.verdict.job import check_job


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(root=tmp_path / "project")


def first_order(project: Project, case: str) -> Submission:
    facts = context_of(project).facts
    (repeat,) = begin(check_job(job_of(project, case)), facts, Silent(), AlwaysAgain())
    return next(repeat)


def test_a_training_in_a_job_is_what_it_is_here(project: Project) -> None:
    sound = project.add("sound")
    engine, context = WorkerEngine(context_of(project)), context_of(project)
    there = train(check_job(job_of(project, sound)), context.facts, Silent(), AlwaysAgain(), engine)
    job = job_of(project, sound)
    elsewhere = replace(job, dirs=replace(job.dirs, root=project.root / "here"))
    here = train(check_job(elsewhere), context.facts, Silent(), AlwaysAgain(), LocalEngine(context))
    assert (there.verdict, here.verdict) == (Verdict.PASSED, Verdict.PASSED)
    assert there.attempts[0].metrics == here.attempts[0].metrics
    assert there.attempts[0].ends[0].progress == here.attempts[0].ends[0].progress
    assert there.facts(context.facts).host == context.facts.host
    assert engine.exit_codes == [0]


def test_a_job_with_a_checkout_of_its_own_says_what_is_other_there(project: Project) -> None:
    """An image may have been made of another commit, or of an edited tree."""
    case, identity = project.add("sound"), "-c user.name=t -c user.email=t@example.org"
    make = (
        f"git init -q && git add train.py && git {identity} commit -qm one && git clone -q . image"
    )
    image = f"cd image && echo 2 >train.py && git {identity} commit -qam two"
    subprocess.run(["/bin/sh", "-c", f"{make} && {image}"], cwd=project.root, check=True)
    context = context_of(project)
    job = job_of(project, case)
    found = []
    for number, env in enumerate(({}, {"GIT_DIR": f"{project.root}/image/.git"})):
        checked = check_job(replace(job, dirs=replace(job.dirs, root=project.root / f"{number}")))
        engine = WorkerEngine(context, env)
        training = train(checked, context.facts, Silent(), AlwaysAgain(), engine)
        found.append([x.split()[0] for x in training.other_code(context.facts)])
        assert (training.facts(context.facts).commit == context.facts.commit) is (not env)
    assert found == [[], ["HEAD,", "train.py"]]


def test_a_spec_is_for_its_owner_and_has_nothing_of_the_controller(project: Project) -> None:
    project.add("sound")
    os.environ["OF_THE_CONTROLLER"] = "secret"
    try:
        path = WorkerEngine(context_of(project)).spec(first_order(project, "sound"))
    finally:
        del os.environ["OF_THE_CONTROLLER"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "OF_THE_CONTROLLER" not in path.read_text()
    assert read_spec(path).plan.phases[0].own_env


def test_a_job_that_is_told_to_end_leaves_no_rank_and_says_so(project: Project) -> None:
    project.add("hang", "hang@3:0", env={"TINY_PROJECT": str(project.root)})
    path = WorkerEngine(context_of(project)).spec(first_order(project, "hang"))
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest_megatron.engines.worker", str(path)],
        env=project.env(),
        stdout=subprocess.DEVNULL,
    )
    up = Path(f"{project.state('hang')}.up")
    wait_until(up.exists, "the training hangs")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 1
    wait_until(lambda: project.processes() == [], "no process is left")
    record = read_record(path.with_suffix(".outcome"))
    assert record is not None
    assert record.trouble is not None
    assert record.trouble.kind is TroubleKind.CANCELLED
    assert "was told to end by SIGTERM" in record.trouble.text


def test_a_second_start_of_a_job_touches_nothing(project: Project) -> None:
    project.add("sound")
    order = first_order(project, "sound")
    order.dirs.root.mkdir(parents=True)
    engine = WorkerEngine(context_of(project))
    engine.submit([order])
    (again,) = engine.poll()
    assert again.outcome is not None
    assert again.outcome.trouble is not None
    assert again.outcome.trouble.kind is TroubleKind.REQUEUED
    assert engine.exit_codes == [1]
    assert list(order.dirs.root.iterdir()) == []


def test_the_outcome_of_the_first_start_of_a_job_stays(project: Project) -> None:
    project.add("sound")
    path = WorkerEngine(context_of(project)).spec(first_order(project, "sound"))
    words = [sys.executable, "-m", "pytest_megatron.engines.worker", str(path)]
    assert subprocess.run(words, check=False, capture_output=True).returncode == 0
    first = path.with_suffix(".outcome").read_bytes()
    again = subprocess.run(words, check=False, capture_output=True, text=True)
    assert again.returncode == 1
    assert "pytest-megatron: the job was started a second time, and " in again.stderr
    assert path.with_suffix(".outcome").read_bytes() == first


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param(None, "the job must see the run directory", id="missing"),
        pytest.param("{}", "is no spec of this version", id="another-version"),
        pytest.param("{", "is no spec of this version", id="cut-off"),
    ],
)
def test_a_spec_that_cannot_be_read_says_why(
    tmp_path: Path, content: str | None, expected: str
) -> None:
    path = tmp_path / "spec.json"
    if content is not None:
        path.write_text(content)
    done = subprocess.run(
        [sys.executable, "-m", "pytest_megatron.engines.worker", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_a_further_attempt_keeps_away_from_the_host_that_a_trouble_names(project: Project) -> None:
    job, facts = job_of(project, project.add("sound")), context_of(project).facts
    (repeat,) = begin(check_job(job), facts, Silent(), AlwaysAgain())
    next(repeat)
    lost = EngineError(kind=TroubleKind.LOST, text="task 1 on b was lost", hosts=("b",))
    further = repeat.send(SubmissionOutcome(hosts=("a", "b"), trouble=lost))
    assert further.avoid_hosts == {"b"}


def test_an_unknown_engine_is_named_with_those_there_are(project: Project) -> None:
    with pytest.raises(LaunchError, match=r"unknown engine 'slurmm', expected one of .*local"):
        open_engine("slurmm", context_of(project))
