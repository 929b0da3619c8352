from __future__ import annotations

import pytest

from pytest_megatron.errors import CaseError
from pytest_megatron.workloads.recipe.case import Argument
from pytest_megatron.workloads.training.plan.phases import (
    command_words,
    unquote,
    with_argument,
    with_words,
)


def words(name: str, text: str | None, **settings: object) -> list[str]:
    argument = Argument(name=name, text=text, line=7, **settings)  # type: ignore[arg-type]
    return command_words([argument], {"DATA": "/d", "EMPTY": ""}, file="model_config.yaml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("true", ["--x"], id="true is a bare flag"),
        pytest.param("false", ["--x", "false"], id="false is a word"),
        pytest.param(None, ["--x", "null"], id="null is a word"),
        pytest.param("", [], id="empty is dropped"),
        pytest.param("1.0e-5", ["--x", "1.0e-5"], id="a number keeps its spelling"),
        pytest.param("a  b", ["--x", "a b"], id="blanks collapse, one word"),
        pytest.param("'a  b'", ["--x", "a  b"], id="quotes keep blanks and go"),
        pytest.param(r"a\;b", ["--x", "a;b"], id="a backslash goes"),
        pytest.param("([0]*3+[1]*9)", ["--x", "([0]*3+[1]*9)"], id="parentheses stay, one word"),
        pytest.param("[a b]", ["--x", "a", "b"], id="brackets make words"),
        pytest.param("M-M|M*", ["--x", "M-M|M*"], id="nothing is a pipe or a glob"),
        pytest.param("a; rm -rf / &", ["--x", "a; rm -rf / &"], id="nothing is a command"),
        pytest.param("${DATA}/text", ["--x", "/d/text"], id="a reference"),
        pytest.param("$DATA/text", ["--x", "/d/text"], id="a bare reference"),
        pytest.param("${NONE:-/e}/t", ["--x", "/e/t"], id="a default"),
        pytest.param("${EMPTY:-/e}/t", ["--x", "/e/t"], id="a default for an empty value"),
    ],
)
def test_a_flag_gets_the_words_that_a_shell_would_have_given(
    text: str | None, expected: list[str]
) -> None:
    """Words are made without a shell, whatever is in them."""
    assert words("--x", text) == expected


def test_a_quoted_true_is_a_word() -> None:
    assert words("--x", "true", is_text=True) == ["--x", "true"]


def test_a_yaml_list_makes_words() -> None:
    assert words("--spec", None, words=("a b", "${DATA}")) == ["--spec", "a", "b", "/d"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("2", ["trainer.max_steps=2"], id="value"),
        pytest.param("true", ["trainer.max_steps"], id="true"),
        pytest.param("a b", ["trainer.max_steps=a b"], id="blanks"),
        pytest.param(None, ["trainer.max_steps=null"], id="null"),
    ],
)
def test_a_name_without_a_dash_makes_key_value(text: str | None, expected: list[str]) -> None:
    assert words("trainer.max_steps", text) == expected


def test_an_unset_name_is_an_error_with_file_line_and_way_out() -> None:
    with pytest.raises(CaseError) as caught:
        words("--x", "${LUSTRE}/data")
    assert str(caught.value) == (
        "model_config.yaml:7: ${LUSTRE} is not set, expected it in ENV_VARS, in the recipe "
        "(data_path, checkpoint_load_path, data_cache_path) or in the environment; "
        "export LUSTRE=... or write ${LUSTRE:-default}"
    )


@pytest.mark.parametrize("text", ["'open", 'a "b', "$(rm -rf /)"])
def test_what_a_shell_would_stumble_over_or_run_is_refused(text: str) -> None:
    """In Megatron-LM values go through `eval`."""
    """No argument is evaluated by a shell."""
    with pytest.raises(CaseError, match=r"model_config\.yaml:7: "):
        words("--x", text)


def test_setting_an_argument_keeps_its_place() -> None:
    before = (Argument(name="--a", text="1", line=1), Argument(name="--b", text="2", line=2))
    assert [(a.name, a.text) for a in with_argument(before, "--a", "9")] == [
        ("--a", "9"),
        ("--b", "2"),
    ]
    assert [a.name for a in with_argument(before, "--c", "3")] == ["--a", "--b", "--c"]


def test_unquote_joins_adjacent_parts() -> None:
    assert unquote("""a'b c'"d" e""", where="x") == "ab cd e"


@pytest.mark.parametrize(
    ("command", "further", "expected"),
    [
        ("--steps 9 --a", "--steps 4", "--steps 4 --a"),
        ("--steps=9 --a", "--steps 4", "--steps 4 --a"),
        ("--steps 9 --a", "--steps=4", "--steps=4 --a"),
        ("--steps=9 --a", "--steps=4", "--steps=4 --a"),
        ("train.steps=9 a=1", "train.steps=4", "train.steps=4 a=1"),
        ("--steps 9 --steps 8", "--steps 4", "--steps 9 --steps 4"),
        ("--stepsize 9", "--steps 4", "--stepsize 9 --steps 4"),
        ("--resume --a", "--resume", "--resume --a"),
        ("--range 1 9 x", "--range 1 4", "--range 1 4 x"),
        ("x", "--out d --every 2 y=1", "x --out d --every 2 y=1"),
        ("x --out old", "--out new --every 2", "x --out new --every 2"),
    ],
)
def test_words_take_the_place_of_those_of_the_same_name(
    command: str, further: str, expected: str
) -> None:
    assert " ".join(with_words(command.split(), further.split())) == expected
