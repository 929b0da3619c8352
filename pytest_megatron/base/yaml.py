"""YAML files as plain data that still knows its lines.

Scalars mean what PyYAML's `safe_load`
makes of them (YAML 1.1), but a date stays text. Knows nothing of recipes or test cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

import yaml
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from pytest_megatron.base.files import JsonValue, read_bytes
from pytest_megatron.errors import MegatronError

# Where in a document: keys of mappings and indices of lists, from the top.
YamlPath: TypeAlias = tuple[str | int, ...]
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


class _YamlMarks(NamedTuple):
    """What a file has of the elements of a mapping or list beside their values.

    Attributes:
        lines: Key or index -> line of the key, or of the element.
        texts: Key or index -> a number, boolean or null as it is written.
    """

    lines: dict[str | int, int]
    texts: dict[str | int, str]


class _YamlReader:
    """Turns libyaml's events into data; one instance reads one document."""

    def __init__(self, loader: yaml.BaseLoader) -> None:
        self.marks: dict[int, _YamlMarks] = {}  # by id() of a container
        self.duplicates: list[Duplicate] = []
        self._next: Callable[[], yaml.Event] = loader.get_event
        self._anchors: dict[str, tuple[JsonValue, str | None, int] | None] = {}
        self._plain: dict[str, JsonValue] = {}  # what a plain scalar means, by its text
        self._path: list[str | int] = []
        self._num_nodes = 0  # with every alias written out
        self._kept: list[JsonValue] = []  # alive, so that no id() in `marks` is used twice

    def document(self) -> JsonValue:
        """Read all events; of an empty file there is None."""
        self._next()
        if isinstance(self._next(), yaml.StreamEndEvent):
            return None
        value, _ = self._node(self._next())
        self._next()
        if not isinstance(after := self._next(), yaml.StreamEndEvent):
            raise _wrong(after, "holds a second YAML document, expected one")
        return value

    def _node(self, event: yaml.Event) -> tuple[JsonValue, str | None]:
        """Return the value that an event begins, and of a scalar that is no string its source."""
        self._num_nodes += 1
        if isinstance(event, yaml.ScalarEvent):
            value = self._scalar(event)
            written = None if isinstance(value, str) else event.value
            if event.anchor is not None:
                self._anchors[event.anchor] = (value, written, 1)
            return value, written
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        assert isinstance(event, yaml.CollectionStartEvent)
        if event.tag not in {None, "!", _TAG + "map", _TAG + "seq"}:
            raise _wrong(event, f"tag {event.tag!r} is unknown, expected none; remove it")
        if len(self._path) == MAX_DEPTH:
            raise _wrong(event, f"is nested deeper than {MAX_DEPTH} levels")
        before = self._num_nodes
        if event.anchor is not None:  # known, but not to be used before its end
            self._anchors[event.anchor] = None
        is_mapping = isinstance(event, yaml.MappingStartEvent)
        found = self._mapping() if is_mapping else self._list()
        self._kept.append(found)
        if event.anchor is not None:
            self._anchors[event.anchor] = (found, None, self._num_nodes - before + 1)
        return found, None

    def _scalar(self, event: yaml.ScalarEvent) -> JsonValue:
        """Return the value of a scalar, such as a number or a text."""
        if not event.implicit[0]:  # in quotes, or with a tag
            return event.value if event.tag is None else _resolved(event)
        if event.value not in self._plain:
            self._plain[event.value] = _resolved(event)
        return self._plain[event.value]

    def _alias(self, event: yaml.AliasEvent) -> tuple[JsonValue, str | None]:
        """Return the value of an anchor."""
        if event.anchor not in self._anchors:
            raise _wrong(event, f"alias {event.anchor!r} is unknown, expected an anchor above")
        if (found := self._anchors[event.anchor]) is None:
            raise _wrong(event, f"alias {event.anchor!r} contains itself")
        value, written, size = found
        self._num_nodes += size - 1
        if self._num_nodes > MAX_NODES:
            raise _wrong(event, f"aliases write out to more than {MAX_NODES} values")
        return value, written

    def _list(self) -> list[JsonValue]:
        """Read a list to its end."""
        value: list[JsonValue] = []
        marks = self.marks[id(value)] = _YamlMarks({}, {})
        while not isinstance(event := self._next(), yaml.SequenceEndEvent):
            value.append(self._element(marks, len(value), _line_of(event), event))
        return value

    def _mapping(self) -> dict[str, JsonValue]:
        """Read a mapping to its end."""
        value: dict[str, JsonValue] = {}
        marks = self.marks[id(value)] = _YamlMarks({}, {})
        merged: list[JsonValue] = []
        line = 1
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            key, line = _key(event), _line_of(event)
            if key == "<<":
                merged.append(self._element(_YamlMarks({}, {}), key, line, self._next()))
                continue
            if key in marks.lines:
                path, first = tuple(self._path), marks.lines[key]
                duplicate = Duplicate(path=path, key=key, first_line=first, second_line=line)
                self.duplicates.append(duplicate)
            elif len(marks.lines) == MAX_KEYS:
                problem = f"a mapping has more than {MAX_KEYS} keys, expected fewer; split the file"
                raise YamlError(line, problem)
            value[key] = self._element(marks, key, line, self._next())
        if merged:
            self._merge(value, merged, line)
        return value

    def _element(
        self, marks: _YamlMarks, step: str | int, line: int, event: yaml.Event
    ) -> JsonValue:
        """Return the value of a key or of an element of a list, and note its line and text."""
        self._path.append(step)
        value, written = self._node(event)
        self._path.pop()
        marks.lines[step] = line
        if written is not None:
            marks.texts[step] = written
        return value

    def _merge(self, value: dict[str, JsonValue], merged: list[JsonValue], line: int) -> None:
        """Put the mappings of `<<` before the mapping's own keys, which win."""
        marks, own = self.marks[id(value)], dict(value)
        lines, texts = dict(marks.lines), dict(marks.texts)
        for part in (value, marks.lines, marks.texts):
            part.clear()
        for each in merged:  # of a list, the first wins
            for source in reversed(each) if isinstance(each, list) else [each]:
                if not isinstance(source, dict):
                    raise YamlError(line, "'<<' takes a mapping or a list of mappings")
                of_source = self.marks[id(source)]
                value.update(source)
                marks.lines.update(of_source.lines)
                marks.texts.update({k: t for k, t in of_source.texts.items() if k not in own})
        value.update(own)
        marks.lines.update(lines)
        marks.texts.update(texts)


def _key(event: yaml.Event) -> str:
    """Return the text of a key."""
    if isinstance(event, yaml.ScalarEvent):
        return str(event.value)
    kind = "an alias" if isinstance(event, yaml.AliasEvent) else "a mapping or list"
    raise _wrong(event, f"a key is {kind}, expected a string")


def _resolved(event: yaml.ScalarEvent) -> JsonValue:
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
                return str(event.value)
            case _:
                raise _wrong(event, f"tag {tag!r} is unknown, expected none; remove it")
    except (ValueError, LookupError) as problem:
        raise _wrong(event, f"{event.value!r} is not a {tag}") from problem


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
    _marks: dict[int, _YamlMarks] = field(repr=False)  # by id() of a container of `value`

    def line_of(self, path: Sequence[str | int]) -> int:
        """Return the line, from 1, of the key or list element that `path` leads to.

        A path that leads nowhere gives the line of its longest part that does; `()` gives 1.
        """
        lines = [marks.lines[step] for marks, step, _ in self._walk(path) if step in marks.lines]
        return lines[-1] if lines else 1

    def where(self, path: Sequence[str | int]) -> str:
        """Return `file:line` of `path`, as our errors begin."""
        return f"{self.file}:{self.line_of(path)}"

    def text_of(self, path: Sequence[str | int]) -> str | None:
        """Return a number, boolean or null as it is written in the file, a string as it is.

        `1.0e-5` is a number in `value`; a command line should get those six characters. None
        for a mapping or list, and for a path that leads nowhere.
        """
        found = list(self._walk(path))
        if not found or len(found) < len(path):
            return None
        marks, step, value = found[-1]
        if isinstance(value, str):
            return value
        return None if isinstance(value, dict | list) else marks.texts.get(step)

    def _walk(self, path: Sequence[str | int]) -> Iterator[tuple[_YamlMarks, str | int, JsonValue]]:
        """Yield the marks of each container on a path, the step in it, and the value there."""
        value: JsonValue = self.value
        for step in path:
            marks = self._marks.get(id(value), _YamlMarks({}, {}))
            if isinstance(value, dict) and step in value:
                value = value[str(step)]
            elif isinstance(value, list) and isinstance(step, int) and 0 <= step < len(value):
                value = value[step]
            else:
                return
            yield marks, step, value

    def rearranged(
        self, value: dict[str, JsonValue], lines: Mapping[str, dict[str, int]]
    ) -> YamlDocument:
        """Return a document of other data, which is written in the same file.

        Args:
            value: The data; numbers that should keep their spelling are texts.
            lines: Lines of the keys of `value` at `""`, and at a key those of its mapping.
        """
        marks = {
            id(value[key] if key else value): _YamlMarks(dict(there.items()), {})
            for key, there in lines.items()
        }
        return YamlDocument(file=self.file, value=value, duplicates=(), _marks=marks)


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
    reader = _YamlReader(_LOADER(text))
    try:
        top = reader.document()
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        line = mark.line + 1 if mark is not None else _line_at(text, problem)
        what = getattr(problem, "problem", None) or getattr(problem, "reason", None) or problem
        # The end of a file counts as a line after its last one.
        last = max(1, text.count("\n") + (not text.endswith("\n")))
        raise YamlError(min(line, last), f"is not valid YAML: {what}") from problem
    if not isinstance(top, dict):
        found = "nothing" if top is None else f"a {type(top).__name__}"
        raise YamlError(1, f"holds {found} at its top, expected a mapping")
    return YamlDocument(
        file=file, value=top, duplicates=tuple(reader.duplicates), _marks=reader.marks
    )


def _line_at(text: str, problem: yaml.YAMLError) -> int:
    """Return the line of a character that YAML does not allow."""
    position = getattr(problem, "position", 0)
    return text.count("\n", 0, position) + 1
