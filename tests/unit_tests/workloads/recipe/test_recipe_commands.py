from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pytest_megatron.workloads.commands.recipes import expand, lint

RECIPE = """\
type: basic
format_version: 1
spec: {model: gpt, gpus: 8, platforms: cpu, script: "run {test_case}", build: "i-{environment}"}
products:
  - test_case: [a]
    products: [{environment: [dev], scope: [mr-github, nightly]}]
"""


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    """Run commands in a directory with two recipes, of which one is wrong."""
    monkeypatch.chdir(tmp_path)
    Path("recipes").mkdir()
    Path("recipes/good.yaml").write_text(RECIPE)
    Path("recipes/wrong.yaml").write_text(RECIPE.replace("nightly", "nightlyy"))
    return CliRunner()


@pytest.mark.parametrize("profile", ["compat", "strict"])
def test_expand_prints_every_key_and_leaves_templates(runner: CliRunner, profile: str) -> None:
    result = runner.invoke(expand, ["recipes/good.yaml", "--profile", profile, "--format", "json"])
    shared = {"model": "gpt", "gpus": 8, "platforms": "cpu", "script": "run {test_case}"}
    own = {"build": "i-dev", "environment": "dev", "test_case": "a"}
    default = ["pr", "nightly", "mergegroup"]
    assert (result.exit_code, json.loads(result.stdout)) == (
        0,
        [
            {
                "file": "recipes/good.yaml",
                "spec": {**shared, **own, "scope": "L1", "cadence": default},
            },
            {
                "file": "recipes/good.yaml",
                "spec": {**shared, **own, "scope": "L2", "cadence": ["nightly"]},
            },
        ],
    )


def test_expand_as_text_has_one_line_for_each_row(runner: CliRunner) -> None:
    result = runner.invoke(expand, ["recipes/good.yaml"])
    assert (result.exit_code, result.stdout) == (
        0,
        (
            "recipes/good.yaml::a[dev-cpu-L1]  gpt L1 pr,nightly,mergegroup 1x8 ranks\n"
            "recipes/good.yaml::a[dev-cpu-L2]  gpt L2 nightly 1x8 ranks\n"
            "2 workloads\n"
        ),
    )


def test_expand_goes_on_after_a_recipe_with_errors(runner: CliRunner) -> None:
    result = runner.invoke(expand, ["recipes", "--format", "json"])
    files = [row["file"] for row in json.loads(result.stdout)]
    assert (result.exit_code, files) == (2, ["recipes/good.yaml"] * 2)
    assert runner.invoke(expand, ["recipes"]).stdout.endswith(
        "\n2 workloads, without those of 1 recipe with errors\n"
    )
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(
        "pytest-megatron: recipes/wrong.yaml:6: scope: unknown word 'nightlyy', expected one of L0"
    )


def test_lint_exits_with_1_for_errors_and_0_for_warnings(runner: CliRunner) -> None:
    result = runner.invoke(lint, [])
    assert (result.exit_code, result.stdout.count("\n")) == (1, 2)
    assert result.stdout.startswith("recipes/wrong.yaml:6: error: scope: unknown word 'nightlyy'")
    assert result.stdout.endswith("did you mean 'nightly'? [unknown-word]\n1 error, 0 warnings\n")
    Path("recipes/good.yaml").write_text(RECIPE.replace("[a]", "[a, b]"))
    kinds = [line.split(": ")[1] for line in runner.invoke(lint, []).stdout.splitlines()[:-1]]
    assert kinds == ["error", "warning"]  # whatever their files are called
    Path("recipes/good.yaml").write_text(RECIPE)
    Path("recipes/wrong.yaml").write_text(RECIPE.replace("[a]", "[a, b]"))
    result = runner.invoke(lint, [])
    assert (result.exit_code, "0 errors, 1 warning" in result.stdout) == (0, True)


def test_lint_as_json_and_for_github(runner: CliRunner) -> None:
    Path("recipes/wrong.yaml").write_text("type: basic\nformat_version: 1\nspec: {")
    result = runner.invoke(lint, ["recipes", "--format", "json"])
    (finding,) = json.loads(result.stdout)
    assert (finding["file"], finding["line"], finding["severity"], finding["rule"]) == (
        "recipes/wrong.yaml",
        3,
        "error",
        "unreadable",
    )
    result = runner.invoke(lint, ["recipes", "--format", "github"])
    assert result.stdout.startswith(
        "::error file=recipes/wrong.yaml,line=3,title=unreadable::is not valid YAML: "
    )
