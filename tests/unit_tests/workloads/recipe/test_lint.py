from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from recipe_texts import HEAD

from pytest_megatron.workloads.recipe.lint import lint_recipes

CASE = Path("tests/functional_tests/test_cases/gpt/a/model_config.yaml")
GOLDEN = Path("golden_values/gpt/a/golden_values_dev_dgx_a100.json")
ROWS = """products:
  - test_case: [a]
    products:
      - {environment: [dev], scope: [mr, mr-github]}
"""

Lint = Callable[[dict[Path | str, str]], list[str]]


@pytest.fixture
def findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lint:
    """Write files, lint `recipes` and return one line for each finding, of a rule in the docs."""
    documented = (Path(__file__).parents[4] / "docs/reference/recipes.md").read_text()
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()

    def lint_files(files: dict[Path | str, str]) -> list[str]:
        for path, text in files.items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(text)
        found = lint_recipes([Path("recipes")], root=Path())
        assert [one.rule for one in found if f"| `{one.rule}` | " not in documented] == []
        return [f"{one.where} {one.severity.value} {one.rule}: {one.message}" for one in found]

    return lint_files


def test_a_complete_tree_has_no_findings(findings: Lint) -> None:
    files: dict[Path | str, str] = {
        "recipes/h100/gpt.yaml": HEAD + ROWS,
        CASE: "TEST_TYPE: regular\n",
        GOLDEN: "{}",
    }
    assert findings(files) == []


def test_a_golden_beside_the_case_is_found_too(findings: Lint) -> None:
    beside = CASE.parent / GOLDEN.name
    assert findings({"recipes/a.yaml": HEAD + ROWS, CASE: "TEST_TYPE: regular", beside: ""}) == []


def test_a_row_that_compares_needs_a_golden(findings: Lint) -> None:
    assert findings({"recipes/a.yaml": HEAD + ROWS, CASE: "TEST_TYPE: regular\n"}) == [
        (
            f"recipes/a.yaml:11 error missing-golden: 'a' has no golden in dev on dgx_a100, "
            f"expected {GOLDEN}; run it with --golden record"
        )
    ]


def test_a_disabled_row_without_golden_is_a_warning(findings: Lint) -> None:
    rows = ROWS.replace("mr, mr-github", "mr-broken")
    (finding,) = findings({"recipes/a.yaml": HEAD + rows, CASE: "TEST_TYPE: regular\n"})
    assert finding.startswith("recipes/a.yaml:11 warning missing-golden: ")


@pytest.mark.parametrize(
    "case",
    [
        "TEST_TYPE: regular\nENV_VARS: {SKIP_PYTEST: 1}",
        "TEST_TYPE: regular\nENV_VARS: {ENABLE_LIGHTWEIGHT_MODE: true}",
        "TEST_TYPE: checkpoint-consistency",
        "TEST_TYPE: regular\nTEST_EVALUATION: xpass",
    ],
)
def test_a_case_that_compares_nothing_needs_no_golden(findings: Lint, case: str) -> None:
    assert findings({"recipes/a.yaml": HEAD + ROWS, CASE: case}) == []


def test_a_script_may_do_without_case_and_golden(findings: Lint) -> None:
    head = HEAD + "  script: run me\n"
    assert findings({"recipes/a.yaml": head + ROWS}) == []
    assert findings({"recipes/a.yaml": head + ROWS, CASE: "TEST_TYPE: regular"}) == []


def test_a_row_without_script_needs_a_case_and_a_program(findings: Lint) -> None:
    head = HEAD.replace("  training_script_path: train.py\n", "")
    assert findings({"recipes/a.yaml": head + ROWS}) == [
        (
            "recipes/a.yaml:10 error nothing-to-run: 'a' has neither 'script' nor "
            "'training_script_path'; add one"
        ),
        f"recipes/a.yaml:10 error missing-case: 'a' has no case, expected {CASE}",
    ]


def test_a_golden_that_no_row_reads_is_a_warning(findings: Lint) -> None:
    stray = CASE.parent / "golden_values_dev_dgx_a100_2nd.json"
    files: dict[Path | str, str] = {
        "recipes/a.yaml": HEAD + ROWS,
        CASE: "TEST_TYPE: regular",
        GOLDEN: "",
        stray: "",
    }
    assert findings(files) == [
        (
            f"{stray} warning unreachable-golden: no row of the recipes reads this golden; "
            "remove it or add a row"
        )
    ]
    assert lint_recipes([Path("recipes/a.yaml")], root=Path()) == ()  # one file alone


@pytest.mark.parametrize(
    ("case", "finding"),
    [
        pytest.param(
            "TEST_TYPE: release\nMODE: inference\n",
            ":1 error case: TEST_TYPE release does not go with MODE inference, expected "
            "one of frozen-start, regular",
            id="type beside mode",
        ),
        pytest.param(
            "TEST_TYPE: regular\nMODEL_ARGS_2: {}\n",
            ":2 error case: TEST_TYPE regular never runs with MODEL_ARGS_2; remove it, or "
            "change TEST_TYPE",
            id="arguments of a phase that there is not",
        ),
        pytest.param(
            "TEST_TYPE: ckpt-resume\nMODEL_ARGS: {--save: '${CHECKPOINT_SAVE_PATH}'}\n",
            ":1 error case: TEST_TYPE is ckpt-resume, and nothing names "
            "${CHECKPOINT_LOAD_PATH}, so no checkpoint is resumed; add --load: "
            "${CHECKPOINT_LOAD_PATH} to MODEL_ARGS, or RESUME",
            id="a resume that loads nothing",
        ),
        pytest.param(
            "TEST_TYPE: regular\nEXPECTED_FAILURE: x\n",
            ":2 error case: EXPECTED_FAILURE is read only with TEST_EVALUATION: xpass; remove "
            "it, or add that",
            id="an expected failure without xpass",
        ),
    ],
)
def test_a_case_is_checked(findings: Lint, case: str, finding: str) -> None:
    """A typo, or a pair that compares nothing, never takes a check away."""
    files: dict[Path | str, str] = {"recipes/a.yaml": HEAD + ROWS, CASE: case, GOLDEN: ""}
    (found,) = findings(files)
    assert found.startswith(f"{CASE}{finding}")


def test_a_recipe_that_is_no_yaml_leaves_the_others(findings: Lint) -> None:
    files: dict[Path | str, str] = {"recipes/a.yaml": "a: [", "recipes/b.yaml": HEAD + ROWS}
    assert [line.split(": ")[0] for line in findings(files)] == [
        "recipes/a.yaml:1 error unreadable",
        "recipes/b.yaml:11 error missing-case",
    ]


@pytest.mark.parametrize("program", ["tools/gone.py --verbose"])
def test_a_program_that_is_not_there_is_an_error(findings: Lint, program: str) -> None:
    head = HEAD.replace("train.py", program)
    found = findings({"recipes/a.yaml": head + ROWS, CASE: "TEST_TYPE: regular\n", GOLDEN: "{}"})
    (line,) = found
    file, _, _ = program.partition(" ")
    assert line == (
        f"recipes/a.yaml:11 error missing-program: 'a' trains with {file}, which is not there; "
        "write it, or change training_script_path, which counts from the project's root"
    )


@pytest.mark.parametrize("program", ["/opt/gone.py", "nemo llm pretrain", "$HOME/gone.py"])
def test_a_program_that_may_be_elsewhere_is_not_looked_for(findings: Lint, program: str) -> None:
    head = HEAD.replace("train.py", program)
    assert findings({"recipes/a.yaml": head + ROWS, CASE: "TEST_TYPE: regular", GOLDEN: ""}) == []


def test_a_program_that_the_case_makes_is_not_looked_for(findings: Lint) -> None:
    head = HEAD.replace("train.py", "made.py")
    case = "TEST_TYPE: regular\nBEFORE_SCRIPT: touch made.py\n"
    assert findings({"recipes/a.yaml": head + ROWS, CASE: case, GOLDEN: ""}) == []


def test_a_case_of_too_many_keys_is_refused_at_once(findings: Lint) -> None:
    names = "".join(f"  VAR_{number}: {number}\n" for number in range(10_002))
    case = f"TEST_TYPE: regular\nENV_VARS:\n{names}"
    (found,) = findings({"recipes/a.yaml": HEAD + ROWS, CASE: case, GOLDEN: "{}"})
    assert found == (
        f"{CASE}:10003 error case-unreadable: a mapping has more than 10000 keys, expected fewer; "
        "split the file"
    )
