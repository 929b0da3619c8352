"""Each environment is broken in one way, and doctor says in which."""

from __future__ import annotations

import re
import venv
from pathlib import Path

import pytest
from staged_environment import Staged
from stages import STAGES

from pytest_megatron.base.findings import Severity
from pytest_megatron.doctor.command import examine
from pytest_megatron.doctor.probes.machine import last_words

# What the machine of the tests may have of itself.
REAL = {"disk-full", "host-name"}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("template") / "venv"
    venv.EnvBuilder(symlinks=True, with_pip=False).create(directory)
    return directory


@pytest.fixture
def staged(template: Path, tmp_path: Path) -> Staged:
    return Staged(template, tmp_path)


@pytest.mark.parametrize("name", STAGES)
def test_a_broken_environment_gives_the_one_finding_that_says_so(staged: Staged, name: str) -> None:
    break_it, rule, words = STAGES[name]
    break_it(staged)
    examination = examine(staged.places, with_collective=False)
    counted = [f for f in examination.findings if f.severity is not Severity.NOTE]
    counted = [f for f in counted if f.rule.id not in REAL]
    assert [finding.rule.id for finding in counted] == [rule]
    text = f"{counted[0].found} {counted[0].wrong} {counted[0].fix}"
    assert re.search(words, text), text
    assert examination.exit_code(is_strict=True) == (
        2 if counted[0].severity is Severity.ERROR else 1
    )


def test_a_sound_environment_has_only_notes_on_what_could_be_added(staged: Staged) -> None:
    staged.driver("570.26")
    staged.torch()
    found = examine(staged.places, with_collective=False).findings
    notes = [finding for finding in found if finding.rule.id not in REAL]
    assert [finding.rule.id for finding in notes] == ["compiled-missing"] * 6
    assert "NVTE_PYTORCH_FORCE_BUILD=TRUE" in notes[0].fix


def rules_found(staged: Staged) -> list[str]:
    return [finding.rule.id for finding in examine(staged.places, with_collective=False).findings]


def test_an_older_minor_driver_is_no_finding(staged: Staged) -> None:
    staged.driver("535.104.05")
    staged.torch()
    assert set(rules_found(staged)) - REAL == {"compiled-missing"}


def test_gpus_that_the_user_hides_are_no_finding(staged: Staged) -> None:
    staged.driver("570.26", num_gpus=8)
    staged.torch()
    staged.env["CUDA_VISIBLE_DEVICES"] = "0,1"
    assert set(rules_found(staged)) - REAL == {"compiled-missing"}


def test_a_collective_that_cannot_run_is_an_error(staged: Staged) -> None:
    staged.torch("2.8.0", cuda=None, count=0)  # made up: it has no torch.distributed
    found = examine(staged.places).findings[0]
    assert found.rule.id == "collective-fails"
    assert "all_reduce of 2 ranks with gloo: rank " in found.found
    assert "ModuleNotFoundError: No module named 'torch.distributed'" in found.found


def test_a_rank_is_quoted_by_its_exception_and_by_what_nccl_says_of_it() -> None:
    text = (
        "[rank0]: Traceback (most recent call last):\n"
        "[rank0]: torch.distributed.DistBackendError: NCCL error in: ../NCCLUtils.cpp:94, invalid\n"
        "[rank0]: ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
        "[rank0]: Last error:\n"
        "[rank0]: Bootstrap : no socket interface found\n"
        "[rank0]:[W1121 15:59:18.6 ProcessGroupNCCL.cpp:1575] Warning: not destroyed\n"
    )
    assert last_words(text) == (
        "torch.distributed.DistBackendError: NCCL error in: ../NCCLUtils.cpp:94, invalid: "
        "Bootstrap : no socket interface found"
    )
    assert last_words("[rank1]:[W0 x.cpp:1] Warning: only this\n") == "it printed nothing"
