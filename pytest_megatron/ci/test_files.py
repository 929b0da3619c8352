"""Test files of unit jobs: their buckets, and the marks that leave tests out.

A bucket is a file or `dir/**/*.py`; a file belongs to the bucket that names it most exactly. Pure
but for listing files.
Source: Megatron-LM tests/unit_tests/run_ci_test.sh and find_test_cases.py, d98e8a64dd
"""

from __future__ import annotations

import fnmatch
import heapq
import itertools
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from pytest_megatron.base.text import listed
from pytest_megatron.ci.table import CiTable, MarkRule
from pytest_megatron.errors import RecipeError
from pytest_megatron.runs.history import typical_durations

EXPERIMENTAL = "experimental"
LAUNCH_ON = "launch_on_"
Experimental = Literal["exclude", "include", "only"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkChoice:
    """The environments, tags and platforms that tests are wanted for.

    Attributes:
        environments, tags, platforms: Empty leaves none out.
    """

    environments: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    platforms: tuple[str, ...] = ()
    experimental: Experimental = "exclude"


def launch_mark(platform: str) -> str:
    """Return the mark of tests that run on a platform: `launch_on_gb200` of `dgx_gb200`."""
    return f"{LAUNCH_ON}{platform.removeprefix('dgx_')}"


def wanted_launch_marks(platforms: Iterable[str], table: CiTable) -> tuple[str, ...]:
    """Return the marks of which a test needs one; none if all tests run on one of the platforms."""
    asked = tuple(platforms)
    if not asked or not set(asked) <= set(table.opt_in_platforms):
        return ()
    return tuple(map(launch_mark, asked))


def reason_to_leave_out(marks: AbstractSet[str], choice: MarkChoice, table: CiTable) -> str | None:
    """Return the mark, or the lack of one, that keeps a test out; None if it runs.

    Args:
        marks: Names of the test's marks.
        choice: Environments, tags and platforms.
        table: The project's.
    """
    launch = wanted_launch_marks(choice.platforms, table)
    if launch and not marks & set(launch):
        return f"without {' or '.join(launch)}"
    if choice.experimental == "exclude" and EXPERIMENTAL in marks:
        return EXPERIMENTAL
    if choice.experimental == "only" and EXPERIMENTAL not in marks:
        return f"not {EXPERIMENTAL}"
    for rule in table.marks:
        if rule.mark in marks and _applies(rule, choice):
            return rule.mark
    return None


def _applies(rule: MarkRule, choice: MarkChoice) -> bool:
    """Return whether a rule covers every environment, tag and platform of a choice."""
    pairs = (
        (rule.environment, choice.environments),
        (rule.tag, choice.tags),
        (rule.platform, choice.platforms),
    )
    return all(not words or (asked and set(asked) <= set(words)) for words, asked in pairs)


def known_marks(table: CiTable) -> dict[str, str]:
    """Return the known marks, each with its effect."""
    found = {EXPERIMENTAL: "runs with megatron_experimental_tests include or only"}
    for platform in table.opt_in_platforms:
        found[launch_mark(platform)] = f"runs on {platform} as well, where others do not"
    for rule in table.marks:
        parts = [
            f"{what} {' or '.join(words)}"
            for what, words in (
                ("environment", rule.environment),
                ("tag", rule.tag),
                ("platform", rule.platform),
            )
            if words
        ]
        found[rule.mark] = f"left out for {', '.join(parts)}" if parts else "left out"
    return found


SUFFIX = "/**/*.py"
TEST_FILES = ("test_*.py", "*_test.py")  # pytest's own default
_SKIPPED_DIRS = ("__pycache__", "node_modules", "venv", "build", "dist")
MAX_LISTED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Test files that one job runs.

    Attributes:
        pattern: As a recipe names it: a file, or `dir/**/*.py`.
        files: From the project's root, sorted.
        words: Arguments of `--bucket` that run it and nothing else; `!` excludes.
    """

    pattern: str
    files: tuple[str, ...]
    words: tuple[str, ...]


def find_test_files(root: Path, folders: Iterable[str]) -> tuple[str, ...]:
    """Return the test files below folders of a project, from its root, sorted."""
    found: set[str] = set()
    for folder in folders:
        for directory, names, files in os.walk(root / folder):
            names[:] = [n for n in names if n not in _SKIPPED_DIRS and not n.startswith(".")]
            there = Path(directory).relative_to(root)
            found.update((there / name).as_posix() for name in files if is_test_file(name))
    return tuple(sorted(found))


def is_test_file(name: str) -> bool:
    """Return whether pytest takes a file of that name for one of tests."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in TEST_FILES)


def base_of(pattern: str) -> str:
    """Return the folder or file that a pattern is about."""
    parts = PurePosixPath(pattern.removesuffix(SUFFIX)).parts
    return "/".join(itertools.takewhile(lambda part: not set(part) & set("*?{["), parts))


def share_out(files: Sequence[str], patterns: Mapping[str, str]) -> tuple[Bucket, ...]:
    """Return the bucket of each pattern; together they hold every file exactly once.

    Args:
        files: All test files, from the project's root.
        patterns: Pattern -> where it is written, `file:line`; in the order of the result.

    Raises:
        RecipeError: A pattern is none or matches no file, or a file is in no bucket.
    """
    bases = {pattern: _checked_base(pattern, where) for pattern, where in patterns.items()}
    owned: dict[str, list[str]] = {pattern: [] for pattern in patterns}
    nobodys: list[str] = []
    for file in files:
        holding = [p for p, base in bases.items() if file == base or file.startswith(f"{base}/")]
        if holding:
            owned[max(holding, key=lambda pattern: len(bases[pattern]))].append(file)
        else:
            nobodys.append(file)
    if nobodys:
        raise RecipeError(
            ", ".join(sorted({where.rpartition(":")[0] for where in patterns.values()})),
            f"no bucket holds {listed(nobodys, MAX_LISTED)}, expected each test file in one; "
            f"add a bucket, such as [{os.path.commonpath(nobodys)}{SUFFIX}]",
        )
    for pattern, held in owned.items():
        if not held:
            raise RecipeError(
                patterns[pattern],
                f"bucket {pattern!r} holds no test file, expected at least one; "
                f"correct the path, or drop it",
            )
    return tuple(
        Bucket(
            pattern=pattern,
            files=tuple(sorted(held)),
            words=(pattern, *(f"!{inner}" for inner in _below(pattern, bases))),
        )
        for pattern, held in owned.items()
    )


def _checked_base(pattern: str, where: str) -> str:
    """Return the folder or file of a bucket; another pattern is an error."""
    base = pattern.removesuffix(SUFFIX)
    is_folder = base != pattern
    if not base or any(sign in base for sign in "*?,!") or is_folder == base.endswith(".py"):
        raise RecipeError(
            where, f"test_case: {pattern!r} is no bucket, expected a file or dir{SUFFIX}"
        )
    return base


def _below(pattern: str, bases: Mapping[str, str]) -> tuple[str, ...]:
    """Return the widest buckets that lie within another."""
    inner = {p: b for p, b in bases.items() if b.startswith(f"{bases[pattern]}/")}
    return tuple(
        p for p, base in inner.items() if not any(base.startswith(f"{b}/") for b in inner.values())
    )


DEFAULT_S = 1.0  # of a file, where nothing at all has been recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One job of several.

    Attributes:
        files: Sorted; at least one.
        expected_s: How long they take together, as recorded.
    """

    number: int
    files: tuple[str, ...]
    expected_s: float


def balance(
    files: Sequence[str], durations_s: Mapping[str, float], num_shards: int
) -> tuple[Shard, ...]:
    """Return the shards; together they hold every file exactly once.

    The same files and durations give the same shards, in whatever order they come. A file without
    a duration counts as the median of those that have one. There is no shard without files.

    Args:
        files: Test files.
        durations_s: File -> seconds; may lack files, and have others.
        num_shards: How many jobs; fewer files give fewer.
    """
    known = [durations_s[file] for file in files if file in durations_s]
    default_s = statistics.median(known) if known else DEFAULT_S
    weights = {file: durations_s.get(file, default_s) for file in files}
    loads = [(0.0, 0, number) for number in range(1, min(num_shards, len(weights)) + 1)]
    held: dict[int, list[str]] = {number: [] for _, _, number in loads}
    for file in sorted(weights, key=lambda file: (-weights[file], file)):
        load, num_files, number = heapq.heappop(loads)
        held[number].append(file)
        heapq.heappush(loads, (load + weights[file], num_files + 1, number))
    return tuple(
        Shard(
            number=number,
            files=tuple(sorted(mine)),
            expected_s=round(sum(weights[file] for file in mine), 3),
        )
        for number, mine in held.items()
    )


def read_durations(history: Path, files: Sequence[str]) -> dict[str, float]:
    """Return seconds for each test file, from the project's root, that a history of runs has."""
    totals: dict[str, float] = defaultdict(float)
    known = set(files)
    for node_id, seconds in typical_durations(history).items():
        file = node_id.partition("::")[0]
        if file in known:
            totals[file] += seconds
    return dict(totals)
