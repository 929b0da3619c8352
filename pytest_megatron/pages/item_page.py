"""The page of one workload: verdict, attempts, all curves. Pure.

item_page(item, facts) -> HTML of <run-dir>/<item>/curves.html
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from pytest_megatron.base.files import JsonValue
from pytest_megatron.pages.encode import MOST_BYTES, encode_charts
from pytest_megatron.pages.html import data_block, document, link, links, text
from pytest_megatron.pages.model import AttemptRow, Chart, MetricFinding, PageItem, RunFacts

_MOST_TEXTS = 6  # of one chart
_MOST_OPEN = 8  # comparisons without a curve
_CONTROLS = (
    '<div class="bar"><span id="legend" class="bar-legend"></span>'
    '<label class="toggle"><input type="checkbox" id="log">log scale</label>'
    '<button type="button" id="whole">whole run</button>'
    '<span class="hint">drag over steps to zoom, then drag to move; click and turn the wheel; '
    "double click: whole run; keys: arrows, +, -, 0, l</span></div>"
)


def item_page(
    item: PageItem,
    run: RunFacts,
    *,
    files: str | None = "",
    index: str | None = "../index.html",
    most_bytes: int = MOST_BYTES,
) -> str:
    """Return the page of a workload.

    Args:
        item: With its curves.
        run: What it is of.
        files: What leads from the page to the item's directory; None if that cannot be reached.
        index: What leads to the run's page; None if there is none.
        most_bytes: What the curves may take.
    """
    curves = [charts_block(item.charts, most_bytes=most_bytes)]
    ends = [_attempts(item.attempts, files), _triage(item.triage)]
    has_failed = any(attempt.cause is not None for attempt in item.attempts)
    has_links = item.links and files is not None
    parts = [
        f"<nav>{link(index, run.name) if index else text(run.name)}</nav>",
        f"<h1>{_verdict(item.verdict)} {text(item.node_id)}</h1>",
        _facts(item, run),
        _problem(item),
        f"<p>{links(item.links, files)}</p>" if has_links else "",
        *(ends + curves if has_failed else curves + ends),
        _findings(item.others),
        *(f"<p class=quiet>{text(note)}</p>" for note in item.notes),
        _again(item.node_id, run.name),
    ]
    return document(f"{item.verdict}: {item.node_id}", "\n".join(filter(None, parts)), "curves.js")


def charts_block(charts: Sequence[Chart], *, most_bytes: int = MOST_BYTES) -> str:
    """Return the charts of a page, with what they are drawn from."""
    drawn = [chart for chart in charts if any(len(curve.series) for curve in chart.curves)]
    if not drawn:
        return "<p class=quiet>No curve was measured.</p>" + data_block({"charts": []})
    encoded: list[JsonValue] = []
    for chart, values in zip(drawn, encode_charts(drawn, most_bytes=most_bytes), strict=True):
        assert isinstance(values, dict)
        shown = next((f for f in chart.findings if not f.passed), None) or next(
            iter(chart.findings), None
        )
        layers: list[JsonValue] = [] if shown is None else [[ok, say] for ok, say in shown.layers]
        encoded.append(
            {
                **values,
                "t": list[JsonValue](_texts(chart.findings)),
                "l": layers,
                "rule": "" if shown is None else shown.rule,
            }
        )
    return (
        f"<h2>Curves</h2>{_CONTROLS}<noscript><p>The curves are drawn by a script, which this "
        "browser does not run. <code>pytest-megatron report --svg DIR</code> writes pictures.</p>"
        f'</noscript><div id="charts"></div>{data_block({"charts": encoded})}'
    )


def _texts(findings: Sequence[MetricFinding]) -> Iterator[str]:
    """Yield what was found of one metric; the same of several repeats once."""
    said: dict[str, list[MetricFinding]] = {}
    for finding in findings:
        said.setdefault(_short(finding), []).append(finding)
    several = len({(f.repeat, f.against) for f in findings}) > 1
    for number, (words, found) in enumerate(said.items()):
        if number == _MOST_TEXTS:
            yield f"and {len(said) - number} more; see comparison.json"
            return
        repeats = ", ".join(str(repeat) for repeat in dict.fromkeys(f.repeat for f in found))
        against = "" if found[0].against == "golden" else f" against the {found[0].against}"
        yield f"repeat {repeats}{against}: {words}" if several else words


def _short(finding: MetricFinding) -> str:
    """Return the text of a finding without the file at its end and the metric at its start."""
    words = finding.text.removesuffix(f"; {finding.golden_path}")
    return words.removeprefix(f"{finding.metric}: ").removeprefix(f"{finding.metric}, ")


def _verdict(verdict: str) -> str:
    return f'<span class="verdict {text(verdict)}">{text(verdict)}</span>'


def _again(node_id: str, run: str) -> str:
    words = shlex.quote(node_id)
    return (
        "<h2>Run it again</h2><p>This attempt, from the run's directory or an artifact of it; and "
        f"the workload as it is now:</p><pre>pytest-megatron repro {text(shlex.quote(run))} "
        f"{text(words)}\npytest -p megatron {text(words)}</pre>"
    )


def _facts(item: PageItem, run: RunFacts) -> str:
    duration = () if item.duration_s is None else (("time", f"{item.duration_s:.1f} s"),)
    first = (("in quarantine", item.quarantine), ("summary", item.summary))
    shown = (*first, *duration, ("platform", item.platform), ("started", run.started), *run.facts)
    pairs = "".join(
        f"<span><b>{text(word)}</b> {text(value)}</span>" for word, value in shown if value
    )
    return f"<div class=facts>{pairs}</div>"


def _problem(item: PageItem) -> str:
    if item.problem is None:
        return ""
    shown = item.problem.removeprefix(f"{item.node_id}: ")
    return f"<pre class=problem>{text(shown)}</pre>"


def _attempts(attempts: Sequence[AttemptRow], files: str | None) -> str:
    if not attempts:
        return ""
    rows = []
    for attempt in attempts:
        if attempt.cause is None:
            ended = "<span class=passed>trained to the end</span>"
        else:
            known = f" ({attempt.signature})" if attempt.signature else ""
            again = ", run again" if attempt.is_transient else ""
            ended = f"<span class=failed>{text(attempt.cause)}</span>{text(known + again)}"
        rows.append(
            f"<tr><td>{text(attempt.name)}<td>{ended}<td class=n>{attempt.duration_s:.1f} s"
            f"<td>{links(attempt.links, files)}"
        )
    return (
        "<h2>Attempts</h2><div class=wide><table><thead><tr><th>attempt<th>end<th class=n>time"
        f"<th>files</thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _triage(texts: Sequence[str]) -> str:
    if not texts:
        return ""
    return f"<h2>Why attempts failed</h2><pre>{text(chr(10).join(texts))}</pre>"


def _findings(findings: Sequence[MetricFinding]) -> str:
    """Return what was found where there is no curve to show it on; many that passed folded up."""
    if not findings:
        return ""
    failed = [f for f in findings if not f.passed]
    passed = [f for f in findings if f.passed]
    parts = [_table_of(failed)] if failed else []
    if len(passed) > _MOST_OPEN:
        parts.append(
            f"<details><summary>{len(passed)} passed</summary>{_table_of(passed)}</details>"
        )
    elif passed:
        parts.append(_table_of(passed))
    return f"<h2>Other comparisons</h2>{''.join(parts)}"


def _table_of(findings: Sequence[MetricFinding]) -> str:
    rows = "".join(
        f"<tr><td>{_verdict('passed' if f.passed else 'failed')}<td>{text(f.metric)}"
        f"<td class=n>{f.repeat}<td>{text(f.against)}<td>{text(_short(f))}"
        f"<td class=n>{'' if f.largest is None else f'{f.largest:.1e}'}"
        for f in findings
    )
    return (
        "<div class=wide><table><thead><tr><th>verdict<th>what<th class=n>repeat<th>against"
        f"<th>found<th class=n>off by</thead><tbody>{rows}</tbody></table></div>"
    )
