"""The command or the mark that stands for each place that was found. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pytest_megatron.adopt.find import FoundClass, FoundPlace, FoundRecipe, Inventory
from pytest_megatron.adopt.launch import LaunchedTests
from pytest_megatron.adopt.python_code import StartedRanks
from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.text import columns, counted

PROGRAM = "pytest -p megatron"
_ALL_GPUS = ("gpu", "auto")
_THREADS = ("MultiThreadedTestCase", "FSDPTestMultiThread")
_HEADINGS = {  # one, several, and what follows
    "pytest": ("pytest command", "pytest commands", " that a launcher starts on each rank; type"),
    "script": (
        "launched test program",
        "launched test programs",
        "; make the checks tests, and type",
    ),
    "class": ("test class", "test classes", " that start ranks; mark the tests"),
    "spawn": ("call", "calls", " that start ranks in tests; mark the tests"),
    "subprocess": ("launcher", "launchers", " that tests start; mark what is launched"),
    "mark": ("mark", "marks", " of MPI; mark the tests"),
    "recipe": ("recipe", "recipes", " of Megatron-LM's format; type"),
}
_NOTES = {
    "class": "they run as they are without --ranks; with --ranks they need @pytest.mark.controller",
    "spawn": "they run as they are without --ranks; with --ranks they need @pytest.mark.controller",
    "subprocess": "they run as they are without --ranks; with --ranks, @pytest.mark.controller",
}
MIGRATION = "before and after of each: the page 'Migrate distributed tests' of the documentation"
_MPI = "stays: its tests use mpi4py, and ranks of pytest-megatron are no MPI processes"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptAdvice:
    """What stands for a place.

    Attributes:
        found: The place in a word or two.
        instead: A command or a mark; with `is_command`, one that can be pasted.
        notes: What else changes.
    """

    place: FoundPlace
    found: str
    instead: str
    is_command: bool
    notes: tuple[str, ...] = ()


def advise(place: FoundPlace, inventory: Inventory) -> AdoptAdvice:
    """Return what to type or to write instead of a place."""
    match place.what:
        case LaunchedTests() as launched:
            uses_mpi = inventory.uses_mpi and launched.launcher == "mpi"
            instead = _MPI if uses_mpi else command_for(launched)
            return AdoptAdvice(
                place=place,
                found=_shown(launched),
                instead=instead,
                is_command=not uses_mpi,
                notes=() if uses_mpi else tuple(_notes(launched)),
            )
        case FoundRecipe(num_workloads=number):
            return AdoptAdvice(
                place=place,
                found=counted(number, "workload"),
                instead=f"{PROGRAM} {place.path} --plan",
                is_command=True,
            )
        case FoundClass(base=base, definition=definition):
            size = definition.world_size or "N"
            is_fixture = base == "DistributedFixture"
            mark = "nothing: threads of one process" if base in _THREADS else _mark(size)
            return AdoptAdvice(
                place=place,
                found=f"{definition.name}({base})",
                instead="a test on its own world size" if is_fixture else mark,
                is_command=False,
            )
        case StartedRanks(kind="mark", num_ranks=ranks):
            instead = _MPI if inventory.uses_mpi else _mark(ranks or "N")
            return AdoptAdvice(
                place=place, found=place.what.what, instead=instead, is_command=False
            )
        case StartedRanks(what=what, num_ranks=ranks):
            return AdoptAdvice(
                place=place, found=what, instead=_mark(ranks or "N"), is_command=False
            )


def command_for(launched: LaunchedTests) -> str:
    """Return the command that runs the same tests on a gang of ranks."""
    script = (launched.script,) if launched.script else ()
    arguments = (*_coverage(launched), *script, *(() if script else launched.arguments))
    words = (*launched.variables, PROGRAM, *_ranks(launched), *arguments)
    return " ".join(" ".join(word.split("\n")) for word in words)


def _ranks(launched: LaunchedTests) -> Iterator[str]:
    number = launched.num_ranks
    quoted = f'"{number}"' if re.search(r"[$`]", number) else number
    yield "--gpus all" if number in _ALL_GPUS else f"--ranks {quoted or 'N'}"
    if launched.num_nodes:
        yield f"--nnodes {launched.num_nodes} --node-rank I --rdzv-endpoint HOST:PORT"


def _coverage(launched: LaunchedTests) -> Iterator[str]:
    """Yield pytest-cov's options for those of `coverage run`."""
    for word in launched.coverage or ():
        name, _, value = word.partition("=")
        if name == "--source" and value:
            yield f"--cov={value}"


def _notes(launched: LaunchedTests) -> Iterator[str]:
    if launched.num_ranks in ("", "N") and launched.launcher != "xdist":
        yield "N: the number of ranks, which is not written at this place"
    if launched.coverage is not None:
        yield "coverage of ranks is measured by pytest-cov"
    if launched.num_nodes:
        yield "one such command on each node; under Slurm, node and address are known"


def _shown(launched: LaunchedTests) -> str:
    number = f" x {launched.num_ranks}" if launched.num_ranks else ""
    return f"{launched.launcher}{number}"


def _mark(size: str) -> str:
    return f"@pytest.mark.world_size({size})"


def advice_lines(
    advice: Sequence[AdoptAdvice], inventory: Inventory, *, most: int | None
) -> Iterator[str]:
    """Yield what a person reads, a paragraph for each kind.

    Args:
        advice: In the order of paths.
        inventory: For the goldens beside recipes.
        most: Places of one kind that are listed; None is all.
    """
    for kind, (one, many, rest) in _HEADINGS.items():
        mine = [item for item in advice if item.place.kind == kind]
        if not mine:
            continue
        yield f"{counted(len(mine), one, many)}{rest}:"
        rows = [(f"  {item.place.where}", item.found, item.instead) for item in mine[:most]]
        yield from columns(rows)
        if len(mine) > len(rows):
            yield f"  and {len(mine) - len(rows)} more; --all lists them"
        if kind in _NOTES:
            yield f"  {_NOTES[kind]}"
        if kind == "recipe":
            yield (
                f"  with {counted(inventory.num_cases, 'test case')} and "
                f"{counted(inventory.num_goldens, 'golden')}; `pytest-megatron lint` checks them"
            )
        for note in dict.fromkeys(note for item in mine for note in item.notes):
            yield f"  {note}"
        yield ""
    yield MIGRATION


def typed_lines(advice: Sequence[AdoptAdvice], *, most: int | None) -> Iterator[str]:
    """Yield the commands again, each once."""
    commands = list(dict.fromkeys(item.instead for item in advice if item.is_command))
    if commands:
        yield "to type:"
        yield from (f"  {command}" for command in commands[:most])
    if len(commands) > len(commands[:most]):
        yield f"  and {len(commands[most:])} more; --all lists them"


def as_json(advice: Sequence[AdoptAdvice]) -> list[JsonValue]:
    """Return the advice for other programs."""
    return [
        {
            "file": item.place.path,
            "line": item.place.line,
            "kind": item.place.kind,
            "found": item.found,
            "instead": item.instead,
            "is_command": item.is_command,
            "notes": list(item.notes),
        }
        for item in advice
    ]
