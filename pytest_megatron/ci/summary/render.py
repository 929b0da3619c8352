"""Text, Markdown and annotations of a summary.

Pure but for `write_outputs`. Names and logs in a summary are anybody's, and are escaped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from pytest_megatron.base.files import write_texts_together
from pytest_megatron.base.templates import render_macro
from pytest_megatron.base.text import (
    counted,
    listed,
    plain,
    shorten,
    within_limit,
    workflow_command,
)
from pytest_megatron.ci.summary.merge import CiSummary
from pytest_megatron.ci.summary.model import JobItem
from pytest_megatron.errors import CiError

STEP_SUMMARY_BYTES = 900_000  # GitHub takes 1 MiB for a step
COMMENT_BYTES = 60_000  # GitHub takes 65,536 characters for a comment
_MOST_NAME = 300
_MOST_ALSO = 5
_BLOCK_LINES, _BLOCK_ROWS = 20, 50
_INDENT = "    "
_MOST_MESSAGE = 1000  # characters of an annotation


def headline(summary: CiSummary) -> str:
    """Return `failed: 2 of 40 items, 1 of 5 jobs has a problem`."""
    bad = sum(item.is_bad for item in summary.items)
    parts = [f"{bad} of {counted(len(summary.items), 'item')}" if bad else ""]
    num_bad = len(summary.bad_jobs)
    verb = "has" if num_bad == 1 else "have"
    parts.append(
        f"{num_bad} of {counted(len(summary.jobs), 'job')} {verb} a problem" if num_bad else ""
    )
    parts.append(counted(len(summary.problems), "problem") + " besides" if summary.problems else "")
    told = ", ".join(part for part in parts if part)
    ran = f"{counted(len(summary.items), 'item')} in {counted(len(summary.jobs), 'job')}"
    flaky = f", {summary.count('flaky')} flaky" if summary.count("flaky") else ""
    return f"{summary.verdict}: {told or ran + flaky}"


def cost(summary: CiSummary) -> str:
    """Return `12.3 GPU hours (44,280 GPU-seconds)`; empty where no GPU was used."""
    hours = summary.gpu_s / 3600
    shown = f"{hours:,.1f}" if hours >= 1 else f"{hours:.2g}"
    return f"{shown} GPU hours ({summary.gpu_s:,.0f} GPU-seconds)" if hours else ""


def github_annotations(summary: CiSummary) -> list[str]:
    """Return commands of GitHub for what fails the run: problems first, then items."""
    found = [
        workflow_command("error", {}, shorten(text, _MOST_MESSAGE)) for text in summary.problems
    ]
    for job in summary.bad_jobs:
        problem = shorten(plain("; ".join(job.problems)), _MOST_MESSAGE)
        found.append(workflow_command("error", {"title": plain(job.name)}, problem))
    for item in (item for group in summary.groups for item in group):
        file, line = item.source
        place = {"file": plain(file), "line": line, "title": plain(item.node_id)}
        found.append(workflow_command("error", place, _message(item)))
    return within_limit(found, "the summary of this run has all")


def _message(item: JobItem) -> str:
    cause = item.cause
    text = item.verdict if cause is None else "\n".join(filter(None, (cause.text, cause.advice)))
    return plain(text, _MOST_MESSAGE)


def as_text(summary: CiSummary) -> str:
    """Return the summary for a terminal."""
    blocks = ["\n".join(_text_head(summary))]
    blocks += ["\n".join(_text_group(group)) for group in summary.groups]
    if summary.flaky:
        lines = (f"{_INDENT}{item.node_id}: {item.how_flaky}" for item in summary.flaky)
        blocks.append("\n".join(["flaky", *lines]))
    return plain("\n\n".join(blocks))


def _text_head(summary: CiSummary) -> Iterator[str]:
    """Yield the first lines of the summary: verdict, plan and cost."""
    yield headline(summary)
    if summary.headline:
        yield f"planned: {summary.headline}"
    if used := cost(summary):
        yield f"cost: {used}"
    for problem in summary.problems:
        yield f"problem: {problem}"
    width = max((len(job.name) for job in summary.jobs), default=0)
    for job in summary.jobs:
        yield f"{_INDENT}{job.verdict:<7} {job.name:<{width}}  {job.counts}"
        for problem in job.problems:
            yield f"{_INDENT * 2}{problem}"
    for note in summary.notes:
        yield f"note: {note}"
    if summary.fetch and summary.groups:
        yield f"to have the artifacts at home: {summary.fetch}"


def _text_group(group: Sequence[JobItem]) -> Iterator[str]:
    """Yield the lines of failures with one cause."""
    item, cause = group[0], group[0].cause
    yield f"{item.verdict} {item.node_id} ({item.job})"
    if cause is not None:
        for line in cause.text.splitlines():
            yield f"{_INDENT}{line}"
        if cause.rank is not None or cause.place:
            yield f"{_INDENT}{_started(cause.rank, cause.place or '')}"
        if cause.line:
            yield f"{_INDENT * 2}{cause.line}"
        if cause.advice:
            yield f"{_INDENT}{cause.advice}"
    if len(group) > 1:
        yield f"{_INDENT}{_also(group)}"
    if item.reproduce:
        yield f"{_INDENT}reproduce: {item.reproduce}"


def as_markdown(summary: CiSummary, most_bytes: int = STEP_SUMMARY_BYTES) -> str:
    """Return the summary for a step summary or a comment.

    Args:
        summary: The summary.
        most_bytes: Limit in bytes of UTF-8; what does not fit is counted, least interesting first.
    """
    budget = most_bytes - 200  # for the lines that count what was left out
    found: list[str] = []
    for title, blocks in _sections(summary):
        budget, part = _fit(title, list(blocks), budget)
        found += part
    return "\n\n".join(found) + "\n"


def _fit(title: str, blocks: Sequence[str], budget: int) -> tuple[int, list[str]]:
    """Return the rest of a budget, and as many blocks as it has room for."""
    shown = [title] if title and blocks else []
    size = sum(_bytes(text) for text in shown)
    for number, block in enumerate(blocks):
        if size + _bytes(block) > budget:
            shown.append(f"... and {len(blocks) - number} more; `summary.json` has all.")
            return 0, shown if budget > _bytes(title) else []
        shown.append(block)
        size += _bytes(block)
    return budget - size, shown


def _bytes(text: str) -> int:
    return len(text.encode()) + 2  # and a blank line


def _sections(summary: CiSummary) -> Iterator[tuple[str, Iterator[str]]]:
    """Yield headings of the Markdown summary, each with its text."""
    yield "", _markdown_head(summary)
    yield "### What failed", (_block("group", group) for group in summary.groups)
    yield "### Flaky", _blocks("flaky", summary.flaky, _BLOCK_ROWS)
    jobs = sorted(summary.jobs, key=lambda job: job.verdict in ("passed", "flaky"))
    yield "### Jobs", _blocks("jobs", jobs, _BLOCK_ROWS)


def _markdown_head(summary: CiSummary) -> Iterator[str]:
    """Yield the first blocks of the Markdown summary."""
    yield _block("title", headline(summary), summary)
    if summary.headline:
        yield _block("planned", summary)
    if used := cost(summary):
        yield f"Cost: {used}."
    problems = [(problem, ()) for problem in summary.problems]
    yield from _blocks("problems", [*problems, *summary.job_problems.items()], _BLOCK_LINES)
    yield from _blocks("problems", [(note, ()) for note in summary.notes[:20]], _BLOCK_LINES)
    if summary.fetch and summary.groups:
        yield _block("fetch", summary)


def _block(macro: str, *arguments: object) -> str:
    return render_macro("ci_summary.md", macro, *arguments).rstrip("\n")


def _blocks(macro: str, rows: Sequence[object], size: int) -> Iterator[str]:
    """Yield rows in blocks, so that a part of many rows can be left out."""
    for start in range(0, len(rows), size):
        yield _block(macro, rows[start : start + size])


def _started(rank: int | None, place: str) -> str:
    """Name the rank and the line at which a failure began."""
    if rank is None:
        return f"see {place}"
    return f"started on rank {rank}" + (f", {place}" if place else "")


def _also(group: Sequence[JobItem]) -> str:
    """Name the other items that failed for the same cause."""
    others = [f"{item.node_id} ({item.job})"[:_MOST_NAME] for item in group[1:]]
    return f"the same in {listed(others, _MOST_ALSO)}"


def write_outputs(summary: CiSummary, directory: Path) -> None:
    """Write all files of the summary, or none.

    Args:
        summary: The summary.
        directory: Made if it is not there.

    Raises:
        CiError: One cannot be written.
    """
    texts = {
        "summary.json": json.dumps(summary.as_json(), indent=2, allow_nan=False) + "\n",
        "summary.md": as_markdown(summary),
        "comment.md": as_markdown(summary, COMMENT_BYTES),
    }
    try:
        write_texts_together({directory / name: text for name, text in texts.items()})
    except OSError as error:
        raise CiError(str(directory), f"cannot be written: {error.strerror}") from error
