"""The published JSON Schemas: current, and of the files that are really written."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner

from pytest_megatron.workloads.commands.recipes import SCHEMAS, lint, schema_path
from pytest_megatron.workloads.golden.model import REQUEST_METRICS, Provenance

ROOT = Path(__file__).parents[4]
CASE = "TEST_TYPE: ckpt-resume\nMODEL_ARGS:\n  --seed: 1\nMODEL_ARGS_2: {}\n"
BLOCK = '{"start_step": 1, "end_step": 2, "step_interval": 1, "values": %s}'
INFERENCE = '{"0": {"generated_tokens": [1, 2], "logprobs": [-0.5]}, "throughput": [11.5]}'


def problems(name: str, *files: Path) -> str:
    """Return what check-jsonschema prints of files that do not fit."""
    program = Path(sys.executable).with_name("check-jsonschema")
    argv = list(map(str, (program, "--schemafile", schema_path(name), *files)))
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout


def test_what_is_published_is_what_the_code_has() -> None:
    script = runpy.run_path(str(ROOT / "docs/reference/schema_files.py"))
    for name in script["MAKERS"]:
        assert schema_path(name).read_text() == script["text_of"](name), "python3 dev.py generate"
    golden = json.loads(schema_path("golden").read_text())["$defs"]
    origin = {field.name for field in fields(Provenance)} - {"extra"}
    assert golden["Provenance"]["properties"].keys() == origin
    assert {key for one in golden["PromptAnswer"]["anyOf"] for key in one["required"]} == {
        *REQUEST_METRICS
    }


def test_every_file_of_the_package_has_a_name() -> None:
    files = {path.name for path in schema_path("run").parent.iterdir()}
    assert files == {f"{name}.schema.json" for name in SCHEMAS}


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("case", "tests/functional_tests/test_cases/**/model_config.yaml"),
        ("golden", "golden_values/**/*.json"),
        ("recipe", "recipes/*.yaml"),
    ],
)
def test_the_files_of_this_project_fit(name: str, pattern: str) -> None:
    files = sorted(ROOT.glob(pattern))
    assert files
    assert problems(name, *files) == ""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param("case", CASE, id="resume"),
        pytest.param("golden", f'{{"lm loss": {BLOCK % "[10.5, 10.2]"}}}', id="list"),
        pytest.param("golden", f'{{"lm loss": {BLOCK % """{"1": "nan"}"""}}}', id="text"),
        pytest.param("golden", INFERENCE, id="inference"),
    ],
)
def test_what_readers_take_fits(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / ("file.yaml" if name == "case" else "file.json")
    file.write_text(text)
    assert problems(name, file) == ""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param("case", CASE.replace("MODEL_ARGS_2", "MODEL_ARG_2"), id="unknown key"),
        pytest.param("case", CASE.replace("ckpt-resume", "resume"), id="unknown word"),
        pytest.param("golden", "{}", id="empty"),
        pytest.param("golden", f'{{"lm loss": {BLOCK % """{"one": 10.5}"""}}}', id="no step"),
        pytest.param("golden", f'{{"lm loss": {BLOCK % """{"1": true}"""}}}', id="no number"),
        pytest.param("golden", '{"lm loss": {"start_step": 1}}', id="no values"),
    ],
)
def test_what_readers_refuse_does_not_fit(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / ("file.yaml" if name == "case" else "file.json")
    file.write_text(text)
    assert "Schema validation errors were encountered" in problems(name, file)


def test_lint_prints_where_a_schema_is_and_checks_nothing() -> None:
    done = CliRunner().invoke(lint, ["--schema", "recipe", "no_such_directory"])
    assert done.exit_code == 0
    document = json.loads(Path(done.output.rstrip("\n")).read_text())
    assert document["title"] == "pytest-megatron recipe"
