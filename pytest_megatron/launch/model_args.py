"""Reads numbers and switches out of MODEL_ARGS as Megatron's own parser would. Pure.

Source: Megatron-LM megatron/training/arguments.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from pytest_megatron.launch.arguments import Argument


class ModelArgs:
    """The arguments of one start of a training; of two with one name the last one counts."""

    def __init__(self, arguments: Iterable[Argument]) -> None:
        self._last = {argument.name: argument for argument in arguments}

    def __contains__(self, name: str) -> bool:
        """Whether the argument is there, with whatever value."""
        return name in self._last

    def text(self, name: str) -> str | None:
        """Return a value as written; None without it, for null and for a list."""
        argument = self._last.get(name)
        return None if argument is None or argument.text is None else argument.text.strip(" \"'")

    def number(self, name: str) -> int | None:
        """Return a value that is a whole number, None for any other."""
        text = self.text(name)
        return int(text) if text is not None and text.isdecimal() else None

    def size(self, name: str) -> int | None:
        """Return a parallel size: 1 where it is not given, None where it is no number from 1 on."""
        return (self.number(name) or None) if name in self._last else 1

    def is_on(self, *names: str) -> bool:
        """Whether one of these switches is set."""
        return any(self.text(name) == "true" for name in names)

    def line(self, *names: str) -> int | None:
        """Return the line of the first of these arguments that is there."""
        return next((self._last[name].line for name in names if name in self._last), None)

    def has_any(self, *names: str) -> bool:
        """Whether one of these arguments is there."""
        return any(name in self._last for name in names)
