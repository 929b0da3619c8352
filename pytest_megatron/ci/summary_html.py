"""A summary as one page of HTML, without a script or anything from elsewhere. Pure.

Names and logs in it are anybody's: every one of them is escaped, and none becomes a link's target.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from pytest_megatron.ci.merge import CauseGroup, CiSummary
from pytest_megatron.ci.outcome import JobItem, JobRun
from pytest_megatron.ci.summary_text import counts, headline, how_flaky
from pytest_megatron.markdown import plain

_MOST_SLOW = 20
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
    body += _section("Jobs", _table(("job", "verdict", "came to", "artifact"), _job_rows(summary)))
    slow = [(_text(i.node_id), _text(i.job), _seconds(i)) for i in summary.slowest(_MOST_SLOW)]
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


def _job_rows(summary: CiSummary) -> list[tuple[str, str, str, str]]:
    return [_job_row(job) for job in summary.jobs]


def _job_row(job: JobRun) -> tuple[str, str, str, str]:
    verdict = f'<span class="{job.verdict}">{job.verdict}</span>'
    return _text(job.name), verdict, _text(counts(job)), _text(job.artifact or "")


def _seconds(item: JobItem) -> str:
    return f'<span class="number">{item.duration_s:.1f}</span>'
