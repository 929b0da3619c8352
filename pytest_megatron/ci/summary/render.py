"""Text and Markdown of a summary. Pure; names and logs in it are anybody's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path

from pytest_megatron.base.files import write_texts_together
from pytest_megatron.base.text import code, escaped, fenced, plain, table
from pytest_megatron.ci.summary.junit import JUnitCase, Suite, address, join
from pytest_megatron.ci.summary.merge import CauseGroup, CiSummary
from pytest_megatron.ci.summary.model import ItemCause, JobItem, JobRun
from pytest_megatron.errors import CiError

STEP_SUMMARY_BYTES = 900_000  # GitHub takes 1 MiB for a step
COMMENT_BYTES = 60_000  # GitHub takes 65,536 characters for a comment
_MOST_NAME = 300
_MOST_TEXT = 1500
_MOST_ALSO = 5
_MOST_JOBS = 20
_MOST_SLOW = 10
_INDENT = "    "
_MARKS = {
    "passed": ":white_check_mark:",
    "flaky": ":warning:",
    "failed": ":x:",
    "broken": ":boom:",
}


def headline(summary: CiSummary) -> str:
    """Return `failed: 2 of 40 items, 1 of 5 jobs has a problem`."""
    bad = sum(item.is_bad for item in summary.items)
    parts = [f"{bad} of {_number(len(summary.items), 'item')}" if bad else ""]
    num_bad = len(summary.bad_jobs)
    verb = "has" if num_bad == 1 else "have"
    parts.append(
        f"{num_bad} of {_number(len(summary.jobs), 'job')} {verb} a problem" if num_bad else ""
    )
    parts.append(_number(len(summary.problems), "problem") + " besides" if summary.problems else "")
    told = ", ".join(part for part in parts if part)
    ran = f"{_number(len(summary.items), 'item')} in {_number(len(summary.jobs), 'job')}"
    flaky = f", {summary.count('flaky')} flaky" if summary.count("flaky") else ""
    return f"{summary.verdict}: {told or ran + flaky}"


def as_text(summary: CiSummary) -> str:
    """Return the summary for a terminal."""
    blocks = ["\n".join(_text_head(summary))]
    blocks += ["\n".join(_text_group(group)) for group in summary.groups]
    if summary.flaky:
        lines = (f"{_INDENT}{item.node_id}: {how_flaky(item)}" for item in summary.flaky)
        blocks.append("\n".join(["flaky", *lines]))
    slow = summary.slowest(_MOST_SLOW)
    if slow:
        lines = (f"{_INDENT}{item.duration_s:8.1f} s  {item.node_id} ({item.job})" for item in slow)
        blocks.append("\n".join(["slowest", *lines]))
    return plain("\n\n".join(blocks))


def _text_head(summary: CiSummary) -> Iterator[str]:
    yield headline(summary)
    if summary.headline:
        yield f"planned: {summary.headline}"
    for problem in summary.problems:
        yield f"problem: {problem}"
    width = max((len(job.name) for job in summary.jobs), default=0)
    for job in summary.jobs:
        yield f"{_INDENT}{job.verdict:<7} {job.name:<{width}}  {counts(job)}"
        for problem in job.problems:
            yield f"{_INDENT * 2}{problem}"
    for note in summary.notes:
        yield f"note: {note}"
    if summary.fetch and summary.groups:
        yield f"to have the artifacts at home: {summary.fetch}"


def _text_group(group: CauseGroup) -> Iterator[str]:
    item, cause = group.first, group.first.cause
    yield f"{item.verdict} {item.node_id} ({item.job})"
    if cause is not None:
        for line in cause.text.splitlines():
            yield f"{_INDENT}{line}"
        if cause.rank is not None or cause.place:
            yield f"{_INDENT}{_started(cause.rank, cause.place or '')}"
        if cause.line:
            yield f"{_INDENT * 2}{cause.line}"
        if cause.signature:
            kind = "transient" if cause.is_transient else "not transient"
            advice = f": {cause.advice}" if cause.advice else ""
            yield f"{_INDENT}known as {cause.signature}, {kind}{advice}"
    if len(group.items) > 1:
        yield f"{_INDENT}{_also(group, lambda name: name)}"
    if item.reproduce:
        yield f"{_INDENT}reproduce: {item.reproduce}"


def as_markdown(summary: CiSummary, most_bytes: int = STEP_SUMMARY_BYTES) -> str:
    """Return the summary for a step summary or a comment.

    Args:
        summary: What to tell.
        most_bytes: Of UTF-8. What does not fit is counted, the least interesting first.
    """
    budget = most_bytes - 200  # for the lines that say what was left out
    found: list[str] = []
    for title, blocks in _sections(summary):
        budget, part = _fit(title, list(blocks), budget)
        found += part
    return "\n\n".join(found) + "\n"


def _fit(title: str, blocks: Sequence[str], budget: int) -> tuple[int, list[str]]:
    """Return what is left of a budget, and as many blocks as it has room for."""
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
    yield "", _markdown_head(summary)
    yield "### What failed", (_markdown_group(group) for group in summary.groups)
    yield (
        "### Flaky",
        _tables(
            ("item", "job", "why"),
            [(_name(i), code(i.job, _MOST_NAME), escaped(how_flaky(i))) for i in summary.flaky],
        ),
    )
    yield "### Jobs", _tables(("job", "verdict", "came to", "artifact"), list(_job_rows(summary)))
    slow = summary.slowest(_MOST_SLOW)
    rows = [(_name(i), code(i.job, _MOST_NAME), f"{i.duration_s:.1f}") for i in slow]
    yield "### Slowest", _tables(("item", "job", "s"), rows, numbers=(2,))


def _tables(
    head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()
) -> Iterator[str]:
    """Yield a table in parts of 50 rows, so that a part of a long one can be left out."""
    for start in range(0, len(rows), 50):
        yield table(head, rows[start : start + 50], numbers)


def _markdown_head(summary: CiSummary) -> Iterator[str]:
    yield f"## {_MARKS[summary.verdict]} {escaped(headline(summary))}"
    if summary.headline:
        yield f"Planned: {escaped(summary.headline)}."
    lines = [f"- {escaped(problem[:_MOST_TEXT])}" for problem in summary.problems]
    lines += [
        f"- {_job_names(names)} {escaped(problem[:_MOST_TEXT])}"
        for problem, names in summary.job_problems.items()
    ]
    for start in range(0, len(lines), 20):
        yield "\n".join(lines[start : start + 20])
    if summary.notes:
        yield "\n".join(f"- {escaped(note[:_MOST_TEXT])}" for note in summary.notes[:20])
    if summary.fetch and summary.groups:
        yield f"To reproduce a failure at home, first: {code(summary.fetch)}"


def _job_names(names: Sequence[str]) -> str:
    """Return the names of jobs of which one thing is said."""
    shown = ", ".join(code(name, _MOST_NAME) for name in names[:_MOST_JOBS])
    more = f" and {len(names) - _MOST_JOBS} more" if len(names) > _MOST_JOBS else ""
    return f"{shown}{more}" if len(names) == 1 else f"{len(names)} jobs, {shown}{more}: each"


def _markdown_group(group: CauseGroup) -> str:
    item, cause = group.first, group.first.cause
    lines = [f"#### {_MARKS[item.verdict]} {_name(item)}", ""]
    if cause is not None:
        lines += [fenced(cause.text, _MOST_TEXT), ""]
        if cause.rank is not None or cause.place:
            lines.append(f"- {_markdown_place(cause)}")
        if cause.signature:
            kind = "transient" if cause.is_transient else "not transient"
            advice = f": {escaped(cause.advice)}" if cause.advice else ""
            lines.append(f"- known as {code(cause.signature)}, {kind}{advice}")
    lines.append(f"- in job {code(item.job, _MOST_NAME)}")
    if len(group.items) > 1:
        lines.append(f"- {_also(group, code)}")
    if item.reproduce:
        lines += ["", fenced(item.reproduce, language="sh")]
    return "\n".join(lines)


def _markdown_place(cause: ItemCause) -> str:
    line = "" if cause.line is None else f": {code(cause.line, _MOST_NAME)}"
    place = "" if cause.place is None else code(cause.place, _MOST_NAME)
    return f"{_started(cause.rank, place)}{line}"


def _job_rows(summary: CiSummary) -> Iterator[tuple[str, str, str, str]]:
    for job in sorted(summary.jobs, key=lambda job: job.verdict in ("passed", "flaky")):
        artifact = "" if job.artifact is None else code(job.artifact, _MOST_NAME)
        mark = f"{_MARKS[job.verdict]} {job.verdict}"
        yield code(job.name, _MOST_NAME), mark, escaped(counts(job)), artifact


def _started(rank: int | None, place: str) -> str:
    if rank is None:
        return f"see {place}"
    return f"started on rank {rank}" + (f", {place}" if place else "")


def counts(job: JobRun) -> str:
    """Return `2 failed, 40 passed, 12.0 s`."""
    words = ("failed", "broken", "flaky", "passed", "skipped")
    told = [f"{number} {word}" for word in words if (number := job.count(word))]
    return f"{', '.join(told) or 'no items'}, {job.duration_s:.1f} s"


def how_flaky(item: JobItem) -> str:
    """Return why an item that did not pass at once fails nothing."""
    if item.is_held:
        return f"{item.verdict}, in quarantine"
    causes = f": {', '.join(item.causes)}" if item.causes else ""
    return f"passed at attempt {max(item.num_attempts, 2)}{causes}"


def _also(group: CauseGroup, form: Callable[[str], str]) -> str:
    others = [f"{item.node_id} ({item.job})" for item in group.items[1:]]
    shown = [form(name[:_MOST_NAME]) for name in others[:_MOST_ALSO]]
    more = f" and {len(others) - _MOST_ALSO} more" if len(others) > _MOST_ALSO else ""
    return f"the same in {', '.join(shown)}{more}"


def _name(item: JobItem) -> str:
    return code(item.node_id, _MOST_NAME)


def _number(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


_MOST_SLOW_ROWS = 20
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; --line: light-dark(#ddd, #444); --box: light-dark(#f5f5f5, #222) }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line) }
td { overflow-wrap: anywhere; vertical-align: top }
pre { background: var(--box); padding: .6rem; white-space: pre-wrap; overflow-wrap: anywhere }
.number { text-align: right; white-space: nowrap }
.passed { color: light-dark(#1a7f37, #3fb950) }
.flaky { color: light-dark(#9a6700, #d29922) }
.failed, .broken { color: light-dark(#cf222e, #ff7b72) }
h3 { overflow-wrap: anywhere; margin: 1.5rem 0 .3rem }
"""


def as_html(summary: CiSummary, pages: str | None = None) -> str:
    """Return the page.

    Args:
        summary: What to tell.
        pages: Where the pages with curves are, relative to this one; None if there are none.
    """
    body = [f'<h1 class="{summary.verdict}">{_text(headline(summary))}</h1>', *_head(summary)]
    if pages is not None:
        body.append(f'<p><a href="{escape(pages)}">Curves and runs</a></p>')
    body += _section("What failed", [_group(group) for group in summary.groups])
    flaky = [(_text(i.node_id), _text(i.job), _text(how_flaky(i))) for i in summary.flaky]
    body += _section("Flaky", _table(("item", "job", "why"), flaky))
    body += _section(
        "Jobs", _table(("job", "verdict", "came to", "artifact"), _html_job_rows(summary))
    )
    slow = [(_text(i.node_id), _text(i.job), _seconds(i)) for i in summary.slowest(_MOST_SLOW_ROWS)]
    body += _section("Slowest", _table(("item", "job", "s"), slow))
    return "\n".join(
        (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width">',
            f"<title>{_text(headline(summary))}</title><style>{_STYLE}</style></head><body>",
            *body,
            "</body></html>\n",
        )
    )


def _text(text: str) -> str:
    return escape(plain(text))


def _section(title: str, found: Sequence[str]) -> list[str]:
    return [f"<h2>{title}</h2>", *found] if found else []


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    names = "".join(f"<th>{name}</th>" for name in head)
    lines = (f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return [f"<table><thead><tr>{names}</tr></thead><tbody>", *lines, "</tbody></table>"]


def _head(summary: CiSummary) -> Iterator[str]:
    if summary.headline:
        yield f"<p>Planned: {_text(summary.headline)}</p>"
    problems = [_text(problem) for problem in summary.problems]
    problems += [
        f"<b>{_text(', '.join(names))}</b> {_text(problem)}"
        for problem, names in summary.job_problems.items()
    ]
    problems += [f"note: {_text(note)}" for note in summary.notes]
    if summary.fetch and summary.groups:
        problems.append(f"to have the artifacts at home: <code>{_text(summary.fetch)}</code>")
    if problems:
        yield f"<ul>{''.join(f'<li>{problem}</li>' for problem in problems)}</ul>"


def _group(group: CauseGroup) -> str:
    item, cause = group.first, group.first.cause
    lines = [f'<h3><span class="{item.verdict}">{item.verdict}</span> {_text(item.node_id)}</h3>']
    facts = [f"in job {_text(item.job)}"]
    if cause is not None:
        lines.append(f"<pre>{_text(cause.text)}</pre>")
        if cause.rank is not None:
            facts.append(f"started on rank {cause.rank}")
        if cause.place is not None:
            shown = f": <code>{_text(cause.line)}</code>" if cause.line else ""
            facts.append(f"<code>{_text(cause.place)}</code>{shown}")
        if cause.signature is not None:
            advice = f": {_text(cause.advice)}" if cause.advice else ""
            facts.append(f"known as {_text(cause.signature)}{advice}")
    others = [f"{_text(other.node_id)} ({_text(other.job)})" for other in group.items[1:]]
    if others:
        facts.append(f"the same in {', '.join(others)}")
    lines.append(f"<ul>{''.join(f'<li>{fact}</li>' for fact in facts)}</ul>")
    if item.reproduce:
        lines.append(f"<pre>{_text(item.reproduce)}</pre>")
    return "\n".join(lines)


def _html_job_rows(summary: CiSummary) -> list[tuple[str, str, str, str]]:
    return [_job_row(job) for job in summary.jobs]


def _job_row(job: JobRun) -> tuple[str, str, str, str]:
    verdict = f'<span class="{job.verdict}">{job.verdict}</span>'
    return _text(job.name), verdict, _text(counts(job)), _text(job.artifact or "")


def _seconds(item: JobItem) -> str:
    return f'<span class="number">{item.duration_s:.1f}</span>'


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
