"""The `--format` of every command that prints its answer in more than one form."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import click

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def format_option(
    *forms: str, about: str | None = None
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Return a decorator that adds `--format`, handed over as `form`; text is the default.

    Args:
        forms: Which there are in the order in which the help lists them; one of them is text.
        about: What the help says of them.
    """
    return click.option(
        "--format",
        "form",
        type=click.Choice(forms),
        default="text",
        show_default=True,
        help=about,
    )


def printable(text: str) -> str:
    """Return text of a file with control characters written out, for a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
