"""`pytest-megatron trace`: compares and prints traces of tensors, outside pytest.

Thin: finds, compares and prints. Errors go up to `main`, which ends with exit code 2.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.text import columns, counted, printable
from pytest_megatron.cli.formats import (
    EXIT_FAILED,
    EXIT_UNUSABLE,
    PATH,
    echo_json,
    format_option,
)
from pytest_megatron.errors import RunError, TraceError
from pytest_megatron.runs.traces import FoundTrace, differences_beside, find_traces, pair_traces
from pytest_megatron.trace.bits import compare_bits, headline
from pytest_megatron.trace.divergences import TraceComparison, as_text, comparison_to_json
from pytest_megatron.trace.files import (
    TraceRecord,
    rank_files,
    read_end,
    read_header,
    read_records,
)

_COLUMNS = ("step", "phase", "module", "tensor", "shape", "dtype", "norm", "hash")


@click.group("trace", context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Compare and print traces of tensors, which --tensor-trace and --audit-determinism record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compared:
    """Two traces and how they compare; None with the problem where they cannot be compared."""

    reference: FoundTrace
    candidate: FoundTrace
    comparison: TraceComparison | None
    problem: str = ""

    @property
    def verdict(self) -> str:
        return "unusable" if self.comparison is None else self.comparison.verdict

    @property
    def line(self) -> str:
        """The verdict in a line."""
        name = f"{self.verdict}: {self.reference.name}"
        if self.comparison is None:
            return f"{name}: {self.problem}"
        if self.comparison.divergences:
            return f"{name}: {headline(self.comparison.divergences[0])}"
        tensors = counted(self.comparison.num_compared, "tensor")
        return f"{name}: {tensors} of {counted(self.comparison.steps, 'step')}"


@command.command("diff")
@click.argument("run_a", type=PATH)
@click.argument("run_b", type=PATH)
@click.argument("item", required=False)
@format_option("text", "json")
def diff(*, run_a: Path, run_b: Path, item: str | None, form: str) -> None:
    """Find the first tensor that two runs of one layout compute differently, bit by bit.

    RUN_A and RUN_B are run directories, artifacts of runs, or directories of traces. ITEM is a node
    id or a part of one; without it, every item with a trace in both.

    Exit code 0: all are equal. 1: one differs. 2: the input is unusable.
    """
    with tempfile.TemporaryDirectory() as scratch:
        sides = [
            find_traces(path, Path(scratch) / side, item)
            for side, path in (("a", run_a), ("b", run_b))
        ]
        compared = [_compare(*pair) for pair in pair_traces(*sides)]
        beside = dict.fromkeys(
            line for one in compared for line in differences_beside(one.reference, one.candidate)
        )
    verdicts = {one.verdict for one in compared}
    verdict = next(word for word in ("different", "unusable", "equal") if word in verdicts)
    if form == "json":
        traces: list[JsonValue] = [_to_json(one) for one in compared]
        echo_json({"verdict": verdict, "differences": list(beside), "traces": traces})
    else:
        click.echo(printable("\n".join(_diff_lines(compared, list(beside)))))
    sys.exit({"equal": 0, "different": EXIT_FAILED}.get(verdict, EXIT_UNUSABLE))


def _compare(reference: FoundTrace, candidate: FoundTrace) -> _Compared:
    comparison, problem = None, ""
    try:
        comparison = compare_bits(reference.directory, candidate.directory)
    except TraceError as error:
        problem = str(error)
    return _Compared(
        reference=reference, candidate=candidate, comparison=comparison, problem=problem
    )


def _diff_lines(compared: Sequence[_Compared], beside: Sequence[str]) -> Iterator[str]:
    yield from beside
    for one in compared:
        yield one.line
        if one.comparison is not None and one.comparison.divergences:
            yield from (f"  {line}" for line in as_text(one.comparison).splitlines())
    num_equal = sum(one.verdict == "equal" for one in compared)
    if len(compared) > 1:
        yield f"{num_equal} of {counted(len(compared), 'trace')} are equal"


def _to_json(one: _Compared) -> JsonValue:
    return {
        "item": one.reference.node_id or None,
        "phase": one.reference.number or None,
        "reference": str(one.reference.directory),
        "candidate": str(one.candidate.directory),
        "verdict": one.verdict,
        "text": one.line,
        "comparison": None if one.comparison is None else comparison_to_json(one.comparison),
    }


@command.command("show")
@click.argument("path", metavar="DIR", type=PATH)
@click.argument("item", required=False)
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, metavar="N")
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="0 are initial weights.")
@click.option("--module", default="", metavar="TEXT", help="Modules whose name has this text.")
@format_option("text", "json")
def show(
    *, path: Path, item: str | None, rank: int, step: int | None, module: str, form: str
) -> None:
    """Print a trace of a rank, one line a tensor.

    DIR is the directory of a trace; or a run directory or an artifact of one, with ITEM where it
    has traces of several.
    """
    with tempfile.TemporaryDirectory() as scratch:
        found = find_traces(path, Path(scratch), item)
        if len(found) > 1:
            names = "".join(f"\n  {one.name}: {one.directory}" for one in found)
            raise RunError(str(path), f"has {len(found)} traces, expected one; name one:{names}")
        files = rank_files(found[0].directory)
        if rank not in files:
            raise TraceError("--rank", f"{rank} is not in the trace, expected 0 to {max(files)}")
        records = [
            record
            for record in read_records(files[rank])
            if step in (None, record.step) and module in record.module
        ]
        header, end = read_header(files[rank]), read_end(files[rank])
    num_steps = None if end is None else end.steps
    if form == "json":
        rows: list[JsonValue] = [dict(zip(_COLUMNS, _cells(one), strict=True)) for one in records]
        echo_json({"rank": rank, "world_size": len(files), "steps": num_steps, "tensors": rows})
        return
    core = "" if header.megatron_core is None else f", megatron-core {header.megatron_core}"
    steps = "cut off" if num_steps is None else counted(num_steps, "step")
    click.echo(
        printable(
            f"rank {rank} of {len(files)} on {header.device}, torch {header.torch}{core}: "
            f"{steps}, {counted(len(records), 'tensor')}"
        )
    )
    click.echo(printable("\n".join(columns([_COLUMNS, *map(_cells, records)]))))


def _cells(record: TraceRecord) -> tuple[str, ...]:
    shape = "x".join(map(str, record.shape)) or "1"
    norm = "not finite" if record.norm is None else f"{record.norm:.6g}"
    place = (str(record.step), record.phase, record.module or "the model", record.tensor)
    return (*place, shape, record.dtype, norm, record.hash)
