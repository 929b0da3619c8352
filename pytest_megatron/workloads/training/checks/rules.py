"""Rules, and findings: a rule with what was found. All texts are in `rules.toml`.

`doctor` has a table of its own beside this one.
"""

from __future__ import annotations

import functools
import string
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pytest_megatron.base.findings import Severity
from pytest_megatron.base.schema import trusted

TABLE = Path(__file__).parent / "rules.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRule:
    """One row of the table; `found`, `wrong`, `fix` and `source` are templates."""

    id: str
    severity: Severity
    group: str
    checks: str
    found: str
    wrong: str
    fix: str
    source: str
    trouble: str | None = None

    @property
    def names(self) -> frozenset[str]:
        """Names that a check has to fill in."""
        texts = (self.found, self.wrong, self.fix, self.source)
        fields = (field for text in texts for _, field, _, _ in string.Formatter().parse(text))
        return frozenset(field for field in fields if field is not None)


class RuleMatch:
    """Match of a rule: its id, the place, and the values for its templates."""

    __slots__ = ("rule", "values", "where")

    def __init__(self, rule: str, where: str | None = None, /, **values: object) -> None:
        self.rule = rule
        self.where = where
        self.values = {name: str(value) for name, value in values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFinding:
    """A rule that something here goes against, in words.

    Attributes:
        found: What is there; `wrong`: why that matters; `fix`: what to do.
        values: What the rule's templates were filled in with.
        where: `file:line`, the option or the variable that the user can go to; None where the rule
            is about a machine as a whole.
    """

    rule: CheckRule
    found: str
    wrong: str
    fix: str
    source: str
    values: Mapping[str, str]
    where: str | None = None

    @property
    def severity(self) -> Severity:
        """Severity of the rule."""
        return self.rule.severity

    @property
    def is_error(self) -> bool:
        """True if a training would fail or be wrong."""
        return self.severity is Severity.ERROR

    @property
    def text(self) -> str:
        """All of it as the text of one error, without the place."""
        return f"{self.found}: {self.wrong}; {self.fix} [{self.rule.id}]"

    @property
    def line(self) -> str:
        """The finding with its severity and its place, for a terminal."""
        place = "" if self.where is None else f"{self.where}: "
        return f"{self.severity.value}: {place}{self.text}"


def read_rules(table: Path) -> Mapping[str, CheckRule]:
    """Return the rules of a table by id, in the order of the report."""
    data = cast("dict[str, list[dict[str, str]]]", tomllib.loads(table.read_text(encoding="utf-8")))
    return {row["id"]: trusted(CheckRule, row) for row in data["rule"]}


@functools.cache
def check_rules() -> Mapping[str, CheckRule]:
    """Return the rules about workloads."""
    return read_rules(TABLE)


def finding_of(hit: RuleMatch, table: Mapping[str, CheckRule]) -> CheckFinding:
    """Return a match in the words of its rule."""
    rule = table[hit.rule]
    assert rule.names <= hit.values.keys(), f"{rule.id} lacks {rule.names - hit.values.keys()}"
    return CheckFinding(
        rule=rule,
        found=rule.found.format_map(hit.values),
        wrong=rule.wrong.format_map(hit.values),
        fix=rule.fix.format_map(hit.values),
        source=rule.source.format_map(hit.values),
        values=hit.values,
        where=hit.where,
    )
