"""Makes one verdict of many jobs. Pure; whatever is not known to have passed has not.

What it does better than its Source: Megatron-LM .github/workflows/cicd-main.yml, whose verdict job
counts no failure where it cannot ask for the jobs, d98e8a64dd
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.text import grouped
from pytest_megatron.ci.jobs import CiJob, PlanFile
from pytest_megatron.ci.summary.model import JobItem, JobRun

SUCCESS = "success"
FAILURE = "failure"
SKIPPED = "skipped"
_Policy: TypeAlias = Mapping[str, object]
# job of the workflow -> kind of its jobs
_GROUPS = {"unit": "unit", "integration": "workload"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CiSummary:
    """Results of all jobs.

    Attributes:
        jobs: The last try of each, those that the plan has and that left nothing as well.
        problems: Problems of the whole, such as runs of two commits.
        notes: Lines that fail nothing.
        headline: The plan, in a line.
        fetch: Command that downloads the artifacts under the same names; None if they are here.
    """

    jobs: tuple[JobRun, ...]
    fetch: str | None = None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    headline: str | None = None

    @property
    def verdict(self) -> str:
        """`failed`, `broken`, `flaky` or `passed`."""
        verdicts = {job.verdict for job in self.jobs}
        if "failed" in verdicts:
            return "failed"
        if self.problems or "broken" in verdicts or not self.jobs:
            return "broken"
        return "flaky" if "flaky" in verdicts else "passed"

    @property
    def has_passed(self) -> bool:
        """True if CI may be green."""
        return self.verdict in ("passed", "flaky")

    @property
    def items(self) -> tuple[JobItem, ...]:
        """The items of all jobs."""
        return tuple(item for job in self.jobs for item in job.items)

    @property
    def gpu_s(self) -> float:
        """GPU-seconds of all items."""
        return sum(item.gpu_s for item in self.items)

    @property
    def bad_jobs(self) -> tuple[JobRun, ...]:
        """Jobs that are wrong beside their items."""
        return tuple(job for job in self.jobs if job.problems)

    @property
    def job_problems(self) -> Mapping[str, tuple[str, ...]]:
        """Problems of jobs beside their items -> the jobs that have them."""
        found: dict[str, tuple[str, ...]] = {}
        for job in self.bad_jobs:
            for problem in job.problems:
                found[problem] = (*found.get(problem, ()), job.name)
        return found

    @property
    def groups(self) -> list[list[JobItem]]:
        """Failures by cause: those of the code first, then those that most items share."""
        found = grouped(
            (one.node_id if one.cause is None else one.cause.key_of(one.node_id), one)
            for one in self.items
            if one.is_bad
        )
        return sorted(found.values(), key=_interest)

    @property
    def flaky(self) -> tuple[JobItem, ...]:
        """Items that passed when they were run again, and those whose failure does not count."""
        return tuple(i for i in self.items if i.verdict == "flaky" or i.is_held)

    def count(self, *verdicts: str) -> int:
        """Return how many items have one of these verdicts."""
        return sum(item.verdict in verdicts for item in self.items)

    def as_json(self) -> dict[str, JsonValue]:
        """Return the summary for `summary.json`."""
        counts = {v: self.count(v) for v in ("passed", "failed", "flaky", "broken", "skipped")}
        return {
            "schema": 1,
            "verdict": self.verdict,
            "passed": self.has_passed,
            "planned": self.headline,
            "fetch": self.fetch,
            "counts": dict(counts),
            "gpu_s": round(self.gpu_s, 1),
            "problems": list(self.problems),
            "notes": list(self.notes),
            "jobs": [job.as_json() for job in self.jobs],
            "failures": [
                {
                    **first.as_json(),
                    "also": [{"node_id": item.node_id, "job": item.job} for item in others],
                }
                for first, *others in self.groups
            ],
            "flaky": [item.as_json() for item in self.flaky],
        }


def merge(
    runs: Sequence[JobRun],
    expected: PlanFile | None = None,
    results: Mapping[str, str] | None = None,
) -> CiSummary:
    """Make one verdict of all jobs.

    Args:
        runs: Results of jobs, in any order.
        expected: The plan; None takes the jobs that are there for all.
        results: Job of the workflow -> `success`, `failure`, `cancelled` or `skipped`, as the CI
            system reports; None where it does not.
    """
    by_name = _by_name(runs)
    planned = {} if expected is None else {job.id: job for job in expected.jobs}
    jobs: list[JobRun] = []
    notes: list[str] = []
    for name, tries in by_name.items():
        job, earlier = _last(tries)
        notes += earlier
        if expected is not None:
            job = _checked(job, planned.get(name), expected.run_id)
        jobs.append(job)
    if expected is not None:
        jobs += [_missing(job) for name, job in planned.items() if name not in by_name]
    problems = [*_commits(jobs, expected), *_results(results or {}, expected, jobs)]
    problems += _policies(jobs)
    return CiSummary(
        jobs=tuple(sorted(jobs, key=lambda job: job.name)),
        problems=tuple(problems),
        notes=tuple(notes),
        headline=None if expected is None else expected.headline,
    )


def _by_name(runs: Sequence[JobRun]) -> dict[str, list[JobRun]]:
    """Return the tries of each job."""
    return grouped((run.name, run) for run in runs)


def _last(tries: Sequence[JobRun]) -> tuple[JobRun, list[str]]:
    """Return the last try of a job; two of the same number cannot be distinguished."""
    ordered = sorted(tries, key=lambda run: run.run_attempt)
    last = ordered[-1]
    same = [run for run in ordered if run.run_attempt == last.run_attempt]
    if len(same) > 1:
        names = ", ".join(str(run.artifact) for run in same)
        problem = (
            f"{len(same)} artifacts say that they are this job, try {last.run_attempt}: {names}"
        )
        items = tuple(item for run in same for item in run.items)
        problems = tuple(problem for run in same for problem in run.problems)
        last = replace(last, items=items, problems=(problem, *problems))
    earlier = [
        f"{run.name}: try {run.run_attempt} was {run.verdict} ({run.artifact}); "
        f"try {last.run_attempt} counts"
        for run in ordered
        if run.run_attempt != last.run_attempt
    ]
    return last, earlier


def _checked(job: JobRun, planned: CiJob | None, run_id: str | None) -> JobRun:
    """Return a job with every difference between what was planned and what ran."""
    if planned is None:
        return replace(job, problems=(*job.problems, "is not in the plan"))
    problems = list(job.problems)
    ran_in = "" if job.record is None else job.record.run_id
    if run_id and ran_in and run_id != ran_in:
        problems.append(f"is of run {ran_in}, the plan is of run {run_id}")
    # A job that was killed did not run some items for that reason.
    if planned.node_id is not None and not job.problems:
        item = next((item for item in job.items if item.node_id == planned.node_id), None)
        if item is None:
            problems.append(f"did not run {planned.node_id}")
        elif not item.is_bad:
            problems += _differences(item, planned)
    return replace(job, problems=tuple(problems))


def _differences(item: JobItem, planned: CiJob) -> Iterator[str]:
    """Yield how a workload that did not fail ran otherwise than planned."""
    if item.verdict == "skipped":
        yield f"skipped {item.node_id}, which the plan has"
        return
    if item.is_lightweight and not planned.lightweight:
        yield f"ran {item.node_id} lightweight, the plan has all of it"
        return
    if item.num_repeats < planned.n_repeat and not item.is_held:
        yield f"trained {item.node_id} {item.num_repeats} of {planned.n_repeat} times"
    if planned.compared and not item.is_compared:
        yield f"did not compare {item.node_id} with its golden, which the plan has"


def _policy_name(policy: _Policy) -> str:
    """Return the name of a policy, with what identifies the content of its file."""
    name, digest = policy.get("name") or "unknown", policy.get("sha256")
    return f"{name} (SHA-256 {str(digest)[:12]})" if digest else str(name)


def _policies(jobs: Sequence[JobRun]) -> list[str]:
    """Return a problem if not all workloads were compared under one policy."""
    found = _jobs_by(
        (job.name, {_policy_name(i.policy or {}) for i in job.items if i.is_compared})
        for job in jobs
    )
    return [f"jobs compared under different policies: {_listed(found)}"] if len(found) > 1 else []


def _missing(job: CiJob) -> JobRun:
    problem = "is in the plan and left nothing: it was cancelled, or its artifact was not uploaded"
    return JobRun(name=job.id, artifact=None, problems=(problem,))


def _commits(jobs: Sequence[JobRun], expected: PlanFile | None) -> list[str]:
    """Report that not all jobs tested the same commit."""
    found = _jobs_by((job.name, job.commits) for job in jobs)
    planned = None if expected is None else expected.commit
    if len(found) <= 1 and (planned is None or set(found) <= {planned}):
        return []
    plan = f", the plan is of {planned[:12]}" if planned else ""
    commits = {commit[:12]: names for commit, names in found.items()}
    return [f"jobs tested different commits: {_listed(commits)}{plan}"]


def _jobs_by(values: Iterable[tuple[str, Collection[str]]]) -> dict[str, list[str]]:
    """Return value -> names of the jobs that have it."""
    return grouped((value, job) for job, own in values for value in sorted(own))


def _listed(found: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{value} in {', '.join(names)}" for value, names in found.items())


def _results(
    results: Mapping[str, str], expected: PlanFile | None, jobs: Sequence[JobRun]
) -> list[str]:
    """Report results of the CI system that no artifact has."""
    bad = {job.name for job in jobs if job.verdict in ("failed", "broken")}
    problems = []
    for name, result in sorted(results.items()):
        kind = _GROUPS.get(name, name)
        due = () if expected is None else expected.jobs
        planned = {job.id for job in due if job.kind == kind}
        is_empty = expected is not None and name in _GROUPS and not planned
        is_shown = result == FAILURE and bool(bad & planned)
        if result == SUCCESS or is_shown or (result == SKIPPED and is_empty):
            continue
        what = {SKIPPED: "was skipped, and the plan has something for it"}.get(result)
        problems.append(f"job {name!r} of the workflow {what or f'ended as {result!r}'}")
    return problems


def _interest(group: Sequence[JobItem]) -> tuple[bool, bool, int, str]:
    """Sort failures of one cause: of the code first, then those of many items."""
    first = group[0]
    is_transient = first.cause is not None and first.cause.is_transient
    return first.verdict == "broken", is_transient, -len(group), first.node_id
