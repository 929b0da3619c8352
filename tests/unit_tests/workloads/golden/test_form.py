from __future__ import annotations

import json
from pathlib import Path

import pydantic
import pytest
from typing_extensions import TypedDict

from pytest_megatron.base.files import JsonValue
from pytest_megatron.workloads.golden.model import Provenance, series_of
from pytest_megatron.workloads.golden.store import Form, lay_out, read_golden, write_golden

GOLDEN: dict[str, JsonValue] = {
    "lm loss": {
        "start_step": 1,
        "end_step": 3,
        "step_interval": 1,
        "value_precision": "full",
        "values": {"1": 10.5, "2": 9.25, "3": "nan"},
    },
    "timing": 1.5,
    "_provenance": {"command": ["a", "b"], "versions": {"torch": "2", "numpy": "1"}, "spread": {}},
}


def test_the_compact_form_has_a_line_for_each_metric_and_each_fact() -> None:
    """Pain point 31: goldens were 75 % of all added lines."""
    assert lay_out(GOLDEN, Form.COMPACT) == (
        "{\n"
        '  "lm loss": {"start_step": 1, "end_step": 3, "step_interval": 1, '
        '"value_precision": "full", "values": {"1": 10.5, "2": 9.25, "3": "nan"}},\n'
        '  "timing": 1.5,\n'
        '  "_provenance": {\n'
        '    "command": ["a", "b"],\n'
        '    "versions": {\n'
        '      "torch": "2",\n'
        '      "numpy": "1"\n'
        "    },\n"
        '    "spread": {}\n'
        "  }\n"
        "}\n"
    )


def test_a_request_has_a_line_for_each_field() -> None:
    document: dict[str, JsonValue] = {"0": {"tokens": [1, 2], "text": "a"}, "throughput": [1.5]}
    assert lay_out(document, Form.COMPACT) == (
        '{\n  "0": {\n    "tokens": [1, 2],\n    "text": "a"\n  },\n  "throughput": [1.5]\n}\n'
    )


def test_the_list_form_leaves_out_steps_at_equal_distances() -> None:
    block: dict[str, JsonValue] = {"start_step": 5, "end_step": 15, "step_interval": 5}
    even: JsonValue = block | {"values": {"5": 1.0, "10": 2.0, "15": 3.0}}
    uneven: JsonValue = block | {"values": {"1": 0.5, "5": 1.0, "10": 2.0}}
    single: JsonValue = block | {"values": {"5": 1.0}}
    later: JsonValue = block | {"values": {"10": 1.0, "15": 1.0}, "non_finite": {"5": "nan"}}
    text = lay_out({"a": even, "b": uneven, "c": single, "d": later}, Form.LIST)
    a = block | {"values": [1.0, 2.0, 3.0]}
    assert json.loads(text) == {"a": a, "b": uneven, "c": single, "d": later}


@pytest.mark.parametrize("form", Form)
def test_a_golden_of_every_form_is_read_as_it_was_written(tmp_path: Path, form: Form) -> None:
    metrics = {
        "iteration-time": series_of({2: 0.5, 3: 0.25}, is_full_precision=True),
        "lm loss": series_of({1: 4.8753004, 5: 4.5, 10: 1e-30}, is_full_precision=True),
    }
    provenance = Provenance(commit="abc", spread={"lm loss": 0.0}, extra={"later": {"a": 1}})
    path = tmp_path / "golden.json"
    write_golden(path, metrics, provenance, form)
    golden = read_golden(path)
    assert golden.metrics == metrics
    assert golden.provenance == provenance
    assert path.read_text().endswith("\n}\n")


class _Metric(TypedDict):
    """What Megatron-LM's reader asks of every top-level key; it ignores what else is there."""

    start_step: int
    end_step: int
    step_interval: int
    values: dict[int, int | float | str]


@pytest.mark.parametrize("form", [form for form in Form if form is not Form.LIST])
def test_megatrons_reader_takes_our_metric_maps(tmp_path: Path, form: Form) -> None:
    path = tmp_path / "golden.json"
    loss = series_of({1: 4.5, 2: 4.25}, is_full_precision=True)
    write_golden(path, {"lm loss": loss}, Provenance(commit="abc", repeats=2), form)
    reader = pydantic.TypeAdapter(dict[str, _Metric])
    read = reader.validate_json(path.read_text())
    assert read["lm loss"]["values"] == {1: 4.5, 2: 4.25}
    assert read["_provenance"]["values"] == {}
