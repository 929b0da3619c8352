"""`pytest-megatron repro`: a failing item of a run or an artifact once more, here."""

from __future__ import annotations

import itertools
import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path, PurePath

import click

from pytest_megatron.base.command import PATH, echo_error
from pytest_megatron.base.project import ask_git
from pytest_megatron.base.text import counted, printable
from pytest_megatron.errors import MegatronError, ReproError
from pytest_megatron.repro.again import (
    PYTEST_EXITS,
    Again,
    Wishes,
    command_for,
    environment_with,
)
from pytest_megatron.repro.choose import (
    Chosen,
    choose,
    find_plan,
    read_own_item,
    read_own_run,
)
from pytest_megatron.repro.compare import differences
from pytest_megatron.runs.environment import NAME as PATCH_NAME
from pytest_megatron.runs.environment import gather_facts
from pytest_megatron.runs.find import find_runs
from pytest_megatron.runs.layout import OWN_DIR, RUNS_DIR, make_own_dir
from pytest_megatron.runs.record import (
    RecordedAttempt,
    RecordedItem,
    RecordedPlan,
    RecordedTest,
    RecordedWorkload,
)


class ReproExit(IntEnum):
    """Exit codes of `pytest-megatron repro`."""

    PASSED = 0
    SAME = 1
    OTHER = 3
    UNKNOWN = 125  # also OTHER, while git bisects: another failure says nothing about this one
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class ReproOutcome:
    """What came of it.

    Attributes:
        text: In a line or two.
    """

    exit: ReproExit
    text: str


def judge_again(chosen: Chosen, again: RecordedItem | None, returncode: int) -> ReproOutcome:
    """Compare an item that ran again with what it was.

    Args:
        chosen: What it was.
        again: The record of it now; None where it did not run.
        returncode: Return code of pytest.
    """
    if again is None or again.verdict == "skipped":
        did_not = PYTEST_EXITS.get(returncode, "it did not run")
        why = did_not if again is None else "it was skipped"
        return ReproOutcome(
            exit=ReproExit.UNKNOWN, text=f"cannot tell: {why} (pytest ended with {returncode})"
        )
    if again.verdict in ("passed", "flaky"):
        return ReproOutcome(exit=ReproExit.PASSED, text="passes here")
    told = again.headline
    if not chosen.has_failed:
        return ReproOutcome(exit=ReproExit.OTHER, text=f"fails here, and did not there: {told}")
    if is_same_failure(chosen, again):
        return ReproOutcome(exit=ReproExit.SAME, text=f"fails in the same way: {told}")
    if again.verdict == "broken" and chosen.item.verdict != "broken":
        return ReproOutcome(
            exit=ReproExit.UNKNOWN, text=f"cannot tell: it could not run here: {told}"
        )
    return ReproOutcome(
        exit=ReproExit.OTHER,
        text=f"fails in another way\n  there: {chosen.problem}\n  here:  {told}",
    )


def is_same_failure(chosen: Chosen, again: RecordedItem) -> bool:
    """Whether two failures of an item have the same fingerprint, of the best that is known."""
    if chosen.fingerprint is not None and again.fingerprint is not None:
        return chosen.fingerprint == again.fingerprint
    there, here = chosen.attempt, again.attempts[-1] if again.attempts else None
    if there is None or here is None:
        return chosen.problem == again.headline
    if isinstance(there, RecordedAttempt) and isinstance(here, RecordedAttempt):
        known = there.fingerprint, here.fingerprint
        if None not in known:
            return known[0] == known[1]
    return there.signature == here.signature


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where items are done again.

    Attributes:
        root: The project; pytest runs in it.
        scratch: Directory of this reproduction: what was unpacked, and new run directories.
    """

    root: Path
    scratch: Path

    def command(
        self, chosen: Chosen, wishes: Wishes, before: Sequence[str], name: str = "run"
    ) -> Again:
        """Return the command whose results go to a directory of that name."""
        target = self.scratch / name
        inside = target.is_relative_to(self.root)
        return command_for(
            chosen,
            wishes,
            before,
            run_dir=str(target.relative_to(self.root) if inside else target),
        )

    def run(
        self, chosen: Chosen, again: Again, name: str = "run", *, is_quiet: bool
    ) -> ReproOutcome:
        """Run the command to its end and judge what it left.

        Args:
            chosen: The item.
            again: From `command`, with the same `name`.
            name: Name of the directory for results.
            is_quiet: Whether what pytest prints goes into a file beside that directory.

        Raises:
            KeyboardInterrupt: Ctrl-C, once pytest has ended its processes.
            ReproError: pytest cannot be started.
        """
        log = self.scratch / f"{name}.log"
        self.scratch.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("wb") if is_quiet else open(os.devnull, "wb") as file:  # noqa: PTH123
                process = subprocess.Popen(
                    again.argv,
                    cwd=self.root,
                    env=environment_with(again.env),
                    stdout=file if is_quiet else None,
                    stderr=subprocess.STDOUT if is_quiet else None,
                )
        except OSError as error:
            raise ReproError(again.argv[0], f"cannot be started: {error.strerror}") from error
        try:
            returncode = process.wait()
        except KeyboardInterrupt:  # pytest has it too, and needs a moment to end its ranks
            process.wait()
            raise
        return judge_again(chosen, read_own_item(self.scratch / name, chosen.node_id), returncode)


def smallest_cause(
    tests: Sequence[str], is_cause: Callable[[Sequence[str]], bool]
) -> tuple[str, ...]:
    """Return a part of `tests`, in their order, of which none can be left out.

    Source: Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002 (ddmin).

    Args:
        tests: In the order in which they ran; together they are a cause.
        is_cause: Runs these and returns whether the failure is there. Called once for each part.
    """
    known: dict[tuple[str, ...], bool] = {}

    def holds(part: Sequence[str]) -> bool:
        """Return whether the item fails after these tests; each trial runs once."""
        key = tuple(part)
        if key not in known:
            known[key] = is_cause(key)
        return known[key]

    current, num_parts = list(tests), 2
    while len(current) > 1:
        parts = _split(current, num_parts)
        smaller = next((part for part in reversed(parts) if holds(part)), None)
        if smaller is not None:
            current, num_parts = smaller, 2
            continue
        rests = [[t for p in parts if p is not part for t in p] for part in parts]
        smaller = next((rest for rest in rests if num_parts > 2 and holds(rest)), None)  # noqa: PLR2004 - of two, the rest is the other part
        if smaller is not None:
            current, num_parts = smaller, max(num_parts - 1, 2)
        elif num_parts >= len(current):
            break
        else:
            num_parts = min(num_parts * 2, len(current))
    return tuple(current)


def _split(tests: Sequence[str], num_parts: int) -> list[list[str]]:
    """Return `tests` in parts of nearly equal length."""
    bounds = [len(tests) * number // num_parts for number in range(num_parts + 1)]
    return [list(tests[a:b]) for a, b in itertools.pairwise(bounds)]


_WANTED = ("plan.json", "triage.json", "comparison.json", PATCH_NAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """Everything that was decided before anything runs."""

    path: Path
    stage: Stage
    chosen: Chosen
    wishes: Wishes
    notes: tuple[str, ...]


@click.command(name="repro")
@click.argument("path", type=PATH)
@click.argument("item", required=False)
@click.option("--attempt", type=click.IntRange(min=1), metavar="K", help="The last by default.")
@click.option("--repeat", type=click.IntRange(min=1), metavar="I", help="Of a workload, likewise.")
@click.option("--ranks", type=click.IntRange(min=1), metavar="N", help="On N ranks of one node.")
@click.option("--print", "is_print", is_flag=True, help="Print what would run instead.")
@click.option(
    "--bisect-order", "is_bisect", is_flag=True, help="Find which earlier tests it takes."
)
@click.option("--trust", "is_trusted", is_flag=True, help="Use every variable that the run holds.")
@click.option("--project", type=PATH, default=Path(), help="The checkout.")
@click.option("--pytest-args", default="", metavar="TEXT", help="More arguments for pytest.")
def command(  # noqa: PLR0913 - one for each option
    *,
    path: Path,
    item: str | None,
    attempt: int | None,
    repeat: int | None,
    ranks: int | None,
    is_print: bool,
    is_bisect: bool,
    is_trusted: bool,
    project: Path,
    pytest_args: str,
) -> None:
    """Do a failing item of a run again: PATH is a run directory, a zip or a tar of one.

    ITEM is a node id, a name or a part of one; without it, the only item that failed.

    Exit code 0: it passes here. 1: it fails in the same way. 3: it fails in another way. 125: that
    is unknown, also for 3 while git bisects.
    """
    wishes = Wishes(
        num_ranks=ranks,
        is_trusted=is_trusted,
        words=tuple(shlex.split(pytest_args)),
    )
    try:
        prepared = _prepare(path, item, wishes, project.absolute(), attempt=attempt, repeat=repeat)
        act = _bisect if is_bisect else _print_only if is_print else _run_again
        outcome = act(prepared)
    except MegatronError as error:
        echo_error(error)
        sys.exit(ReproExit.UNKNOWN)
    except KeyboardInterrupt:
        sys.exit(ReproExit.INTERRUPTED)
    code = outcome.exit
    if outcome.text:
        click.echo(printable(f"repro: {outcome.text}"))
    if code is ReproExit.OTHER and _is_bisecting(prepared.stage.root):
        code = ReproExit.UNKNOWN
    sys.exit(code)


def _prepare(
    path: Path,
    item: str | None,
    wishes: Wishes,
    root: Path,
    *,
    attempt: int | None,
    repeat: int | None,
) -> _Prepared:
    """Find the item and note the differences to its run."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    stage = Stage(root=root, scratch=root / OWN_DIR / "repro" / name)
    make_own_dir(root)
    runs = find_runs([path], stage.scratch, _is_wanted, looks_up=True)
    records = {run.directory: read_own_run(run.directory) for run in runs}
    chosen = choose(records, item, where=str(path), attempt=attempt, repeat=repeat)
    is_own = chosen.run_dir.resolve().is_relative_to((root / RUNS_DIR).resolve())
    wishes = replace(wishes, is_trusted=wishes.is_trusted or is_own)
    file = root / chosen.node_id.partition("::")[0]
    if not file.is_file():
        raise ReproError(
            str(file), "is not here; run this in the project's checkout, or give --project"
        )
    plan = _plan_of(chosen)
    there = _num_ranks(chosen.item, plan)
    notes = []
    num_ranks = wishes.num_ranks or there
    if num_ranks != there:
        notes.append(
            f"{num_ranks} instead of {there} ranks: sums are taken in another order, so curves "
            f"differ in their last digits"
        )
    facts = gather_facts(root)
    notes += differences(chosen, plan, facts, root, num_ranks=num_ranks)
    return _Prepared(path=path, stage=stage, chosen=chosen, wishes=wishes, notes=tuple(notes))


def _is_wanted(name: PurePath) -> bool:
    """Return whether a member of an artifact is needed to do an item again."""
    return name.name in _WANTED and "project" not in name.parts


def _plan_of(chosen: Chosen) -> RecordedPlan | None:
    """Return the plan of the chosen attempt, None without one."""
    found = chosen.attempt
    if not isinstance(found, RecordedAttempt) or not (found.repeat and found.attempt):
        return None
    return find_plan(chosen.run_dir, chosen.node_id, found.repeat, found.attempt)[1]


def _num_ranks(item: RecordedItem, plan: RecordedPlan | None) -> int:
    """Return the number of ranks that an item ran on."""
    if isinstance(item, RecordedTest):
        return item.world_size
    return 1 if plan is None else plan.world_size or 1


def _print_header(prepared: _Prepared, again: Again) -> None:
    """Print the item and the differences to its run."""
    chosen = prepared.chosen
    lines = [f"repro: {chosen.node_id}, {chosen.item.verdict} in {prepared.path}"]
    if chosen.problem:
        lines.append(f"  there: {chosen.problem}")
    if chosen.before:
        lines.append(f"  after: {counted(len(chosen.before), 'test')} on the same gang")
    lines += [f"  {note}" for note in (*prepared.notes, *again.left_out)]
    for text in lines:
        click.echo(printable(text))


def _again(prepared: _Prepared) -> Again:
    return prepared.stage.command(prepared.chosen, prepared.wishes, prepared.chosen.before)


def _run_again(prepared: _Prepared) -> ReproOutcome:
    """Run the item, and compare how it ends."""
    again = _again(prepared)
    _print_header(prepared, again)
    click.echo(printable(f"  {again.line}"))
    return prepared.stage.run(prepared.chosen, again, is_quiet=False)


def _print_only(prepared: _Prepared) -> ReproOutcome:
    """Print the commands instead of running them."""
    click.echo(f"cd {shlex.quote(str(prepared.stage.root))}")
    click.echo(printable(_again(prepared).line))
    return ReproOutcome(exit=ReproExit.PASSED, text="")


def _bisect(prepared: _Prepared) -> ReproOutcome:
    """Find the tests before the item without which it passes."""
    chosen = prepared.chosen
    if isinstance(chosen.item, RecordedWorkload):
        raise ReproError(
            "--bisect-order", f"{chosen.node_id} is a workload, which nothing precedes"
        )
    _print_header(prepared, _again(prepared))
    trial = _trials(prepared)
    if trial(()):
        return ReproOutcome(exit=ReproExit.SAME, text="fails by itself: no earlier test is needed")
    if not chosen.before:
        return ReproOutcome(
            exit=ReproExit.PASSED, text="passes by itself, and nothing ran before it"
        )
    if not trial(chosen.before):
        return ReproOutcome(
            exit=ReproExit.UNKNOWN, text="cannot tell: it passes here after all that ran before it"
        )
    found = smallest_cause(chosen.before, trial)
    line = prepared.stage.command(chosen, prepared.wishes, found, name="smallest").line
    tests = "".join(f"\n  {node_id}" for node_id in found)
    return ReproOutcome(exit=ReproExit.SAME, text=f"fails in the same way after{tests}\n{line}")


def _trials(prepared: _Prepared) -> Callable[[Sequence[str]], bool]:
    """Return a function that runs the item after some tests; True if it fails as it did."""
    chosen, stage = prepared.chosen, prepared.stage
    number = 0

    def trial(before: Sequence[str]) -> bool:
        """Run the item after some tests; return whether it fails in the same way."""
        nonlocal number
        number += 1
        name = f"trial_{number}"
        again = stage.command(chosen, prepared.wishes, before, name=name)
        outcome = stage.run(chosen, again, name, is_quiet=True)
        word = {
            ReproExit.PASSED: "passes",
            ReproExit.SAME: "fails",
            ReproExit.OTHER: "fails in another way",
        }
        said = word.get(outcome.exit, outcome.text.partition("\n")[0])
        click.echo(printable(f"  trial {number}, after {len(before)}: {said}"))
        return outcome.exit is ReproExit.SAME

    return trial


def _is_bisecting(root: Path) -> bool:
    """Return whether git bisects in a checkout."""
    found = ask_git(root, "rev-parse", "--git-path", "BISECT_START")
    return found is not None and (root / found).exists()
