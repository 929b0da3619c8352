"""The names that other projects may import: frozen, light, and in the documentation."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pytest_megatron

ROOT = Path(__file__).parents[2]
PUBLIC = {
    *("Checking", "Describing", "Engine", "EngineContext", "EngineError", "JobSpec"),
    "LaunchError",
    *("MegatronError", "ModelParallel", "Planned", "Resources", "Setting", "Submission"),
    *("SubmissionOutcome", "SubmissionPhase", "TroubleKind", "Update", "Workload", "__version__"),
    *("outcome_of", "read_record", "write_spec"),
}
HEAVY = {"click", "numpy", "pydantic", "pytest", "torch", "typing_extensions", "xdist", "yaml"}


def test_the_names_are_these_and_no_others() -> None:
    assert set(pytest_megatron.__all__) == set(dir(pytest_megatron)) == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC - {"__version__"}))
def test_a_name_is_that_of_its_object(name: str) -> None:
    assert getattr(pytest_megatron, name).__name__ == name


def test_the_version_is_that_of_the_package() -> None:
    assert pytest_megatron.__version__ == importlib.metadata.version("pytest-megatron")


def test_another_name_is_an_error_as_python_has_it() -> None:
    with pytest.raises(ImportError, match=r"cannot import name 'runs_of' from 'pytest_megatron'"):
        exec("from pytest_megatron import runs_of", {})  # noqa: S102 - mypy would refuse it


def test_importing_it_loads_nothing_else() -> None:
    code = "import sys, pytest_megatron; print(*sys.modules)"
    argv = [sys.executable, "-S", "-c", code]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {name for name in loaded if name.startswith("pytest_megatron")} == {"pytest_megatron"}
    assert loaded & HEAVY == set()


def test_every_name_is_documented() -> None:
    page = (ROOT / "docs/reference/python-api.md").read_text()
    assert set(re.findall(r"`(\w+)`", page)) >= PUBLIC
