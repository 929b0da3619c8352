from __future__ import annotations

import datetime as dt
import tomllib

import pytest

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.project import (
    ProjectConfig,
    Quarantine,
    QuarantineError,
    parse_quarantine,
    today,
)
from pytest_megatron.errors import ConfigError
from pytest_megatron.flaky.quarantine import matches, project_quarantines, table_line

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
def test_a_pattern_that_names_everything_is_refused(pattern: str) -> None:
    table: dict[str, JsonValue] = {pattern: {"reason": "#12", "until": f"{today()}"}}
    with pytest.raises(ConfigError, match="names every item"):
        project_quarantines(ProjectConfig(tables={"quarantine": table}))


def test_an_end_that_is_far_away_is_refused() -> None:
    with pytest.raises(QuarantineError, match="until: found 2099-01-01, expected a day within"):
        parse_quarantine({"reason": "#12", "until": "2099-01-01"})


def test_a_line_of_the_table_is_read_as_it_was_meant() -> None:
    hostile = 't.py::c["] \\ \n[tool.x]\x7f\x00 `|<b>\U0001f600 # *]'
    (found,) = tomllib.loads(table_line(hostile, HELD)).items()
    assert (found[0], parse_quarantine(found[1])) == (hostile, HELD)
