from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import pytest
from golden_command import run

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.findings import Finding
from pytest_megatron.base.yaml import read_document
from pytest_megatron.errors import GoldenError
from pytest_megatron.workloads.golden.lint import Project, lint_goldens
from pytest_megatron.workloads.recipe.case import fingerprint
from pytest_megatron.workloads.recipe.load import load_recipe
from pytest_megatron.workloads.recipe.model import BUILT_IN_WORDS

DOCS = Path(__file__).parents[4] / "docs" / "reference"
DOCUMENTED = (DOCS / "goldens.md").read_text() + (DOCS / "recipes.md").read_text()
RECIPE = """\
type: basic
format_version: 1
spec: {model: gpt, gpus: 1, platforms: cpu, training_script_path: train.py}
products:
  - test_case: [tp1]
    products:
      - {environment: [dev], scope: [mr], platforms: [cpu, dgx_h100]}
"""
CASE = "TEST_TYPE: regular\nMODEL_ARGS: {--train-iters: 10}\nMETRICS: [lm loss]\n"
NAME = "golden_values_dev_dgx_h100.json"
COMMIT = "1234567890123456789012345678901234567890"


class Tree:
    """A project with one case, two rows and goldens beside it and in our place."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ours = root / "golden_values/gpt/tp1"
        self.beside = root / "tests/functional_tests/test_cases/gpt/tp1"
        for directory in (root / "recipes", self.ours, self.beside):
            directory.mkdir(parents=True)
        (root / "recipes/gpt.yaml").write_text(RECIPE)
        self.case = self.beside / "model_config.yaml"
        self.case.write_text(CASE)

    def golden(
        self, path: Path, provenance: Mapping[str, JsonValue] | None = None, *, end: int = 10
    ) -> Path:
        """Write a sound golden; its values differ from file to file."""
        offset = zlib.crc32(bytes(path.relative_to(self.root))) % 1000 / 331
        block: dict[str, JsonValue] = {
            "start_step": 1,
            "end_step": end,
            "step_interval": 1,
            "value_precision": "full",
        }
        values = {str(s): offset + 1 / s for s in range(1, end + 1)}
        times = {str(s): offset / s for s in range(1, end + 1)}
        document: dict[str, JsonValue] = {
            "iteration-time": {**block, "values": dict(times)},
            "lm loss": {**block, "values": dict(values)},
        }
        if provenance:
            document["_provenance"] = dict(provenance)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=2))
        return path

    def lint(self, *paths: Path) -> list[str]:
        """Return the findings as `file severity rule: message`."""
        project = Project(
            root=self.root,
            recipes=(self.root / "recipes",),
            vocabulary=BUILT_IN_WORDS,
        )
        findings = lint_goldens(paths, project).findings
        assert [found for found in findings if f"| `{found.rule}` | " not in DOCUMENTED] == []
        return [self.show(found) for found in findings]

    def show(self, found: Finding) -> str:
        where = found.where.replace(f"{self.root}/", "")
        message = found.message.replace(f"{self.root}/", "")
        return f"{where} {found.severity.value} {found.rule}: {message}"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_sound_goldens_have_no_finding(tree: Tree) -> None:
    tree.golden(tree.beside / NAME)
    tree.golden(tree.ours / "golden_values_dev_cpu.json", {"commit": COMMIT, "repeats": 2})
    assert tree.lint() == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("{}", "golden-unreadable: holds no metric ({}), ", id="empty object"),
        pytest.param(
            '{"lm loss": {"start_step": 1, "end_step": 1, "step_interval": 1, "values": {}}}',
            "golden-unreadable: lm loss: no value; ",
            id="no value",
        ),
    ],
)
def test_a_golden_without_values_is_an_error_where_a_row_reads_it(
    tree: Tree, text: str, expected: str
) -> None:
    (tree.ours / NAME).write_text(text)
    findings = tree.lint()
    assert any(f" error {expected}" in finding for finding in findings), findings
    (tree.ours / NAME).rename(tree.ours / "golden_values_lts_dgx_h100.json")
    (finding,) = tree.lint()
    assert " warning unreachable-golden: " in finding


def test_what_is_no_number_has_its_step(tree: Tree) -> None:
    """Text, nan and inf in goldens are equal."""
    path = tree.golden(tree.beside / NAME)
    document = json.loads(path.read_text())
    document["lm loss"]["values"]["3"] = float("nan")
    document["iteration-time"]["values"]["1"] = "nan"
    path.write_text(json.dumps(document, indent=2))
    assert tree.lint() == [
        (
            f"tests/functional_tests/test_cases/gpt/tp1/{NAME} error golden-unreadable: "
            "lm loss: nan at step 3, expected a finite number; record it again"
        ),
    ]


def test_a_golden_that_ends_early_is_an_error(tree: Tree) -> None:
    path = tree.golden(tree.beside / NAME, end=9)
    assert tree.lint() == [
        f"{path.relative_to(tree.root)} error golden-truncated: {name}: ends at step 9, the "
        f"training of {tree.case.relative_to(tree.root)} at 10; record it again"
        for name in ("iteration-time", "lm loss")
    ]
    tree.case.write_text(CASE.replace("10", "9"))
    assert tree.lint() == []


def test_a_golden_that_a_time_limit_ended_is_no_error_of_a_release(tree: Tree) -> None:
    """Megatron-LM fills it up with "nan": 13 goldens of releases at d98e8a64dd."""
    path = tree.golden(tree.beside / NAME)
    document = json.loads(path.read_text())
    document["lm loss"]["values"] |= {"9": "nan", "10": "nan"}
    path.write_text(json.dumps(document, indent=2))
    (ended,) = tree.lint()
    assert "error golden-truncated: lm loss: ends at step 8, the training of" in ended
    tree.case.write_text(CASE.replace("regular", "release"))
    assert tree.lint() == []


def test_a_golden_fits_its_case(tree: Tree) -> None:
    tree.golden(tree.beside / NAME)
    tree.case.write_text(CASE.replace("lm loss", "grad-norm"))
    (finding,) = tree.lint()
    assert " error golden-metric: " in finding
    assert "compares 'grad-norm', which is not here" in finding
    tree.case.write_text("TEST_TYPE: regular\nMODE: inference\nMETRICS: [logprobs]\n")
    (finding,) = tree.lint()
    assert " error golden-metric: holds series of a training, MODE of " in finding


def test_goldens_that_no_row_reads_are_named(tree: Tree) -> None:
    """544 goldens unread, 103 of them junk."""
    names = ("dev_dgx_h100_2nd", "dev_oldcluster", "lts", "weekly_dgx_h100", "lts_dgx_h100")
    paths = [tree.golden(tree.beside / f"golden_values_{name}.json") for name in names]
    paths.append(tree.golden(tree.root / "golden_values/gpt/nocase" / NAME))
    paths.append(tree.golden(tree.root / "golden_values/gpt" / NAME))
    paths[0].write_text("{}")  # nothing else is said of it
    message = "no row of the recipes reads this golden; remove it or add a row"
    assert tree.lint() == [
        f"{name} warning unreachable-golden: {message}"
        for name in sorted(path.relative_to(tree.root).as_posix() for path in paths)
    ]


def test_a_golden_of_another_case_is_stale(tree: Tree) -> None:
    rows = load_recipe(tree.root / "recipes/gpt.yaml")
    now = fingerprint(rows[1], read_document(tree.case).value)
    tree.golden(tree.ours / NAME, {"commit": COMMIT, "config_hash": now})
    assert tree.lint() == []
    tree.case.write_text(CASE + "ENV_VARS: {A: 1}\n")
    (finding,) = tree.lint()
    assert " warning golden-stale: was made of another case or row: its config_hash is " in finding


def test_only_the_files_asked_for_are_looked_at(tree: Tree) -> None:
    path = tree.golden(tree.ours / NAME, {"commit": COMMIT})
    (tree.beside / "golden_values_dev_cpu.json").write_text("{}")
    assert tree.lint(path) == []
    assert len(tree.lint(tree.beside)) == 1
    (tree.root / "empty").mkdir()
    with pytest.raises(GoldenError, match=r"empty: holds no golden_values\*\.json"):
        tree.lint(tree.root / "empty")
    with pytest.raises(GoldenError, match="no such file or directory, expected goldens"):
        tree.lint(tree.root / "nothing")


def test_a_file_of_no_tree_is_looked_at_as_if_it_were_read(tree: Tree) -> None:
    (tree.root / "candidate.json").write_text("{}")
    assert [finding.split(": ")[0] for finding in tree.lint(tree.root / "candidate.json")] == [
        "candidate.json error golden-unreadable",
    ]


def test_goldens_are_left_alone_where_it_is_not_known_who_reads_them(tree: Tree) -> None:
    (tree.beside / "golden_values_lts_dgx_h100.json").write_text("{}")
    (tree.ours / NAME).write_text("{}")
    (tree.root / "recipes/bad.yaml").write_text("products: [")
    (finding,) = tree.lint()
    assert f"{NAME} error golden-unreadable: holds no metric" in finding


def test_the_command_prints_findings_and_what_it_looked_at(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tree.root)
    sound = tree.golden(tree.beside / NAME).relative_to(tree.root)
    stray = sound.with_name("golden_values_dev_dgx_h100_2nd.json")
    stray.write_text("{}")
    found = run("lint")
    line, *counts = found.out.splitlines()
    assert line == (
        f"{stray}: warning: no row of the recipes reads this golden; remove it or add a row "
        "[unreachable-golden]"
    )
    assert (found.code, counts) == (
        0,
        ["0 errors, 1 warning", "2 goldens; 1 of them read by a row"],
    )
    sound.write_text("{}")
    found = run("lint", sound, "--format", "github")
    told = f"::error file={sound},title=golden-unreadable::holds no metric ({{}}), expected an "
    assert (found.code, found.out) == (1, f"{told}object of metrics; record it again\n")
    assert run("lint", "nothing").code == 2
    Path("recipes/bad.yaml").write_text("products: [")
    assert run("lint").err == (
        "1 recipe with errors, see pytest-megatron lint; so no golden is named as unreachable\n"
    )
