"""Record of a CI job, written before it starts: `job.json` beside its run directory.

A job that is killed, or whose pytest refuses to start, leaves nothing else; the summary still knows
which one it was.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.base.files import write_json_atomically
from pytest_megatron.base.schema import Positive, Text
from pytest_megatron.errors import CiError
from pytest_megatron.runs.layout import make_results_dir
from pytest_megatron.runs.record import RecordedFile, to_json

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
