"""The Slurm engine on a real Slurm: what can become of a job, and what the engine makes of it."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import pytest
from labs import SlurmLab, wait_until
from slurm_orders import Run, on_lab, outcomes, until
from tiny_project import Project
from tiny_project import Run as SessionRun

from pytest_megatron.engines.slurm.submit import SlurmSettings
from pytest_megatron.workloads.engine.api import SubmissionOutcome, TroubleKind, Update

pytestmark = pytest.mark.nightly


class StartSession(Protocol):
    def __call__(self, project: Project, *words: str, **env: str) -> subprocess.Popen[str]: ...


FOREVER = 'touch "up-$ITEM"; exec sleep 1000'
WAITS_ONCE = """
import os, pathlib, runpy, signal
state = pathlib.Path(os.environ["TINY_TRAIN_STATE"])
if os.environ["RANK"] == "0" and not state.exists():
    pathlib.Path(f"{state}.host").write_text(os.environ["SLURMD_NODENAME"])
    state.touch()
    signal.pause()
runpy.run_path("train.py", run_name="__main__")
"""
# The script's parent and its parent are the guard; theirs is the job's own process.
KILLS_ITS_JOB = "kill -KILL $(ps -o ppid= -p $(ps -o ppid= -p $PPID))"
_SLOW_S = 180.0  # pytest, nemo-run and torch start one after the other
NODES = frozenset({"node1", "node2", "node3", "node4"})


def are_up(run: Run, *items: str) -> bool:
    """Whether these trainings run."""
    return all((run.root / f"up-{item}").exists() for item in items)


def job_of(update: Update) -> str:
    """Return the job that an update is about, as scancel takes it."""
    found = re.search(r"job (\d+) ", update.detail)
    assert found is not None, update
    return found[1]


@pytest.mark.everyday
def test_each_job_leaves_its_own_outcome(slurm_lab: SlurmLab, tmp_path: Path) -> None:
    run = Run(tmp_path)
    engine = on_lab(run, slurm_lab)
    lines = {"good": "true", "bad": "echo no such rank >&2; exit 3", "env": '[ "$ITEM" = env ]'}
    engine.submit([*(run.order(item, line) for item, line in lines.items())])
    engine.submit([run.order("wide", nodes=2)])
    first = {u.key.split("/")[0]: job_of(u) for u in engine.poll()[:4]}
    assert len({*first.values()}) == 4
    found = outcomes(engine, 4)
    engine.close()
    codes = {item: (o.ends[0].returncode, o.trouble) for item, o in found.items()}
    assert codes == {"good": (0, None), "bad": (3, None), "env": (0, None), "wide": (0, None)}
    assert [(len(o.hosts), set(o.hosts) <= NODES) for o in (found["good"], found["wide"])] == [
        (1, True),
        (2, True),
    ]
    assert not list((run.run_dir / "engine/specs").rglob("*.json"))


@pytest.fixture(scope="module")
def troubled(
    slurm_lab: SlurmLab, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, SubmissionOutcome]]:
    """What came of jobs to which everything happened at once."""
    run = Run(tmp_path_factory.mktemp("troubled"))
    engine = on_lab(run, slurm_lab)
    elsewhere, on_node1 = ("node1", "node2"), NODES - {"node1"}
    engine.submit(
        [
            run.order("cancelled", FOREVER, avoid_hosts=elsewhere),
            run.order("requeued", FOREVER, avoid_hosts=elsewhere),
            run.order("killed", KILLS_ITS_JOB, avoid_hosts=elsewhere),
            run.order("on_the_node", FOREVER, avoid_hosts=on_node1),
            run.order("on_two_nodes", FOREVER, nodes=2, avoid_hosts=("node3", "node4")),
            run.order("too_wide", nodes=9),
        ]
    )
    items = ["cancelled", "requeued", "on_the_node", "on_two_nodes"]
    last = until(engine, lambda _: are_up(run, *items))
    requeued = job_of(last["requeued"])
    slurm_lab.ask("scancel", job_of(last["cancelled"]))
    slurm_lab.ask("scontrol", "update", f"job={requeued}", "requeue=1")
    slurm_lab.ask("scontrol", "requeue", requeued)
    slurm_lab.ask("scontrol", "update", "nodename=node1", "state=down", "reason=test")
    ended = {item: u.outcome for item, u in last.items() if u.outcome is not None}
    yield {**ended, **outcomes(engine, 6 - len(ended))}
    engine.close()
    slurm_lab.fix()


@pytest.mark.parametrize(
    ("item", "kind", "said", "hosts"),
    [
        ("cancelled", TroubleKind.CANCELLED, r"ended as CANCELLED: it was cancelled", r"node[34]"),
        ("requeued", TroubleKind.REQUEUED, "put into the queue again once after", r"node[34]"),
        ("killed", TroubleKind.LOST, "was killed by SIGKILL, and left no record", r"node[34]"),
        ("on_the_node", TroubleKind.NODE_FAIL, "on node1 ended as NODE_FAIL", "node1"),
        ("on_two_nodes", TroubleKind.NODE_FAIL, "ended as NODE_FAIL", "node1(,node2)?"),
        ("too_wide", TroubleKind.NOT_STARTED, "Slurm refused it: .*Node count specif", ""),
    ],
)
def test_what_happened_to_a_job_is_told_apart(
    troubled: Mapping[str, SubmissionOutcome], item: str, kind: TroubleKind, said: str, hosts: str
) -> None:
    trouble = troubled[item].trouble
    assert trouble is not None
    assert (trouble.kind, bool(re.search(said, trouble.text))) == (kind, True), trouble
    assert re.fullmatch(hosts, ",".join(troubled[item].hosts)), troubled[item]


def test_trouble_shows_the_end_of_the_jobs_own_log(
    troubled: Mapping[str, SubmissionOutcome],
) -> None:
    trouble = troubled["on_the_node"].trouble
    assert trouble is not None
    assert "DUE TO NODE FAILURE" in trouble.evidence[-1]


def test_slurmctld_may_go_while_jobs_run_and_be_asked_to_submit(
    slurm_lab: SlurmLab, tmp_path: Path
) -> None:
    run = Run(tmp_path)
    engine = on_lab(run, slurm_lab)
    engine.submit([run.order("early", 'touch "up-$ITEM"; until [ -e go ]; do sleep 0.1; done')])
    until(engine, lambda _: are_up(run, "early"))
    slurm_lab.kill_controller()
    (tmp_path / "go").touch()
    restart = threading.Timer(1.0, slurm_lab.start_controller)
    restart.start()
    engine.submit([run.order("late")])
    found = outcomes(engine, 2)
    engine.close()
    restart.join()
    assert {item: o.trouble for item, o in found.items()} == {"early": None, "late": None}


def test_cancel_ends_ours_and_nobody_elses(slurm_lab: SlurmLab, tmp_path: Path) -> None:
    run = Run(tmp_path)
    other = slurm_lab.submit("--wrap", "sleep 1000", "--output=/dev/null")
    engine = on_lab(run, slurm_lab, SlurmSettings(interval_s=0.05, timers_s=6.0, max_jobs=2))
    engine.submit([run.order(item, FOREVER) for item in ("a", "b", "c")])
    until(engine, lambda _: are_up(run, "a", "b"))
    engine.cancel([run.order(item).key for item in ("a", "b", "c")])
    found = {u.key[0]: u.outcome for u in engine.poll() if u.outcome is not None}
    engine.close()
    kinds = {item: o.trouble.kind for item, o in found.items() if o.trouble is not None}
    assert kinds == dict.fromkeys("abc", TroubleKind.CANCELLED)
    assert slurm_lab.ask("squeue", "-h", "-o", "%A").split() == [str(other)]
    slurm_lab.cancel_all()


@pytest.fixture
def session_of(slurm_lab: SlurmLab) -> Iterator[StartSession]:
    """Starts pytest for a project on the lab's Slurm."""
    started: list[subprocess.Popen[str]] = []

    def start(project: Project, *words: str, **env: str) -> subprocess.Popen[str]:
        settings = "format_version: 1\nslurm: {account: any, interval: 0.2}\n"
        (project.root / "cluster.yaml").write_text(settings)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**slurm_lab.env, **env}.items():
                patch.setenv(name, value)
            chosen = ["--executor=slurm", "--executor-config=cluster.yaml", *words]
            started.append(project.start("recipes", *chosen))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
    slurm_lab.cancel_all()


def test_a_session_that_ci_ends_cancels_its_jobs(
    slurm_lab: SlurmLab, tmp_path: Path, session_of: StartSession
) -> None:
    project = Project(root=tmp_path / "project")
    (project.root / "once.py").write_text(WAITS_ONCE)
    project.row(project.case("waits"), training_script_path=["once.py"])
    process = session_of(project)
    wait_until(project.state("waits").exists, "it waits", limit_s=_SLOW_S)
    process.terminate()
    text, _ = process.communicate(timeout=_SLOW_S)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, text
    assert "KeyboardInterrupt: SIGTERM: whoever started pytest ended it" in text
    assert "waiting for 1 cancelled job to end" in text
    assert slurm_lab.ask("squeue", "-h", "-o", "%A %T").split() == []


@pytest.mark.everyday
def test_a_run_names_the_rank_that_failed_and_leaves_a_node_that_did(
    slurm_lab: SlurmLab, tmp_path: Path, session_of: StartSession
) -> None:
    project = Project(root=tmp_path / "project")
    (project.root / "once.py").write_text(WAITS_ONCE)
    project.row(project.case("moved"), training_script_path=["once.py"])
    project.add("crashes", "crash@4:1")
    process = session_of(project, "--max-attempts=2")
    wait_until(project.state("moved").exists, "it waits", limit_s=_SLOW_S)
    host = Path(f"{project.state('moved')}.host").read_text()
    slurm_lab.ask("scontrol", "update", f"nodename={host}", "state=down", "reason=test")
    text, _ = process.communicate(timeout=_SLOW_S)
    slurm_lab.fix()
    run = SessionRun(
        returncode=process.returncode, stdout=text, stderr="", directory=project.root / "run"
    )
    assert run.returncode == 1, text
    assert (run.verdict("moved"), run.verdict("crashes")) == (
        ("PASSED", "flaky"),
        ("FAILED", "failed"),
    )
    problem = run.problem("crashes")
    assert problem.startswith("rank 1 of 2 raised ValueError: the crash of rank 1 at train.py:")
    assert ", after iteration 3 of 10\n" in problem
    assert f"on {host} ended as NODE_FAIL" in text
    first, second = run.attempts("moved")
    assert (first["signature"], second["signature"]) == ("engine_node_fail", None)


def test_a_job_with_a_loss_that_is_not_finite_is_ended_and_leaves_its_record(
    slurm_lab: SlurmLab, tmp_path: Path, session_of: StartSession
) -> None:
    project = Project(root=tmp_path / "project")
    project.add("nan", "nan@3", "hang@8")
    process = session_of(project)
    text, _ = process.communicate(timeout=_SLOW_S)
    run = SessionRun(
        returncode=process.returncode, stdout=text, stderr="", directory=project.root / "run"
    )
    assert run.verdict("nan") == ("FAILED", "failed"), text
    assert "stopped after iteration 7 of 10: lm loss is nan at step 3" in run.problem("nan")
    assert slurm_lab.ask("squeue", "-h", "-o", "%A %T").split() == []
