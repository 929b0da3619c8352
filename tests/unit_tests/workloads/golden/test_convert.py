from __future__ import annotations

import json

import pytest

from pytest_megatron.base.files import JsonValue
from pytest_megatron.errors import GoldenError
from pytest_megatron.workloads.golden.formats.convert import ConvertOptions, convert
from pytest_megatron.workloads.golden.store import Form, parse_document

COMPACT = ConvertOptions(form=Form.COMPACT)
MEGATRON = ConvertOptions(form=Form.MEGATRON, is_plain=True)


def block(values: JsonValue, **more: JsonValue) -> dict[str, JsonValue]:
    return {"start_step": 1, "end_step": 2, "step_interval": 1, "values": values, **more}


def test_numbers_keep_their_digits_and_unknown_keys_stay() -> None:
    text = (
        '{"b": {"later": [1], "start_step": 1, "end_step": 9, "step_interval": 4, "values": '
        '{"1": 10.500001234567891, "2": 5, "4": 22837833216.0}}, "iteration_timing_avg": 0.25}'
    )
    converted = convert(text, "g.json", COMPACT)
    assert converted.losses == ()
    assert converted.text == (
        '{\n  "b": {"start_step": 1, "end_step": 4, "step_interval": 2, "values": '
        '{"1": 10.500001234567891, "2": 5, "4": 22837833216.0}, "later": [1]},\n'
        '  "iteration_timing_avg": 0.25\n}\n'
    )


@pytest.mark.parametrize("form", Form)
def test_every_age_of_a_golden_becomes_every_form(form: Form) -> None:
    whole = {"lm loss": block({"1": 2.5, "2": "nan"})}
    old: dict[str, str] = {
        "map": json.dumps(whole),
        "list": json.dumps({"lm loss": block([2.5, "nan"])}),
        "twice": json.dumps(json.dumps(whole)),
        "zeros": json.dumps({"lm loss": block({"01": 2.5, "2": "nan"})}),
    }
    texts = {name: convert(text, "g.json", ConvertOptions(form=form)) for name, text in old.items()}
    assert len({converted.text for converted in texts.values()}) == 1
    assert {converted.losses for converted in texts.values()} == {()}
    metrics = parse_document(texts["map"].text, "g.json").metrics
    assert metrics == parse_document(old["map"], "g.json").metrics
    assert convert(texts["map"].text, "g.json", ConvertOptions(form=form)).text == texts["map"].text


def test_what_is_not_finite_is_kept_apart_or_told() -> None:
    text = (
        '{"a": {"start_step": 1, "end_step": 2, "step_interval": 1, "values": {"1": NaN, "2": 1}}}'
    )
    kept = convert(text, "g.json", COMPACT)
    assert json.loads(kept.text)["a"]["non_finite"] == {"1": "nan"}
    assert kept.losses == ()
    assert convert(text, "g.json", MEGATRON).losses == ("a: 1 value of nan or inf",)


def test_what_megatron_does_not_write_is_told() -> None:
    metrics = {"a": block({"1": 1.5}), "average": 2.0, "_provenance": {"commit": "abc"}}
    converted = convert(json.dumps(metrics), "g.json", MEGATRON)
    assert converted.losses == ("'average', a number beside the metrics", "its provenance (commit)")
    assert list(json.loads(converted.text)) == ["a"]


def test_rounding_and_dropping_are_told() -> None:
    whole = {
        "a": block({"1": 1.23456789, "2": "nan"}, value_precision="full"),
        "b": block({"1": 3.0}, value_precision="full"),
    }
    wish = ConvertOptions(form=Form.COMPACT, is_rounded=True, drops_text=True)
    converted = convert(json.dumps(whole), "g.json", wish)
    assert converted.losses == (
        "a: 1 step with a text for a value ('nan')",
        "a: digits of 1 value, rounded by 2.1e-06 at most",
        "b: that its values have all their digits",
    )
    found = json.loads(converted.text)
    assert (found["a"]["values"], found["a"]["end_step"]) == ({"1": 1.23457}, 1)
    assert "value_precision" not in found["a"]


def test_an_inference_golden_keeps_all_that_it_has() -> None:
    request = {"generated_tokens": [1, 2], "latency": 0.5, "tpot": [0.25]}
    whole = {"10": request, "2": request, "throughput": [1.5], "_provenance": {"commit": "abc"}}
    converted = convert(json.dumps(whole), "g.json", COMPACT)
    assert json.loads(converted.text) == whole
    assert list(json.loads(converted.text)) == ["2", "10", "throughput", "_provenance"]
    with pytest.raises(GoldenError, match="which JSON cannot say; record it again"):
        convert('{"0": {"logprobs": [NaN]}}', "g.json", COMPACT)
    with pytest.raises(GoldenError, match=r"g\.json: a number in it is not finite"):
        convert('{"0": {"logprobs": [1], "latency": NaN}}', "g.json", COMPACT)
