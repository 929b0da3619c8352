"""Stands in for yq where it is not installed: `yq [-i] [-r] [eval] EXPRESSION [FILE]`, `yq -P`.

Started as a file, on the PATH of a recipe's script only. Reads and writes YAML with PyYAML, so a
file that it changes in place loses its comments; that file is in a copy of the project.

Of the expressions (mikefarah's, version 4) it knows those that test drivers use: pipes, paths
(`.A.B`, `."--flag"`, `.[0]`, `.[]`, `.[env(KEY)]`), `//`, `==`, `!=`, `+`, `and`, `or`, assignment,
lists, literals, `...` and some functions. Anything else is an error that names it: a stand-in that
guesses would change what a driver runs.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeAlias

import yaml
from typing_extensions import override

Yaml: TypeAlias = "dict[str, Yaml] | list[Yaml] | str | float | int | bool | None"
# What an expression is: for each input, the places that it means.
Expression: TypeAlias = "Callable[[Assignable], Iterator[Assignable]]"

_TOKEN = re.compile(
    r"""\s*(?:(?P<text>"(?:[^"\\]|\\.)*")|(?P<number>-?\d+(?:\.\d+)?)|(?P<name>[A-Za-z_][\w-]*)"""
    r"""|(?P<sign>\.\.\.|//|==|!=|\|=|[.|,;()\[\]+=]))"""
)


class Spelt(float):
    """A number that is printed as it was written: `3.0e-5`, not `3e-05`."""

    def __new__(cls, text: str) -> Self:
        """Read a number of YAML."""
        number = super().__new__(cls, float(text.replace("_", "")))
        number.text = text
        return number

    text: str

    @override
    def __str__(self) -> str:
        return self.text


class YqError(Exception):
    """An expression that is not understood, or that does not fit the document."""


@dataclass(frozen=True, slots=True)
class Assignable:
    """A value, and where it stands, so that it can be assigned to."""

    value: Yaml
    parent: dict[str, Yaml] | list[Yaml] | None = None
    key: str | int | None = None

    def set(self, value: Yaml) -> None:
        """Replace the value at its place in the document."""
        if not isinstance(self.parent, dict) or not isinstance(self.key, str):
            raise YqError("only a key of a mapping can be assigned to")
        self.parent[self.key] = value


def compile_expression(text: str) -> Expression:
    """Return what an expression does.

    Raises:
        YqError: It uses what this stand-in does not know.
    """
    return _Parser(text).whole()


def truth(value: Yaml) -> bool:
    """Return if a value counts as true: neither null nor false."""
    return value is not None and value is not False


def spell(value: Yaml) -> str:
    """Return a single value as yq prints it and as `tostring` and `+` see it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | Spelt):
        return str(value)
    return json.dumps(value)


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, str]] = []
        position = 0
        while position < len(text.rstrip()):
            match = _TOKEN.match(text, position)
            if match is None or match.lastgroup is None:
                raise YqError(f"cannot read {text[position:]!r} of {text!r}")
            self._tokens.append((match.lastgroup, match[match.lastgroup]))
            position = match.end()
        self._at = 0

    def whole(self) -> Expression:
        """Parse the whole expression."""
        found = self._pipe() if self._tokens else _identity
        if self._at < len(self._tokens):
            raise self._unknown()
        return found

    def _peek(self) -> str | None:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else None

    def _take(self, *signs: str) -> str | None:
        """Take the next token if it is one of these."""
        if self._at < len(self._tokens) and self._tokens[self._at][1] in signs:
            self._at += 1
            return self._tokens[self._at - 1][1]
        return None

    def _need(self, sign: str) -> None:
        if self._take(sign) is None:
            raise self._unknown()

    def _unknown(self) -> YqError:
        rest = " ".join(word for _, word in self._tokens[self._at :]) or "its end"
        return YqError(f"cannot read {rest!r} of {self._text!r}; install yq 4 for it")

    def _pipe(self) -> Expression:
        """Parse expressions between `|`."""
        left = self._assignment()
        while self._take("|"):
            left = _piped(left, self._assignment())
        return left

    def _assignment(self) -> Expression:
        """Parse an expression with `=` behind it, if there is one."""
        left = self._binary(0)
        if self._take("="):
            return _assigned(left, self._binary(0))
        return left

    def _binary(self, level: int) -> Expression:
        """Parse operators of one level, which bind less than those above."""
        if level == len(_LEVELS):
            return self._path()
        left = self._binary(level + 1)
        while (sign := self._take(*_LEVELS[level])) is not None:
            left = _applied(_BINARY[sign], left, self._binary(level + 1))
        return left

    def _path(self) -> Expression:
        """Parse a path: `.a`, `[0]`, `[]`."""
        found = self._primary()
        while True:
            if self._take("["):
                if self._take("]"):
                    found = _piped(found, _each)
                    continue
                found = _indexed(found, self._pipe())
                self._need("]")
            elif self._peek() == ".":
                self._at += 1
                found = _piped(found, self._after_dot())
            else:
                return found

    def _primary(self) -> Expression:
        """Parse what a path begins with."""
        kind, word = self._tokens[self._at] if self._peek() is not None else ("", "")
        self._at += 1
        if word == ".":
            return self._after_dot(is_first=True)
        if word == "...":  # `... comments=""`: PyYAML keeps none, so that clearing is nothing
            for expected in ("comments", "=", '""'):
                self._need(expected)
            return _identity
        if word in ("(", "["):
            return self._bracket(word)
        if kind == "name":
            return self._named(word)
        if kind not in ("text", "number"):
            self._at -= 1
            raise self._unknown()
        return _constant(json.loads(word))

    def _bracket(self, opened: str) -> Expression:
        """Parse what is in parentheses or makes a list."""
        if opened == "[" and self._take("]"):
            return _constant([])
        inner = self._pipe()
        self._need("]" if opened == "[" else ")")
        if opened == "(":
            return inner
        return lambda place: iter([Assignable([found.value for found in inner(place)])])

    def _after_dot(self, *, is_first: bool = False) -> Expression:
        """Parse a key behind a dot."""
        kind, word = self._tokens[self._at] if self._peek() is not None else ("", "")
        if kind in ("name", "text"):
            self._at += 1
            key = json.loads(word) if kind == "text" else word
            return _indexed(_identity, _constant(key))
        if is_first or word == "[":
            return _identity
        raise self._unknown()

    def _named(self, name: str) -> Expression:
        """Parse a literal or a function with its arguments."""
        literals: dict[str, Yaml] = {"true": True, "false": False, "null": None}
        if name in literals:
            return _constant(literals[name])
        if name in ("env", "strenv"):
            self._need("(")
            variable = self._tokens[self._at][1] if self._peek() is not None else ""
            self._at += 1
            self._need(")")
            return lambda _: iter([Assignable(os.environ.get(variable))])
        arguments: list[Expression] = []
        if self._take("("):
            arguments.append(self._pipe())
            while self._take(";"):
                arguments.append(self._pipe())
            self._need(")")
        match arguments:
            case [] if name in _PLAIN:
                return _PLAIN[name]
            case [one] if name in _OF_ONE:
                return lambda place: _OF_ONE[name](place, one)
            case [path, change] if name == "with":
                return lambda place: _with(place, path, change)
        raise YqError(f"{name!r} of {self._text!r} is not known here; install yq 4 for it")


def _identity(place: Assignable) -> Iterator[Assignable]:
    yield place


def _constant(value: Yaml) -> Expression:
    return lambda _: iter([Assignable(value)])


def _piped(left: Expression, right: Expression) -> Expression:
    return lambda place: (end for middle in left(place) for end in right(middle))


def _assigned(left: Expression, right: Expression) -> Expression:
    """Return the expression that assigns."""

    def assign(place: Assignable) -> Iterator[Assignable]:
        """Set each place on the left to the values on the right."""
        for target in left(place):
            for found in right(place):
                target.set(found.value)
        yield place

    return assign


def _each(place: Assignable) -> Iterator[Assignable]:
    """Yield the elements of a list or a mapping."""
    if isinstance(place.value, dict):
        yield from (Assignable(v, place.value, k) for k, v in place.value.items())
    elif isinstance(place.value, list):
        yield from (Assignable(v, place.value, i) for i, v in enumerate(place.value))
    elif place.value is not None:
        raise YqError(f"{spell(place.value)!r} has no elements")


def _indexed(base: Expression, index: Expression) -> Expression:
    """Return the expression that looks up an element."""

    def look_up(place: Assignable) -> Iterator[Assignable]:
        """Yield the elements under each index."""
        for outer in base(place):
            for found in index(place):
                key, value = found.value, outer.value
                if isinstance(value, dict):
                    yield Assignable(value.get(spell(key)), value, spell(key))
                elif isinstance(value, list) and isinstance(key, int):
                    yield Assignable(value[key] if key < len(value) else None, value, key)
                elif value is None:
                    yield Assignable(None)
                else:
                    raise YqError(f"{spell(value)!r} has no {spell(key)!r}")

    return look_up


def _applied(
    function: Callable[[Iterator[Assignable], Iterator[Assignable]], Iterator[Yaml]],
    left: Expression,
    right: Expression,
) -> Expression:
    """Return the expression that applies an operator."""
    return lambda place: (Assignable(value) for value in function(left(place), right(place)))


def _or_else(left: Iterator[Assignable], right: Iterator[Assignable]) -> Iterator[Yaml]:
    found = [place.value for place in left if truth(place.value)]
    yield from found or [place.value for place in right]


def _equal(left: Iterator[Assignable], right: Iterator[Assignable]) -> Iterator[Yaml]:
    others = [place.value for place in right]
    yield from (_same(place.value, other) for place in left for other in others)


def _same(left: Yaml, right: Yaml) -> bool:
    return left == right and isinstance(left, bool) == isinstance(right, bool)


def _unequal(left: Iterator[Assignable], right: Iterator[Assignable]) -> Iterator[Yaml]:
    yield from (not value for value in _equal(left, right))


def _both(left: Iterator[Assignable], right: Iterator[Assignable]) -> Iterator[Yaml]:
    others = [place.value for place in right]
    yield from (truth(place.value) and truth(other) for place in left for other in others)


def _either(left: Iterator[Assignable], right: Iterator[Assignable]) -> Iterator[Yaml]:
    others = [place.value for place in right]
    yield from (truth(place.value) or truth(other) for place in left for other in others)


def _plus(left: Iterator[Assignable], right: Iterator[Assignable]) -> Iterator[Yaml]:
    """Add numbers, lists or texts."""
    others = [place.value for place in right]
    for place in left:
        for other in others:
            a, b = place.value, other
            numbers = (int, float)
            if isinstance(a, numbers) and isinstance(b, numbers):
                yield a + b
            elif isinstance(a, list) and isinstance(b, list):
                yield [*a, *b]
            else:
                yield ("" if a is None else spell(a)) + ("" if b is None else spell(b))


_LEVELS = (("//",), ("or",), ("and",), ("==", "!="), ("+",))
_BINARY = {
    "//": _or_else,
    "==": _equal,
    "!=": _unequal,
    "and": _both,
    "or": _either,
    "+": _plus,
}


def _to_entries(place: Assignable) -> Iterator[Assignable]:
    """Yield the keys and values of a mapping as a list."""
    if place.value is not None and not isinstance(place.value, dict):
        raise YqError(f"to_entries: {spell(place.value)!r} is no mapping")
    items = (place.value or {}).items()
    yield Assignable([{"key": key, "value": value} for key, value in items])


def _keys(place: Assignable) -> Iterator[Assignable]:
    value = place.value
    yield Assignable(list(value) if isinstance(value, dict) else [])


def _has(place: Assignable, key: Expression) -> Iterator[Assignable]:
    """Yield whether a mapping has a key."""
    value = place.value
    for found in key(place):
        yield Assignable(isinstance(value, dict) and found.value in value)


def _select(place: Assignable, condition: Expression) -> Iterator[Assignable]:
    if any(truth(found.value) for found in condition(place)):
        yield place


def _with(place: Assignable, path: Expression, change: Expression) -> Iterator[Assignable]:
    """Change the places of a path."""
    for found in path(place):
        for _ in change(found):
            pass
    yield place


def _join(place: Assignable, by: Expression) -> Iterator[Assignable]:
    """Join a list to a text."""
    values = place.value if isinstance(place.value, list) else []
    for found in by(place):
        yield Assignable(spell(found.value).join("" if v is None else spell(v) for v in values))


def _test(place: Assignable, pattern: Expression) -> Iterator[Assignable]:
    for found in pattern(place):
        yield Assignable(re.search(spell(found.value), spell(place.value)) is not None)


_PLAIN: dict[str, Expression] = {
    "keys": _keys,
    "length": lambda place: iter([Assignable(_length(place.value))]),
    "to_entries": _to_entries,
    "tostring": lambda place: iter([Assignable(spell(place.value))]),
}
_OF_ONE: dict[str, Callable[[Assignable, Expression], Iterator[Assignable]]] = {
    "explode": lambda place, _: iter([place]),  # anchors are resolved when a file is read
    "has": _has,
    "join": _join,
    "select": _select,
    "test": _test,
}


def _length(value: Yaml) -> int:
    return len(value) if isinstance(value, dict | list | str) else 0


_TAG = "tag:yaml.org,2002:"
_OLD = tuple(_TAG + name for name in ("bool", "float", "int", "timestamp"))


class _Loader(yaml.SafeLoader):
    """Reads as YAML 1.2 does: `yes` and `on` are words, and numbers keep their spelling."""


class _Dumper(yaml.SafeDumper):
    """Writes numbers as they were."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rows if tag not in _OLD]
    for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    f"{_TAG}bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    f"{_TAG}float",
    re.compile(r"^[-+]?(?:\.\d+|\d+(?:\.\d*)?)(?:[eE][-+]?\d+)?$"),
    list("-+.0123456789"),
)


def _spelt(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Spelt:
    return Spelt(loader.construct_scalar(node))


_Loader.add_constructor(f"{_TAG}float", _spelt)
_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def _written(dumper: yaml.SafeDumper, number: float) -> yaml.ScalarNode:
    return dumper.represent_scalar(f"{_TAG}float", str(number))


for _kind in (Spelt, int, float):
    _Dumper.add_representer(_kind, _written)


def main(arguments: Sequence[str]) -> int:
    """Run one call of yq."""
    flags = [word for word in arguments if word.startswith("-") and word != "-"]
    words = [word for word in arguments if word not in flags and word not in ("eval", "e")]
    if not words and set(flags) & {"-P", "--prettyPrint"}:
        words = ["."]
    unknown = set(flags) - {"-i", "-r", "--inplace", "--unwrapScalar", "-e", "-P", "--prettyPrint"}
    if unknown or not words or len(words) > 2:  # noqa: PLR2004 - expression and file
        return _complain(f"cannot do {' '.join(arguments)!r}; install yq 4")
    is_in_place = bool(set(flags) & {"-i", "--inplace"})
    path = Path(words[1]) if len(words) > 1 and words[1] != "-" else None
    try:
        text = sys.stdin.read() if path is None else path.read_text(encoding="utf-8")
        document = yaml.load(text, _Loader)  # noqa: S506 - a safe loader
        found = list(compile_expression(words[0])(Assignable(document)))
    except (OSError, yaml.YAMLError, YqError) as error:
        return _complain(str(error))
    printed = "".join(_printed(place) for place in found)
    if is_in_place and path is not None:
        path.write_text(printed, encoding="utf-8")
    else:
        sys.stdout.write(printed)
    return 0


def _complain(text: str) -> int:
    sys.stderr.write(f"yq (stand-in): {text}\n")
    return 1


def _printed(place: Assignable) -> str:
    """Return a value as yq prints it."""
    value = place.value
    if isinstance(value, dict | list):
        return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 16)
    return f"{spell(value)}\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
