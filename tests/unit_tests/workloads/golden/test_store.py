from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from golden_files import write_golden

from pytest_megatron.base.yaml import parse_document
from pytest_megatron.errors import GoldenError, MetricsError
from pytest_megatron.workloads.golden.model import Provenance, series_of
from pytest_megatron.workloads.golden.store import (
    golden_path,
    new_golden_path,
    read_golden,
    read_metrics,
    write_metrics,
)
from pytest_megatron.workloads.recipe.expand import Profile
from pytest_megatron.workloads.recipe.load import load_document
from pytest_megatron.workloads.recipe.model import Workload

LOSS = series_of({1: 4.875300407409668, 2: 4.5}, is_full_precision=True)


@pytest.fixture
def workload() -> Workload:
    text = """
        type: basic
        spec: {model: gpt, platforms: dgx_h100, gpus: 1, script: "true"}
        products: [{test_case: [tp1], products: [{environment: [dev], scope: [mr]}]}]
    """
    loaded = load_document(parse_document(text, Path("r.yaml")), Profile.COMPAT)
    return loaded.workloads[0]


def test_a_golden_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    provenance = Provenance(
        command=("pretrain_gpt.py", "--bf16"),
        commit="abc",
        is_dirty=False,
        versions={"torch": "2.9"},
        repeats=3,
        deterministic=True,
        spread={"lm loss": 0.0, "iteration-time": series_of({1: 0.5}, is_full_precision=True)},
    )
    write_golden(path, {"num-zeros": series_of({1: 5.0}), "lm loss": LOSS}, provenance)
    golden = read_golden(path)
    assert (golden.path, golden.provenance) == (str(path), provenance)
    assert list(golden.metrics) == ["lm loss", "num-zeros"]
    assert list(json.loads(path.read_text())) == ["lm loss", "num-zeros", "_provenance"]


@pytest.mark.parametrize(
    ("metrics", "problem"),
    [
        pytest.param({}, "no metric to write", id="nothing"),
        pytest.param({"a": series_of({})}, "a has no value; not written", id="empty"),
        pytest.param(
            {"a": series_of({3: math.nan})}, "a, step 3: nan is not finite; not written", id="nan"
        ),
        pytest.param(
            {"a": series_of({3: "nan"})}, "a, step 3: 'nan' is not finite; not written", id="text"
        ),
    ],
)
def test_a_golden_with_a_hole_is_not_written(
    tmp_path: Path, metrics: dict[str, object], problem: str
) -> None:
    path = tmp_path / "golden.json"
    path.write_text("old")
    with pytest.raises(GoldenError, match=problem):
        write_golden(path, metrics, Provenance())  # type: ignore[arg-type] # parametrised
    assert path.read_text() == "old"


def test_a_golden_of_ours_comes_before_one_beside_the_case(
    tmp_path: Path, workload: Workload
) -> None:
    name = "golden_values_dev_dgx_h100.json"
    ours = tmp_path / "golden_values" / "gpt" / "tp1" / name
    theirs = tmp_path / "tests" / "functional_tests" / "test_cases" / "gpt" / "tp1" / name
    assert golden_path(tmp_path, workload) == ours
    theirs.parent.mkdir(parents=True)
    theirs.write_text("{}")
    assert golden_path(tmp_path, workload) == theirs
    assert new_golden_path(tmp_path, workload) == ours
    ours.parent.mkdir(parents=True)
    ours.write_text("{}")
    assert golden_path(tmp_path, workload) == ours


def test_a_missing_or_binary_golden_is_named(tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    with pytest.raises(GoldenError, match=r"golden\.json: no such file"):
        read_golden(path)
    path.write_bytes(b"{\xff}")
    with pytest.raises(GoldenError, match="not UTF-8 text, at byte 1"):
        read_golden(path)
    with pytest.raises(GoldenError, match="cannot be read: Is a directory"):
        read_golden(tmp_path)


def test_the_metrics_of_a_run_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.json"
    write_metrics(path, {"lm loss": series_of({1: math.inf, 2: 1.5}, is_full_precision=True)})
    observed = read_metrics(path)
    assert dict(observed.metrics["lm loss"].items()) == {1: math.inf, 2: 1.5}


def test_a_run_that_left_nothing_is_an_error_whatever_lies_beside_it(tmp_path: Path) -> None:
    """Nothing of another attempt is read where an attempt left no logs."""
    for name in ("attempt_1/tensorboard", "attempt_2/tensorboard"):
        (tmp_path / name).mkdir(parents=True)
    write_metrics(tmp_path / "attempt_1" / "metrics.json", {"lm loss": LOSS})
    (tmp_path / "attempt_1/tensorboard/events.out.tfevents.1.host").write_bytes(b"")
    with pytest.raises(MetricsError, match="attempt_2"):
        read_metrics(tmp_path / "attempt_2" / "tensorboard")
    with pytest.raises(MetricsError, match=r"attempt_2/metrics\.json: no such file"):
        read_metrics(tmp_path / "attempt_2" / "metrics.json")


def test_json_lines_are_recognised_by_their_suffix(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 2}\n')
    assert list(read_metrics(path).metrics) == ["a"]
