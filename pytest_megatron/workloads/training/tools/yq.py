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
            left = _applied(sign, left, self._binary(level + 1))
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
                return lambda place: iter([Assignable(_PLAIN[name](place.value))])
            case [one] if name in _OF_ONE:
                return _OF_ONE[name](one)
            case [path, change] if name == "with":
                return lambda place: _with(place, path, change)
        raise YqError(f"{name!r} of {self._text!r} is not known here; install yq 4 for it")


def _identity(assignable: Assignable) -> Iterator[Assignable]:
    yield assignable


def _constant(value: Yaml) -> Expression:
    return lambda _: iter([Assignable(value)])


def _piped(left: Expression, right: Expression) -> Expression:
    return lambda place: (end for middle in left(place) for end in right(middle))


def _assigned(left: Expression, right: Expression) -> Expression:
    """Return the expression that assigns."""

    def assign(assignable: Assignable) -> Iterator[Assignable]:
        """Set each place on the left to the values on the right."""
        for target in left(assignable):
            for found in right(assignable):
                target.set(found.value)
        yield assignable

    return assign


def _each(assignable: Assignable) -> Iterator[Assignable]:
    """Yield the elements of a list or a mapping."""
    if isinstance(assignable.value, dict):
        yield from (Assignable(v, assignable.value, k) for k, v in assignable.value.items())
    elif isinstance(assignable.value, list):
        yield from (Assignable(v, assignable.value, i) for i, v in enumerate(assignable.value))
    elif assignable.value is not None:
        raise YqError(f"{spell(assignable.value)!r} has no elements")


def _indexed(base: Expression, index: Expression) -> Expression:
    """Return the expression that looks up an element."""

    def look_up(assignable: Assignable) -> Iterator[Assignable]:
        """Yield the elements under each index."""
        for outer in base(assignable):
            for found in index(assignable):
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


def _applied(sign: str, left: Expression, right: Expression) -> Expression:
    """Return the expression that applies an operator to each pair of values."""
    if sign == "//":
        return lambda place: iter([*filter(_is_true, left(place))] or right(place))
    function = _BINARY[sign]

    def apply(assignable: Assignable) -> Iterator[Assignable]:
        """Yield the results, those of a value on the left together."""
        others = list(right(assignable))
        for one in left(assignable):
            yield from (Assignable(function(one.value, other.value)) for other in others)

    return apply


def _is_true(assignable: Assignable) -> bool:
    return truth(assignable.value)


def _same(left: Yaml, right: Yaml) -> bool:
    return left == right and isinstance(left, bool) == isinstance(right, bool)


def _plus(left: Yaml, right: Yaml) -> Yaml:
    """Add numbers, lists or texts."""
    if isinstance(left, int | float) and isinstance(right, int | float):
        return left + right
    if isinstance(left, list) and isinstance(right, list):
        return [*left, *right]
    return "".join(spell(value) for value in (left, right) if value is not None)


_LEVELS = (("//",), ("or",), ("and",), ("==", "!="), ("+",))
_BINARY: dict[str, Callable[[Yaml, Yaml], Yaml]] = {
    "==": _same,
    "!=": lambda left, right: not _same(left, right),
    "and": lambda left, right: truth(left) and truth(right),
    "or": lambda left, right: truth(left) or truth(right),
    "+": _plus,
}


def _to_entries(value: Yaml) -> Yaml:
    """Return the keys and values of a mapping as a list."""
    if value is not None and not isinstance(value, dict):
        raise YqError(f"to_entries: {spell(value)!r} is no mapping")
    return [{"key": key, "value": one} for key, one in (value or {}).items()]


def _with(assignable: Assignable, path: Expression, change: Expression) -> Iterator[Assignable]:
    """Change the places of a path."""
    for found in path(assignable):
        for _ in change(found):
            pass
    yield assignable


def _join(value: Yaml, by: Yaml) -> Yaml:
    """Join a list to a text."""
    values = value if isinstance(value, list) else []
    return spell(by).join("" if one is None else spell(one) for one in values)


_PLAIN: dict[str, Callable[[Yaml], Yaml]] = {
    "keys": lambda value: list(value) if isinstance(value, dict) else [],
    "length": lambda value: len(value) if isinstance(value, dict | list | str) else 0,
    "to_entries": _to_entries,
    "tostring": spell,
}


def _by_value(function: Callable[[Yaml, Yaml], Yaml]) -> Callable[[Expression], Expression]:
    """Return what makes an expression of a function of a place's value and an argument."""
    return lambda argument: (
        lambda place: (Assignable(function(place.value, found.value)) for found in argument(place))
    )


def _select(condition: Expression) -> Expression:
    return lambda place: iter([place] if any(map(_is_true, condition(place))) else [])


_OF_ONE: dict[str, Callable[[Expression], Expression]] = {
    "explode": lambda _: _identity,  # anchors are resolved when a file is read
    "has": _by_value(lambda value, key: isinstance(value, dict) and key in value),
    "join": _by_value(_join),
    "select": _select,
    "test": _by_value(lambda value, pattern: bool(re.search(spell(pattern), spell(value)))),
}


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


def _printed(assignable: Assignable) -> str:
    """Return a value as yq prints it."""
    value = assignable.value
    if isinstance(value, dict | list):
        return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 16)
    return f"{spell(value)}\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
