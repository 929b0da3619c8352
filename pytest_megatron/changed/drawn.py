"""Tests that run although nothing changed for them: `--changed` watches itself by a few of them.

Each session that leaves out tests draws some, and appends a line about them to a file. A test that
fails then was to be selected, or is flaky. Pure but for reading and appending.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pytest_megatron.base.files import append_lines, parse_json, read_bytes
from pytest_megatron.base.schema import SchemaError, validate
from pytest_megatron.errors import ConfigError

FILE_NAME = "drawn.jsonl"
SHARE = 0.05  # of the time that is saved
_LEAST_S = 0.01  # of a test, whose duration is rounded


@dataclass(frozen=True, kw_only=True)
class DrawnRun:
    """A session that left out tests.

    Attributes:
        time: `2026-01-31T12:00:00Z`, when it ended.
        commit: None outside of a commit.
        seed: With which the same tests are drawn from the same ones.
        num_left_out: Tests that nothing changed for, the drawn ones among them.
        drawn: Node ids of those that ran.
        failed: Those of them that failed, and those that failed when drawn before and now again.
        passed: Those that failed when drawn before, and passed now.
    """

    time: str
    commit: str | None
    seed: int
    num_left_out: int
    drawn: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()

    @property
    def missed(self) -> frozenset[str]:
        """The drawn that failed."""
        return frozenset(self.drawn) & frozenset(self.failed)


def draw(durations_s: Mapping[str, float], seed: int, *, costly: Collection[str]) -> list[str]:
    """Return items drawn by a seed, of a share of the time of all.

    Args:
        durations_s: Node id -> recorded duration.
        seed: Any number.
        costly: Items that are only drawn if they fit into that share; of all others one is
            drawn in any case.
    """
    names = sorted(durations_s)
    random.Random(seed).shuffle(names)  # noqa: S311 - no secret
    costs = {name: max(_LEAST_S, durations_s[name]) for name in names}
    left = SHARE * sum(costs.values())
    found: list[str] = []
    for name in names:
        if costs[name] <= left:
            found.append(name)
            left -= costs[name]
    return found or [name for name in names if name not in costly][:1]


def open_failures(runs: Iterable[DrawnRun]) -> set[str]:
    """Return the tests that failed when they were drawn, and have not passed since."""
    found: set[str] = set()
    for run in runs:
        found = (found | set(run.failed)) - set(run.passed)
    return found


def read_drawn(path: Path) -> list[DrawnRun]:
    """Return the lines of a file, in their order; none where it is not there.

    A line that a killed session left unfinished is left out.

    Raises:
        ConfigError: It cannot be read, or a line is none of such a file.
    """
    try:
        lines = read_bytes(path).splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None
    found = []
    for number, line in enumerate(lines, 1):
        try:
            value = parse_json(line)
        except ValueError:
            continue
        try:
            found.append(validate(DrawnRun, value))
        except SchemaError:
            problem = "is no line about drawn tests; remove it"
            raise ConfigError(f"{path}:{number}", problem) from None
    return found


def append_drawn(path: Path, run: DrawnRun) -> None:
    """Add a line to a file, in one piece.

    Raises:
        OSError: It cannot be written.
    """
    append_lines(path, f"{json.dumps(asdict(run))}\n")
