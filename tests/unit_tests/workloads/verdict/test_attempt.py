"""Attempts whose files are laid down by hand: every end that a phase can have."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_megatron.runs.layout import PhaseDirs
from pytest_megatron.triage.rank_log import End
from pytest_megatron.workloads.golden.model import Series, series_of
from pytest_megatron.workloads.training.plan.plan import PhasePlan
from pytest_megatron.workloads.training.run.runner import PhaseEnd, Progress
from pytest_megatron.workloads.verdict.attempt import (
    FailureCause,
    _innermost,
    find_problem,
    judge_metrics,
    why_it_ended,
)


def phase(
    root: Path,
    *,
    returncode: int = 0,
    end: End = End.EXITED,
    hung_rank: int | None = None,
    last: int | None = 10,
    at: int | None = 4,
) -> PhaseEnd:
    dirs = PhaseDirs(root=root)
    dirs.tensorboard.mkdir(parents=True, exist_ok=True)
    dirs.logs.mkdir(exist_ok=True)
    plan = PhasePlan(
        number=1, argv=(), env={}, own_env={}, dirs=dirs, last_iteration=last, world_size=2
    )
    return PhaseEnd(
        plan=plan,
        end=end,
        returncode=returncode,
        num_left=0,
        duration_s=1.0,
        hung_rank=hung_rank,
        progress=None if at is None else Progress(iteration=at, last=10),
    )


def write_lines(root: Path, losses: dict[int, float], name: str = "lm loss") -> None:
    lines = [json.dumps({"step": step, name: loss}) for step, loss in losses.items()]
    (root / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))


def cause_of(end: PhaseEnd, *names: str) -> FailureCause | None:
    names = names or ("lm loss",)
    return why_it_ended([end], 1, 60) or judge_metrics([end], names=names)[1]


def text_of(end: PhaseEnd, *names: str) -> str:
    cause = cause_of(end, *names)
    assert cause is not None
    return f"{cause.text}; see {cause.see}"


def test_a_whole_run_has_no_cause(tmp_path: Path) -> None:
    write_lines(tmp_path, dict.fromkeys(range(1, 11), 1.0))
    assert cause_of(phase(tmp_path)) is None


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        pytest.param(
            dict.fromkeys(range(1, 10), 1.0),
            "the training ended with exit code 0, but lm loss stops at step 9, "
            "expected it to go on to 10",
            id="one step short",
        ),
        pytest.param(
            {1: 1.0, 2: float("inf"), 10: float("nan")},
            "lm loss is inf at step 2, the first that is not finite",
            id="inf",
        ),
    ],
)
def test_a_run_with_exit_code_0_may_still_be_no_good(
    tmp_path: Path, losses: dict[int, float], expected: str
) -> None:
    write_lines(tmp_path, losses)
    assert text_of(phase(tmp_path)) == f"{expected}; see {tmp_path}/launcher.log"


def test_what_a_run_left_in_the_background_is_told_where_metrics_are_missing(
    tmp_path: Path,
) -> None:
    end = replace(phase(tmp_path), num_left=1)
    told = "and 1 process that it left in the background was ended"
    assert f"exit code 0, {told}, but wrote no metrics" in text_of(end)
    (tmp_path / "metrics.jsonl").write_text("no JSON\n")
    assert f"exit code 0 after iteration 4 of 10, {told}, but " in text_of(end)
    write_lines(tmp_path, {1: 1.0, 2: 1.0})
    assert f"stops at step 2, expected it to go on to 10; it ended, {told}; see" in text_of(end)
    write_lines(tmp_path, {1: 1.0, 10: float("nan")})
    assert "background" not in text_of(end)
    write_lines(tmp_path, {1: 1.0, 10: 1.0})
    assert cause_of(end) is None


def test_a_run_that_logs_every_fifth_step_is_whole(tmp_path: Path) -> None:
    write_lines(tmp_path, {1: 1.0, 5: 1.0, 10: 1.0})
    assert cause_of(phase(tmp_path, last=12)) is None


def test_a_metric_that_is_compared_must_be_there(tmp_path: Path) -> None:
    write_lines(tmp_path, {10: 1.0}, "grad-norm")
    text = text_of(phase(tmp_path))
    assert text.startswith("the training wrote no 'lm loss', only grad-norm; see ")


def test_no_metrics_are_a_cause(tmp_path: Path) -> None:
    text = text_of(phase(tmp_path))
    assert text == (
        "the training ended with exit code 0, but wrote no metrics: neither JSON lines to "
        f"$PYTEST_MEGATRON_METRICS nor TensorBoard files to $TENSORBOARD_PATH; see {tmp_path}"
    )


def test_a_script_judges_itself(tmp_path: Path) -> None:
    assert judge_metrics([phase(tmp_path)], names=None) == ((), None)


@pytest.mark.parametrize(("last_phase", "is_whole"), [(1, True), (2, False)])
def test_ranks_that_do_not_exit_leave_a_whole_training_only_in_its_last_phase(
    tmp_path: Path, last_phase: int, *, is_whole: bool
) -> None:
    end = replace(phase(tmp_path, returncode=-15, end=End.NOT_EXITED), waiting=(1,))
    cause = why_it_ended([end], last_phase, 60)
    assert cause is not None
    assert cause.text == "trained to the end, and rank 1 did not exit"
    assert cause.is_after_training is is_whole


def test_a_launcher_that_fails_alone_is_quoted_and_looked_up(tmp_path: Path) -> None:
    end = phase(tmp_path, returncode=1, at=None)
    end.plan.dirs.launcher_log.write_text("RuntimeError: EADDRINUSE\n")
    cause = cause_of(end)
    assert cause is not None
    assert (cause.rank, cause.evidence, cause.is_transient) == (
        None,
        ("RuntimeError: EADDRINUSE",),
        True,
    )
    assert (cause.text, cause.see) == (
        "the launcher raised RuntimeError: EADDRINUSE, before the first iteration that was logged",
        f"{tmp_path}/launcher.log:1",
    )


def test_a_hung_collective_names_the_rank_that_reported_it(tmp_path: Path) -> None:
    end = phase(tmp_path, returncode=-15, end=End.HUNG_COLLECTIVE, hung_rank=1)
    cause = cause_of(end)
    assert cause is not None
    assert (cause.rank, cause.is_transient) == (1, False)
    assert (cause.text, cause.see) == (
        "a collective did not finish: rank 1 reported it, after iteration 4 of 10",
        f"{tmp_path}/logs",
    )


def test_a_time_limit_is_never_transient(tmp_path: Path) -> None:
    end = phase(tmp_path, returncode=-15, end=End.TIME_LIMIT)
    end.plan.dirs.launcher_log.write_text("RuntimeError: EADDRINUSE\n")
    text = "time limit of 60 s reached, after iteration 4 of 10"
    for one, silence in ((end, ""), (replace(end, quiet_s=51.2), ", nothing logged for 51 s")):
        cause = cause_of(one)
        assert cause is not None
        assert (cause.is_transient, cause.text) == (False, text + silence)


def test_values_without_steps_are_counted_as_such(tmp_path: Path) -> None:
    far = Progress(iteration=7, last=None, has_step=False)
    cause = cause_of(replace(phase(tmp_path, returncode=1), progress=far))
    assert cause is not None
    assert cause.text.endswith(", after logged value 7")


def test_a_rank_that_stays_is_where_its_current_thread_is() -> None:
    stack = (
        "Thread 0x00007f9a9b9f26c0 (most recent call first):",
        '  File "/srv/loader.py", line 8 in fetch',
        '  File "/usr/lib/python3.12/threading.py", line 1030 in _bootstrap',
        "",
        "Current thread 0x00007f9a9cc2cb80 (most recent call first):",
        '  File "/usr/lib/python3.12/threading.py", line 1622 in _shutdown',
    )
    assert _innermost(stack) == "threading.py:1622 in _shutdown"
    assert _innermost(stack[:4]) == "loader.py:8 in fetch"


def steps(*numbers: int) -> Series:
    return series_of({number: 1.0 + number for number in numbers})


@pytest.mark.parametrize(
    ("metrics", "problem"),
    [
        pytest.param({"loss": steps(1, 5, 10, 15, 20)}, None, id="first and every fifth"),
        pytest.param({"loss": steps(0, 10)}, None, id="from 0 on, with a distance"),
        pytest.param({"loss": steps(1, 5, 10)}, "loss stops at step 10", id="too early"),
        pytest.param({"loss": steps(3, 9, 18), "val": steps(12)}, None, id="one evaluation"),
        pytest.param({"loss": steps(1, 2), "val": steps(12)}, "loss stops at step 2", id="both"),
        pytest.param({"loss": steps(12)}, "loss stops at step 12", id="one value alone"),
    ],
)
def test_a_training_ended_early_if_another_value_was_due(
    metrics: dict[str, Series], problem: str | None
) -> None:
    found = find_problem(metrics, tuple(metrics), 19)
    assert (found or "").partition(", expected")[0].rpartition("but ")[2] == (problem or "")


def test_of_two_losses_the_one_that_was_not_finite_first_is_named() -> None:
    late, early = (series_of({3: 1.0, 7: 1.0, 11: n, 15: n}) for n in (1.0, float("nan")))
    late = series_of({**dict(late.items()), 15: float("nan")})
    found = find_problem({"train/loss": late, "val/loss": early}, ("train/loss", "val/loss"), 15)
    assert found == "val/loss is nan at step 11, the first that is not finite"


def test_a_compared_metric_has_one_value_at_each_step(tmp_path: Path) -> None:
    end = phase(tmp_path)
    lines = ["", *(f'{{"step": {step}, "lm loss": 3.5, "eval": {step}}}\n' for step in range(11))]
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join([*lines, '{"step": 4, "eval": 9, "lm loss": 3.5}\n']))
    assert cause_of(end) is None
    log.write_text("".join([*lines, '{"step": 4, "lm loss": NaN}\n']))
    problem = text_of(end)
    assert f"{log}:12: step 4 has two values of 'lm loss', 3.5 and then nan" in problem
