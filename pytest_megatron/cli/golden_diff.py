"""`pytest-megatron golden diff`: how goldens differ, between files, directories and commits.

Thin: finds both sides, compares and prints.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from pytest_megatron.base.text import printable
from pytest_megatron.cli.formats import format_option, root_option
from pytest_megatron.errors import GoldenError
from pytest_megatron.refresh.difference import FileChange
from pytest_megatron.refresh.pull_request import markdown
from pytest_megatron.refresh.revision import (
    DEFAULT_PATHS,
    compare_sides,
    side_of_path,
    side_of_revision,
    side_of_tree,
)
from pytest_megatron.refresh.text import FORMS, differences_json, differences_text

EXIT_DIFFERENT = 1
_MOST_REVISIONS = 2


@click.command("diff")
@click.argument("paths", nargs=-1, metavar="[OLD NEW | PATH...]")
@click.option(
    "--rev",
    "revisions",
    multiple=True,
    metavar="COMMIT",
    help="Compare the goldens of a commit with the working tree, or of two commits (A..B).",
)
@format_option(*FORMS)
@click.option("--exit-code", is_flag=True, help="Exit with 1 if anything differs.")
@root_option
def command(
    *, paths: tuple[str, ...], revisions: tuple[str, ...], form: str, exit_code: bool, root: Path
) -> None:
    """Say how goldens differ: two files, two directories, or with --rev a commit.

    With --rev, PATH limits what is compared, by default to every golden of the project.
    """
    revisions = tuple(part for one in revisions for part in one.split("..", 1))
    if len(revisions) > _MOST_REVISIONS or not all(revisions):
        raise GoldenError("--rev", f"found {len(revisions)} commits, expected COMMIT or A..B")
    if revisions:
        wanted = paths or DEFAULT_PATHS
        old = side_of_revision(root, revisions[0], wanted)
        new = (
            side_of_revision(root, revisions[1], wanted)
            if len(revisions) == _MOST_REVISIONS
            else side_of_tree(root, wanted)
        )
    else:
        if len(paths) != 2:  # noqa: PLR2004 - old and new
            raise GoldenError(
                "golden diff", f"found {len(paths)} paths, expected OLD and NEW, or --rev COMMIT"
            )
        old, new = side_of_path(Path(paths[0])), side_of_path(Path(paths[1]))
        if ("" in old) != ("" in new):
            raise GoldenError(
                paths[1], f"{paths[0]} is of the other kind; give two files or two directories"
            )
    differences, problems = compare_sides(old, new)
    for problem in problems:
        click.echo(printable(problem), err=True)
    if form == "json":
        click.echo(json.dumps(differences_json(differences), indent=2, allow_nan=False))
    else:
        click.echo(printable((markdown if form == "markdown" else differences_text)(differences)))
    if exit_code and (problems or any(d.state is not FileChange.UNCHANGED for d in differences)):
        sys.exit(EXIT_DIFFERENT)
