"""Scripts that call Megatron-LM's driver, read as data. Pure.

A recipe's script prepares a shell, fills an array `ARGUMENTS`, and hands it to the driver
`run_ci_test.sh`. The few statements that such scripts consist of are known here, and nothing is
executed: what is not known is named, so that bash can run the script as it stands.

Source: Megatron-LM tests/test_utils/recipes and
tests/functional_tests/shell_test_utils/run_ci_test.sh, d98e8a64dd.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pytest_megatron.workloads.recipe.model import DRIVER

CODE = "/opt/megatron-lm"  # where scripts expect the checkout
OWN = "\ue000"  # in a value: the number of the shell's process, which is another in each run
_STATUS, _COMPUTED = "\ue001", "\ue002"  # exit code of a command, and its output


class ScriptError(Exception):
    """A script is wrong: its line, from 0, and the problem."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(problem)
        self.line = line


@dataclass(slots=True)
class _Statement:
    """A simple command, in a line of its own or before `;`.

    Attributes:
        line: Where it begins, from 0.
        words: As written, with the lines on which they stand.
        operators: What a pipe, a list or a redirection has between its words.
        array: Elements of the array that its only word fills, likewise.
        is_array: Whether it does.
        is_open: Whether the parenthesis of the array is.
    """

    line: int
    words: list[tuple[int, str]] = field(default_factory=list)
    operators: list[str] = field(default_factory=list)
    array: list[tuple[int, str]] = field(default_factory=list)
    is_array: bool = False
    is_open: bool = False

    def take_element(self, line: int, said: str, *, is_word: bool) -> None:
        """Add what stands in the parenthesis, or close it.

        Raises:
            ScriptError: It is nothing that an array can have.
        """
        if is_word and "\n" in said:
            raise ScriptError(line, "a quote is not closed on its line; close it")
        if is_word:
            self.array.append((line, said))
        elif said not in ")\n":
            raise ScriptError(line, f"an array has {said!r}; quote it")
        self.is_open = said != ")"


_TOKEN = re.compile(
    r"""(?P<blank>(?:[ \t]|\\\n)+|\#[^\n]*)
    |(?P<end>\n|;(?!;))
    |(?P<operator>\|\||&&|;;|<<|>>|[|&<>()])
    |(?P<word>(?:'[^']*'|"(?:[^"\\]|\\.)*"|\\.|\$\((?:[^()'"]|'[^']*'|"[^"]*")*\)|`[^`]*`
        |\$\{[^}]*\}|[^ \t\n;|&<>()'"\\`])+)""",
    re.VERBOSE | re.DOTALL,
)
_PART = re.compile(
    r"""'(?P<single>[^']*)'|(?P<quote>")|\\(?P<escaped>.?)
    |\$(?:(?P<bare>[A-Za-z_]\w*|[$?])
        |\{(?P<name>[A-Za-z_]\w*)(?::(?P<operator>[-=])(?P<default>(?:[^{}"'`$]|\$\$)*))?\})
    |(?P<command>\$\(|`)|(?P<odd>\$[{'"])|(?P<plain>\$|[^"'\\$`]+)""",
    re.VERBOSE | re.DOTALL,
)
_NAMED = re.compile(r"([A-Za-z_]\w*)=").match
_ARRAY = re.compile(r"\"?\$\{(\w+)\[@\]\}\"?").fullmatch
_COMMAND = re.compile(r"\$\([^)]*\)?|`[^`]*`?").search


def _statements(text: str) -> list[_Statement]:
    """Split a script; what follows a here-document is not looked at.

    Raises:
        ScriptError: A quote or a parenthesis is not closed.
    """
    found, at = [_Statement(0)], 0
    while at < len(text):
        line, here = text.count("\n", 0, at), found[-1]
        if (token := _TOKEN.match(text, at)) is None:
            raise ScriptError(line, f"the quote {text[at]} is not closed; close it")
        kind, said, at = token.lastgroup, token[0], token.end()
        if kind == "blank":
            continue
        if here.is_open:
            here.take_element(line, said, is_word=kind == "word")
        elif kind == "end":
            found.append(_Statement(line))
        elif said == "(" and len(here.words) == 1 and text[at - 2] == "=":
            here.is_array = here.is_open = True
        elif kind == "operator":
            here.operators.append(said)
            if said == "<<":
                break
        else:
            here.line = here.line if here.words else line
            here.words.append((line, said))
    if found[-1].is_open:
        raise ScriptError(found[-1].line, "the parenthesis of an array is not closed; close it")
    return [one for one in found if one.words or one.operators]


class _UnknownError(Exception):
    """A statement is none that has a meaning here."""


_CONTROL = ("case", "do", "for", "function", "if", "select", "until", "while", "{", "[[")
_PURE = re.compile(r"[$`(]*\s*(?:basename|date|dirname|echo|hostname|pwd)\b[^;&<>`]*[)`]").fullmatch


class DriverCall:
    """What a script hands to the driver, found by following its statements.

    Attributes:
        arguments: Key to line, from 0, and value, as the driver takes them; none of a call that
            only bash can make.
        env: Variables that the script exports before the call, likewise.
        unset: Variables that it removes before.
        directory: Where it calls the driver; the checkout is `CODE`.
        removed: Directories that it removes afterwards.
        unknown: Line and text of the first statement that only bash can run, or None.
    """

    def __init__(self, text: str, env: Mapping[str, str]) -> None:
        """Read a script, its placeholders filled in, that calls the driver.

        Args:
            text: The script.
            env: The environment in which it would run.

        Raises:
            ScriptError: It cannot be read, calls the driver twice, or hands a command's output to
                it.
        """
        self.arguments: dict[str, tuple[int, str]] = {}
        self.env: dict[str, tuple[int, str]] = {}
        self.unset: frozenset[str] = frozenset()
        self.directory = CODE
        self.removed: list[str] = []
        self.unknown: tuple[int, str] | None = None
        self._is_called = False
        self._environment = env
        self._variables: dict[str, str] = {}
        self._arrays: dict[str, list[tuple[int, str]]] = {}
        self._exported: dict[str, tuple[int, str]] = {}
        self._unset: set[str] = set()
        self._here = CODE
        self._is_strict = False  # `set -u`
        self._known: dict[str, Callable[[Sequence[str], int], None]] = {
            **dict.fromkeys((":", "echo", "ls", "pwd", "true"), self._take_echo),
            "cd": self._take_cd,
            "exit": self._take_exit,
            "export": self._take_export,
            "rm": self._take_rm,
            "set": self._take_set,
            "unset": self._take_unset,
        }
        self._read(_statements(text), text.splitlines())

    def _read(self, statements: Sequence[_Statement], lines: Sequence[str]) -> None:
        """Follow the statements."""
        has_control = any(self._is_control(one) for one in statements)
        calls = [one for one in statements if self._calls_driver(one)]
        if len(calls) > 1 and not has_control:
            raise ScriptError(
                calls[1].line,
                "calls the driver a second time, expected one call; give each a recipe of its own",
            )
        for one in statements:
            try:
                self._take(one)
            except _UnknownError:
                self.unknown = self.unknown or (one.line, lines[one.line].strip())
        if not self._is_called:
            self.unknown = self.unknown or (0, f"no plain call of {DRIVER}")

    def _is_control(self, statement: _Statement) -> bool:
        first = statement.words[0][1] if statement.words else ""
        return first in _CONTROL or "(" in statement.operators

    def _calls_driver(self, statement: _Statement) -> bool:
        words = [word.strip("\"'") for _, word in statement.words if not _NAMED(word)]
        return any(word.endswith(DRIVER) for word in words[: 2 if words[:1] == ["bash"] else 1])

    def _take(self, statement: _Statement) -> None:
        """Follow a statement.

        Raises:
            _UnknownError: It has no meaning here.
        """
        words = [word for _, word in statement.words]
        if statement.operators:
            # `rm -rf ... || true` alone
            if statement.operators != ["||"] or words[-1] != "true":
                raise _UnknownError
            words = words[:-1]
        if self._calls_driver(statement):
            self._take_call(statement, statement.words)
            return
        name = words[0] if words else ""
        if statement.is_array and _NAMED(name):
            self._arrays[name.removesuffix("=")] = statement.array
        elif _NAMED(name):
            for word in words:
                self._assign(word, statement.line)
        else:
            if (taken := self._known.get(name)) is None:
                raise _UnknownError
            taken(words[1:], statement.line)

    def _assign(self, word: str, line: int) -> str:
        """Follow `NAME=value`, and return the name."""
        named = _NAMED(word)
        if named is None or word[named.end() :].startswith("~"):
            raise _UnknownError
        is_new = named[1] not in self._variables and named[1] not in self._environment
        if self._arrays and not self._is_called and not is_new:
            raise _UnknownError  # the array was filled with the value before
        value = self._value(word[named.end() :], line)
        if named[1] in self._exported:
            self._exported[named[1]] = line, value
        self._variables[named[1]] = value
        return named[1]

    def _take_export(self, words: Sequence[str], line: int) -> None:
        for word in words:
            name = self._assign(word, line) if _NAMED(word) else word
            if name.startswith("-"):
                raise _UnknownError
            value = self._variables.get(name, self._environment.get(name, ""))
            if _STATUS in value or _COMPUTED in value or OWN in value:
                raise _UnknownError
            self._exported[name] = line, value
            self._unset.discard(name)

    def _take_unset(self, words: Sequence[str], _line: int) -> None:
        for name in words:
            self._exported.pop(name, None)
            self._variables.pop(name, None)
            self._unset.add(name)

    def _take_echo(self, words: Sequence[str], line: int) -> None:
        for word in words:
            self._value(word, line)

    def _take_set(self, words: Sequence[str], line: int) -> None:
        for word in words:
            text = self._value(word, line)
            if "u" in text and text.startswith(("-", "+")):
                self._is_strict = text.startswith("-")

    def _take_cd(self, words: Sequence[str], line: int) -> None:
        if len(words) != 1 or (path := self._value(words[0], line)).startswith(("-", "~")):
            raise _UnknownError
        self._here = posixpath.normpath(posixpath.join(self._here, path))

    def _take_exit(self, words: Sequence[str], line: int) -> None:
        is_of_driver = len(words) == 1 and self._value(words[0], line) == _STATUS
        if not self._is_called or not is_of_driver:
            raise _UnknownError

    def _take_rm(self, words: Sequence[str], line: int) -> None:
        home = self._environment.get("HOME", "")
        for word in words:
            path = self._value(word, line)
            if path.startswith("-") or path == f"{home}/.netrc":
                continue
            if not self._is_called or not path.startswith("/"):
                raise _UnknownError
            self.removed.append(path)

    def _take_call(self, statement: _Statement, words: Sequence[tuple[int, str]]) -> None:
        """Follow `NAME=value bash .../run_ci_test.sh ${ARGUMENTS[@]}`."""
        names = [word.strip("\"'") for _, word in words]
        at = next(i for i, name in enumerate(names) if name.endswith(DRIVER))
        before = [i for i in range(at) if not _NAMED(names[i])]
        place = posixpath.normpath(posixpath.join(self._here, names[at]))
        if statement.operators or [names[i] for i in before] not in ([], ["bash"]):
            raise _UnknownError
        if place != f"{CODE}/{DRIVER}" or any(i != at - 1 for i in before):
            raise _UnknownError
        env = dict(self._exported)
        for _, word in words[: at - len(before)]:
            name = self._assign(word, statement.line)
            env[name] = statement.line, self._variables[name]
        found: dict[str, tuple[int, str]] = {}
        for line, word in words[at + 1 :]:
            array = _ARRAY(word)
            given = [(line, word)] if array is None else self._arrays.get(array[1], [])
            for inner_line, inner in given:
                self._add_argument(found, inner_line, inner)
        self.arguments, self.env, self.unset = found, env, frozenset(self._unset)
        self.directory, self._is_called = self._here, True

    def _add_argument(self, found: dict[str, tuple[int, str]], line: int, word: str) -> None:
        """Add a word of the driver's, as it takes it: without a layer of quotes."""
        if (command := _COMMAND(word)) is not None:  # the driver evaluates what it is given
            raise ScriptError(line, _not_a_value(command[0]))
        text = self._value(word, line)
        key, is_there, value = text.partition("=")
        if not is_there or not key.isidentifier():
            raise ScriptError(line, f"{text!r} is no argument of the driver, expected KEY=VALUE")
        if _COMPUTED in value or _STATUS in value:
            raise ScriptError(line, _not_a_value(key))
        for quote in "\"'":
            value = value.removesuffix(quote).removeprefix(quote)
        if set(value) & set("$;|&<>()*?~[]{}\"'\\!#"):
            raise _UnknownError
        found[key] = (line, value)

    def _value(self, word: str, line: int) -> str:
        """Return a word as the shell would expand it.

        Raises:
            ScriptError: A variable is not set, and the script demands it.
            _UnknownError: Only a shell knows.
        """
        found, is_quoted, at = "", False, 0
        while at < len(word):
            part = _PART.match(word, at)
            if part is None or (is_quoted and word[at] == "'"):
                found, at = found + word[at], at + 1
                continue
            at = part.end()
            if part["quote"]:
                is_quoted = not is_quoted
            elif part["bare"] or part["name"]:
                found += self._variable(part, line)
            elif part["command"]:
                if _PURE(word[part.start() :].rstrip('"')) is None:
                    raise _UnknownError
                return found + _COMPUTED
            elif part["odd"]:
                raise _UnknownError
            elif (char := part["escaped"]) is not None:
                found += char if not is_quoted or char in '"\\$`' else f"\\{char}"
            else:
                found += part["plain"] or part["single"] or ""
        return found

    def _variable(self, part: re.Match[str], line: int) -> str:
        """Return the value of a variable, or its default."""
        name, default = part["bare"] or part["name"], part["default"]
        if name in ("$", "?"):
            return OWN if name == "$" else _STATUS
        is_known = name not in self._unset
        value = self._variables.get(name, self._environment.get(name) if is_known else None)
        if not value and default is not None:
            value = default.replace("$$", OWN)
            if part["operator"] == "=":
                self._variables[name] = value
        if value is None and self._is_strict:
            raise ScriptError(
                line, f"${name} is not set, and the script ends there (set -u); export it"
            )
        return value or ""


def _not_a_value(text: str) -> str:
    return (
        f"the driver is given the output of a command, {text!r}, expected a value; write the "
        f"value, or have bash run the script: -o megatron_script=bash"
    )
