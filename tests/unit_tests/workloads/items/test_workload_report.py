from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from recipe_rows import row_of

from pytest_megatron.runs.layout import ItemDirs
from pytest_megatron.runs.record import RecordedAttempt
from pytest_megatron.triage.signatures import match_signature
from pytest_megatron.workloads.golden.compare.result import Comparison, ComparisonRule
from pytest_megatron.workloads.golden.model import MetricMap, series_of
from pytest_megatron.workloads.golden.policy import ComparisonPolicy
from pytest_megatron.workloads.items.report import (
    item_record,
    summary_line,
    training_failure,
)
from pytest_megatron.workloads.recipe.case import read_case
from pytest_megatron.workloads.training.plan.plan import Setting
from pytest_megatron.workloads.verdict.attempt import (
    Attempt,
    FailureCause,
)
from pytest_megatron.workloads.verdict.compare import Judgement, RepeatComparison
from pytest_megatron.workloads.verdict.job import Training, WorkloadJob
from pytest_megatron.workloads.verdict.retry import RetryPolicy, fingerprint

SETTING = Setting(root=Path("/p"), env={}, tee_ranks=(), is_lightweight=False)
JOB = WorkloadJob(
    node_id="recipes/r.yaml::tp1[dev-cpu]",
    workload=row_of(),
    case=None,
    dirs=ItemDirs(root=Path("/run/item")),
    setting=SETTING,
    num_repeats=1,
    retry=RetryPolicy(),
)
CRASH = FailureCause(
    text="rank 1 of 2 raised ValueError: no",
    see="logs/1/stderr.log",
    evidence=("Traceback", "ValueError: no"),
    rank=1,
)
NO_PORT = FailureCause(text="rank 0 of 2 raised E", signature=match_signature(["EADDRINUSE"]))
LOSS: MetricMap = {"lm loss": series_of({1: 6.134, 10: 5.234})}


def training(*causes: FailureCause | None) -> Training:
    """A training of one repeat; its last attempt measured a loss if it is clean."""
    attempts = tuple(
        Attempt(
            repeat=1,
            number=number,
            dirs=JOB.dirs.attempt(repeat=1, attempt=number),
            ends=(),
            metrics=(LOSS,) if cause is None else (),
            cause=cause,
        )
        for number, cause in enumerate(causes, start=1)
    )
    return Training(job=JOB, attempts=attempts)


def test_a_failure_is_its_cause_and_the_last_words_of_the_rank() -> None:
    assert training_failure(training(CRASH)) == (
        "rank 1 of 2 raised ValueError: no\n"
        "    Traceback\n"
        "    ValueError: no\n"
        "see logs/1/stderr.log"
    )


def test_a_known_cause_comes_with_advice_and_what_was_tried_before() -> None:
    known = replace(CRASH, evidence=(), signature=match_signature(["CUDA out of memory"]))
    assert training_failure(training(NO_PORT, known)).splitlines()[1:] == [
        (
            "known as cuda_oom (not transient, so not run again): lower the micro batch or the "
            "model, or look for another process on the GPU"
        ),
        "see logs/1/stderr.log",
        "attempt 1: rank 0 of 2 raised E",
    ]


def test_a_summary_has_time_loss_and_what_was_odd() -> None:
    assert summary_line(training(NO_PORT, None), None) == (
        "0.0 s, lm loss 6.1340 -> 5.2340 in 10 iterations, attempt 1 failed: port_in_use"
    )


def test_a_summary_counts_what_was_not_judged_and_says_why_once() -> None:
    found = [
        Comparison(metric=name, passed=True, rule=rule, golden_path="g", notes=notes)
        for name, rule, notes in (
            ("lm loss", ComparisonRule.BAND, ("off in the last digits",)),
            ("iteration-time", ComparisonRule.NOT_JUDGED, ("another host",)),
            ("mem-max-allocated-bytes", ComparisonRule.NOT_JUDGED, ("another host",)),
        )
    ]
    repeats = [
        RepeatComparison(repeat=n, against="golden", measured=Path("m"), comparisons=tuple(found))
        for n in (1, 2)
    ]
    judgement = Judgement(repeats=tuple(repeats), policy=ComparisonPolicy.STRICT)
    assert summary_line(training(None), judgement).endswith(
        "in 10 iterations, off in the last digits, 2 not judged: iteration-time, "
        "mem-max-allocated-bytes (another host)"
    )


def test_a_pass_without_a_golden_that_was_asked_for_is_named() -> None:
    record = item_record(training(None), None, is_uncompared=True)
    assert record.summary is not None
    assert record.summary.endswith(" in 10 iterations, not compared with a golden")
    failed = item_record(training(CRASH), None, problem="long", is_uncompared=True)
    assert "not compared" not in str(failed.summary)


def test_a_record_has_every_attempt_with_its_cause() -> None:
    record = item_record(training(NO_PORT, None), None)
    found = (record.verdict, record.problem, record.directory, record.causes)
    assert found == ("flaky", None, "/run/item", ("port_in_use",))
    assert record.attempts[0] == RecordedAttempt(
        repeat=1,
        attempt=1,
        directory="/run/item/repeat_1/attempt_1",
        cause="rank 0 of 2 raised E",
        signature="port_in_use",
        is_transient=True,
        fingerprint=fingerprint(NO_PORT),
    )


def test_a_row_that_cannot_be_traced_says_why(tmp_path: Path) -> None:
    path = tmp_path / "model_config.yaml"
    path.write_text("TEST_TYPE: regular\nMODE: inference\nMETRICS: [logprobs]\nMODEL_ARGS: {}\n")
    job = replace(JOB, case=read_case(path), setting=replace(SETTING, trace="hash"))
    trained = replace(training(None), job=job)
    assert summary_line(trained, None).endswith("in 10 iterations, not traced: MODE is inference")
