"""What may become a golden. Megatron-LM's refresh has no gate at all."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from staged_run import COMMIT, NUM_STEPS, ORIGIN, Staged, curve, digests_of, metric_map

from pytest_megatron.base.files import JsonValue
from pytest_megatron.workloads.golden.model import MetricMap, Provenance, Value
from pytest_megatron.workloads.golden.policy import ComparisonPolicy
from pytest_megatron.workloads.golden.store import read_golden
from pytest_megatron.workloads.refresh.difference import differ
from pytest_megatron.workloads.refresh.gate import refusals_of, refuse_mass
from pytest_megatron.workloads.refresh.read import read_run
from pytest_megatron.workloads.refresh.write import Terms, accept

SOUND = metric_map(curve())


@pytest.fixture
def staged(tmp_path: Path) -> Staged:
    return Staged(root=tmp_path)


def rules(
    staged: Staged,
    terms: Terms = Terms(),  # noqa: B008 - frozen
    *,
    has_remedy: bool = True,
) -> list[str]:
    """Accept the run; return why not. Whatever is refused, the goldens are as they were.

    What no reason outweighs says what to do, unless it only repeats what the run says.
    """
    before = tree(staged)
    outcome = accept(
        read_run(staged.run_dir, staged.root, ComparisonPolicy.STRICT), staged.root, terms
    )
    assert not outcome.refused or tree(staged) == before
    found = [refusal for _, refusal in outcome.refused]
    hard = [refusal.text for refusal in found if not refusal.rule.is_soft]
    assert not (hard and has_remedy) or "; " in hard[0]
    return [refusal.rule.value for refusal in found]


def tree(staged: Staged) -> dict[str, bytes]:
    files = (staged.root / "golden_values").rglob("*")
    return {str(p): p.read_bytes() for p in files if p.is_file()}


def changed(steps: Callable[[int], bool], to: Callable[[float], Value]) -> MetricMap:
    values = {s: to(float(v)) if steps(s) else v for s, v in curve().items()}
    return metric_map(values)


def cut_to(values: dict[int, Value], *, bits: int) -> dict[int, Value]:
    parts = {s: math.frexp(float(v)) for s, v in values.items()}
    return {s: math.ldexp(round(part * 2**bits) / 2**bits, e) for s, (part, e) in parts.items()}


def test_what_two_clean_repeats_measured_is_taken(staged: Staged) -> None:
    staged.add("c", [SOUND, SOUND])
    assert rules(staged) == []
    golden = read_golden(staged.root / staged.target("c"))
    assert golden.metrics.keys() == SOUND.keys()
    assert golden.provenance is not None
    assert (golden.provenance.commit, golden.provenance.repeats) == (COMMIT, 2)


BAD: dict[str, tuple[MetricMap, list[str]]] = {
    "crashed after 3 steps": (metric_map(curve(3)), ["truncated"]),
    "cancelled at step 60": (metric_map(curve(60)), ["truncated"]),
    "NaN in the second half": (changed(lambda s: s > 50, lambda _: math.nan), ["not-finite"]),
    "+30 and -30 % in turn": (
        metric_map({s: float(v) * (1.3 if s % 2 else 0.7) for s, v in curve().items()}),
        ["step-1"],
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_the_four_bad_candidates_that_megatrons_refresh_takes_are_refused(
    staged: Staged, what: str
) -> None:
    """In Megatron-LM each of them overwrites the golden, and the report says 0.

    The run claims that all went well; what it measured says otherwise.
    """
    bad, expected = BAD[what]
    staged.golden("c")
    staged.add("c", [bad, bad])
    found = rules(staged)
    assert set(expected) <= set(found)


@pytest.mark.parametrize(
    ("exit_code", "cause"),
    [
        (1, "rank 0 of 2 raised ValueError after iteration 3"),
        (0, "lm loss stops at step 60"),
    ],
)
def test_a_training_that_failed_is_no_golden_and_its_cause_is_told(
    staged: Staged, exit_code: int, cause: str
) -> None:
    """Megatron-LM's tool takes the values of jobs that failed, by design."""
    staged.add("c", [SOUND, SOUND], attempts=[{"exit_codes": [exit_code], "cause": cause}])
    (candidate,) = read_run(staged.run_dir, staged.root, ComparisonPolicy.STRICT)
    assert [refusal.line for refusal in refusals_of(candidate, None)] == [
        f"[not-trained] {cause}; run it again, once it trains to its end"
    ]
    assert rules(staged, Terms(reason="whatever"), has_remedy=False) == ["not-trained"]


@pytest.mark.parametrize("exit_code", [3, -9])
def test_an_exit_code_without_a_cause_is_enough(staged: Staged, exit_code: int) -> None:
    staged.add("c", [SOUND, SOUND], attempts=[{"exit_codes": [exit_code]}])
    assert rules(staged, Terms(reason="whatever")) == ["not-trained"]


def test_a_repeat_that_needed_another_attempt_is_no_golden(staged: Staged) -> None:
    """In Megatron-LM a second attempt is judged by what the first one left."""
    directory = staged.add("c", [SOUND, SOUND])
    (directory / "repeat_1" / "attempt_1").rename(directory / "repeat_1" / "attempt_2")
    (directory / "repeat_1" / "attempt_1").mkdir()
    node = "recipes/r.yaml::c[dev-cpu]"
    record = staged.items[node]
    assert isinstance(record, dict)
    attempts = record["attempts"]
    assert isinstance(attempts, list)
    second = dict(attempts[0]) if isinstance(attempts[0], dict) else {}
    attempts[0] = {**second, "exit_codes": [1], "cause": "rank 1 raised: EADDRINUSE"}
    attempts.insert(1, {**second, "attempt": 2})
    golden = record["golden"]
    assert isinstance(golden, dict)
    golden["digests"] = digests_of(directory)
    staged.write()
    assert rules(staged) == ["retry"]


def test_an_attempt_that_the_record_keeps_quiet_about_is_found(staged: Staged) -> None:
    directory = staged.add("c", [SOUND, SOUND])
    (directory / "repeat_1" / "attempt_2").mkdir()
    assert rules(staged) == ["damaged-run"]


def test_a_run_without_metrics_takes_none_of_another_repeat(staged: Staged) -> None:
    """In Megatron-LM a repeat without logs has the result of the one before."""
    directory = staged.add("c", [SOUND, SOUND])
    (directory / "repeat_2" / "attempt_1" / "phase_1" / "metrics.json").unlink()
    assert rules(staged, has_remedy=False) == ["damaged-run"]


def test_a_candidate_that_was_edited_is_refused(staged: Staged) -> None:
    directory = staged.add("c", [SOUND, SOUND])
    path = directory / "golden_candidate.json"
    golden = json.loads(path.read_text())
    golden["lm loss"]["values"]["50"] = 3.0
    path.write_text(json.dumps(golden))
    assert rules(staged) == ["damaged-run"]


def test_a_run_whose_measured_values_were_edited_is_refused(staged: Staged) -> None:
    """Candidate and repeats fit together; the run noted what it had left."""
    directory = staged.add("c", [SOUND, SOUND])
    measured = [directory / f"repeat_{n}/attempt_1/phase_1/metrics.json" for n in (1, 2)]
    for path in (directory / "golden_candidate.json", *measured):
        content = json.loads(path.read_text())
        content["lm loss"]["values"]["50"] = 3.0
        path.write_text(json.dumps(content))
    assert rules(staged) == ["damaged-run"]


def test_a_candidate_without_the_digests_of_its_run_is_refused(staged: Staged) -> None:
    staged.add("c", [SOUND, SOUND], record={"golden": {"digests": None}})
    assert rules(staged) == ["damaged-run"]


HOLES: dict[str, tuple[list[MetricMap], str]] = {
    "one repeat": ([SOUND], "repeats"),
    "repeats apart": ([SOUND, changed(lambda s: s > 9, lambda v: v * 1.01)], "spread"),
    "a hole": (
        [metric_map({s: v for s, v in curve().items() if s != 40})] * 2,
        "missing-steps",
    ),
    "a hole in one repeat": (
        [SOUND, metric_map({s: v for s, v in curve().items() if s != 40})],
        "unequal-steps",
    ),
    "stopped one step early": ([metric_map(curve(NUM_STEPS - 1))] * 2, "truncated"),
    "inf at a step": ([changed(lambda s: s == 7, lambda _: math.inf)] * 2, "not-finite"),
    "at step 1 alone": ([metric_map({1: 10.0})] * 2, "truncated"),
}


@pytest.mark.parametrize("what", HOLES)
@pytest.mark.parametrize("has_old", [False, True], ids=["new", "old"])
def test_what_is_not_whole_is_refused(staged: Staged, what: str, *, has_old: bool) -> None:
    repeats, rule = HOLES[what]
    if has_old:
        staged.golden("c")
    staged.add("c", repeats)
    assert rule in rules(staged)


# Which steps the loss is logged at; 244 goldens of Megatron-LM have step 1 and then every fifth.
LOGGED: dict[str, Callable[[int], bool]] = {
    "1, then every fifth": lambda s: s == 1 or s % 5 == 0,
    "1 and the last": lambda s: s in {1, NUM_STEPS},
    "1, 50, 100": lambda s: s in {1, 50, 100},
    "every tenth from 1": lambda s: s % 10 == 1,
    "every 30th and the last": lambda s: s % 30 == 0 or s == NUM_STEPS,
    "each of the first ten, then every tenth": lambda s: s <= 10 or s % 10 == 0,
    "the 60th and the last": lambda s: s in {60, NUM_STEPS},
}


@pytest.mark.parametrize("what", LOGGED)
def test_a_loss_may_be_logged_more_often_at_its_ends(staged: Staged, what: str) -> None:
    loss = metric_map({s: v for s, v in curve().items() if LOGGED[what](s)})
    staged.golden("c", loss)
    staged.add("c", [loss, loss])
    assert rules(staged) == []


SPARSE: dict[str, tuple[MetricMap, str]] = {
    "powers of two": (
        metric_map({s: v for s, v in curve().items() if s.bit_count() == 1 or s == NUM_STEPS}),
        "missing-steps",
    ),
    "a hole in each repeat": (
        metric_map({s: v for s, v in curve().items() if not 30 <= s < 60}),
        "missing-steps",
    ),
    "it never moves": (metric_map(dict.fromkeys(curve(), 0.0)), "constant"),
    "it stands still in the end": (changed(lambda s: s > 70, lambda _: 2.5), "constant"),
}


@pytest.mark.parametrize("what", SPARSE)
def test_an_odd_curve_that_every_repeat_has_wants_a_reason_once(staged: Staged, what: str) -> None:
    new, rule = SPARSE[what]
    staged.add("c", [new, new])
    assert rule in rules(staged)
    assert rules(staged, Terms(reason="so it is logged")) == []
    staged.golden("d", new)
    again = replace(staged, name="again", items={})
    again.add("d", [new, new])
    assert rules(again) == []


def test_a_loss_that_stands_still_where_the_old_one_moved_is_refused(staged: Staged) -> None:
    frozen = changed(lambda s: s > 70, lambda _: 2.5)
    staged.golden("c")
    staged.add("c", [frozen, frozen])
    assert "frozen" in rules(staged, Terms(reason="whatever"))


def test_a_metric_that_the_old_golden_has_must_not_go(staged: Staged) -> None:
    staged.golden("c", metric_map(curve(), num_zeros={1: 4.0}))
    staged.add("c", [SOUND, SOUND])
    assert rules(staged) == ["fewer-metrics"]


ORIGINS: dict[str, tuple[Provenance, str]] = {
    "no commit": (replace(ORIGIN, commit=None), "not-committed"),
    "dirty": (replace(ORIGIN, is_dirty=True), "dirty"),
    "other ranks": (replace(ORIGIN, world_size=4), "world-size"),
    "other GPU": (replace(ORIGIN, gpu="8x NVIDIA H200"), "gpu"),
    "other case": (replace(ORIGIN, config_hash="0ther"), "config-changed"),
}


@pytest.mark.parametrize("what", ORIGINS)
def test_where_it_was_measured_must_be_where_the_golden_is_of(staged: Staged, what: str) -> None:
    origin, rule = ORIGINS[what]
    staged.golden("c", origin=replace(ORIGIN, gpu="8x NVIDIA H100"))
    staged.add("c", [SOUND, SOUND], origin=origin)
    assert rules(staged) == [rule]


def test_what_makes_a_tree_dirty_is_named(staged: Staged) -> None:
    names: list[JsonValue] = ["a.py", "plan.json", "summary/", "x", "y", "z"]
    dirty = replace(ORIGIN, is_dirty=True)
    staged.add("c", [SOUND, SOUND], origin=dirty, record={"golden": {"uncommitted": names}})
    candidates = read_run(staged.run_dir, staged.root, ComparisonPolicy.STRICT)
    ((_, refusal),) = accept(candidates, staged.root, Terms(), is_dry=True).refused
    assert refusal.line == (
        "[dirty] the tree of the run had changes that its commit lacks: a.py, plan.json, summary/, "
        "x, y and 1 more; commit them, or have git ignore those that no training reads, and run "
        "again; or give --allow-dirty, which the golden then says"
    )


def test_a_dirty_tree_may_be_allowed(staged: Staged) -> None:
    staged.add("c", [SOUND, SOUND], origin=replace(ORIGIN, is_dirty=True))
    assert rules(staged, Terms(is_dirty_allowed=True)) == []


RECORDS: dict[str, dict[str, JsonValue]] = {
    "expected-failure": {"is_expected": True},
    "quarantine": {"quarantine": {"holds": True}},
    "platform": {"platform": "dgx_h100"},
}


@pytest.mark.parametrize("rule", RECORDS)
def test_what_nothing_says_is_right_is_refused(staged: Staged, rule: str) -> None:
    staged.add("c", [SOUND, SOUND], record=RECORDS[rule])
    assert rules(staged) == [rule]


def test_hardware_that_failed_meanwhile_and_lightweight_runs_are_refused(staged: Staged) -> None:
    faults: dict[str, JsonValue] = {
        "health": {"faults": ["GPU 1 had an uncorrected ECC error"], "notes": []}
    }
    staged.add("c", [SOUND, SOUND], attempts=[faults])
    assert rules(staged) == ["hardware"]
    light = replace(staged, name="light", items={})
    light.add("d", [SOUND, SOUND], plan={"is_lightweight": True})
    assert rules(light) == ["lightweight"]


def test_a_resumed_training_that_disagrees_is_no_golden(staged: Staged) -> None:
    directory = staged.add("c", [SOUND, SOUND])
    bad = {"metric": "lm loss", "passed": False, "text": "lm loss, step 51: off"}
    repeat = {"repeat": 1, "against": "first phase", "comparisons": [bad]}
    (directory / "comparison.json").write_text(json.dumps({"repeats": [repeat]}))
    assert rules(staged) == ["disagrees"]


WORSE: dict[str, tuple[MetricMap, list[str]]] = {
    "loss": (changed(lambda s: s > 1, lambda v: v * 1.002), ["loss-worse"]),
    "first step": (changed(lambda s: s == 1, lambda v: v * 0.99), ["step-1"]),
    "worse at the end": (changed(lambda s: s > 75, lambda v: v * 1.8), ["loss-worse"]),
    "first lower, then higher": (
        metric_map({s: float(v) * (0.7 if s < 50 else 1.3) for s, v in curve().items()}),
        ["step-1", "loss-worse"],
    ),
    "lower and higher in turn": (
        metric_map({s: float(v) * (1 + 0.0015 * (-1) ** s) for s, v in curve().items()}),
        ["step-1", "outside-band"],
    ),
    "too good": (changed(lambda s: s > 1, lambda v: v * 0.5), ["loss-better"]),
    "a little better": (changed(lambda s: s > 1, lambda v: v * 0.9991), ["outside-band"]),
    "a little worse": (changed(lambda s: s > 1, lambda v: v * 1.0009), ["outside-band"]),
    "one step": (changed(lambda s: s == 40, lambda v: v * 1.04), ["outside-band"]),
    "within the band": (changed(lambda s: s > 1, lambda v: v * 1.0002), []),
}


@pytest.mark.parametrize("what", WORSE)
def test_a_loss_that_gets_worse_wants_a_reason(staged: Staged, what: str) -> None:
    new, expected = WORSE[what]
    staged.golden("c")
    staged.add("c", [new, new])
    assert rules(staged) == expected
    if expected:
        assert rules(staged, Terms(reason="the batch is twice as large")) == []
        origin = read_golden(staged.root / staged.target("c")).provenance
        assert origin is not None
        assert origin.reason == "the batch is twice as large"


def test_what_a_run_may_do_to_a_long_curve_wants_a_reason_of_a_golden(staged: Staged) -> None:
    long = curve(400)
    staged.golden("c", metric_map(long))
    new = metric_map({s: float(v) * (1.0009 if s > 1 else 1) for s, v in long.items()})
    staged.add("c", [new, new])
    assert rules(staged) == ["outside-band"]


def test_a_count_that_changes_wants_a_reason(staged: Staged) -> None:
    def zeros(number: float) -> MetricMap:
        return metric_map(curve(), num_zeros=dict.fromkeys(range(1, NUM_STEPS + 1), number))

    staged.golden("c", zeros(1000.0))
    staged.add("c", [zeros(3000.0)] * 2)
    assert rules(staged) == ["outside-band"]


def test_a_curve_that_a_wide_band_would_let_through_wants_a_reason(staged: Staged) -> None:
    """Repeats that are 5 % apart at the old golden's steps allow any of these single values."""
    wide = replace(ORIGIN, repeats=5, deterministic=False, spread={"lm loss": 2e-3})
    for name, new in {
        "up": changed(lambda s: s > 1, lambda v: v * 1.007),
        "down": changed(lambda s: s > 1, lambda v: v * 0.993),
        "both": metric_map({s: float(v) * (1.007 if s % 2 else 0.993) for s, v in curve().items()}),
        "tail": changed(lambda s: s > 75, lambda v: v * 1.007),
    }.items():
        staged.golden(name, origin=wide)
        run = replace(staged, name=f"run-{name}", items={})
        run.add(name, [new, new])
        assert rules(run), name


def test_the_same_commit_must_measure_the_same_bits(staged: Staged) -> None:
    """Something that git does not see has changed: an ignored module, for one."""
    same = replace(ORIGIN, deterministic=True, repeats=2, versions={"torch": "2.13"})
    bits = changed(lambda s: s > 1, lambda v: v * 1.000001)
    staged.golden("c", origin=same)
    staged.add("c", [bits, bits], origin=same)
    assert rules(staged) == ["outside-band"]
    staged.golden("d", origin=replace(same, commit="0ther"))
    other = replace(staged, name="other", items={})
    other.add("d", [bits, bits], origin=same)
    assert rules(other) == []


@pytest.mark.parametrize(
    ("precision", "amount", "expected"),
    [
        pytest.param("bf16", 1e-4, [], id="another order of a sum"),
        pytest.param("bf16", 5e-4, ["outside-band"], id="more than that"),
        pytest.param("fp32", 1e-4, ["outside-band"], id="what no order explains"),
    ],
)
def test_another_commit_may_round_otherwise_where_bits_are_few(
    staged: Staged, precision: str, amount: float, expected: list[str]
) -> None:
    before = replace(ORIGIN, deterministic=True, repeats=2, precision=precision, commit="0ther")
    staged.golden("c", origin=before)
    noisy = metric_map({s: float(v) * (1 + amount * math.sin(s * s)) for s, v in curve().items()})
    if amount > 1e-4:
        noisy = changed(lambda s: s > 1, lambda v: v * (1 + amount))
    staged.add("c", [noisy, noisy], origin=replace(before, commit=COMMIT))
    assert rules(staged) == expected


def test_steps_that_the_old_golden_has_must_not_go(staged: Staged) -> None:
    staged.golden("c")
    late = metric_map({s: v for s, v in curve().items() if s > 50})
    staged.add("c", [late, late])
    assert rules(staged) == ["late-start", "fewer-steps"]


ODD: dict[str, tuple[MetricMap, list[str]]] = {
    "rising from 5.5 to 40": (
        metric_map({s: 5.5 + 34.5 * s / NUM_STEPS for s in curve()}),
        ["not-falling"],
    ),
    "the second half": (
        metric_map({s: v for s, v in curve().items() if s > 50}),
        ["late-start"],
    ),
    "flat after a high first step": (
        metric_map({s: 14.0 if s == 1 else 10 + 0.1 * math.sin(s * s) for s in curve()}),
        ["not-falling"],
    ),
    "rising in the last tenth": (
        changed(lambda s: s > 90, lambda v: v * 4),
        ["not-falling"],
    ),
    "one step of 1e31": (
        changed(lambda s: s == 9, lambda _: 1e31),
        ["implausible"],
    ),
    "negative": (
        metric_map({s: -2 - s / NUM_STEPS for s in curve()}),
        ["implausible"],
    ),
    "two decimals": (metric_map({s: round(float(v), 2) for s, v in curve().items()}), ["rounded"]),
    "two decimals of four values": (
        metric_map({s: round(float(v), 2) for s, v in curve().items() if s % 25 == 0}),
        ["rounded"],
    ),
    "a mean of eight in bfloat16": (metric_map(cut_to(curve(), bits=11)), ["rounded"]),
    "float32": (metric_map(cut_to(curve(), bits=24)), []),
    "five decimals": (metric_map({s: round(float(v), 5) for s, v in curve().items()}), []),
    "every tenth step": (metric_map({s: v for s, v in curve().items() if s % 10 == 0}), []),
    "a loss that balances experts": (
        metric_map(curve(), load_balancing_loss={s: 1 + s / 10 for s in curve()}),
        [],
    ),
}


@pytest.mark.parametrize("what", ODD)
def test_a_first_golden_is_looked_at_by_itself(staged: Staged, what: str) -> None:
    new, expected = ODD[what]
    staged.add("c", [new, new])
    assert rules(staged) == expected
    if expected:
        assert rules(staged, Terms(reason="a loss that is no cross-entropy")) == []


# Gradient descent on a small network that fits a sine, from docs/tutorials/first-workload.md.
STEEP = {
    "learning rate 0.1": (
        *(1.1908, 0.1480, 0.1422, 0.1393, 0.1370, 0.1349, 0.1329, 0.1309, 0.1290, 0.1272),
        *(0.1253, 0.1235, 0.1218, 0.1200, 0.1183, 0.1166, 0.1150, 0.1133, 0.1117, 0.1102),
    ),
}


@pytest.mark.parametrize("what", STEEP)
def test_a_loss_that_falls_steeply_at_first_is_falling(staged: Staged, what: str) -> None:
    digits = [value + 1e-6 for value in STEEP[what]]  # written above with fewer than a run has
    loss = metric_map(dict(enumerate(digits, start=1)))
    phases: list[JsonValue] = [{"last_iteration": len(STEEP[what])}]
    staged.add("c", [loss, loss], plan={"phases": phases})
    assert rules(staged) == []


def test_what_the_old_golden_has_too_is_not_asked_again(staged: Staged) -> None:
    new, _ = ODD["rising from 5.5 to 40"]
    staged.golden("c", new)
    staged.add("c", [new, new])
    assert rules(staged) == []


def test_a_training_may_begin_where_its_checkpoint_ends(staged: Staged) -> None:
    late = metric_map({s: v for s, v in curve().items() if s > 50})
    phases: list[JsonValue] = [{"last_iteration": NUM_STEPS, "rewind_to": 50}]
    staged.add("c", [late, late], plan={"phases": phases})
    assert rules(staged) == []


def test_memory_and_time_want_a_reason_on_one_class_of_host(staged: Staged) -> None:
    def costs(time: float, memory: float) -> MetricMap:
        steps = range(1, NUM_STEPS + 1)
        return metric_map(
            curve(),
            iteration_time=dict.fromkeys(steps, time),
            mem_max_allocated_bytes=dict.fromkeys(steps, memory),
        )

    staged.golden("c", costs(1.0, 1000.0))
    new = costs(1.06, 1011.0)
    staged.add("c", [new, new])
    assert rules(staged) == ["memory", "time"]
    busy = replace(staged, name="busy", items={})
    staged.golden("e", costs(1.0, 1000.0), replace(ORIGIN, spread={"iteration-time": 0.2}))
    busy.add("e", [costs(1.5, 1000.0)] * 2)
    assert rules(busy) == []
    other = replace(staged, name="elsewhere", items={})
    staged.golden("d", costs(1.0, 1000.0), replace(ORIGIN, host_class="another"))
    other.add("d", [new, new])
    assert rules(other) == []


@pytest.mark.parametrize(("factor", "word"), [(1.00025, "worse"), (0.99975, "better")])
def test_many_goldens_that_move_one_way_have_one_cause(
    staged: Staged, factor: float, word: str
) -> None:
    """In one commit of Megatron-LM 102 of 126 got worse, and nobody was asked.

    No one of them would be asked about.
    """
    new = changed(lambda s: s > 1, lambda v: v * factor)
    for number in range(21):
        staged.golden(f"c{number}")
        staged.add(f"c{number}", [new, new])
    candidates = read_run(staged.run_dir, staged.root, ComparisonPolicy.STRICT)
    outcome = accept(candidates, staged.root, Terms())
    ((name, refusal),) = outcome.refused
    assert (name, refusal.rule.value) == ("21 goldens", "one-direction")
    assert refusal.text.startswith(f"21 of 21 losses that change get {word}")
    assert accept(candidates, staged.root, Terms(reason="new data")).refused == ()


def test_many_goldens_that_move_both_ways_are_no_matter(staged: Staged) -> None:
    old = read_golden(staged.golden("c"))
    sides = [
        replace(old, metrics=changed(lambda _: True, lambda v, f=factor: v * f))  # type: ignore[misc]
        for factor in (1.01, 0.99)
    ]
    differences = [differ(f"g{n}", old, sides[n % 2]) for n in range(40)]
    assert refuse_mass(differences) is None
    assert refuse_mass(differences[:20:2]) is None


def test_one_refusal_keeps_the_whole_set_from_being_written(staged: Staged) -> None:
    staged.add("good", [SOUND, SOUND])
    staged.add("bad", [metric_map(curve(60))] * 2)
    assert rules(staged) == ["truncated", "truncated"]
