from __future__ import annotations

import json
from pathlib import Path

import pydantic
import pytest
from golden_files import write_golden
from typing_extensions import TypedDict

from pytest_megatron.base.files import JsonValue
from pytest_megatron.workloads.golden.model import Provenance, series_of
from pytest_megatron.workloads.golden.store import lay_out, read_golden

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
    """Goldens were 75 % of all added lines."""
    assert lay_out(GOLDEN) == (
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
    assert lay_out(document) == (
        '{\n  "0": {\n    "tokens": [1, 2],\n    "text": "a"\n  },\n  "throughput": [1.5]\n}\n'
    )


@pytest.mark.parametrize("form", ["as written", "a line a step", "Megatron-LM's", "list"])
def test_a_golden_of_every_form_is_read(tmp_path: Path, form: str) -> None:
    """Goldens of earlier versions have one of four forms."""
    metrics = {
        "iteration-time": series_of({2: 0.5, 3: 0.25}, is_full_precision=True),
        "lm loss": series_of({1: 4.8753004, 5: 4.5, 10: 1e-30}, is_full_precision=True),
    }
    provenance = Provenance(commit="abc", spread={"lm loss": 0.0}, versions={"torch": "2"})
    path = tmp_path / "golden.json"
    write_golden(path, metrics, provenance)
    document = json.loads(path.read_text())
    assert path.read_text().endswith("\n}\n")
    if form == "list":
        document["iteration-time"]["values"] = [0.5, 0.25]
    if form != "as written":
        path.write_text(json.dumps(document, indent=4 if form == "Megatron-LM's" else 2))
    golden = read_golden(path)
    assert golden.metrics == metrics
    assert golden.provenance == provenance


class _Metric(TypedDict):
    """What Megatron-LM's reader asks of every top-level key; it ignores what else is there."""

    start_step: int
    end_step: int
    step_interval: int
    values: dict[int, int | float | str]


def test_megatrons_reader_takes_our_metric_maps(tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    loss = series_of({1: 4.5, 2: 4.25}, is_full_precision=True)
    write_golden(path, {"lm loss": loss}, Provenance(commit="abc", repeats=2))
    reader = pydantic.TypeAdapter(dict[str, _Metric])
    read = reader.validate_json(path.read_text())
    assert read["lm loss"]["values"] == {1: 4.5, 2: 4.25}
    assert read["_provenance"]["values"] == {}
