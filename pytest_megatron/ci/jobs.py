"""Jobs of a CI plan, made from rows, buckets and shards, each with the command that runs it."""

from __future__ import annotations

import ast
import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.schema import Count, Text, open_to_others
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
from pytest_megatron.errors import EmptySelectionError, RecipeError, SelectionError
from pytest_megatron.gpu.host import CPU_PLATFORM
from pytest_megatron.runs.layout import item_dirs
from pytest_megatron.session.decision import Decision
from pytest_megatron.workloads.recipe.model import UNIT_MODEL, Workload

PYTEST = ("pytest", "-p", "megatron")


@open_to_others
@dataclass(frozen=True, kw_only=True)
class CiJob:
    """One job of CI, under the keys of `plan --format json`.

    Attributes:
        id: Good for the name of a job and of an artifact; unique in the plan. Of a workload, the
            name of its directory in a run.
        kind: `workload` or `unit`.
        name: For people: a node id, a bucket, a shard.
        test_case: Test case of a workload, or the bucket's pattern.
        build: The row's container build, "" where it has none.
        gpus: On each node; 0 on the platform cpu.
        ranks: On each node.
        time_limit_s: For one training, or for all tests of a bucket.
        timeout_minutes: For the whole job: every repeat at its limit, and a margin.
        compared: Whether a workload is compared with a golden; None where that is not known.
        num_files: The number of test files of a unit job.
        command: The one line to type, from the project's root.
    """

    id: Text
    kind: str = ""
    name: str = ""
    model: str = ""
    test_case: str = ""
    environment: str = ""
    platform: str = CPU_PLATFORM
    build: str = ""
    nodes: Count = 1
    gpus: Count = 0
    ranks: Count = 0
    n_repeat: Count = 1
    lightweight: bool = False
    time_limit_s: Count = 0
    timeout_minutes: Count = 60
    compared: bool | None = None
    num_files: Count = 0
    command: str = ""

    @property
    def node_id(self) -> str | None:
        """The workload that it runs; None for unit tests."""
        return self.name if self.kind == "workload" else None


@open_to_others
@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """A plan, as far as other commands read it from `plan --format json`.

    Attributes:
        commit: The commit that was planned for; None where the plan has none.
        run_id: Id of the run of GitHub Actions that planned, None elsewhere.
    """

    event: str = ""
    labels: tuple[str, ...] = ()
    scope: str = ""
    environment: str = ""
    image: str = ""
    rule: str = ""
    commit: str | None = None
    run_id: str | None = None
    jobs: tuple[CiJob, ...]

    @property
    def headline(self) -> str | None:
        """Scope, event and the like, in a line."""
        parts = {
            "event": self.event,
            "labels": " and ".join(self.labels),
            "scope": self.scope,
            "environment": self.environment,
            "rule": self.rule,
        }
        return ", ".join(f"{key} {text}" for key, text in parts.items() if text) or None


def _command(argv: Sequence[str], env: Mapping[str, str]) -> str:
    words = [f"{name}={shlex.quote(value)}" for name, value in sorted(env.items())]
    return " ".join([*words, shlex.join(argv)])


def workload_jobs(
    workloads: Iterable[Workload],
    decision: Decision,
    table: CiTable,
    compares: Callable[[Workload], bool | None],
) -> tuple[CiJob, ...]:
    """Return a job for each row.

    Args:
        workloads: The rows that are selected.
        decision: How often and how short they run.
        table: For time limits.
        compares: Whether the row's case is compared with a golden, None where that is not known.
    """
    return tuple(
        replace(
            _workload_job(workload, decision, table),
            compared=not decision.is_lightweight and compares(workload),
        )
        for workload in workloads
    )


def _workload_job(workload: Workload, decision: Decision, table: CiTable) -> CiJob:
    """Return the CI job of a workload."""
    node_id = workload.node_id
    repeats = decision.num_repeats(workload.n_repeat)
    limit_s = workload.time_limit_s or table.default_time_limit_s
    is_cpu = workload.platform == CPU_PLATFORM
    # With its platform, hardware that is missing is an error; without it the row is skipped.
    argv = [*PYTEST, node_id, "--megatron-platform", workload.platform]
    argv += ["--megatron-n-repeat", str(repeats)]
    argv += ["--megatron-lightweight"] if decision.is_lightweight else []
    return CiJob(
        id=item_dirs(Path(), node_id).root.name,
        kind="workload",
        name=node_id,
        model=workload.model,
        test_case=workload.test_case,
        environment=workload.environment,
        platform=workload.platform,
        build=str(workload.spec.get("build") or ""),
        nodes=workload.nodes,
        gpus=0 if is_cpu else workload.gpus,
        ranks=workload.gpus,
        n_repeat=repeats,
        lightweight=decision.is_lightweight,
        time_limit_s=limit_s,
        timeout_minutes=math.ceil(repeats * limit_s / 60) + table.job_margin_minutes,
        command=_command(argv, decision.env),
    )


def refuse_own_runners(jobs: Iterable[CiJob], table: CiTable) -> None:
    """Make sure that code of a stranger, a fork's pull request, runs on GitHub's runners alone.

    Raises:
        SelectionError: A job is for another runner.
    """
    for platform in (job.platform or CPU_PLATFORM for job in jobs):
        if platform not in table.workflow.hosted_runners:
            raise SelectionError(
                "the plan",
                f"a pull request of a fork runs on no runner of your own, such as that of "
                f"{platform}; read it, and push its branch to this repository",
            )


def unit_settings(row: Workload) -> CiJob:
    """Return what all jobs of a row of unit tests share, for `unit_job`."""
    return CiJob(
        id=row.test_case,
        environment=row.environment,
        platform=row.platform,
        build=str(row.spec.get("build") or ""),
        gpus=0 if row.platform == CPU_PLATFORM else row.gpus,
        ranks=row.gpus,
        time_limit_s=row.time_limit_s or 0,
    )


def unit_job(
    bucket: Bucket, row: CiJob, choice: UnitChoice, table: CiTable, *, experimental: str
) -> CiJob:
    """Return the job of a bucket or a shard.

    Args:
        bucket: The bucket, with its test files.
        row: What it shares with others; no `platform` is any, no `gpus` and no `ranks` run tests
            in pytest's own process.
        choice: For the tag of the tests, and whether they are selected by what changed.
        table: For the time limit.
        experimental: `exclude`, or `only`, of tests with the mark `experimental`.
    """
    limit_s, tag = row.time_limit_s or table.default_time_limit_s, choice.tag
    argv = [*PYTEST, *_gang_options(row), "--megatron-environment", row.environment]
    argv += ["--megatron-tag", tag] if tag else []
    argv += ["--megatron-platform", row.platform] if row.platform else []
    argv += ["-o", "megatron_experimental_tests=only"] if experimental == "only" else []
    argv += ["--megatron-bucket", ",".join(bucket.words)]
    argv += ["--testmon"] if choice.is_selective else []
    kind = "-experimental" if experimental == "only" else ""
    where = f"{row.environment}-{row.platform or 'any'}-{tag or 'any'}{kind}"
    return replace(
        row,
        id=item_dirs(Path(), f"unit-{bucket.pattern}-{where}").root.name,
        kind="unit",
        name=f"{bucket.pattern} (experimental)" if kind else bucket.pattern,
        model=UNIT_MODEL,
        test_case=bucket.pattern,
        time_limit_s=limit_s,
        timeout_minutes=math.ceil(limit_s / 60) + table.job_margin_minutes,
        num_files=len(bucket.files),
        command=_command(argv, {}),
    )


def _gang_options(row: CiJob) -> list[str]:
    """Return the options of pytest for the ranks of a bucket."""
    if row.gpus:
        return ["--megatron-gpus", str(row.gpus)]
    return ["--megatron-ranks", str(row.ranks), "--megatron-device", "cpu"] if row.ranks else []


def unit_matrix(jobs: Sequence[CiJob]) -> list[JsonValue]:
    """Return Megatron-LM's matrix of unit tests: a bucket for each entry."""
    units = (job for job in jobs if job.kind == "unit")
    buckets = dict.fromkeys(job.test_case for job in units)
    return [{"bucket": bucket} for bucket in buckets]


def integration_matrix(jobs: Sequence[CiJob]) -> list[JsonValue]:
    """Return Megatron-LM's matrix of workloads; rows of one test case are one entry there."""
    workloads = (job for job in jobs if job.kind == "workload")
    cases = dict.fromkeys((job.model, job.test_case) for job in workloads)
    return [{"model": model, "test_case": test_case} for model, test_case in cases]


_LATEST = "latest"


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
        is_selective: Whether `--testmon` selects among the tests of a job.
    """

    environment: str
    platforms: tuple[str, ...]
    tag: str
    is_selective: bool = False


@dataclass(slots=True, kw_only=True)
class UnitJobs:
    """The jobs of unit tests.

    Attributes:
        left_out: Rows and buckets without a job.
    """

    jobs: list[CiJob] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    def leave_out(self, row: Workload, *reasons: str) -> None:
        """Note that a row has no job, and why."""
        self.left_out.append(LeftOut(name=row.node_id, reasons=reasons))


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
    found = UnitJobs()
    for platform in dict.fromkeys(row.platform for row in rows):
        mine = [row for row in rows if row.platform == platform]
        if choice.platforms and platform not in choice.platforms:
            for row in mine:
                found.leave_out(row, f"platform {platform}, asked {', '.join(choice.platforms)}")
            continue
        patterns: dict[str, str] = {}
        for row in mine:
            patterns.setdefault(row.test_case, row.where)
        buckets = {bucket.pattern: bucket for bucket in share_out(files, patterns)}
        for row in _chosen(mine, choice, found):
            own = replace(choice, tag=row.tag or "")
            jobs = _jobs_of(buckets[row.test_case], unit_settings(row), own, table, root)
            found.jobs += jobs
            if not jobs:
                found.leave_out(row, f"no file has {launch_mark(platform)}")
    return found


def _chosen(rows: Sequence[Workload], choice: UnitChoice, found: UnitJobs) -> Iterable[Workload]:
    """Return the rows of a platform that are asked for; note the others in `found`."""
    chosen: dict[str, Workload] = {}
    for row in rows:
        if reasons := _missed(row, choice):
            found.leave_out(row, *reasons)
        elif (first := chosen.setdefault(row.test_case, row)) is not row:
            raise RecipeError(
                row.where,
                f"bucket {row.test_case!r} is also at {first.where} for the same environment, "
                f"platform and tag, expected it once; remove one",
            )
    return chosen.values()


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
    """Return a job for each shard of the test files.

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
    shards = balance(files, durations_s, num_shards)
    buckets = (
        Bucket(
            pattern=f"shard-{shard.number}-of-{len(shards)}", files=shard.files, words=shard.files
        )
        for shard in shards
    )
    return UnitJobs(
        jobs=[job for one in buckets for job in _jobs_of(one, row, choice, table, root)]
    )


def _jobs_of(
    bucket: Bucket, row: CiJob, choice: UnitChoice, table: CiTable, root: Path
) -> list[CiJob]:
    """Return the job of a bucket, and one more for its experimental tests, if it has any."""
    files = bucket.files
    for mark in wanted_launch_marks((row.platform,) if row.platform else (), table):
        files = tuple(file for file in files if _has_mark(root / file, mark))
    if not files:
        return []
    own = replace(bucket, files=files)
    jobs = [unit_job(own, row, choice, table, experimental="exclude")]
    tests = tuple(file for file in files if _has_mark(root / file, EXPERIMENTAL))
    if tests and choice.tag in ("", _LATEST):
        own = replace(bucket, files=tests)
        jobs.append(unit_job(own, row, choice, table, experimental="only"))
    return jobs


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


def unit_rows(rows: Iterable[Workload]) -> tuple[Workload, ...]:
    """Return the rows that are buckets of unit tests."""
    return tuple(row for row in rows if row.model == UNIT_MODEL)
