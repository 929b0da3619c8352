"""Phases of an audit among those of a release, run by a launcher that trains nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from pytest_megatron.base.files import JsonValue
from pytest_megatron.process.guarded import CommandEnd
from pytest_megatron.runs.layout import AttemptDirs
from pytest_megatron.workloads.recipe.case import read_case
from pytest_megatron.workloads.recipe.model import Row, parse_row
from pytest_megatron.workloads.training.plan.phases import TRACKER, iteration_name
from pytest_megatron.workloads.training.plan.plan import (
    AttemptPlan,
    PhasePlan,
    Setting,
    plan_attempt,
)
from pytest_megatron.workloads.training.run.runner import (
    End,
    ForwardingListener,
    PhaseEnd,
    run_attempt,
)

RELEASE = "TEST_TYPE: release\nMODEL_ARGS: {--train-iters: 20, --exit-interval: 20}\n"


@dataclass
class Ended:
    """A command that has ended."""

    returncode: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def poll(self, _: float) -> CommandEnd:
        return self.wait()

    def wait(self) -> CommandEnd:
        return CommandEnd(returncode=self.returncode, num_left=0, duration_s=0.0)

    def stop(self) -> None:
        pass

    def dump_stacks(self) -> None:
        pass

    def activity(self) -> None:
        pass


@dataclass
class Launcher:
    """Starts nothing: each window saves ten iterations more; names the phases that it started."""

    failing: str = ""
    started: list[str] = field(default_factory=list)

    def __call__(self, phase: PhasePlan, _: Path) -> Ended:
        self.started.append(phase.name)
        if phase.name.startswith("window"):
            saved = Path(phase.env["CHECKPOINT_SAVE_PATH"])
            iteration = 10 * phase.number
            (saved / iteration_name(iteration)).mkdir(parents=True)
            (saved / TRACKER).write_text(str(iteration))
        return Ended(returncode=int(phase.name == self.failing))


def plan_of(tmp_path: Path) -> AttemptPlan:
    """Plan a release of up to four windows, with an audit."""
    case = tmp_path / "model_config.yaml"
    case.write_text(RELEASE)
    spec: dict[str, JsonValue] = {
        "model": "gpt",
        "test_case": "a",
        "environment": "dev",
        "platforms": "cpu",
        "scope": "L0",
        "cadence": ["pr"],
        "gpus": 1,
        "training_script_path": "train.py",
        "max_windows": 4,
    }
    row = parse_row(Row(line=1, spec=spec, axes=()), file=Path("recipes/r.yaml"), variant=())
    setting = Setting(root=tmp_path, env={}, tee_ranks=(), is_lightweight=False, is_audited=True)
    dirs = AttemptDirs(root=tmp_path / "attempt_1")
    return plan_attempt(row, read_case(case), dirs, setting, repeat=1)


def run(plan: AttemptPlan, launcher: Launcher) -> Sequence[PhaseEnd]:
    return run_attempt(plan, {}, ForwardingListener(), launcher)


def test_an_audit_takes_no_window_of_a_release(tmp_path: Path) -> None:
    launcher = Launcher()
    ends = run(plan_of(tmp_path), launcher)
    assert launcher.started == ["audit 1", "audit 2", "window 1", "window 2"]
    assert [(end.end, end.saved) for end in ends] == [
        *((End.EXITED, None), (End.EXITED, None)),
        *((End.EXITED, 10), (End.EXITED, 20)),
    ]


def test_windows_are_counted_without_the_audit(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    launcher = Launcher()
    cut = tuple(phase for phase in plan.phases if phase.number not in (2, 3, 4))
    *_, last = run(replace(plan, phases=cut), launcher)
    assert last.end is End.NOT_DONE
    assert "1 windows are over, which is all that max_windows allows" in str(last.problem)


def test_nothing_is_trained_after_an_audit_that_fails(tmp_path: Path) -> None:
    launcher = Launcher(failing="audit 1")
    (end,) = run(plan_of(tmp_path), launcher)
    assert (launcher.started, end.returncode) == (["audit 1"], 1)
