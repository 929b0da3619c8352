"""Options and types of arguments that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import click

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

PATH = click.Path(path_type=Path)
root_option = click.option(
    "--root",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=Path(),
    help="The project.  [default: the current directory]",
)


def format_option(
    *forms: str, about: str | None = None
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Return a decorator that adds `--format`, handed over as `form`; text is the default.

    Args:
        forms: Which there are in the order in which the help lists them; one of them is text.
        about: Their help.
    """
    return click.option(
        "--format",
        "form",
        type=click.Choice(forms),
        default="text",
        show_default=True,
        help=about,
    )
