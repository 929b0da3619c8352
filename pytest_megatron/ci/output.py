"""Writes a summary's files: for machines, for a step summary, for a comment, for JUnit viewers."""

from __future__ import annotations

import json
from pathlib import Path

from pytest_megatron.ci.junit import Suite, join
from pytest_megatron.ci.merge import Summary
from pytest_megatron.ci.summary_text import COMMENT_BYTES, as_markdown
from pytest_megatron.errors import CiError
from pytest_megatron.files import write_texts_together


def write_outputs(summary: Summary, directory: Path) -> None:
    """Write all of them or none.

    Raises:
        CiError: One cannot be written.
    """
    suites = [
        Suite(name=job.name, junits=job.junits, problems=job.problems) for job in summary.jobs
    ]
    if summary.problems:
        suites.append(Suite(name="all jobs", junits=(), problems=summary.problems))
    texts = {
        "summary.json": json.dumps(summary.as_json(), indent=2, allow_nan=False) + "\n",
        "summary.md": as_markdown(summary),
        "comment.md": as_markdown(summary, COMMENT_BYTES),
        "junit.xml": join(suites),
    }
    try:
        write_texts_together({directory / name: text for name, text in texts.items()})
    except OSError as error:
        raise CiError(str(directory), f"cannot be written: {error.strerror}") from error
