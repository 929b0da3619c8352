from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Iterator

import pytest

from pytest_megatron.base.files import JsonValue
from pytest_megatron.errors import GoldenError
from pytest_megatron.workloads.golden.build import series_in
from pytest_megatron.workloads.golden.model import Provenance, Value, series_of, to_float32
from pytest_megatron.workloads.golden.store import (
    metrics_to_json,
    parse_golden,
    shortest,
)


def block(values: JsonValue, **more: JsonValue) -> dict[str, JsonValue]:
    return {"start_step": 1, "end_step": 10, "step_interval": 5, "values": values, **more}


def values_of(document: JsonValue) -> dict[int, Value]:
    return dict(parse_golden(json.dumps(document), "g.json").metrics["lm loss"].items())


def test_a_metric_map_is_read_in_order_of_steps() -> None:
    document = parse_golden(
        json.dumps({"lm loss": block({"10": 3, "1": 4.5, "5": "nan"}), "_provenance": {"a": 1}}),
        "g.json",
    )
    assert list(document.metrics["lm loss"].items()) == [(1, 4.5), (5, "nan"), (10, 3.0)]
    assert not document.metrics["lm loss"].is_full_precision
    assert document.provenance == Provenance()


def test_a_list_of_values_stands_at_start_and_interval() -> None:
    text = json.dumps({"lm loss": block([3.0, 2.0], start_step=0), "iteration_timing_avg": 0.4})
    document = parse_golden(text, "g.json")
    assert dict(document.metrics["lm loss"].items()) == {0: 3.0, 5: 2.0}


def test_value_precision_is_read_and_an_unknown_one_refused() -> None:
    full = {"lm loss": block({"1": 1.0}, value_precision="full")}
    assert parse_golden(json.dumps(full), "g").metrics["lm loss"].is_full_precision
    odd = json.dumps({"a": block({"1": 1.0}, value_precision="half")})
    with pytest.raises(GoldenError, match="'value_precision' is str 'half', expected full"):
        parse_golden(odd, "g")


def test_json_inside_a_json_string_is_decoded_twice() -> None:
    inner = json.dumps({"lm loss": block({"1": 1.0})})
    document = parse_golden(json.dumps(inner), "g.json")
    assert dict(document.metrics["lm loss"].items()) == {1: 1.0}


def test_bare_literals_are_read() -> None:
    document = parse_golden('{"a": {"values": {"1": NaN, "2": Infinity, "3": NaN}}}', "g.json")
    assert [str(v) for v in document.metrics["a"].values] == ["nan", "inf", "nan"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "g.json: empty file (0 bytes), expected JSON; record it again", id="0"),
        pytest.param(
            '{\n  "a": 1,\n}',
            "g.json:2:9: not JSON: illegal trailing comma before end of object",
            id="comma",
        ),
        pytest.param(
            '{"a": 1}\n{"a": 2}\n',
            "g.json:2:1: not JSON: extra data",
            id="json-lines",
        ),
        pytest.param(
            '{"a": 1}\n' + "[" * 100_000, "g.json:2:1: not JSON: extra data", id="deep-second-line"
        ),
        pytest.param(
            "{}",
            "g.json: holds no metric ({}), expected an object of metrics; record it again",
            id="empty-object",
        ),
        pytest.param(
            "[1, 2]", "g.json: holds a JSON list of 2, expected an object of metrics", id="list"
        ),
        pytest.param(
            '{"a": 1, "a": 2}',
            "g.json: the key 'a' is there twice; keep one of them",
            id="duplicate",
        ),
        pytest.param(
            '{"dgx_h100": {"batch_1": {"avg_latency_ms": 1.0}}}',
            "g.json: no metric block with 'values' in it, found 'dgx_h100'; no golden",
            id="baseline",
        ),
        pytest.param(
            '{"a": {"values": {"1": 1}}, "b": {}}',
            "g.json: 'b' is no metric block: it has no 'values'",
            id="block-without-values",
        ),
        pytest.param(
            '{"a": {"values": {"1.5": 1}}}',
            "g.json: a: step '1.5', expected a decimal number of at most 18 digits",
            id="step",
        ),
        pytest.param(
            '{"a": {"values": {"1": true}}}',
            "g.json: a, step 1: bool 'True', expected a number",
            id="boolean",
        ),
        pytest.param(
            '{"a": {"values": {"1": 1.0, "01": 2.0}}}',
            "g.json: a: step 1 is there twice; keep one of them",
            id="step-twice",
        ),
        pytest.param(
            '{"a": {"values": [1]}}',
            "g.json: a: 'start_step' is None, a list of values needs it to be a step number",
            id="list-without-start",
        ),
        pytest.param(
            '{"a": {"values": {}, "non_finite": {"1": "NaN"}}}',
            "g.json: a, step 1: 'NaN', expected one of -inf, inf, nan",
            id="non-finite",
        ),
    ],
)
def test_what_is_no_golden_is_named(text: str, message: str) -> None:
    with pytest.raises(GoldenError) as caught:
        parse_golden(text, "g.json")
    if "trailing comma" in message:  # Python 3.13 words and places it differently
        assert str(caught.value).startswith("g.json:")
    else:
        assert str(caught.value) == message


def test_blocks_are_written_sorted_with_interval_and_precision() -> None:
    written = metrics_to_json(
        {
            "b": series_of({5: 2.0, 1: 1.0, 10: 3.0}, is_full_precision=True),
            "a": series_of({7: 1.5}),
        }
    )
    assert json.dumps(written) == json.dumps(
        {
            "a": {"start_step": 7, "end_step": 7, "step_interval": 1, "values": {"7": 1.5}},
            "b": {
                "start_step": 1,
                "end_step": 10,
                "step_interval": 5,
                "value_precision": "full",
                "values": {"1": 1.0, "5": 2.0, "10": 3.0},
            },
        }
    )


def test_nan_inf_text_and_missing_survive_writing_and_reading() -> None:
    values: dict[int, Value] = {1: math.nan, 2: math.inf, 3: -math.inf, 4: "nan", 6: 1.0}
    written = metrics_to_json({"lm loss": series_of(values, is_full_precision=True)})
    read = values_of(written)
    assert {s: repr(v) for s, v in read.items()} == {s: repr(v) for s, v in values.items()}


def test_a_float32_is_written_with_as_few_digits_as_give_it_back() -> None:
    rng = random.Random(0)
    assert shortest(to_float32(4.8753)) == 4.8753
    for _ in range(2000):
        value = struct.unpack(
            "<f", struct.pack("<f", rng.uniform(-1, 1) * 10 ** rng.uniform(-9, 9))
        )
        assert to_float32(shortest(value[0])) == value[0]


@pytest.mark.parametrize("value", [0.1, 4159301632.0, 1e300, 0.0, 4.8753])
def test_a_whole_number_and_what_is_no_float32_are_written_as_they_are(value: float) -> None:
    assert shortest(value) == value


ODD: list[JsonValue] = [None, True, 1.5, -1, "x", "1e5", [], ["full"], [None], {}, {"1": 2}]
ODD += [{"a": []}, 10**30, -(10**400), math.nan, math.inf]
SERIES: JsonValue = {
    "lm loss": {
        "start_step": 1,
        "end_step": 2,
        "step_interval": 1,
        "value_precision": "full",
        "values": {"1": 1.0, "2": 2.0},
        "non_finite": {"3": "nan"},
    },
    "num-zeros": {"start_step": 1, "end_step": 2, "step_interval": 1, "values": [1, 2]},
    "_provenance": {"repeats": 2, "spread": {"lm loss": 0.0}, "versions": {"a": "b"}},
}
REQUESTS: JsonValue = {
    "0": {"generated_text": "b", "generated_tokens": [1, 2], "logprobs": [-1.0, -2.0]},
    "1": {"routing_indices": [[1], [2], [3]], "routing_indices_token_indices": [0, 2]},
    "throughput": [1.0],
    "async_sched_step_count": [3],
}


def places(value: JsonValue, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every place in a JSON value."""
    yield path
    if isinstance(value, dict):
        for key, part in value.items():
            yield from places(part, (*path, key))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from places(part, (*path, index))


def put(value: JsonValue, path: tuple[str | int, ...], new: JsonValue) -> JsonValue:
    """The value with something else at a place."""
    if not path:
        return new
    key, *rest = path
    if isinstance(value, dict):
        return {k: put(v, tuple(rest), new) if k == key else v for k, v in value.items()}
    assert isinstance(value, list)
    return [put(v, tuple(rest), new) if i == key else v for i, v in enumerate(value)]


@pytest.mark.parametrize("golden", [SERIES, REQUESTS], ids=["series", "requests"])
def test_another_type_anywhere_is_read_or_is_one_error_of_the_file(golden: JsonValue) -> None:
    refused: list[str] = []
    for place in places(golden):
        for odd in ODD:
            text = json.dumps(put(golden, place, odd))
            try:
                series_in(parse_golden(text, "g.json"))
            except GoldenError as error:
                refused.append(str(error))
    assert len(refused) > 200
    assert all(message.startswith("g.json:") for message in refused)
