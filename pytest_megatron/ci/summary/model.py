"""Results of one job of CI: its record, its items, and problems of the job itself.

The record, `job.json` beside the run directory, is written before the job starts. One that is
killed, or whose pytest refuses to start, leaves nothing else; the summary still knows which it was.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.base.files import JsonValue, write_json_atomically
from pytest_megatron.base.schema import Positive, Text
from pytest_megatron.errors import CiError
from pytest_megatron.runs.layout import make_results_dir
from pytest_megatron.runs.record import RecordedFile, to_json

BAD = ("failed", "broken")
_ASSERTION = re.compile(r"(?:\[rank \d+\] )?(?:E +)?(?:AssertionError\b|assert\b)")
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+(?:\.\d+)?(?:e[-+]?\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemCause:
    """Cause of an item that did not pass, from its run directory or its JUnit XML.

    Attributes:
        text: The headline.
        rank: The rank that it began with.
        place: File in the artifact and line, or file and line of the project.
        line: The line that stands there.
        advice: What to do, in a line.
        fingerprint: The same for failures of one cause.
    """

    text: str
    rank: int | None = None
    place: str | None = None
    line: str | None = None
    advice: str | None = None
    is_transient: bool = False
    fingerprint: str = ""

    def key_of(self, node_id: str) -> str:
        """Return the key that failures of one cause share.

        Without its numbers, an assertion of one test reads as that of another.
        """
        if self.fingerprint:
            return self.fingerprint
        text = _NUMBER.sub("#", self.text)
        return f"{node_id.partition('[')[0]}: {text}" if _ASSERTION.match(self.text) else text

    def as_json(self) -> dict[str, JsonValue]:
        """Return the cause for `summary.json`."""
        return {
            "text": self.text,
            "root_rank": self.rank,
            "place": self.place,
            "line": self.line,
            "advice": self.advice,
            "transient": self.is_transient,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class JobItem:
    """One workload or test in one job.

    Attributes:
        verdict: `passed`, `failed`, `flaky`, `broken` or `skipped`.
        is_held: Whether its failure does not count, by quarantine.
        causes: Signatures of attempts that failed before it passed.
        reproduce: Command that shows the failure again.
        num_repeats: How often a workload was trained to its end.
        is_compared: Whether a workload was compared with its golden; None where that is not known.
        is_lightweight: Whether it ran shortened.
        policy: Under which it was compared, as a plan has it; None where that is not known.
        gpu_s: GPU-seconds of all attempts, as far as its run directory has them.
        line: Where it is in the project's file, that of its node id; None where not known.
    """

    node_id: str
    job: str
    verdict: str
    duration_s: float = 0.0
    num_attempts: int = 1
    is_held: bool = False
    causes: tuple[str, ...] = ()
    cause: ItemCause | None = None
    reproduce: str | None = None
    num_repeats: int = 0
    is_compared: bool | None = None
    is_lightweight: bool = False
    policy: Mapping[str, object] | None = None
    gpu_s: float = 0.0
    line: int | None = None

    @property
    def is_bad(self) -> bool:
        """True if it fails its job."""
        return self.verdict in BAD and not self.is_held

    @property
    def source(self) -> tuple[str, int]:
        """File of the project and line: those of the failure if it has them, else its own."""
        place = "" if self.cause is None else self.cause.place or ""
        path, _, line = place.rpartition(":")
        is_of_project = path.endswith(".py") and ".." not in path and not path.startswith("/")
        if is_of_project and line.isdecimal():
            return path, int(line)
        return self.node_id.partition("::")[0], self.line or 1

    @property
    def how_flaky(self) -> str:
        """Why a flaky item counts as passed."""
        if self.is_held:
            return f"{self.verdict}, in quarantine"
        causes = f": {', '.join(self.causes)}" if self.causes else ""
        return f"passed at attempt {max(self.num_attempts, 2)}{causes}"

    def as_json(self) -> dict[str, JsonValue]:
        """Return the item for `summary.json`."""
        return {
            "node_id": self.node_id,
            "job": self.job,
            "verdict": self.verdict,
            "counts": not self.is_held,
            "duration_s": round(self.duration_s, 3),
            "gpu_s": round(self.gpu_s, 1),
            "num_attempts": self.num_attempts,
            "causes": list(self.causes),
            "cause": None if self.cause is None else self.cause.as_json(),
            "reproduce": self.reproduce,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRun:
    """One try of one job, or the rest of it.

    Attributes:
        name: Id of the job in the plan, else the name of the directory.
        artifact: Source of the job, as a user would type it; None if there is none.
        problems: Why the job counts as failed beside its items.
        commits: Those that its runs tested.
        has_run_file: Whether it left a `run.json`, and not JUnit XML alone.
    """

    name: str
    artifact: str | None
    record: CiJobRecord | None = None
    items: tuple[JobItem, ...] = ()
    problems: tuple[str, ...] = ()
    commits: frozenset[str] = frozenset()
    has_run_file: bool = False

    @property
    def run_attempt(self) -> int:
        """Number of the try, from 1."""
        return 1 if self.record is None else self.record.run_attempt

    @property
    def verdict(self) -> str:
        """`failed`, `broken`, `flaky` or `passed`; `broken` also where nothing is known of it."""
        if any(item.is_bad and item.verdict == "failed" for item in self.items):
            return "failed"
        if self.problems or any(item.is_bad for item in self.items):
            return "broken"
        return "flaky" if any(item.verdict == "flaky" for item in self.items) else "passed"

    @property
    def duration_s(self) -> float:
        """Seconds of all items together."""
        return sum(item.duration_s for item in self.items)

    @property
    def counts(self) -> str:
        """The verdicts of the job's items: `2 failed, 40 passed, 12.0 s`."""
        words = ("failed", "broken", "flaky", "passed", "skipped")
        found = [f"{number} {word}" for word in words if (number := self.count(word))]
        return f"{', '.join(found) or 'no items'}, {self.duration_s:.1f} s"

    def count(self, *verdicts: str) -> int:
        """Return how many items have one of these verdicts."""
        return sum(item.verdict in verdicts for item in self.items)

    def as_json(self) -> dict[str, JsonValue]:
        """Return the job for `summary.json`, without its items."""
        return {
            "job": self.name,
            "verdict": self.verdict,
            "artifact": self.artifact,
            "run_attempt": self.run_attempt,
            "problems": list(self.problems),
            "num_items": len(self.items),
            "duration_s": round(self.duration_s, 3),
        }


FILE_NAME = "job.json"
LOG_NAME = "pytest.log"
_FORBIDDEN = re.compile(r'["<>|:\r\n\\?/*\x00-\x1f ]')  # what names of artifacts must not have
_COMMIT = ("GITHUB_SHA", "CI_COMMIT_SHA")
_RUN_ID = ("GITHUB_RUN_ID", "CI_PIPELINE_ID")


@dataclass(frozen=True, kw_only=True)
class CiJobRecord(RecordedFile):
    """One try of one job.

    Attributes:
        job: Id of the job in the plan.
        test_case: Test case, after which the artifact is named.
        run_id: Id of the whole run of CI, or `local`.
        run_attempt: Counted from 1: a re-run of a job leaves artifacts beside the earlier ones.
        unique: Different for each try of each job.
    """

    job: Text
    test_case: str = ""
    run_id: str = ""
    run_attempt: Positive
    commit: str | None = None
    unique: str = ""

    @property
    def artifact(self) -> str:
        """Name of the artifact: `logs-<test case>-<run id>-<unique>`."""
        return f"logs-{slug(self.test_case)}-{self.run_id}-{self.unique}"


def slug(name: str) -> str:
    """Return a name of a test case or a job as artifacts may have it: `/` and `*` become `-`.

    Source: Megatron-LM .github/actions/action.yml, names of artifacts, d98e8a64dd.
    """
    return _FORBIDDEN.sub("-", name)


def new_job(job: str, test_case: str, env: Mapping[str, str]) -> CiJobRecord:
    """Return the record of a job that starts now.

    Args:
        job: Id of the job in the plan.
        test_case: Test case of the row, or a bucket's pattern.
        env: Variables of GitHub or GitLab, as far as they are there.
    """
    attempt = env.get("GITHUB_RUN_ATTEMPT", "1")
    return CiJobRecord(
        job=job,
        test_case=test_case,
        run_id=slug(_first(env, _RUN_ID) or "local"),
        run_attempt=int(attempt) if attempt.isdigit() else 1,
        commit=_first(env, _COMMIT),
        unique=slug(env.get("CI_JOB_ID", "")) or str(uuid.uuid4()),
    )


def _first(env: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((env[name] for name in names if env.get(name)), None)


def write_job(record: CiJobRecord, directory: Path) -> None:
    """Make the directory of a job's artifact, with `job.json` in it.

    Raises:
        CiError: It cannot be made, or holds an earlier job.
    """
    try:
        if directory.is_dir() and any(directory.iterdir()):
            raise CiError(str(directory), "is not empty; give a directory for this job alone")
        make_results_dir(directory)
        content = {**to_json(record), "artifact": record.artifact}
        write_json_atomically(directory / FILE_NAME, content)
    except OSError as error:
        raise CiError(str(directory), f"cannot be written: {error.strerror}") from error
