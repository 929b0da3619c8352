"""YAML files as plain data that still knows its lines.

Scalars mean what PyYAML's `safe_load`
makes of them (YAML 1.1), but a date stays text. Knows nothing of recipes or test cases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias, cast

import yaml
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from pytest_megatron.base.files import JsonValue, read_bytes
from pytest_megatron.errors import MegatronError

# Where in a document: keys of mappings and indices of lists, from the top.
YamlPath: TypeAlias = tuple[str | int, ...]
# The lines of a container's elements.
Lines: TypeAlias = dict[str, int] | list[int]
_Container: TypeAlias = "dict[str, JsonValue] | list[JsonValue]"
_TAG = "tag:yaml.org,2002:"
MAX_NODES = 1_000_000  # with every alias written out; 10,000 recipe rows are 70,000
MAX_DEPTH = 100
MAX_KEYS = 10_000  # of one mapping; every word of a case is compared with the known ones


class YamlError(Exception):
    """A file cannot be read as data; becomes an error of the caller's kind.

    Attributes:
        line: Counted from 1; None where the file itself cannot be read.
        problem: Lower case, no final period.
    """

    def __init__(self, line: int | None, problem: str) -> None:
        super().__init__(line, problem)
        self.line = line
        self.problem = problem


class _Resolver(Protocol):
    """PyYAML's resolver, as far as we call it; its stubs lack the types."""

    def resolve(self, kind: type[yaml.Node], value: str, implicit: tuple[bool, bool]) -> str: ...


_RESOLVER: _Resolver = Resolver()


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicate:
    """A key that one mapping has twice; the later value counts.

    Attributes:
        path: The mapping that has it.
        first_line: Line of the occurrence that is overwritten, counted from 1.
        second_line: Line of the occurrence that overwrites it.
    """

    path: YamlPath
    key: str
    first_line: int
    second_line: int


@dataclass(slots=True)
class _YamlFrame:
    """A mapping or list that is being read."""

    value: _Container
    anchor: str | None
    num_before: int
    key: str | None = None  # of a mapping, between the key and its value
    key_line: int = 0
    merged: list[JsonValue] = field(default_factory=list)  # the values of `<<`
    is_mapping: bool = field(init=False)
    lines: Lines = field(init=False)

    def __post_init__(self) -> None:
        self.is_mapping = isinstance(self.value, dict)
        self.lines = {} if self.is_mapping else []


class Builder:
    """Turns libyaml's events into data; one instance reads one document."""

    def __init__(self) -> None:
        self.top: JsonValue = None
        self.lines: dict[int, Lines] = {}
        self.texts: dict[tuple[int, str | int], str] = {}
        self.duplicates: list[Duplicate] = []
        self.num_nodes = 0
        self.num_documents = 0
        self.stack: list[_YamlFrame] = []
        self.anchors: dict[str, tuple[JsonValue, str | None, int]] = {}
        self.plain: dict[str, JsonValue] = {}  # what a plain scalar means, by its text
        self.kept: list[JsonValue] = []  # alive, so that no id() in `lines` is used twice

    def build(self, loader: yaml.BaseLoader) -> None:
        """Read all events of `loader` into `top`."""
        stack = self.stack
        for event in iter(loader.get_event, None):
            kind = type(event)
            if kind is yaml.ScalarEvent:
                frame = stack[-1] if stack else None
                if frame is not None and frame.key is None and frame.is_mapping:
                    frame.key, frame.key_line = event.value, event.start_mark.line + 1
                else:
                    self.on_scalar(event)
            elif kind is yaml.MappingStartEvent:
                self.on_start(event, {})
            elif kind is yaml.SequenceStartEvent:
                self.on_start(event, [])
            elif kind in {yaml.MappingEndEvent, yaml.SequenceEndEvent}:
                self.on_end()
            elif kind is yaml.AliasEvent:
                self.on_alias(event)
            elif kind is yaml.DocumentStartEvent:
                self.num_documents += 1
                if self.num_documents > 1:
                    raise _wrong(event, "holds a second YAML document, expected one")

    def on_scalar(self, event: yaml.ScalarEvent) -> None:
        """Build the value of a scalar, such as a number or a text."""
        text: str = event.value
        value: JsonValue = text
        written = None
        if event.implicit[0]:  # plain
            if text not in self.plain:
                self.plain[text] = self.resolve(event)
            value = self.plain[text]
        elif event.tag is not None:
            value = self.resolve(event)
        if not isinstance(value, str):
            written = text
        if event.anchor is not None:
            self.anchors[event.anchor] = (value, written, 1)
        self.attach(value, written, _line_of(event))

    def resolve(self, event: yaml.ScalarEvent) -> JsonValue:
        """Return the value of a plain or tagged scalar."""
        tag = event.tag
        if tag is None or tag == "!":
            tag = str(_RESOLVER.resolve(yaml.ScalarNode, event.value, (True, False)))
        node = yaml.ScalarNode(tag, event.value)
        try:
            match tag.removeprefix(_TAG):
                case "null":
                    return None
                case "bool":
                    return bool(SafeConstructor().construct_yaml_bool(node))
                case "int":
                    return int(SafeConstructor().construct_yaml_int(node))
                case "float":
                    return float(SafeConstructor().construct_yaml_float(node))
                case "str" | "timestamp" | "merge" | "value":
                    return event.value
                case _:
                    raise _wrong(event, f"tag {tag!r} is unknown, expected none; remove it")
        except (ValueError, KeyError) as problem:
            raise _wrong(event, f"{event.value!r} is not a {tag}") from problem

    def on_start(self, event: yaml.CollectionStartEvent, value: _Container) -> None:
        """Open a mapping or list."""
        frame = self.stack[-1] if self.stack else None
        if frame is not None and frame.key is None and frame.is_mapping:
            raise _wrong(event, "a key is a mapping or list, expected a string")
        if event.tag not in {None, "!", _TAG + "map", _TAG + "seq"}:
            raise _wrong(event, f"tag {event.tag!r} is unknown, expected none; remove it")
        if len(self.stack) == MAX_DEPTH:
            raise _wrong(event, f"is nested deeper than {MAX_DEPTH} levels")
        if event.anchor is not None:  # known, but not to be used before its end
            self.anchors[event.anchor] = (None, None, -1)
        self.num_nodes += 1
        line = _line_of(event)
        if frame is not None and frame.key is None:
            frame.key_line = line
        self.stack.append(_YamlFrame(value, event.anchor, self.num_nodes))

    def on_end(self) -> None:
        """Close a mapping or list and put it where it belongs."""
        frame = self.stack.pop()
        if frame.merged:
            self.merge(frame)
        self.lines[id(frame.value)] = frame.lines
        if frame.anchor is not None:
            size = self.num_nodes - frame.num_before + 1
            self.anchors[frame.anchor] = (frame.value, None, size)
        self.num_nodes -= 1  # `attach` counts it again
        self.attach(frame.value, None, self.stack[-1].key_line if self.stack else 1)

    def on_alias(self, event: yaml.AliasEvent) -> None:
        """Attach the value of an alias in its place."""
        if event.anchor not in self.anchors:
            raise _wrong(event, f"alias {event.anchor!r} is unknown, expected an anchor above")
        value, written, size = self.anchors[event.anchor]
        if size < 0:
            raise _wrong(event, f"alias {event.anchor!r} contains itself")
        frame = self.stack[-1]
        if frame.key is None and frame.is_mapping:
            raise _wrong(event, "a key is an alias, expected a string")
        self.num_nodes += size - 1
        if self.num_nodes > MAX_NODES:
            raise _wrong(event, f"aliases write out to more than {MAX_NODES} values")
        self.attach(value, written, _line_of(event))

    def attach(self, value: JsonValue, written: str | None, line: int) -> None:
        """Add a finished value to the container that is open."""
        self.num_nodes += 1
        if not self.stack:
            self.top = value
            return
        frame = self.stack[-1]
        if isinstance(frame.value, list):
            step: str | int = len(frame.value)
            frame.value.append(value)
            cast("list[int]", frame.lines).append(line)
        else:
            key = step = cast("str", frame.key)
            frame.key = None
            if key == "<<":
                frame.merged.append(value)
                return
            lines = cast("dict[str, int]", frame.lines)
            if key in lines:
                self.repeat(frame, key, lines[key])
            elif len(lines) == MAX_KEYS:
                problem = f"a mapping has more than {MAX_KEYS} keys, expected fewer; split the file"
                raise YamlError(frame.key_line, problem)
            frame.value[key] = value
            lines[key] = frame.key_line
        if written is not None:
            self.texts[id(frame.value), step] = written

    def repeat(self, frame: _YamlFrame, key: str, first_line: int) -> None:
        """Note that `key` comes a second time; its value is replaced."""
        assert isinstance(frame.value, dict)
        self.kept.append(frame.value[key])
        path: YamlPath = tuple(
            len(f.value) if isinstance(f.value, list) else cast("str", f.key)
            for f in self.stack[:-1]
        )
        self.duplicates.append(
            Duplicate(path=path, key=key, first_line=first_line, second_line=frame.key_line)
        )

    def merge(self, frame: _YamlFrame) -> None:
        """Put the mappings of `<<` before the mapping's own keys, which win."""
        assert isinstance(frame.value, dict)
        sources: list[JsonValue] = []
        for merged in frame.merged:  # of a list, the first wins
            sources += reversed(merged) if isinstance(merged, list) else [merged]
        own, own_lines = dict(frame.value), cast("dict[str, int]", frame.lines)
        lines: dict[str, int] = {}
        frame.value.clear()
        for source in sources:
            if not isinstance(source, dict):
                raise YamlError(frame.key_line, "'<<' takes a mapping or a list of mappings")
            frame.value.update(source)
            lines.update(cast("dict[str, int]", self.lines[id(source)]))
            for key in source:
                if (id(source), key) in self.texts and key not in own:
                    self.texts[id(frame.value), key] = self.texts[id(source), key]
        self.kept += sources
        frame.value.update(own)
        frame.lines = lines | own_lines


def _wrong(event: yaml.Event, problem: str) -> YamlError:
    """Return the problem of something at an event's place."""
    return YamlError(_line_of(event), problem)


def _line_of(event: yaml.Event) -> int:
    """Return the line on which an event starts, from 1."""
    assert event.start_mark is not None
    return event.start_mark.line + 1


_MOST_BYTES = 16 << 20
# libyaml's event loader; a PyYAML built without it has only the slow one.
_LOADER: type[yaml.BaseLoader] = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlDocument:
    """One YAML file, a mapping at its top.

    Attributes:
        file: Name that the caller gave.
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

    def rearranged(
        self, value: dict[str, JsonValue], lines: Mapping[str, dict[str, int]]
    ) -> YamlDocument:
        """Return a document of other data, which is written in the same file.

        Args:
            value: The data; numbers that should keep their spelling are texts.
            lines: Lines of the keys of `value` at `""`, and at a key those of its mapping.
        """
        places = {id(value[key] if key else value): dict(there) for key, there in lines.items()}
        return YamlDocument(
            file=self.file, value=value, duplicates=(), _lines=dict(places), _texts={}
        )


def read_yaml(path: Path, *, error: type[MegatronError]) -> YamlDocument:
    """Read a YAML file whose top is a mapping.

    Raises:
        MegatronError: An `error` with file and line: no such file, not UTF-8, not YAML, several
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
        YamlError: The text is refused, as `read_document` does.
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
