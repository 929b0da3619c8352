"""The record of a distributed test in `run.json`: outcome, ranks, executions. Pure.

Loaded whenever tests run on gangs, so it imports nothing of workloads.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pytest_megatron.base.text import counted, cut_middle, without_colours
from pytest_megatron.gangs.ipc.messages import longrepr_text, skip_reason
from pytest_megatron.gangs.merge import LOGS, Merged, RunEnd
from pytest_megatron.gangs.topology import GangSpec
from pytest_megatron.gpu.host import Gpu
from pytest_megatron.runs.headline import headline_fingerprint
from pytest_megatron.runs.record import RecordedExecution, RecordedTest, RecordedVerdict
from pytest_megatron.triage.signatures import (
    LineRole,
    Signature,
    Table,
    builtin_table,
    is_exception,
    is_named,
    is_raised,
    match_signature,
)


def test_record(
    merged: Sequence[Merged], spec: GangSpec, executions: Sequence[RecordedExecution]
) -> RecordedTest:
    """Return the record of a distributed test.

    Args:
        merged: The reports of its last execution.
        spec: Spec of its gang.
        executions: All executions, the last one last.
    """
    failed = [m for m in merged if m.outcome == "failed"]
    skipped = [m for m in merged if m.outcome == "skipped"]
    reasons = [skip_reason(m.base) for m in skipped if "wasxfail" not in (m.base or {})]
    outcome: RecordedVerdict = "failed" if failed else "skipped" if skipped else "passed"
    verdict: RecordedVerdict = "passed" if outcome == "skipped" and not reasons else outcome
    was_rerun = any(execution.is_transient for execution in executions)
    return RecordedTest(
        verdict="flaky" if was_rerun and verdict == "passed" else verdict,
        outcome=outcome,
        problem=next(iter([*(m.headline for m in failed), *reasons]), None),
        duration_s=round(sum(max(0.0, m.stop - m.start) for m in merged), 3),
        world_size=spec.world_size,
        device=spec.device,
        is_isolated=spec.is_isolated,
        fingerprint=_fingerprint(failed, executions) if failed else None,
        ranks=dict(failed[0].ranks) if failed else {},
        report=tuple(itertools.islice(_report_of(failed), _MOST_SECTIONS)),
        attempts=tuple(executions),
    )


_MOST_SECTIONS, _MOST_CHARS = 20, 8_000  # of a failure, and of each section
_ELSEWHERE = ("ranks", LOGS)  # sections that have keys of their own


def _report_of(failed: Iterable[Merged]) -> Iterator[tuple[str, str]]:
    """Yield titles and texts of tracebacks, stacks and captured output."""
    for merged in failed:
        longrepr = None if merged.base is None else merged.base.get("longrepr")
        shown = [("traceback", longrepr_text(longrepr)), *merged.blocks, *merged.sections]
        phase = "" if merged.when == "call" else f", in {merged.when}"
        for title, text in shown:
            if title not in _ELSEWHERE and text.strip():
                yield f"{title}{phase}", cut_middle(without_colours(text), _MOST_CHARS)


def _fingerprint(failed: Sequence[Merged], executions: Sequence[RecordedExecution]) -> str:
    return headline_fingerprint(failed[0].message, executions[-1].end if executions else "")


def execution_record(gang: int, directory: str, end: RunEnd) -> RecordedExecution:
    """Return the record of one execution of a distributed test.

    Args:
        gang: Number of the gang it ran on, counted in the session.
        directory: Directory of that gang's logs.
        end: How it ended.
    """
    return RecordedExecution(
        gang=gang,
        run=end.run,
        directory=directory,
        duration_s=round(end.duration_s, 3),
        end=end.reason.name.lower(),
        is_gang_kept=end.is_kept,
    )


_RANK = re.compile(r"^\[rank \d+\] ")
_NEVER = re.compile(r"(?:AssertionError\b|assert\b|Failed\b|XPASS\b)")
_RAISED = re.compile(r"(?m)^E\s+(.*)$")


def transient_cause(
    merged: Sequence[Merged],
    log_lines: Iterable[str],
    last_stderr_lines: Iterable[str] = (),
    table: Table | None = None,
) -> Signature | None:
    """Return the signature of a transient cause, for which a test may run again, or None.

    Args:
        merged: The reports of one execution.
        log_lines: Lines that its ranks wrote to stderr meanwhile. They do not explain a failure;
            but a genuine cause among them forbids a rerun.
        last_stderr_lines: The end of stderr of ranks that died. Exceptions count, and messages
            that only a failing machine causes.
        table: The signatures; None takes those of the package.
    """
    failed = [m for m in merged if m.outcome == "failed"]
    if not failed or any(_NEVER.match(_RANK.sub("", m.message)) for m in failed):
        return None
    own, others = list(_own_texts(failed)), list(_texts_of_others(failed))
    if is_exception(_RANK.sub("", failed[0].message)) and match_signature(own, table) is None:
        return None  # exceptions of other ranks are consequences
    signature = match_signature([*own, *others, *_raised(last_stderr_lines, table)], table)
    if signature is None or not signature.is_transient:
        return None
    beside = match_signature(_raised(log_lines, table), table)
    return signature if beside is None or beside.is_transient else None


def why_not_again(merged: Sequence[Merged], table: Table | None = None) -> str | None:
    """Return why a failure that is known by name does not run again; None for every other one."""
    table = table or builtin_table()
    failed = [m for m in merged if m.outcome == "failed"]
    texts = [*_own_texts(failed), *_texts_of_others(failed)]
    rows = (row for text in texts if (row := table.raised(text.strip())) is not None)
    row = next(filter(is_named, rows), None)
    if row is None:
        return None
    if row.role is LineRole.CASCADE:
        return f"known as {row.id}, which follows from something else, and that is not known"
    beside = "; a cause beside it" if row.is_transient else ""
    return f"known as {row.id}{beside}, which is not transient"


def _raised(lines: Iterable[str], table: Table | None) -> list[str]:
    return [line for line in lines if is_raised(line, table)]


def _own_texts(failed: Iterable[Merged]) -> Iterable[str]:
    """Yield messages of exceptions, without the source lines of tracebacks."""
    for merged in failed:
        yield from _RANK.sub("", merged.message).splitlines()
        longrepr = None if merged.base is None else merged.base.get("longrepr")
        yield from _RAISED.findall(longrepr_text(longrepr))


def _texts_of_others(failed: Iterable[Merged]) -> Iterable[str]:
    """Yield messages of exceptions of ranks that the headline does not name."""
    for merged in failed:
        for _, text in merged.blocks:
            yield from _RAISED.findall(text)


_BACKENDS = {"cuda": "NCCL", "cpu": "gloo"}


def header_line(spec: GangSpec, gpus: Sequence[Gpu] | None, where: str) -> str:
    """Return the header line on gangs of tests without a marker.

    Args:
        spec: Spec of these gangs.
        gpus: GPUs of this host; None if they are not needed.
        where: Directory of their logs.
    """
    found = ""
    if gpus is not None and not gpus:
        found = ", no GPU found"
    elif gpus:
        found = f", {len(gpus)} x {gpus[0].name} found"
    device = f"{spec.device} ({_BACKENDS[spec.device]})"
    return (
        f"megatron: gangs of {counted(spec.world_size, 'rank')} on {device}{found}; logs in {where}"
    )


def plan_lines(specs: Iterable[GangSpec | None]) -> list[str]:
    """Return a line for each kind of gang with its number of tests.

    Args:
        specs: Spec of each test, None for one of the controller.
    """
    counts = Counter(specs)
    lines = []
    for spec in sorted((s for s in counts if s is not None), reverse=True):
        alone = ", a gang for each" if spec.is_isolated else ""
        gang = f"gangs of {counted(spec.world_size, 'rank')} on {spec.device}{alone}"
        lines.append(f"{gang}: {counted(counts[spec], 'test')}")
    if counts[None]:
        lines.append(f"in this process: {counted(counts[None], 'test')}")
    return lines


def flaky_lines(records: Mapping[str, RecordedTest]) -> list[str]:
    """Return a line for each test that passed after it was run again.

    Args:
        records: Node id -> record of the test.
    """
    lines = []
    for node_id, record in records.items():
        if record.verdict != "flaky":
            continue
        causes = [str(a.signature) for a in record.attempts if a.is_transient]
        lines.append(f"flaky   {node_id}  passed at rerun {len(causes)}, after {', '.join(causes)}")
    return lines
