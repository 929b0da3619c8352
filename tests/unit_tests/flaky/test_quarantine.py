from __future__ import annotations

import datetime as dt
import tomllib
from pathlib import Path

import pytest

from pytest_megatron.base.project import Quarantine, QuarantineError, parse_quarantine
from pytest_megatron.flaky.quarantine import (
    check_pattern,
    edit_table,
    matches,
    owners_of,
)

HELD = Quarantine(reason="#12", until=dt.date(2026, 12, 31))


@pytest.mark.parametrize("until", ["2026-12-31", dt.date(2026, 12, 31)])
def test_a_reason_and_a_date_make_a_quarantine(until: object) -> None:
    assert parse_quarantine({"reason": "#12", "until": until}) == HELD


def test_it_holds_on_its_last_day_and_not_after() -> None:
    days = [dt.date(2026, 12, 31), dt.date(2027, 1, 1)]
    assert [HELD.holds_on(day) for day in days] == [True, False]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"reason": "x"}, "until: is missing, expected the last day that it holds, such as 2026-1"),
        ({"reason": "x", "until": "soon"}, "until: found 'soon', expected the last day"),
        ({"reason": "x", "until": "2026-02-30"}, "until: found '2026-02-30', expected the last"),
        ({"until": "2026-12-31"}, "reason: is missing, expected why it may fail; name the issue"),
        ({"reason": " ", "until": "2026-12-31"}, "reason: found ' ', expected why"),
        ({"reason": "x", "til": "2026-12-31"}, "unknown key 'til', expected one of reason, until"),
        ("x", "found 'x', expected reason and until: "),
    ],
)
def test_what_says_less_is_an_error(given: object, message: str) -> None:
    with pytest.raises(QuarantineError) as raised:
        parse_quarantine(given)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("pattern", "is_match"),
    [
        ("recipes/gpt.yaml::tp2[dev-cpu]", True),
        ("recipes/*::tp2[*]", True),
        ("recipes/gpt.yaml::tp[12][dev-cpu]", False),
        ("tp2", False),
        ("*", True),
    ],
)
def test_only_a_star_means_more_than_itself(pattern: str, *, is_match: bool) -> None:
    assert matches(pattern, "recipes/gpt.yaml::tp2[dev-cpu]") is is_match


@pytest.mark.parametrize("pattern", ["*", "**", "*::*", "*.py"])
def test_a_pattern_that_names_everything_is_refused(pattern: str, tmp_path: Path) -> None:
    with pytest.raises(QuarantineError, match="names every item"):
        check_pattern(pattern, tmp_path)


def test_a_pattern_that_names_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").touch()
    for pattern in ("test_a.py::test_x*", "test_*.py::test_x", "*::test_exchange"):
        check_pattern(pattern, tmp_path)
    for pattern in ("test_b.py::test_x*", "unit/test_*.py::test_x"):
        with pytest.raises(QuarantineError, match="names no file of the project"):
            check_pattern(pattern, tmp_path)


def test_an_end_that_is_far_away_is_refused() -> None:
    with pytest.raises(QuarantineError, match="until: found 2099-01-01, expected a day within"):
        parse_quarantine({"reason": "#12", "until": "2099-01-01"})


TABLE = """\
[project] # the first
name = "x"

[tool.pytest-megatron.quarantine] # kept
# about a
"t.py::a" = { reason = "#1", until = 2026-12-01 } # gone with it
"t.py::b" = { reason = "#2", until = "2026-12-01" }

[tool.other]
list = [
  1,
]
"""
HOSTILE = 't.py::c["] \\ \n[tool.x]\x7f\x00 `|<b>\U0001f600 # *]'


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_table_changes_and_nothing_else(end: str) -> None:
    text = TABLE.replace("\n", end)
    changed = edit_table(text, added={HOSTILE: HELD}, removed=["t.py::a"])
    rows = text.splitlines(keepends=True)
    new = changed.splitlines(keepends=True)
    assert new[:5] == rows[:5]
    assert new[5] == rows[6]
    assert new[7:] == rows[7:]
    assert new[6].endswith(f'{{ reason = "#12", until = 2026-12-31 }}{end}')
    found = tomllib.loads(changed)["tool"]["pytest-megatron"]["quarantine"]
    assert parse_quarantine(found[HOSTILE]) == HELD
    assert "t.py::a" not in found


@pytest.mark.parametrize("text", ["", "[project]", '[project]\nname = "x"\n'])
def test_a_table_that_is_not_there_is_added(text: str) -> None:
    changed = edit_table(text, added={"t.py::a": HELD}, removed=[])
    assert changed.startswith(text)
    assert changed.endswith(
        '[tool.pytest-megatron.quarantine]\n"t.py::a" = { reason = "#12", until = 2026-12-31 }\n'
    )


@pytest.mark.parametrize(
    "text",
    [
        '[tool.pytest-megatron]\nquarantine."t.py::a" = { reason = "#1", until = 2026-12-01 }\n',
        '[tool.pytest-megatron.quarantine."t.py::a"]\nreason = "#1"\nuntil = 2026-12-01\n',
    ],
)
def test_a_table_of_another_form_is_left_to_a_person(text: str) -> None:
    with pytest.raises(QuarantineError, match="is not written with a line for each pattern"):
        edit_table(text, added={}, removed=["t.py::a"])


@pytest.mark.parametrize(
    ("path", "owners"),
    [
        ("tests/unit/test_a.py", "@org/tests you@example.com"),
        ("recipes/gpt.yaml", "@org/recipes"),
        ("recipes/h100/gpt.yaml", "@all"),
        ("docs/a.md", ""),
        ("src/deep/kernel.py", "@org/kernels"),
    ],
)
def test_the_last_rule_that_matches_names_the_owners(path: str, owners: str) -> None:
    rules = """
        # comment
        *            @all
        /tests/      @org/tests you@example.com # of them
        recipes/*    @org/recipes
        [Section][2]
        docs/
        **/kernel.py @org/kernels
        """
    assert owners_of(path, rules) == owners
