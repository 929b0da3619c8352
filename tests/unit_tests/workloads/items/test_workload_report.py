from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_megatron.runs.environment import gather_facts
from pytest_megatron.runs.equivalence import TensorDivergence, TraceComparison, as_text
from pytest_megatron.runs.layout import ItemDirs
from pytest_megatron.runs.record import RecordedAttempt, RecordedAudit
from pytest_megatron.triage.signatures import match_signature
from pytest_megatron.workloads.golden.model import MetricMap, series_of
from pytest_megatron.workloads.golden.policy import policy_named
from pytest_megatron.workloads.golden.store import read_golden
from pytest_megatron.workloads.items.report import (
    folded,
    item_record,
    mismatch,
    not_deterministic,
    summary_line,
    training_failure,
)
from pytest_megatron.workloads.recipe.case import read_case
from pytest_megatron.workloads.recipe.model import Equivalence, Row, parse_row
from pytest_megatron.workloads.refresh.read import make_candidate
from pytest_megatron.workloads.training.plan.plan import Setting
from pytest_megatron.workloads.verdict.attempt import (
    Attempt,
    FailureCause,
    Verdict,
    decide_training,
)
from pytest_megatron.workloads.verdict.compare import Judgement, RepeatComparison
from pytest_megatron.workloads.verdict.equivalence import REFERENCE, Audit, judge_equivalence
from pytest_megatron.workloads.verdict.job import Training, WorkloadJob
from pytest_megatron.workloads.verdict.retry import RetryPolicy, fingerprint

SETTING = Setting(root=Path("/p"), env={}, tee_ranks=(), is_lightweight=False)
WORKLOAD = parse_row(
    Row(
        line=7,
        spec={
            "model": "gpt",
            "test_case": "tp1",
            "environment": "dev",
            "platforms": "cpu",
            "scope": "L0",
            "cadence": ["pr"],
        },
        axes=(),
    ),
    file=Path("recipes/r.yaml"),
    variant=(),
)
JOB = WorkloadJob(
    node_id="recipes/r.yaml::tp1[dev-cpu]",
    workload=WORKLOAD,
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
    return Training(job=JOB, attempts=attempts, verdict=decide_training(attempts))


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


def test_a_mismatch_is_readable_in_80_columns() -> None:
    headline = (
        "lm loss is off at step 7: trained to the end, but its metrics disagree, and no golden"
    )
    file = "    measured: .pytest_megatron/runs/20261121-044344-4100/tiny-a-dev-cpu/metrics.json"
    shown = folded(
        f"{headline}\n"
        "    lm loss, step 7: observed 5.534, golden 5.5395, off by 9.9e-04 relative, tolerance "
        "allows 1.0e-04; 1 of 9 steps outside, 0 may be; golden_values/gpt/a/golden_values.json\n"
        "        passed: presence 9 of 9 steps, step 1 0.0e+00 of 1.0e-04, mean 1.1e-4 of 3.0e-4\n"
        f"{file}"
    )
    assert shown.splitlines() == [
        headline,
        "    lm loss, step 7: observed 5.534, golden 5.5395, off by 9.9e-04 relative,",
        "        tolerance allows 1.0e-04",
        "        1 of 9 steps outside, 0 may be",
        "        golden_values/gpt/a/golden_values.json",
        "        passed: presence 9 of 9 steps, step 1 0.0e+00 of 1.0e-04,",
        "            mean 1.1e-4 of 3.0e-4",
        file,
    ]


def test_a_summary_has_time_loss_and_what_was_odd() -> None:
    assert summary_line(training(NO_PORT, None), None) == (
        "0.0 s, lm loss 6.1340 -> 5.2340 in 10 iterations, attempt 1 failed: port_in_use"
    )


def test_a_summary_of_a_failure_is_short() -> None:
    problem = training_failure(training(CRASH))
    assert summary_line(training(CRASH), None, problem) == (
        "0.0 s, rank 1 of 2 raised ValueError: no"
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


def compared_with_a_layout(trace: TraceComparison) -> tuple[Training, Judgement]:
    layout = Equivalence(arguments={"--tensor-model-parallel-size": 1, "--bf16": None})
    job = replace(JOB, workload=replace(WORKLOAD, equivalence=layout))
    attempt = replace(training(None).attempts[0], metrics=(), equivalence=trace)
    trained = Training(job=job, attempts=(attempt,), verdict=Verdict.PASSED)
    repeat = RepeatComparison(
        repeat=1,
        against=REFERENCE,
        measured=attempt.dirs.root,
        comparisons=(judge_equivalence(trace, "equivalence.json"),),
    )
    policy = policy_named("strict", root=Path("/p"))
    return trained, Judgement(repeats=(repeat,), policy=policy)


def test_a_row_that_agrees_with_its_layout_is_named_with_it() -> None:
    found = compared_with_a_layout(TraceComparison(verdict="equal", steps=2, num_compared=40))
    assert summary_line(*found) == (
        "0.0 s, equivalent to --tensor-model-parallel-size 1, no --bf16, "
        "40 tensors of 2 steps agree"
    )


def test_a_row_that_differs_shows_the_first_tensor_that_does() -> None:
    first = TensorDivergence(
        order=3,
        step=1,
        microbatch=0,
        phase="forward",
        module="decoder.layers.0.mlp",
        tensor="output.0",
        ranks=(1,),
        error=0.5,
        limit=1e-6,
    )
    trace = TraceComparison(
        verdict="different",
        steps=2,
        num_compared=40,
        hint="a sum is missing",
        divergences=(first, replace(first, order=4, module="decoder.layers.1")),
        num_divergences=2,
    )
    trained, judgement = compared_with_a_layout(trace)
    headline, against, *block = mismatch(trained, judgement).splitlines()
    assert headline == (
        "decoder.layers.0.mlp, forward is off: trained to the end, but its tensors disagree"
    )
    assert against == "repeat 1 against the reference:"
    assert block == [*as_text(trace).splitlines(), "more: /run/item/equivalence.json"]
    assert max(map(len, folded("\n".join(block)).splitlines())) <= 80
    assert summary_line(trained, judgement, headline) == f"0.0 s, {headline}"
    record = item_record(trained, judgement, problem="long")
    assert record.fingerprint == "mismatch|reference: decoder.layers.0.mlp, forward"
    assert not record.compared


def test_traces_of_which_nothing_was_compared_do_not_pass() -> None:
    trace = TraceComparison(verdict="equal", steps=2, num_compared=0)
    _, judgement = compared_with_a_layout(trace)
    assert judgement.failed


OTHER_BITS = TraceComparison(
    verdict="different",
    steps=2,
    num_compared=40,
    divergences=(
        TensorDivergence(
            order=3,
            step=1,
            microbatch=0,
            phase="forward",
            module="decoder.layers.0.mlp",
            tensor="output.0",
            ranks=(1,),
            kind="bits",
        ),
    ),
    num_divergences=1,
)
SAME_BITS = TraceComparison(verdict="equal", steps=2, num_compared=40)
NOT_DETERMINISTIC = (
    "not deterministic: forward of decoder.layers.0.mlp output.0, step 1, rank 1, MODEL_ARGS_2"
)


def audited(comparison: TraceComparison, tmp_path: Path, case: str = "") -> Training:
    """A clean training of an audited row, whose case has these lines."""
    path = tmp_path / "model_config.yaml"
    path.write_text(f"TEST_TYPE: regular\nMODEL_ARGS: {{--train-iters: 10}}\n{case}")
    audit = Audit(comparison=comparison, training="MODEL_ARGS_2", num_tensors=80)
    attempt = replace(training(None).attempts[0], audit=audit)
    setting = replace(SETTING, is_audited=True)
    job = replace(JOB, case=read_case(path), setting=setting)
    return Training(job=job, attempts=(attempt,), verdict=Verdict.PASSED)


@pytest.mark.parametrize(
    ("comparison", "text"),
    [(SAME_BITS, "deterministic: 80 tensors of 2 steps"), (OTHER_BITS, NOT_DETERMINISTIC)],
)
def test_an_audit_is_in_the_summary_and_in_the_record(
    tmp_path: Path, comparison: TraceComparison, text: str
) -> None:
    trained = audited(comparison, tmp_path)
    record = item_record(trained, None)
    assert record.summary == f"0.0 s, lm loss 6.1340 -> 5.2340 in 10 iterations, {text}"
    assert record.audit is not None
    found = (record.audit.verdict, record.audit.text, record.audit.num_tensors)
    assert found == (text.partition(":")[0], text, 80)


def test_a_row_that_cannot_be_audited_says_why(tmp_path: Path) -> None:
    trained = audited(SAME_BITS, tmp_path, "MODE: inference\nMETRICS: [logprobs]\n")
    unaudited = (replace(trained.attempts[0], audit=None),)
    record = item_record(replace(trained, attempts=unaudited), None)
    assert record.audit == RecordedAudit(
        verdict="not audited", text="not audited: MODE is inference"
    )
    assert record.summary.endswith("in 10 iterations, not audited: MODE is inference")
    job = replace(trained.job, setting=replace(SETTING, trace="hash"))
    assert summary_line(replace(trained, job=job, attempts=unaudited), None).endswith(
        "in 10 iterations, not traced: MODE is inference"
    )


@pytest.mark.parametrize(
    ("case", "claim"),
    [
        ("", None),
        ("ENV_VARS: {NVTE_ALLOW_NONDETERMINISTIC_ALGO: 1}\n", None),
        (
            "ENV_VARS: {NVTE_ALLOW_NONDETERMINISTIC_ALGO: 0}\n",
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO: 0",
        ),
        (
            "ENV_VARS: {NVTE_ALLOW_NONDETERMINISTIC_ALGO: 0, NON_DETERMINSTIC_RESULTS: 1}\n",
            None,
        ),
    ],
)
def test_only_a_case_that_claims_to_be_deterministic_fails_an_audit(
    tmp_path: Path, case: str, claim: str | None
) -> None:
    assert not_deterministic(audited(SAME_BITS, tmp_path, case)) is None
    problem = not_deterministic(audited(OTHER_BITS, tmp_path, case))
    if claim is None:
        assert problem is None
        return
    assert problem is not None
    first, *block = problem.splitlines()
    assert first == NOT_DETERMINISTIC
    where = tmp_path / "model_config.yaml"
    assert block[-1] == f"    the case claims to be deterministic, by {claim} in {where}"


def test_a_golden_says_what_the_audit_of_its_run_found(tmp_path: Path) -> None:
    trained = audited(OTHER_BITS, tmp_path)
    root = tmp_path / "item"
    job = replace(trained.job, dirs=ItemDirs(root=root), setting=replace(SETTING, root=tmp_path))
    root.mkdir()
    path = make_candidate(
        replace(trained, job=job), gather_facts(tmp_path), arguments=(), policy="strict"
    )
    golden = read_golden(path)
    assert golden.provenance is not None
    assert golden.provenance.audit == NOT_DETERMINISTIC
