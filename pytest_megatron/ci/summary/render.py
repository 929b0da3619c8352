"""Text, Markdown, HTML, annotations and joined JUnit XML of a summary.

Pure but for `write_outputs`. Names and logs in a summary are anybody's, and are escaped.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote
from xml.etree import ElementTree as ET

from pytest_megatron.base.files import JsonValue, write_texts_together
from pytest_megatron.base.templates import render, render_macro
from pytest_megatron.base.text import (
    counted,
    listed,
    plain,
    shorten,
    within_limit,
    workflow_command,
)
from pytest_megatron.ci.summary.merge import CiSummary
from pytest_megatron.ci.summary.model import JobItem, JobRun
from pytest_megatron.errors import CiError
from pytest_megatron.runs.junit import BAD, Junit, JUnitCase, address, read_case

CODE_QUALITY_FILE = "gl-code-quality-report.json"
STEP_SUMMARY_BYTES = 900_000  # GitHub takes 1 MiB for a step
COMMENT_BYTES = 60_000  # GitHub takes 65,536 characters for a comment
_MOST_NAME = 300
_MOST_ALSO = 5
_MOST_SLOW, _MOST_SLOW_ROWS = 10, 20
_BLOCK_LINES, _BLOCK_ROWS = 20, 50
_INDENT = "    "
_MOST_CHARTS = 2  # in Markdown: GitLab draws 2,000 characters of mermaid unasked
_MOST_CURVES = 100  # files
_MOST_MESSAGE = 1000  # characters of an annotation
_UNSAFE = re.compile(r"[^\w.+=-]+", re.ASCII)
_SEVERITY = {"failed": "major", "broken": "critical"}


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
    """Return commands of GitHub for failures that no step of a job could annotate.

    A job annotates its failures when pytest ends. One that was killed did not.
    """
    found = [
        workflow_command("error", {}, shorten(text, _MOST_MESSAGE)) for text in summary.problems
    ]
    for job in summary.bad_jobs:
        problem = shorten(plain("; ".join(job.problems)), _MOST_MESSAGE)
        found.append(workflow_command("error", {"title": plain(job.name)}, problem))
        for item in job.items:
            if item.is_bad:
                file, line = item.source
                place = {"file": plain(file), "line": line, "title": plain(item.node_id)}
                found.append(workflow_command("error", place, _message(item)))
    return within_limit(found, "the summary of this run has all")


def _message(item: JobItem) -> str:
    text = item.verdict if item.cause is None else item.cause.text
    return plain(text, _MOST_MESSAGE)


def code_quality(summary: CiSummary) -> list[JsonValue]:
    """Return the failures as GitLab shows them at the lines of a merge request.

    Source: docs.gitlab.com, Code Quality, report format.
    """
    found: list[JsonValue] = []
    for item in (item for item in summary.items if item.is_bad):
        file, line = item.source
        # Of the same failure in another run the same, whatever the numbers in its text.
        key = f"{item.node_id}\n{item.job}\n{item.verdict}"
        found.append(
            {
                "description": shorten(f"{plain(item.node_id)}: {_message(item)}", _MOST_MESSAGE),
                "check_name": f"pytest-megatron: {item.verdict}",
                "fingerprint": hashlib.sha256(key.encode("utf-8", "replace")).hexdigest(),
                "severity": _SEVERITY[item.verdict],
                "location": {"path": plain(file), "lines": {"begin": line}},
            }
        )
    return found


def as_text(summary: CiSummary) -> str:
    """Return the summary for a terminal."""
    blocks = ["\n".join(_text_head(summary))]
    blocks += ["\n".join(_text_group(group)) for group in summary.groups]
    if summary.flaky:
        lines = (f"{_INDENT}{item.node_id}: {item.how_flaky}" for item in summary.flaky)
        blocks.append("\n".join(["flaky", *lines]))
    slow = summary.slowest(_MOST_SLOW)
    if slow:
        lines = (f"{_INDENT}{item.duration_s:8.1f} s  {item.node_id} ({item.job})" for item in slow)
        blocks.append("\n".join(["slowest", *lines]))
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


def as_markdown(
    summary: CiSummary, most_bytes: int = STEP_SUMMARY_BYTES, link: str | None = None
) -> str:
    """Return the summary for a step summary or a comment.

    Args:
        summary: The summary.
        most_bytes: Limit in bytes of UTF-8; what does not fit is counted, least interesting first.
        link: URL under which the files of the summary will be; None where it is not known.
    """
    budget = most_bytes - 200  # for the lines that count what was left out
    found: list[str] = []
    for title, blocks in _sections(summary, link):
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


def _sections(summary: CiSummary, link: str | None) -> Iterator[tuple[str, Iterator[str]]]:
    """Yield headings of the Markdown summary, each with its text."""
    yield "", _markdown_head(summary)
    yield "### What failed", _failures(summary, link)
    yield "### Flaky", _blocks("flaky", summary.flaky, _BLOCK_ROWS)
    jobs = sorted(summary.jobs, key=lambda job: job.verdict in ("passed", "flaky"))
    yield "### Jobs", _blocks("jobs", jobs, _BLOCK_ROWS)
    yield "### Slowest", _blocks("slowest", summary.slowest(_MOST_SLOW), _BLOCK_ROWS)


def _failures(summary: CiSummary, link: str | None) -> Iterator[str]:
    """Yield a block for each cause of failures, with pictures of the first ones."""
    files = curve_files(summary)
    num_charts = 0
    for group in summary.groups:
        item = group[0]
        picture = item.picture
        has_chart = picture is not None and picture.mermaid is not None
        if has_chart and num_charts < _MOST_CHARTS:
            num_charts += 1
            file = files.get((item.job, item.node_id))
            url = f"{link}/{quote(file)}" if link is not None and file is not None else None
            yield _block("group", group, picture, url)
        else:
            yield _block("group", group)


def curve_files(summary: CiSummary) -> dict[tuple[str, str], str]:
    """Return (job, node id) -> path of the picture of its first metric that is off."""
    drawn = [group[0] for group in summary.groups if group[0].picture]
    drawn += [i for group in summary.groups for i in group[1:] if i.picture]
    return {
        (item.job, item.node_id): f"curves/{number:03}-{_UNSAFE.sub('-', item.node_id)[-60:]}.svg"
        for number, item in enumerate(drawn[:_MOST_CURVES], 1)
    }


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


def as_html(summary: CiSummary, pages: str | None = None) -> str:
    """Return the page of the summary.

    Args:
        summary: The summary.
        pages: Where the pages with curves are, relative to this one; None if there are none.
    """
    return render(
        "ci_summary.html",
        summary=summary,
        headline=headline(summary),
        pages=pages,
        slowest=summary.slowest(_MOST_SLOW_ROWS),
    )


_OUTCOMES = {"flaky": "passed"}


def write_outputs(
    summary: CiSummary, directory: Path, pages: str | None = None, link: str | None = None
) -> None:
    """Write all files of the summary, or none.

    Args:
        summary: The summary.
        directory: Made if it is not there.
        pages: Where the pages with curves are, from that directory; None if there are none.
        link: URL under which the directory will be; None where it is not known.

    Raises:
        CiError: One cannot be written.
    """
    files = curve_files(summary)
    items = {(item.job, item.node_id): item for item in summary.items}
    texts = {
        "summary.json": json.dumps(summary.as_json(), indent=2, allow_nan=False) + "\n",
        "summary.md": as_markdown(summary),
        "comment.md": as_markdown(summary, COMMENT_BYTES, link),
        "index.html": as_html(summary, pages),
        "junit.xml": join(_suites(summary, {key: directory / name for key, name in files.items()})),
        CODE_QUALITY_FILE: json.dumps(code_quality(summary), indent=1) + "\n",
        **{name: one.svg for key, name in files.items() if (one := items[key].picture)},
    }
    try:
        write_texts_together({directory / name: text for name, text in texts.items()})
    except OSError as error:
        raise CiError(str(directory), f"cannot be written: {error.strerror}") from error


def _suites(summary: CiSummary, curves: Mapping[tuple[str, str], Path]) -> Iterator[Suite]:
    """Yield the JUnit suite of each job, and one for problems of all."""
    for job in summary.jobs:
        yield Suite(
            name=job.name,
            junits=job.junits,
            others=tuple(_others(job)),
            problems=job.problems,
            details={address(item.node_id): _details(item, curves) for item in job.items},
        )
    if summary.problems:
        yield Suite(name="all jobs", junits=(), problems=summary.problems)


def _details(item: JobItem, curves: Mapping[tuple[str, str], Path]) -> CaseDetails:
    """Return what the JUnit case of an item gets besides: file, line to type, picture."""
    curve = curves.get((item.job, item.node_id))
    return CaseDetails(
        file=item.node_id.partition("::")[0],
        reproduce=item.reproduce if item.is_bad else None,
        attachment=None if curve is None else curve.as_posix(),
    )


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


_ATTACHMENT = "[[ATTACHMENT|"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseDetails:
    """Details that a case gets in the XML of all jobs.

    Source: docs.gitlab.com, Unit test reports: `file` is a link, `system-out` is shown, and
    `[[ATTACHMENT|...]]` in it is a link to a file of the artifact.

    Attributes:
        reproduce: Command that shows the failure again.
        attachment: A picture, from the directory of the checkout.
    """

    file: str
    reproduce: str | None = None
    attachment: str | None = None

    def add_to(self, case: ET.Element) -> None:
        """Write the details into a JUnit case, whose own attributes stay."""
        case.attrib.setdefault("file", plain(self.file))
        lines = [] if self.attachment is None else [f"{_ATTACHMENT}{self.attachment}]]"]
        if self.reproduce is not None:
            command = plain(self.reproduce).replace(_ATTACHMENT, "[ [ATTACHMENT|")
            lines.append(f"reproduce: {command}")
            properties = case.find("properties")
            if properties is None:
                properties = ET.Element("properties")
                case.insert(0, properties)
            value = {"name": "megatron.reproduce", "value": plain(self.reproduce)}
            ET.SubElement(properties, "property", value)
        if lines:
            output = case.find("system-out")
            output = ET.SubElement(case, "system-out") if output is None else output
            output.text = "\n".join([*lines, output.text or ""]).rstrip("\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Part of one job in the XML of all jobs.

    Attributes:
        others: Items that the files lack, as those of a killed run do.
        problems: Why the job counts as failed beside its tests; each becomes an error.
        details: (class name, name) of a case -> what else is to stand there.
    """

    name: str
    junits: Sequence[Junit]
    others: Sequence[JUnitCase] = ()
    problems: Sequence[str] = ()
    details: Mapping[tuple[str, str], CaseDetails] = field(default_factory=dict)


def join(suites: Iterable[Suite]) -> str:
    """Return one XML of all jobs: a suite for each, and an error for each job without tests."""
    root = ET.Element("testsuites", {"name": "pytest-megatron"})
    for suite in suites:
        element = ET.SubElement(root, "testsuite", {"name": plain(suite.name)})
        for junit in suite.junits:
            element.extend(copy.deepcopy(junit.elements))
        element.extend(_element(case) for case in suite.others)
        for problem in suite.problems:
            element.append(_element(_job_case(suite.name, problem)))
        for case in element:
            found = suite.details.get((case.get("classname", ""), case.get("name", "")))
            if found is not None:
                found.add_to(case)
        cases = [read_case(case) for case in element]
        element.attrib.update(
            tests=str(len(cases)),
            failures=str(sum(case.outcome == "failed" for case in cases)),
            errors=str(sum(case.outcome == "broken" for case in cases)),
            skipped=str(sum(case.outcome == "skipped" for case in cases)),
            time=f"{sum(case.duration_s for case in cases):.3f}",
        )
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _job_case(name: str, problem: str) -> JUnitCase:
    """Return the JUnit case of a problem of a job."""
    return JUnitCase(
        classname="job", name=name, outcome="broken", message=problem, text=problem, duration_s=0.0
    )


def _element(case: JUnitCase) -> ET.Element:
    """Return a case as XML, without characters that XML must not have."""
    attributes = {"classname": plain(case.classname), "name": plain(case.name)}
    element = ET.Element("testcase", {**attributes, "time": f"{case.duration_s:.3f}"})
    tag = next((tag for tag, outcome in BAD.items() if outcome == case.outcome), None)
    if tag is not None:
        ET.SubElement(element, tag, {"message": plain(case.message)}).text = plain(case.text)
    return element
