"""Asks `pytest-megatron triage` about logs that strangers pasted into public issues.

The excerpts, what a person says of them and where they are from stand in `public_logs.toml`.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pytest_megatron.errors import TriageError
from pytest_megatron.triage.api import triage

TABLE = Path(__file__).with_suffix(".toml")
NUL = "\N{SYMBOL FOR NULL}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicLog:
    """One excerpt; its fields are explained in the table."""

    source: str
    families: tuple[str, ...]
    chance: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What triage said of one.

    Attributes:
        family: None where nothing failed.
    """

    log: PublicLog
    family: str | None
    signature: str | None
    is_transient: bool

    @property
    def is_right(self) -> bool:
        return self.family in self.log.families

    @property
    def is_missed(self) -> bool:
        """Whether a failure was called none."""
        return self.family is None

    @property
    def is_false_hope(self) -> bool:
        """Whether a genuine failure would be run again."""
        return self.log.chance == "genuine" and self.is_transient

    @property
    def line(self) -> str:
        """What is printed of it."""
        word = "right" if self.is_right else "HONEST" if self.family == "unknown" else "WRONG"
        again = ", transient" if self.is_transient else ""
        wanted = "" if self.is_right else f"; expected {'|'.join(self.log.families)}"
        alarm = "  GENUINE CALLED TRANSIENT" if self.is_false_hope else ""
        said = f"{self.family}, {self.signature}{again}{wanted}"
        return f"{word:7}{said}{alarm}  {self.log.source}"


def load() -> tuple[PublicLog, ...]:
    """Return all logs of the table."""
    content = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return tuple(
        PublicLog(
            source=str(row["source"]),
            families=tuple(cast("list[str]", row["families"])),
            chance=str(row["chance"]),
            text=str(row["text"]).replace(NUL, "\0"),
        )
        for row in cast("list[dict[str, object]]", content["log"])
    )


def ask(log: PublicLog, directory: Path) -> Told:
    """Lay a log down and triage it, as a person who saved a job's output does."""
    path = directory / "job.log"
    path.write_text(log.text, encoding="utf-8")
    try:
        said = triage([path]).as_json()
    except TriageError:  # it would not even read it
        return Told(log=log, family=None, signature=None, is_transient=False)
    family, signature = said["family"], said["signature"]
    return Told(
        log=log,
        family=None if family is None else str(family),
        signature=None if signature is None else str(signature),
        is_transient=said["transient"] is True,
    )
