"""What is seen of an inference run, and what Megatron-LM's own comparison lets through."""

from __future__ import annotations

import copy

import pytest

from pytest_megatron.base.files import JsonValue
from pytest_megatron.workloads.golden.compare.inference import Pair, compare_generation
from pytest_megatron.workloads.golden.compare.result import ComparisonRule, render
from pytest_megatron.workloads.golden.model import GENERATION_METRICS, Generation, parse_generation
from pytest_megatron.workloads.golden.policy import ComparisonPolicy

REQUEST: dict[str, JsonValue] = {
    "generated_tokens": [3, 1, 2],
    "logprobs": [-1.5, -2.0, -0.25],
    "generated_text": "and so it goes on",
    "routing_indices": [[[2, 1]], [[3, 0]]],
}
GOLDEN: dict[str, JsonValue] = {
    "0": dict(REQUEST),
    "1": dict(REQUEST),
    "throughput": [1.0, 12.0, 13.0],
    "mem-max-allocated-bytes": 1000,
    "lifetime_prefill_token_count": 4,
}
ALL = tuple(m for m in GENERATION_METRICS if m in GOLDEN or m in REQUEST)


def changed(path: str, value: JsonValue) -> Generation:
    """Return the golden with one value changed; the key `request` alone drops a request."""
    whole = copy.deepcopy(GOLDEN)
    *parents, key = path.split("/")
    inner: dict[str, JsonValue] = whole
    for parent in parents:
        deeper = inner[parent]
        assert isinstance(deeper, dict)
        inner = deeper
    if value is None:
        del inner[key]
    else:
        inner[key] = value
    return parse_generation(whole, "o.json")


def failed(
    observed: Generation, *metrics: str, policy: ComparisonPolicy = ComparisonPolicy.STRICT
) -> list[str]:
    golden = parse_generation(GOLDEN, "g.json")
    pair = Pair(golden=golden, observed=observed, path="g.json", policy=policy)
    answers = compare_generation(pair, metrics or ALL)
    return [render(answer) for answer in answers if not answer.passed]


def test_the_very_same_output_passes_under_both_policies() -> None:
    same = parse_generation(GOLDEN, "o.json")
    assert (failed(same), failed(same, policy=ComparisonPolicy.MEGATRON)) == ([], [])


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        pytest.param(
            "1/generated_tokens",
            [3, 7, 2],
            "generated_tokens, request '1', token 1: observed 7, golden 1; "
            "1 of 2 requests differ; g.json",
            id="token",
        ),
        pytest.param(
            "0/generated_tokens",
            [3, 1],
            "generated_tokens, request '0', number of tokens: observed 2, golden 3; "
            "1 of 2 requests differ; g.json",
            id="too few tokens",
        ),
        pytest.param(
            "0/logprobs",
            [-1.5, -2.002, -0.25],
            "logprobs, request '0', position 1: observed -2.002, golden -2; "
            "1 of 2 requests differ; largest difference 2.0e-03, 1e-03 may be; g.json",
            id="logprob",
        ),
        pytest.param(
            "0/logprobs",
            [-1.5, float("nan"), -0.25],
            "logprobs, request '0', position 1: observed nan, golden -2; "
            "1 of 2 requests differ; largest difference 0.0e+00, 1e-03 may be; g.json",
            id="nan",
        ),
        pytest.param(
            "1/routing_indices",
            [[[1, 2]], [[3, 1]]],
            "routing_indices, request '1', token 1: observed the text '[[1, 3]]', "
            "golden the text '[[0, 3]]'; 1 of 2 requests differ; g.json",
            id="expert",
        ),
        pytest.param(
            "throughput",
            [9.0, 10.0, 11.0],
            "throughput, median after the warm-up: observed 10.5, golden 12.5, "
            "off by -1.6e-01 relative, tolerance allows 1.0e-01; "
            "median 10.5 tokens/s, golden 12.5; g.json",
            id="slower",
        ),
        pytest.param(
            "mem-max-allocated-bytes",
            940,
            "mem-max-allocated-bytes, median: observed 940, golden 1000, "
            "off by -6.0e-02 relative, tolerance allows 5.0e-02; g.json",
            id="less memory",
        ),
        pytest.param(
            "lifetime_prefill_token_count",
            5,
            "lifetime_prefill_token_count, count: observed 5, golden 4; g.json",
            id="count",
        ),
    ],
)
def test_a_difference_is_named_with_its_request_and_place(
    path: str, value: JsonValue, text: str
) -> None:
    assert failed(changed(path, value)) == [text]


def test_truncated_text_fails_here_and_passes_in_megatron() -> None:
    """A text of one character passes in Megatron-LM's comparison."""
    short = changed("0/generated_text", "a")
    (text,) = failed(short)
    assert text == (
        "generated_text, request '0', character 1: observed the text 'a', "
        "golden the text 'and so it goes on'; 1 of 2 requests differ; g.json"
    )
    assert failed(short, policy=ComparisonPolicy.MEGATRON) == []


def test_a_missing_request_is_a_difference_that_names_it() -> None:
    """In Megatron-LM a request that the run lacks is a KeyError."""
    (text,) = failed(changed("1", None), "generated_tokens")
    assert text == "requests: requests differ; request '1' is missing in the run; g.json"


def test_a_request_that_the_golden_lacks_is_a_difference() -> None:
    extra = changed("2", {"generated_tokens": [1]})
    (text,) = failed(extra, "generated_tokens")
    assert text == "requests: requests differ; request '2' is not in the golden; g.json"


@pytest.mark.parametrize("metric", ["throughput", "mem-max-allocated-bytes", "logprobs"])
def test_a_listed_metric_must_be_on_both_sides(metric: str) -> None:
    """Megatron-LM ignores a listed metric that the golden lacks."""
    path = metric if metric in GOLDEN else f"0/{metric}"
    without = changed(path, None)
    whole = parse_generation(GOLDEN, "g.json")
    for golden, observed, rule in (
        (without, whole, ComparisonRule.NO_GOLDEN),
        (whole, without, ComparisonRule.NO_METRIC),
    ):
        pair = Pair(golden=golden, observed=observed, path="g.json", policy=ComparisonPolicy.STRICT)
        answer = compare_generation(pair, [metric])[-1]
        assert (answer.metric, answer.passed, answer.rule) == (metric, False, rule)
    pair = Pair(golden=without, observed=whole, path="g.json", policy=ComparisonPolicy.MEGATRON)
    assert all(a.passed for a in compare_generation(pair, [metric, "generated_tokens"]))


def test_small_noise_in_logprobs_and_a_faster_run_pass() -> None:
    assert failed(changed("0/logprobs", [-1.5004, -2.0, -0.25])) == []
    faster = changed("throughput", [1.0, 30.0, 30.0])
    assert failed(faster) == []
    assert len(failed(faster, policy=ComparisonPolicy.MEGATRON)) == 1


def test_time_and_memory_are_judged_on_the_goldens_kind_of_host_only() -> None:
    pair = Pair(
        golden=parse_generation(GOLDEN, "g.json"),
        observed=changed("throughput", [1.0, 2.0]),
        path="g.json",
        policy=ComparisonPolicy.STRICT,
        not_timed="another host",
    )
    (answer,) = compare_generation(pair, ["throughput"])
    assert (answer.passed, answer.is_judged, answer.notes) == (True, False, ("another host",))
