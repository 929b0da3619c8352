"""`pytest-megatron golden convert` and `golden lint`: form, place and errors of golden files."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from pytest_megatron.base.command import (
    EXIT_FAILED,
    EXIT_UNUSABLE,
    PATH,
    Choice,
    echo_error,
    findings_option,
    findings_text,
    root_option,
)
from pytest_megatron.base.files import write_texts_together
from pytest_megatron.base.project import load_config
from pytest_megatron.base.text import counted, printable
from pytest_megatron.errors import GoldenError
from pytest_megatron.workloads.golden.formats.convert import Converted, ConvertOptions
from pytest_megatron.workloads.golden.formats.convert import convert as convert_text
from pytest_megatron.workloads.golden.lint import Project, find_goldens, lint_goldens
from pytest_megatron.workloads.golden.store import Form, place_of, project_form, read_text
from pytest_megatron.workloads.recipe.case import CASES, GOLDENS
from pytest_megatron.workloads.recipe.model import project_words
from pytest_megatron.workloads.refresh.write import locked

# The default directories of recipes: ours, then Megatron-LM's.
_RECIPES = (Path("recipes"), Path("tests/test_utils/recipes"))
_LAYOUTS = {"ours": GOLDENS, "megatron": CASES}


@dataclass(frozen=True, slots=True, kw_only=True)
class _ConvertedFile:
    """One file: its old and new text, and its old and new place."""

    source: Path
    target: Path
    old: str
    new: Converted

    @property
    def is_needed(self) -> bool:
        return self.old != self.new.text or self.source != self.target


@click.command("convert")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=PATH)
@click.option(
    "--to",
    "form",
    type=Choice([form.value for form in Form]),
    help="compact: one line a metric; steps: one line a step; list: compact, without the steps; "
    "megatron: as Megatron-LM writes it, without provenance.  [default: golden-form, or compact]",
)
@click.option(
    "--layout",
    type=Choice(sorted(_LAYOUTS)),
    help="Move goldens to golden_values/<model>/<test_case>, or beside their test cases; other "
    "names of a platform become its own.",
)
@click.option("--five-decimals", is_flag=True, help="Round, as Megatron-LM does.")
@click.option("--drop-text", is_flag=True, help='Leave out steps whose value is a text ("nan").')
@click.option("--check", "is_check", is_flag=True, help="Exit with 1 if a file would change.")
@click.option("--write", "is_writing", is_flag=True, help="Replace the files.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write the new files below this directory instead.",
)
@click.option("--allow-loss", is_flag=True, help="Write also files that lose content.")
@root_option
def convert(  # noqa: PLR0913 - click hands over one argument an option
    *,
    paths: tuple[Path, ...],
    form: str | None,
    layout: str | None,
    five_decimals: bool,
    drop_text: bool,
    is_check: bool,
    is_writing: bool,
    output: Path | None,
    allow_loss: bool,
    root: Path,
) -> None:
    """Write goldens in another form, place or precision.

    PATH is a golden or a directory of goldens. Without --write, --output or --check it only
    prints the changes. A file that is no golden is named and left alone (exit code 2); where
    something would be lost, nothing is written without --allow-loss (exit code 1).
    """
    if sum((is_check, is_writing, output is not None)) > 1:
        raise click.UsageError("--check, --write and --output exclude one another; give one")
    wish = ConvertOptions(
        form=project_form(root) if form is None else Form(form),
        is_plain=form == Form.MEGATRON.value,
        is_rounded=five_decimals,
        drops_text=drop_text,
    )
    movers = _Movers(root, layout, output)
    changes, problems = _plan(find_goldens(paths), wish, movers)
    for problem in problems:
        echo_error(problem)
    needed = [change for change in changes if change.is_needed or output is not None]
    for change in needed:
        click.echo(printable("\n".join(_describe(change))))
    is_asked = is_writing or output is not None
    is_refused = is_asked and not allow_loss and any(change.new.losses for change in needed)
    if needed and is_asked and not is_refused:
        if output is None:
            _replace(root, needed)
        else:
            _write_copies(needed)
    click.echo(_total(changes, needed, is_written=is_asked and not is_refused))
    if is_refused:
        click.echo("nothing written, since something would be lost: give --allow-loss", err=True)
    is_failed = is_refused or (is_check and needed)
    sys.exit(EXIT_UNUSABLE if problems else EXIT_FAILED if is_failed else 0)


class _Movers:
    """Finds the new place of a file."""

    def __init__(self, root: Path, layout: str | None, output: Path | None) -> None:
        self._root = root
        self._tree = None if layout is None else _LAYOUTS[layout]
        self._output = output
        self._environments = project_words(root).environments
        self._other_names = load_config(root).golden_platforms

    def target_of(self, path: Path) -> Path:
        """Return the new place of a file.

        Raises:
            GoldenError: The path of the file does not name a workload.
        """
        base = self._root if self._output is None else self._output
        if self._tree is not None:
            place = place_of(path, self._root, self._environments)
            if place is None:
                raise GoldenError(
                    str(path), "place and name do not say whose golden it is; not moved"
                )
            if place.is_second_run:
                raise GoldenError(str(path), "the dump of a second run, no golden; not moved")
            return base / place.moved(self._tree, self._other_names)
        if self._output is None:
            return path
        absolute, root = path.absolute(), self._root.absolute()
        return base / (absolute.relative_to(root) if absolute.is_relative_to(root) else path.name)


def _plan(
    files: Sequence[Path], options: ConvertOptions, movers: _Movers
) -> tuple[list[_ConvertedFile], list[GoldenError]]:
    """Return the change of each file, and the errors of those that stay."""
    changes: dict[Path, _ConvertedFile] = {}
    problems: list[GoldenError] = []
    sources = {file.absolute() for file in files}
    for file in files:
        try:
            target = movers.target_of(file)
            old = read_text(file)
            new = convert_text(old, str(file), options)
        except GoldenError as error:
            problems.append(error)
            continue
        is_taken = target.absolute() != file.absolute() and target.exists()
        if target in changes or (is_taken and target.absolute() not in sources):
            other = changes[target].source if target in changes else target
            problems.append(GoldenError(str(file), f"would become {target}, as {other}; not moved"))
            continue
        changes[target] = _ConvertedFile(source=file, target=target, old=old, new=new)
    return list(changes.values()), problems


def _write_copies(changes: Sequence[_ConvertedFile]) -> None:
    """Write the new files, and leave the old ones where they are."""
    try:
        write_texts_together({change.target: change.new.text for change in changes})
    except OSError as error:
        raise _cannot_write(error, changes) from error


def _replace(root: Path, changes: Sequence[_ConvertedFile]) -> None:
    """Replace goldens together, as a refresh does it, and remove those that moved.

    Raises:
        GoldenError: One cannot be written, or has changed since it was read; all are as they were.
    """
    targets = {change.target.resolve(): change.new.text for change in changes}
    try:
        with locked(root):
            for change in changes:
                if read_text(change.source) != change.old:
                    raise GoldenError(str(change.source), "has changed meanwhile; convert it again")
            write_texts_together(targets)
            for change in changes:
                if change.source.resolve() not in targets:
                    change.source.unlink()
    except OSError as error:
        raise _cannot_write(error, changes) from error


def _cannot_write(error: OSError, changes: Sequence[_ConvertedFile]) -> GoldenError:
    where = str(error.filename or changes[0].target)
    return GoldenError(where, f"cannot be written: {error.strerror}; nothing was changed")


def _describe(change: _ConvertedFile) -> Iterator[str]:
    """Yield what converting a file changes, notes and loses."""
    moved = "" if change.source == change.target else f" -> {change.target}"
    yield f"{change.source}{moved}: {_sizes([change])}"
    yield from (f"  note: {note}" for note in change.new.notes)
    yield from (f"  loses {loss}" for loss in change.new.losses)


def _sizes(changes: Sequence[_ConvertedFile]) -> str:
    """Describe lines and bytes before and after."""
    lines = [sum(len(text.splitlines()) for text in texts) for texts in _texts(changes)]
    sizes = [sum(len(text.encode()) for text in texts) for texts in _texts(changes)]
    return f"{lines[0]} -> {lines[1]} lines, {sizes[0]} -> {sizes[1]} bytes"


def _texts(changes: Sequence[_ConvertedFile]) -> tuple[list[str], list[str]]:
    return [change.old for change in changes], [change.new.text for change in changes]


def _total(
    changes: Sequence[_ConvertedFile], needed: Sequence[_ConvertedFile], *, is_written: bool
) -> str:
    """Describe how many goldens change, and their sizes."""
    what = "written" if is_written else "would change"
    sizes = f": {_sizes(needed)}" if needed else ""
    return f"{len(needed)} of {counted(len(changes), 'golden')} {what}{sizes}"


@click.command("lint")
@click.argument("paths", metavar="[PATH]...", nargs=-1, type=PATH)
@root_option
@click.option(
    "--recipes",
    type=PATH,
    multiple=True,
    help="Recipe, or directory of recipes, whose rows read the goldens (repeatable).  "
    "[default: recipes or tests/test_utils/recipes in the root]",
)
@findings_option
def lint(paths: tuple[Path, ...], root: Path, recipes: tuple[Path, ...], form: str) -> None:
    """Report errors in goldens.

    PATH is a golden or a directory of goldens; by default all of the project. Exits with 1 if a
    finding is an error, with 0 if there are none or only warnings, with 2 if a path does not
    exist.
    """
    found = tuple(root / path for path in _RECIPES if (root / path).is_dir())
    project = Project(
        root=root,
        recipes=recipes or found[:1],
        vocabulary=project_words(root),
        other_names=load_config(root).golden_platforms,
    )
    report = lint_goldens(paths, project)
    click.echo(printable(findings_text(report.findings, form)), nl=False)
    if form == "text":
        counts = f"{counted(report.num_goldens, 'golden')}, {report.num_bytes / 1e6:.1f} MB"
        reached = f"{report.num_read} of them read by a row" if project.recipes else "no recipes"
        click.echo(f"{counts}; {reached}")
    sys.exit(any(finding.is_error for finding in report.findings))
