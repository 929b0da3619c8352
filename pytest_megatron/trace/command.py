"""`pytest-megatron trace`: compares traces of tensors, outside pytest.

Thin: finds, trains, compares and prints. Errors go up to `main`, which ends with exit code 2.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import NoReturn

import click

from pytest_megatron.base.command import (
    EXIT_FAILED,
    EXIT_UNUSABLE,
    PATH,
    HintingGroup,
    echo_json,
    format_option,
)
from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.text import counted, listed, printable
from pytest_megatron.errors import RunError, TraceError
from pytest_megatron.runs.find import FoundRun, find_runs
from pytest_megatron.runs.headline import PHASE
from pytest_megatron.runs.layout import OWN_DIR, PLAN_FILE, TRACE_DIR, item_dirs, make_own_dir
from pytest_megatron.runs.record import (
    RecordedPhase,
    RecordedPlan,
    RecordedWorkload,
    Result,
    read_if_whole,
    read_run,
)
from pytest_megatron.trace.bits import compare_bits
from pytest_megatron.trace.equivalence import (
    TraceComparison,
    as_text,
    comparison_to_json,
    headline,
)
from pytest_megatron.trace.settings import BEGIN_VARIABLE, TraceValues

_MOST_LISTED, _MOST_LINES = 10, 30
_ALLOCATOR, _HASH_SEED = "PYTHONMALLOC", "PYTHONHASHSEED"
_PHASE = re.compile(r"phase_(\d+)").fullmatch
# Of a machine or a start, not of what is computed.
_PASSED_OVER = frozenset(
    (
        *("CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT", "PATH", "PYTHONPATH"),
        *("PYTEST_MEGATRON_TRACE", "VIRTUAL_ENV"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTrace:
    """The trace of a phase.

    Attributes:
        node_id: Node id of the item; "" for a directory that is in no run.
        number: Number of the phase; 0 for such a directory.
        directory: With a file for each rank.
        plan: Plan of the attempt, where it can be read.
    """

    node_id: str
    number: int
    directory: Path
    plan: RecordedPlan | None = None

    @property
    def phase(self) -> RecordedPhase | None:
        """The phase as it was planned."""
        phases = () if self.plan is None else self.plan.phases
        return next((phase for phase in phases if phase.number == self.number), None)

    @property
    def name(self) -> str:
        """Item and phase, for a person."""
        if not self.node_id:
            return str(self.directory)
        return f"{self.node_id}, {'phase' if self.phase is None else self.phase.name or 'phase'}"


def find_traces(path: Path, scratch: Path) -> list[FoundTrace]:
    """Return the traces at a path: those of the last attempt of the first repeat of each item.

    Args:
        path: A directory of a trace, a run directory, or an artifact of a run.
        scratch: A directory for the files of an artifact.

    Raises:
        RunError: There is no trace.
    """
    bare = next((p for p in (path, path / TRACE_DIR) if any(p.glob("rank_*.jsonl"))), None)
    if bare is not None:
        return [FoundTrace(node_id="", number=0, directory=bare)]
    runs = find_runs([path], scratch, _is_wanted, looks_up=True)
    found = [trace for run in runs for trace in _traces_of(run)]
    if not found:
        raise RunError(
            str(path), "has no trace of tensors; run it with --tensor-trace hash to record one"
        )
    return found


def _is_wanted(name: PurePath) -> bool:
    return name.name == PLAN_FILE or (name.parent.name == TRACE_DIR and name.suffix == ".jsonl")


def _traces_of(run: FoundRun) -> Iterator[FoundTrace]:
    """Yield the traces of a run."""
    record: Result = read_run(run.directory)
    for node_id, item in record.items.items():
        if isinstance(item, RecordedWorkload):
            yield from _traces_in(item_dirs(run.directory, node_id).root, node_id)


def _traces_in(directory: Path, node_id: str) -> Iterator[FoundTrace]:
    """Yield the traces of the last attempt of the first repeat of an item."""
    attempts = {path.parents[1] for path in directory.glob(f"repeat_*/attempt_*/*/{TRACE_DIR}")}
    if not attempts:
        return
    first = min(attempts, key=_numbers)
    attempt = max((one for one in attempts if one.parent == first.parent), key=_numbers)
    plan = read_if_whole(attempt / PLAN_FILE, RecordedPlan)
    phases = {path: match for path in attempt.iterdir() if (match := _PHASE(path.name))}
    for path, match in sorted(phases.items(), key=lambda pair: int(pair[1][1])):
        trace = path / TRACE_DIR
        if trace.is_dir() and not trace.is_symlink():
            yield FoundTrace(node_id=node_id, number=int(match[1]), directory=trace, plan=plan)


def _numbers(attempt: Path) -> tuple[int, ...]:
    """Return repeat and attempt."""
    return tuple(int(part.rpartition("_")[2]) for part in attempt.parts[-2:])


def pair_traces(
    reference: Sequence[FoundTrace], candidate: Sequence[FoundTrace]
) -> list[tuple[FoundTrace, FoundTrace]]:
    """Return traces that belong together: of one item and phase, or the only one on each side.

    Phases of an item that one side alone has are left out.

    Raises:
        RunError: No two do.
    """
    theirs = {(one.node_id, one.number): one for one in candidate}
    pairs = [
        (one, theirs[key]) for one in reference if (key := (one.node_id, one.number)) in theirs
    ]
    if not pairs and len(reference) == len(candidate) == 1:
        pairs = [(reference[0], candidate[0])]
    if not pairs:
        names = [listed([one.name for one in side], 3) for side in (reference, candidate)]
        raise RunError(
            "trace diff",
            f"no trace of one item in both: the first has {names[0]}, the second {names[1]}; "
            "give the directory of each trace",
        )
    return pairs


def differences_beside(reference: FoundTrace, candidate: FoundTrace) -> list[str]:
    """Return a line for each thing that two trainings were not given alike: `torch: 2.12 and 2.13`.

    Paths below the run directories do not count.
    """
    if reference.plan is None or candidate.plan is None:
        return []
    ours, theirs = _given(reference, reference.plan), _given(candidate, candidate.plan)
    lines = [
        f"{name}: {ours.get(name, 'none') or 'given'} and {theirs.get(name, 'none') or 'given'}"
        for name in dict.fromkeys((*ours, *theirs))
        if ours.get(name) != theirs.get(name)
    ]
    for one, which in ((reference, "first"), (candidate, "second")):
        lines += [f"uncommitted changes in the {which}"] if one.plan and one.plan.is_dirty else []
    return lines


def _given(found: FoundTrace, plan: RecordedPlan) -> dict[str, str]:
    """Return what a training was given: versions, hardware, arguments, variables, by name."""
    facts = {name: getattr(plan, name) for name in ("commit", "image", "python", "driver", "cpu")}
    given = {name: value for name, value in facts.items() if value is not None}
    given |= {**plan.versions, "gpus": ", ".join(plan.gpus) or "none"}
    phase = found.phase
    words = () if phase is None else phase.argv
    start = next((i for i, word in enumerate(words) if word.endswith(".py")), 0)
    name = "program"
    for word in words[start:]:  # what is no flag belongs to the one before
        is_flag = word.startswith("--")
        name = word if is_flag else name
        value = "" if is_flag else _without_run(word, found)
        given[name] = f"{given.get(name, '')} {value}".strip()
    variables = {} if phase is None else phase.env
    return given | {
        f"variable {name}": _without_run(value, found)
        for name, value in variables.items()
        if name not in _PASSED_OVER
    }


def _without_run(text: str, found_trace: FoundTrace) -> str:
    """Return a text without the path of its run and the number of its phase."""
    item = re.escape(item_dirs(Path(), found_trace.node_id).root.name)
    return re.sub(rf"[^\s\"'=]*/{item}/repeat_\d+/attempt_\d+/?(phase_\d+)?", "", text)


@click.group("trace", cls=HintingGroup, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Compare traces of tensors, which --tensor-trace records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compared:
    """Two traces and how they compare."""

    reference: FoundTrace
    candidate: FoundTrace
    comparison: TraceComparison

    @property
    def line(self) -> str:
        """The verdict in a line."""
        name = f"{self.comparison.verdict}: {self.reference.name}"
        if self.candidate.node_id != self.reference.node_id:
            name = f"{self.comparison.verdict}: {self.candidate.name} against {self.reference.name}"
        if self.comparison.problem is not None:
            return f"{name}: {self.comparison.problem}"
        if self.comparison.divergences:
            return f"{name}: {headline(self.comparison.divergences[0])}"
        tensors = counted(self.comparison.num_compared, "tensor")
        return f"{name}: {tensors} of {counted(self.comparison.steps, 'step')}"


@command.command("diff")
@click.argument("run_a", type=PATH)
@click.argument("run_b", type=PATH)
@format_option("text", "json")
def diff(*, run_a: Path, run_b: Path, form: str) -> None:
    """Find the first tensor that two runs of one layout compute differently, bit by bit.

    RUN_A and RUN_B are run directories, artifacts of runs, or directories of traces. Every item
    with a trace in both is compared.

    Exit code 0: all are equal. 1: one differs. 2: the input is unusable.
    """
    with tempfile.TemporaryDirectory() as scratch:
        sides = [
            find_traces(path, Path(scratch) / side) for side, path in (("a", run_a), ("b", run_b))
        ]
        compared = [_compare(*pair) for pair in pair_traces(*sides)]
        beside = dict.fromkeys(
            line for one in compared for line in differences_beside(one.reference, one.candidate)
        )
    _end(compared, list(beside), form)


def _end(
    compared: Sequence[_Compared], beside: Sequence[str], form: str, directory: Path | None = None
) -> NoReturn:
    """Print comparisons and end with their exit code.

    Args:
        compared: At least one.
        beside: What the runs were not given alike.
        form: `text` or `json`.
        directory: Of runs that were made for this; removed where all are equal, since it is large.
    """
    verdicts = {one.comparison.verdict for one in compared}
    verdict = next(word for word in ("different", "unusable", "equal") if word in verdicts)
    if form == "json":
        traces: list[JsonValue] = [_to_json(one) for one in compared]
        echo_json({"verdict": verdict, "differences": list(beside), "traces": traces})
    else:
        click.echo(printable("\n".join(_diff_lines(compared, list(beside)))))
    if directory is not None and verdict == "equal":
        shutil.rmtree(directory, ignore_errors=True)
    elif directory is not None:
        click.echo(f"traces: {directory}", err=True)
    sys.exit({"equal": 0, "different": EXIT_FAILED}.get(verdict, EXIT_UNUSABLE))


def _compare(reference: FoundTrace, candidate: FoundTrace) -> _Compared:
    """Compare two traces bit by bit; why that cannot be is kept."""
    try:
        found = compare_bits(reference.directory, candidate.directory)
    except TraceError as error:
        found = TraceComparison(verdict="unusable", problem=str(error))
    return _Compared(reference=reference, candidate=candidate, comparison=found)


def _diff_lines(compared: Sequence[_Compared], beside: Sequence[str]) -> Iterator[str]:
    """Yield the text of comparisons."""
    yield from beside
    for one in compared:
        yield one.line
        if one.comparison.divergences:
            yield from (f"  {line}" for line in as_text(one.comparison).splitlines())
    num_equal = sum(one.comparison.verdict == "equal" for one in compared)
    if len(compared) > 1:
        yield f"{num_equal} of {counted(len(compared), 'trace')} are equal"


def _to_json(one: _Compared) -> JsonValue:
    """Return a comparison as JSON."""
    return {
        "item": one.reference.node_id or None,
        "phase": one.reference.number or None,
        "reference": str(one.reference.directory),
        "candidate": str(one.candidate.directory),
        "verdict": one.comparison.verdict,
        "text": one.line,
        "comparison": comparison_to_json(one.comparison),
    }


@command.command("repeat", context_settings={"ignore_unknown_options": True})
@click.argument("row")
@click.argument("pytest_arguments", nargs=-1, type=click.UNPROCESSED)
@format_option("text", "json")
def repeat(*, row: str, pytest_arguments: tuple[str, ...], form: str) -> None:
    """Train the first steps of ROW twice, and find the first tensor whose bits differ.

    ROW is a node id of pytest. Both trainings are fresh interpreters, with another seed of `hash()`
    and other addresses of objects. Further arguments go to pytest.

    Exit code 0: all are equal. 1: one differs. 2: the row cannot be traced.
    """
    directory = _new_directory("repeat")
    first, second = (
        _train(row, directory / name, "hash", pytest_arguments, env=env)
        for name, env in (("first", {}), ("second", {_ALLOCATOR: "malloc"}))
    )
    compared = [_compare(*pair) for pair in pair_traces(first, second)]
    _end(compared, [], form, directory)


@command.command("compare", context_settings={"ignore_unknown_options": True})
@click.argument("reference")
@click.argument("candidate")
@click.argument("pytest_arguments", nargs=-1, type=click.UNPROCESSED)
@format_option("text", "json")
def compare(
    *, reference: str, candidate: str, pytest_arguments: tuple[str, ...], form: str
) -> None:
    """Train the first steps of two rows, and find the first tensor that differs but for rounding.

    REFERENCE and CANDIDATE are node ids of pytest: one model in two parallel layouts, with the same
    data, seed and batches. Both begin with the weights of the reference. What rounding noise makes
    of the reference is the measure of what counts. Further arguments go to pytest.

    Exit code 0: all are equal. 1: one differs. 2: the rows cannot be traced and compared.
    """
    directory = _new_directory("compare")
    weights = directory / "weights"
    loads: dict[str, object] = {"weights_from": weights}
    begins: tuple[tuple[str, str, dict[str, object]], ...] = (
        ("reference", reference, {"weights_to": weights}),
        ("noise", reference, {**loads, "noise_seed": 1}),
        ("candidate", candidate, loads),
    )
    traces = []
    for name, row, begin in begins:
        found = _train(row, directory / name, "full", pytest_arguments, begin=begin)
        if len(found) != 1:
            names = listed([one.name for one in found], 3)
            raise TraceError(row, f"is {len(found)} trainings, {names}; name one")
        traces += found
    ours, noise, theirs = traces
    from pytest_megatron.trace.compare import compare as compare_layouts

    comparison = compare_layouts(ours.directory, theirs.directory, noise.directory)
    compared = _Compared(reference=ours, candidate=theirs, comparison=comparison)
    _end([compared], [], form, directory)


def _new_directory(name: str) -> Path:
    """Return a new directory for the runs of a command.

    Raises:
        TraceError: It cannot be made.
    """
    try:
        make_own_dir(Path.cwd())
        parent = Path.cwd() / OWN_DIR / "trace"
        parent.mkdir(exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent))
    except OSError as error:
        raise TraceError(str(error.filename), f"{error.strerror}; nothing was run") from error


def _train(
    row: str,
    directory: Path,
    values: TraceValues,
    words: Sequence[str],
    *,
    begin: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
) -> list[FoundTrace]:
    """Train a row; return its traces, which are cut off where it failed.

    Raises:
        TraceError: It left none.
    """
    click.echo(f"{directory.name}: training {row}", err=True)
    command_line = [sys.executable, "-m", "pytest", "-p", "megatron", row]
    command_line += ["--megatron-run-dir", str(directory), "--megatron-golden", "off"]
    command_line += ["--megatron-tensor-trace", values, "--megatron-lightweight", *words]
    inherited = {name: text for name, text in os.environ.items() if name != _HASH_SEED}
    own = {PHASE: "1", BEGIN_VARIABLE: json.dumps(begin or {}, default=str), **(env or {})}
    log = directory.with_name(f"{directory.name}.log")
    with log.open("w") as said:
        done = subprocess.run(
            command_line, env={**inherited, **own}, stdout=said, stderr=said, check=False
        )
    try:
        return find_traces(directory, directory)
    except RunError as error:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-_MOST_LINES:])
        raise TraceError(
            row, f"pytest ended with exit code {done.returncode} and left no trace; {log}:\n{last}"
        ) from error
