"""YAML files as plain data that still knows its lines.

Scalars mean what PyYAML's `safe_load`
makes of them (YAML 1.1), but a date stays text. Knows nothing of recipes or test cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from pytest_megatron.errors import MegatronError
from pytest_megatron.files import JsonValue, read_bytes
from pytest_megatron.yamlevents import Builder, Duplicate, Lines, YamlError, YamlPath

__all__ = [
    "YamlDocument",
    "Duplicate",
    "YamlError",
    "YamlPath",
    "parse_document",
    "read_document",
    "read_yaml",
]

_MOST_BYTES = 16 << 20
# libyaml's event loader; a PyYAML built without it has only the slow one.
_LOADER: type[yaml.BaseLoader] = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlDocument:
    """One YAML file, a mapping at its top.

    Attributes:
        file: As given by the caller.
        value: The data; a key written as a number or a boolean is its text.
        duplicates: Keys that occur twice, in file order.
    """

    file: Path
    value: dict[str, JsonValue]
    duplicates: tuple[Duplicate, ...]
    _lines: dict[int, Lines] = field(repr=False)  # by id() of a container of `value`
    _texts: dict[tuple[int, str | int], str] = field(repr=False)

    def line_of(self, path: Sequence[str | int]) -> int:
        """Return the line, from 1, of the key or list element that `path` leads to.

        A path that leads nowhere gives the line of its longest part that does; `()` gives 1.
        """
        line = 1
        value: JsonValue = self.value
        for step in path:
            lines = self._lines.get(id(value))
            if isinstance(value, dict) and isinstance(lines, dict) and step in value:
                line, value = lines[str(step)], value[str(step)]
            elif isinstance(value, list) and isinstance(lines, list) and _is_index(step, value):
                line, value = lines[int(step)], value[int(step)]
            else:
                break
        return line

    def where(self, path: Sequence[str | int]) -> str:
        """Return `file:line` of `path`, as our errors begin."""
        return f"{self.file}:{self.line_of(path)}"

    def text_of(self, path: Sequence[str | int]) -> str | None:
        """Return a number, boolean or null as it is written in the file, a string as it is.

        `1.0e-5` is a number in `value`; a command line should get those six characters. None
        for a mapping or list, and for a path that leads nowhere.
        """
        value: JsonValue = self.value
        text: str | None = None
        for step in path:
            container = value
            if isinstance(container, dict) and step in container:
                value = container[str(step)]
            elif isinstance(container, list) and _is_index(step, container):
                value = container[int(step)]
            else:
                return None
            text = self._texts.get((id(container), step))
        if isinstance(value, str):
            return value
        return None if isinstance(value, dict | list) else text


def read_yaml(path: Path, *, error: type[MegatronError]) -> YamlDocument:
    """Read a YAML file whose top is a mapping.

    Raises:
        MegatronError: As `error`, with file and line: no such file, not UTF-8, not YAML, several
            documents, no mapping at the top, an unknown tag or alias, or aliases that contain
            themselves or write out to more than a million values.
    """
    try:
        return read_document(path)
    except YamlError as problem:
        where = str(path) if problem.line is None else f"{path}:{problem.line}"
        raise error(where, problem.problem) from problem


def read_document(path: Path) -> YamlDocument:
    """Read a YAML file as `read_yaml` does.

    Raises:
        YamlError: With the line as a number, for those who collect problems.
    """
    try:
        text = read_bytes(path, _MOST_BYTES).decode("utf-8-sig")
    except OSError as problem:
        raise YamlError(None, f"cannot be read: {problem.strerror}") from problem
    except UnicodeDecodeError as problem:
        line = problem.object[: problem.start].count(b"\n") + 1
        raise YamlError(line, "is not UTF-8, expected a YAML text file") from problem
    return parse_document(text, path)


def parse_document(text: str, file: Path) -> YamlDocument:
    """Parse the text of `file`.

    Raises:
        YamlError: As `read_document`.
    """
    builder = Builder()
    try:
        builder.build(_LOADER(text))
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        line = mark.line + 1 if mark is not None else _line_at(text, problem)
        what = getattr(problem, "problem", None) or getattr(problem, "reason", None) or problem
        # The end of a file counts as a line after its last one.
        last = max(1, text.count("\n") + (not text.endswith("\n")))
        raise YamlError(min(line, last), f"is not valid YAML: {what}") from problem
    if not isinstance(builder.top, dict):
        found = "nothing" if builder.top is None else f"a {type(builder.top).__name__}"
        raise YamlError(1, f"holds {found} at its top, expected a mapping")
    return YamlDocument(
        file=file,
        value=builder.top,
        duplicates=tuple(builder.duplicates),
        _lines=builder.lines,
        _texts=builder.texts,
    )


def _is_index(step: str | int, value: list[JsonValue]) -> bool:
    return isinstance(step, int) and 0 <= step < len(value)


def _line_at(text: str, problem: yaml.YAMLError) -> int:
    """Return the line of a character that YAML does not allow."""
    position = getattr(problem, "position", 0)
    return text.count("\n", 0, position) + 1
