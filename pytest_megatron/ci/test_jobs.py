"""Unit jobs: of the buckets that recipes name, or of shards. Reads recipes' rows and test files."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pytest_megatron.ci.jobs import CiJob, unit_job, unit_settings
from pytest_megatron.ci.table import CiTable
from pytest_megatron.ci.test_files import (
    EXPERIMENTAL,
    Bucket,
    balance,
    find_test_files,
    launch_mark,
    share_out,
    wanted_launch_marks,
)
from pytest_megatron.errors import EmptySelectionError, RecipeError
from pytest_megatron.workloads.recipe.model import UNIT_MODEL, Workload

_LATEST = "latest"
UNCHANGED = "nothing changed that it used"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A row, or a bucket, that does not run, and why."""

    name: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitChoice:
    """Selection of unit tests.

    Attributes:
        environment: One word.
        platforms: Empty is any.
        tag: "" is any.
        unaffected: Files of tests for which nothing changed.
    """

    environment: str
    platforms: tuple[str, ...]
    tag: str
    unaffected: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitJobs:
    """The jobs of unit tests.

    Attributes:
        left_out: Rows and buckets without a job.
        files: Id of a job -> its test files.
    """

    jobs: tuple[CiJob, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @staticmethod
    def joined(parts: Iterable[UnitJobs], left_out: Iterable[LeftOut] = ()) -> UnitJobs:
        """Return the jobs of all parts, and further rows and buckets without one."""
        found = tuple(parts)
        return UnitJobs(
            jobs=tuple(job for part in found for job in part.jobs),
            left_out=(*left_out, *(one for part in found for one in part.left_out)),
            files={id_: files for part in found for id_, files in part.files.items()},
        )


def bucket_jobs(
    rows: Sequence[Workload], choice: UnitChoice, table: CiTable, root: Path
) -> UnitJobs:
    """Return a job for each bucket that the recipes' rows of unit tests name.

    The buckets of a platform are all that its rows name, whatever environment and tag they are
    for: a file whose bucket is not asked for is left out, and does not fall to a wider bucket.

    Raises:
        RecipeError: A bucket is none, is named twice, or a test file is in none.
    """
    files = find_test_files(root, table.unit_tests)
    parts: list[UnitJobs] = []
    for platform in dict.fromkeys(row.platform for row in rows):
        mine = [row for row in rows if row.platform == platform]
        if choice.platforms and platform not in choice.platforms:
            reason = f"platform {platform}, asked {', '.join(choice.platforms)}"
            others = tuple(LeftOut(name=_name(row), reasons=(reason,)) for row in mine)
            parts.append(UnitJobs(left_out=others))
            continue
        patterns: dict[str, str] = {}
        for row in mine:
            patterns.setdefault(row.test_case, row.where)
        buckets = {bucket.pattern: bucket for bucket in share_out(files, patterns)}
        parts.append(_jobs_of_platform(mine, buckets, choice, table, root))
    return UnitJobs.joined(parts)


def _jobs_of_platform(
    rows: Sequence[Workload],
    buckets: Mapping[str, Bucket],
    choice: UnitChoice,
    table: CiTable,
    root: Path,
) -> UnitJobs:
    """Return the jobs of unit tests on a platform."""
    parts: list[UnitJobs] = []
    left_out: list[LeftOut] = []
    chosen: dict[str, Workload] = {}
    for row in rows:
        reasons = _missed(row, choice)
        if reasons:
            left_out.append(LeftOut(name=_name(row), reasons=reasons))
        elif (first := chosen.setdefault(row.test_case, row)) is not row:
            raise RecipeError(
                row.where,
                f"bucket {row.test_case!r} is also at {first.where} for the same environment, "
                f"platform and tag, expected it once; remove one",
            )
        elif choice.unaffected.issuperset(buckets[row.test_case].files):
            left_out.append(LeftOut(name=_name(row), reasons=(UNCHANGED,)))
        else:
            made = _jobs_of(buckets[row.test_case], unit_settings(row), row.tag or "", table, root)
            parts.append(made)
            if not made.jobs:
                mark = launch_mark(row.platform)
                left_out.append(LeftOut(name=_name(row), reasons=(f"no file has {mark}",)))
    return UnitJobs.joined(parts, left_out)


def _missed(row: Workload, choice: UnitChoice) -> tuple[str, ...]:
    """Return why a row is not asked for."""
    if row.disabled_reason is not None:
        return (row.disabled_reason,)
    reasons = []
    if row.environment != choice.environment:
        reasons.append(f"environment {row.environment}, asked {choice.environment}")
    if choice.tag and row.tag not in (None, choice.tag):
        reasons.append(f"tag {row.tag}, asked {choice.tag}")
    return tuple(reasons)


def shard_jobs(
    root: Path,
    num_shards: int,
    durations_s: Mapping[str, float],
    row: CiJob,
    choice: UnitChoice,
    table: CiTable,
) -> UnitJobs:
    """Return a job for each shard of the test files, without those that are unaffected.

    Raises:
        EmptySelectionError: There are no test files.
    """
    files = find_test_files(root, table.unit_tests)
    if not files:
        raise EmptySelectionError(
            f"--shards {num_shards}",
            f"there are no test files in {', '.join(table.unit_tests)}, expected some; "
            f"set unit_tests in [tool.pytest-megatron.ci]",
        )
    unchanged = choice.unaffected
    left_out = [LeftOut(name=file, reasons=(UNCHANGED,)) for file in files if file in unchanged]
    files = tuple(file for file in files if file not in unchanged)
    shards = balance(files, durations_s, num_shards) if files else []
    buckets = (
        Bucket(
            pattern=f"shard-{shard.number}-of-{len(shards)}", files=shard.files, words=shard.files
        )
        for shard in shards
    )
    return UnitJobs.joined(
        (_jobs_of(one, row, choice.tag, table, root) for one in buckets), left_out
    )


def _jobs_of(bucket: Bucket, row: CiJob, tag: str, table: CiTable, root: Path) -> UnitJobs:
    """Return the job of a bucket, and one more for its experimental tests, if it has any."""
    files = bucket.files
    for mark in wanted_launch_marks((row.platform,) if row.platform else (), table):
        files = tuple(file for file in files if _has_mark(root / file, mark))
    if not files:
        return UnitJobs()
    own = replace(bucket, files=files)
    jobs = [unit_job(own, row, tag, table, experimental="exclude")]
    files_of = {jobs[0].id: files}
    tests = tuple(file for file in files if _has_mark(root / file, EXPERIMENTAL))
    if tests and tag in ("", _LATEST):
        own = replace(bucket, files=tests)
        jobs.append(unit_job(own, row, tag, table, experimental="only"))
        files_of[jobs[1].id] = tests
    return UnitJobs(jobs=tuple(jobs), files=files_of)


def _has_mark(file: Path, mark: str) -> bool:
    """Return whether a file uses a mark, not merely its name in a string."""
    text = file.read_text(encoding="utf-8", errors="replace")
    if mark not in text:
        return False
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return True  # pytest reports it
    return any(
        isinstance(node, ast.Attribute) and node.attr == mark and _is_mark(node.value)
        for node in ast.walk(tree)
    )


def _is_mark(node: ast.expr) -> bool:
    """Return whether an expression is `pytest.mark`, or `mark`."""
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name == "mark"


def _name(row: Workload) -> str:
    return f"{row.file.as_posix()}::{row.item_name}"


def unit_rows(rows: Iterable[Workload]) -> tuple[Workload, ...]:
    """Return the rows that are buckets of unit tests."""
    return tuple(row for row in rows if row.model == UNIT_MODEL)
