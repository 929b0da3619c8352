"""Writes a summary's files: for machines, for a step summary, for a comment, for JUnit viewers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from pytest_megatron.ci.junit import JUnitCase, Suite, address, join
from pytest_megatron.ci.merge import CiSummary
from pytest_megatron.ci.outcome import JobRun
from pytest_megatron.ci.summary_html import as_html
from pytest_megatron.ci.summary_text import COMMENT_BYTES, as_markdown
from pytest_megatron.errors import CiError
from pytest_megatron.files import write_texts_together

_OUTCOMES = {"flaky": "passed"}


def write_outputs(summary: CiSummary, directory: Path, pages: str | None = None) -> None:
    """Write all of them or none.

    Args:
        summary: What to tell.
        directory: Made if it is not there.
        pages: Where the pages with curves are, from that directory; None if there are none.

    Raises:
        CiError: One cannot be written.
    """
    texts = {
        "summary.json": json.dumps(summary.as_json(), indent=2, allow_nan=False) + "\n",
        "summary.md": as_markdown(summary),
        "comment.md": as_markdown(summary, COMMENT_BYTES),
        "index.html": as_html(summary, pages),
        "junit.xml": join(_suites(summary)),
    }
    try:
        write_texts_together({directory / name: text for name, text in texts.items()})
    except OSError as error:
        raise CiError(str(directory), f"cannot be written: {error.strerror}") from error


def _suites(summary: CiSummary) -> Iterator[Suite]:
    for job in summary.jobs:
        others = tuple(_others(job))
        yield Suite(name=job.name, junits=job.junits, others=others, problems=job.problems)
    if summary.problems:
        yield Suite(name="all jobs", junits=(), problems=summary.problems)


def _others(job: JobRun) -> Iterator[JUnitCase]:
    """Yield the items that only `run.json` has: their XML was never written, or not uploaded."""
    cases = [case for junit in job.junits for case in junit.cases]
    known = {(case.classname, case.name) for case in cases}
    made_up = {case.node_id for case in cases}
    for item in job.items:
        classname, name = address(item.node_id)
        if (classname, name) not in known and item.node_id not in made_up:
            outcome = "skipped" if item.is_held else _OUTCOMES.get(item.verdict, item.verdict)
            text = "" if item.cause is None else item.cause.text
            yield JUnitCase(
                classname=classname,
                name=name,
                outcome=outcome,
                message=text.partition("\n")[0],
                text=text,
                duration_s=item.duration_s,
            )
