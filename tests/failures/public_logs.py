"""Asks `pytest-megatron triage` about logs that strangers pasted into public issues.

    python tests/failures/public_logs.py [--half tuned|held-out|both] [--quiet]

The excerpts, what a person says of them and where they are from stand in `public_logs.toml`. A
digest of the address decides which half a log is in; rules were tuned on one of them alone. Exits
with 1 where the aim is missed: the family right in 80 %, no failure that is called none, no genuine
one that is called transient.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pytest_megatron.errors import TriageError
from pytest_megatron.triage.api import triage

TABLE = Path(__file__).with_suffix(".toml")
AIM = 0.8
NUL = "\N{SYMBOL FOR NULL}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicLog:
    """One excerpt; its fields are explained in the table."""

    source: str
    families: tuple[str, ...]
    chance: str
    text: str

    @property
    def is_held_out(self) -> bool:
        """Whether it is in the half that nothing was tuned on."""
        return hashlib.sha256(self.source.encode()).digest()[0] % 2 == 1


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


def summary(name: str, told: Sequence[Told]) -> str:
    """Return the scores of a half in one line."""
    right = sum(t.is_right for t in told)
    unknown = sum(t.family == "unknown" and not t.is_right for t in told)
    transient = [t for t in told if t.log.chance == "transient"]
    return (
        f"{name:9} family {right}/{len(told)} ({100 * right / len(told):.0f} %), honest unknown "
        f"{unknown}, nothing failed {sum(t.is_missed for t in told)}, genuine called transient "
        f"{sum(t.is_false_hope for t in told)}/{sum(t.log.chance == 'genuine' for t in told)}, "
        f"transient called so {sum(t.is_transient for t in transient)}/{len(transient)}"
    )


def is_good(told: Sequence[Told]) -> bool:
    """Whether a half reaches the aim."""
    right = sum(t.is_right for t in told)
    return right >= AIM * len(told) and not any(t.is_missed or t.is_false_hope for t in told)


def main() -> int:
    """Ask, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--half", choices=("tuned", "held-out", "both"), default="tuned")
    parser.add_argument("--quiet", action="store_true", help="the scores alone")
    asked = parser.parse_args()
    all_good = True
    with tempfile.TemporaryDirectory(prefix="public-logs-") as directory:
        for name, is_held_out in (("tuned", False), ("held-out", True)):
            if asked.half not in (name, "both"):
                continue
            told = [ask(log, Path(directory)) for log in load() if log.is_held_out is is_held_out]
            if not asked.quiet:
                print("\n".join(t.line for t in sorted(told, key=lambda t: not t.is_right)))
            print(summary(name, told))
            all_good &= is_good(told)
    return 0 if all_good else 1


if __name__ == "__main__":
    sys.exit(main())
