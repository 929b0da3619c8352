from __future__ import annotations

from pathlib import Path

import pytest

from pytest_megatron.base.yaml import Duplicate, YamlDocument, parse_document, read_yaml
from pytest_megatron.errors import CaseError, RecipeError

FILE = Path("case.yaml")


def parse(text: str) -> YamlDocument:
    return parse_document(text, FILE)


def test_every_key_and_element_knows_its_line() -> None:
    document = parse("spec:\n  gpus: 8\nproducts:\n  - a: [x,\n        y]\n  - b: {}\n")
    paths = [(), ("spec",), ("spec", "gpus"), ("products", 1), ("products", 0, "a", 1)]
    assert [document.line_of(path) for path in paths] == [1, 1, 2, 6, 5]


def test_a_path_that_leads_nowhere_gives_the_line_of_its_known_part() -> None:
    document = parse("a: 1\nspec:\n  gpus: 8\n")
    assert (document.line_of(("spec", "nodes")), document.where(("spec", 0))) == (2, "case.yaml:2")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("010", 8),
        ("1_000", 1000),
        ("1e-2", "1e-2"),
        ("1.0e-5", 1e-5),
        ("yes", True),
        ("~", None),
        ("", None),
        ("2024-01-01", "2024-01-01"),
        ("'8'", "8"),
        ("!!str 8", "8"),
        ("! 8", 8),
        ("!!int '8'", 8),
    ],
)
def test_scalars_mean_what_safe_load_makes_of_them(text: str, value: object) -> None:
    assert parse(f"a: {text}\n").value == {"a": value}


def test_the_written_form_of_a_number_is_kept() -> None:
    document = parse("a: {lr: 1.0e-5, bf16: true, name: x, list: [0x10, []]}")
    paths = [("a", "lr"), ("a", "bf16"), ("a", "name"), ("a", "list", 0), ("a", "list", 1), ("b",)]
    texts = [document.text_of(path) for path in paths]
    assert texts == ["1.0e-5", "true", "x", "0x10", None, None]


def test_a_key_that_is_a_number_is_its_text() -> None:
    assert parse("{8: 1, true: 2}").value == {"8": 1, "true": 2}


def test_of_duplicate_keys_the_last_wins_and_both_lines_are_reported() -> None:
    document = parse("args:\n  - lr: 1\n    seed: 0\n    lr: [2]\n")
    assert (document.value, document.line_of(("args", 0, "lr")), document.duplicates) == (
        {"args": [{"lr": [2], "seed": 0}]},
        4,
        (Duplicate(path=("args", 0), key="lr", first_line=2, second_line=4),),
    )


def test_own_keys_win_over_merged_ones_and_are_no_duplicates() -> None:
    document = parse("base: &b\n  lr: 1.0\n  seed: 1.50\nargs:\n  <<: *b\n  lr: 2\n")
    assert document.value["args"] == {"lr": 2, "seed": 1.5}
    paths = [("args", "lr"), ("args", "seed")]
    assert [document.line_of(path) for path in paths] == [6, 3]
    assert [document.text_of(path) for path in paths] == ["2", "1.50"]
    assert document.duplicates == ()


def test_of_several_merged_mappings_the_first_wins() -> None:
    document = parse("a: &a {x: 1}\nb: &b {x: 2, y: 2}\nc:\n  <<: [*a, *b]\n")
    assert document.value["c"] == {"x": 1, "y": 2}


def test_an_alias_is_what_its_anchor_is() -> None:
    assert parse("a: &x [1, &y two]\nb: *x\nc: *y").value == {
        "a": [1, "two"],
        "b": [1, "two"],
        "c": "two",
    }


BOMB = "a0: &a0 [x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 8)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("a: [1\nb: 2\n", "case.yaml:2: is not valid YAML: did not find", id="syntax"),
        pytest.param("a: 1\nb: \x00\n", "case.yaml:2: is not valid YAML: ", id="character"),
        pytest.param("- 1\n", "case.yaml:1: holds a list at its top, expected", id="list"),
        pytest.param("", "case.yaml:1: holds nothing at its top", id="empty"),
        pytest.param("a: 1\n---\nb: 2\n", "case.yaml:2: holds a second YAML document", id="second"),
        pytest.param("a: 1\nb: *x\n", "case.yaml:2: alias 'x' is unknown", id="alias"),
        pytest.param("a: &x [1,\n *x]\n", "case.yaml:2: alias 'x' contains itself", id="recursion"),
        pytest.param(BOMB, "case.yaml:7: aliases write out to more than 1000000", id="bomb"),
        pytest.param("[" * 200, "case.yaml:1: is nested deeper than 100", id="deep"),
        pytest.param("a: !!set {x}\n", "case.yaml:1: tag 'tag:yaml.org,2002:set' is", id="set"),
        pytest.param("a: !x 1\n", "case.yaml:1: tag '!x' is unknown", id="tag"),
        pytest.param("a: !!int x\n", "case.yaml:1: 'x' is not a tag:yaml.org,2002:int", id="int"),
        pytest.param("a: !!int ''\n", "case.yaml:1: '' is not a tag:yaml.org,2002:int", id="none"),
        pytest.param("? [a]\n: 1\n", "case.yaml:1: a key is a mapping or list", id="list-key"),
        pytest.param("a: &x 1\n*x : 1\n", "case.yaml:2: a key is an alias", id="alias-key"),
        pytest.param("a:\n  <<: 1\n", "case.yaml:2: '<<' takes a mapping", id="merge"),
    ],
)
def test_a_bad_file_is_one_error_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    FILE.write_text(text)
    with pytest.raises(RecipeError) as raised:
        read_yaml(FILE, error=RecipeError)
    assert str(raised.value).startswith(message)


def test_a_missing_file_and_one_that_is_not_utf8_are_the_callers_error(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match="cannot be read: No such file or directory"):
        read_yaml(tmp_path / "none.yaml", error=CaseError)
    (tmp_path / "latin.yaml").write_bytes(b"a: 1\nb: \xe9\n")
    with pytest.raises(CaseError, match=r"latin\.yaml:2: is not UTF-8"):
        read_yaml(tmp_path / "latin.yaml", error=CaseError)
