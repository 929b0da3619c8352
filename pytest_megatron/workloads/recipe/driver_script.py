"""Scripts that call Megatron-LM's driver, read as data. Pure.

A recipe's script prepares a shell, fills an array `ARGUMENTS`, and hands it to the driver
`run_ci_test.sh`. The plain lines that such scripts consist of are known here, and nothing is
executed: whatever else a line is, only bash can run the script.

Source: Megatron-LM tests/test_utils/recipes and
tests/functional_tests/shell_test_utils/run_ci_test.sh, d98e8a64dd.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Mapping, Sequence

from pytest_megatron.workloads.recipe.model import DRIVER

CODE = "/opt/megatron-lm"  # where scripts expect the checkout
OWN = "\ue000"  # in a value: the number of the shell's process, which is another in each run
_STATUS, _COMPUTED = "\ue001", "\ue002"  # exit code of the driver, and output of a command
_ARRAY, _CALLED_WITH = "ARGUMENTS=", "${ARGUMENTS[@]}"


class ScriptError(Exception):
    """A script is wrong: its line, from 0, and the problem."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line, self.text = line, text


class OnlyBashError(ScriptError):
    """Only bash can run a script: the line, and what is on it or lacks."""


class _UnknownError(Exception):
    """A line is none that is known."""


_OPERATORS = "();<>|&"
_COMMENT = re.compile(r"^\s*#.*|\s#[^\"']*$")
_NAMED = re.compile(r"([A-Za-z_]\w*)=").match
_FROM_ECHO = re.compile(
    r"\s*(\w+)=\$\((?:echo|pwd)\b[^;&|<>`$()]*(?:\| *sed\b[^;&|<>`$()]*)?\)\s*"
).fullmatch
_COMMAND = re.compile(r"\$\([^)]*\)?|`[^`]*`?").search
_VARIABLE = re.compile(
    r"\$(?:(?P<bare>[A-Za-z_]\w*|[$?])"
    r"|\{(?P<name>[A-Za-z_]\w*)(?::(?P<operator>[-=])(?P<default>(?:[^{}$]|\$\$)*))?\})"
)
_OF_A_SHELL = frozenset("$;|&<>()*?~[]{}\"'\\`!#")  # in a value, which the driver evaluates
_HARMLESS = (":", "echo", "ls", "set")
_NETRC = ("${HOME}/.netrc", "$HOME/.netrc")


class DriverCall:
    """What a script hands to the driver, found by following its lines.

    Attributes:
        arguments: Key to line, from 0, and value, as the driver takes them.
        env: Variables that the script exports before the call, likewise.
        unset: Variables that it removes before.
        directory: Where it calls the driver; the checkout is `CODE`.
        removed: Directories that it removes afterwards.
    """

    def __init__(self, text: str, env: Mapping[str, str]) -> None:
        """Read a script, its placeholders filled in, that calls the driver.

        Args:
            text: The script.
            env: The environment in which it would run.

        Raises:
            OnlyBashError: It does more than is known.
            ScriptError: A quote of `ARGUMENTS` is not closed, it has the output of a command, or
                the driver is called twice.
        """
        self.arguments: dict[str, tuple[int, str]] = {}
        self.env: dict[str, tuple[int, str]] = {}
        self.unset: set[str] = set()
        self.directory = CODE
        self.removed: list[str] = []
        self._environment = env
        self._variables: dict[str, str] = {}
        self._is_open = self._is_called = self._is_strict = False
        for number, line in enumerate(text.splitlines()):
            try:
                self._take(number, line)
            except ValueError:
                if self._is_open:
                    raise ScriptError(number, "a quote is not closed on its line") from None
                raise OnlyBashError(number, line.strip()) from None
            except _UnknownError:
                raise OnlyBashError(number, line.strip()) from None
        if not self._is_called:
            raise OnlyBashError(0, f"no plain call of {DRIVER}")

    def _take(self, number: int, line: str) -> None:
        """Follow a line.

        Raises:
            _UnknownError: The line has a form that is unknown.
        """
        if found := _FROM_ECHO(line):
            self._variables[found[1]] = _COMPUTED
            return
        line = _COMMENT.sub("", line)
        if self._is_open and (command := _COMMAND(line)):
            raise ScriptError(number, _not_a_value(command[0]))
        words = _words(line)
        if words[:2] == [_ARRAY, "("] and not self.arguments:
            self._is_open, words = True, words[2:]
        if self._is_open:
            self._is_open = words[-1:] != [")"]
            for word in words if self._is_open else words[:-1]:
                self._add_argument(number, word)
            return
        if words and words[0] in _HARMLESS:
            self._take_harmless(words)
        elif words[:1] == ["rm"]:
            self._remove(words[1:-2] if words[-2:] == ["||", "true"] else words[1:])
        elif words[:1] == ["exit"]:
            if not self._is_called or [*map(self._value, words[1:])] != [_STATUS]:
                raise _UnknownError
        else:
            self._prepare(number, words)

    def _take_harmless(self, words: Sequence[str]) -> None:
        """Follow a command that changes nothing but what a variable is, or that it must be set."""
        for text in map(self._value, words[1:]):
            if words[0] == "set" and "u" in text and text[0] in "-+":
                self._is_strict = text[0] == "-"

    def _prepare(self, number: int, words: Sequence[str]) -> None:
        """Follow a line that prepares the call, or the call."""
        match words:
            case ["cd", path] if not self._is_called and path[0] not in "-~$":
                self.directory = posixpath.normpath(posixpath.join(self.directory, path))
            case ["unset", *names] if not self._is_called:
                self.unset.update(names)
                for name in names:
                    self.env.pop(name, None)
                    self._variables.pop(name, None)
            case ["export", *rest] if not self._is_called:
                for word in rest:
                    self._export(number, word)
            case [*before, driver, arguments] if arguments == _CALLED_WITH:
                if self._is_called:
                    text = "calls the driver a second time, expected one call; give each a recipe"
                    raise ScriptError(number, text)
                self._call(before, driver)
            case _:
                for word in words:
                    name, _ = self._assign(word)
                    if name in self.env or name in self._environment:
                        raise _UnknownError  # the training has it, too

    def _assign(self, word: str) -> tuple[str, str]:
        """Follow `NAME=value`, and return both."""
        named = _NAMED(word)
        if named is None or word[named.end() :].startswith("~"):
            raise _UnknownError
        name, value = named[1], self._value(word[named.end() :])
        self._variables[name] = value
        return name, value

    def _export(self, number: int, word: str) -> None:
        name, value = self._assign(word)
        if {OWN, _STATUS, _COMPUTED} & set(value):
            raise _UnknownError
        self.env[name] = number, value
        self.unset.discard(name)

    def _remove(self, paths: Sequence[str]) -> None:
        """Follow `rm`: of the `.netrc`, which stays, or of a directory after the call."""
        for path in paths:
            if path in _NETRC or path.startswith("-"):
                continue
            if not self._is_called or not (value := self._value(path)).startswith("/"):
                raise _UnknownError
            self.removed.append(value)

    def _call(self, before: Sequence[str], driver: str) -> None:
        """Follow `bash .../run_ci_test.sh ${ARGUMENTS[@]}`."""
        place = posixpath.normpath(posixpath.join(self.directory, driver))
        if [*before] not in ([], ["bash"]) or place != f"{CODE}/{DRIVER}":
            raise _UnknownError
        self._is_called = True

    def _add_argument(self, number: int, word: str) -> None:
        """Add a word of the driver's, as it takes it: without a layer of quotes."""
        key, is_there, value = self._value(word).partition("=")
        for quote in "\"'":
            value = value.removesuffix(quote).removeprefix(quote)
        if {_STATUS, _COMPUTED} & set(value):
            raise ScriptError(number, _not_a_value(key))
        if not is_there or not key.isidentifier() or set(value) & _OF_A_SHELL:
            raise _UnknownError
        self.arguments[key] = number, value

    def _value(self, word: str) -> str:
        """Return a word with its variables filled in.

        Raises:
            _UnknownError: One is not set, or only a shell knows.
        """
        if set(_VARIABLE.sub("", word)) & set("$`\\"):
            raise _UnknownError
        return _VARIABLE.sub(self._variable, word)

    def _variable(self, found: re.Match[str]) -> str:
        """Return the value of a variable, or its default."""
        name, default = found["bare"] or found["name"], found["default"]
        if name in ("$", "?"):
            return OWN if name == "$" else _STATUS
        around = None if name in self.unset else self._environment.get(name)
        value = self._variables.get(name, around)
        if not value and default is not None:
            value = default.replace("$$", OWN)
            if found["operator"] == "=":
                self._variables[name] = value
        if value is None and self._is_strict:  # the script ends there
            raise _UnknownError
        return value or ""


def _words(line: str) -> list[str]:
    """Return the words of a line, without a layer of quotes.

    Raises:
        _UnknownError: It goes on below, or has an operator or a `$` in single quotes.
        ValueError: A quote is not closed.
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars=_OPERATORS)
    lexer.whitespace_split, lexer.commenters = True, ""
    words = list(lexer)
    operators = [word for word in words if not word.strip(_OPERATORS)]
    is_array = operators in (["("], [")"], ["(", ")"])
    is_removal = operators == ["||"] and words[-2:] == ["||", "true"]
    if line.endswith("\\") or ("'" in line and "$" in line):
        raise _UnknownError
    if operators and not is_array and not is_removal:
        raise _UnknownError
    return words


def _not_a_value(text: str) -> str:
    return (
        f"the driver is given the output of a command, {text!r}, expected a value; write the "
        f"value, or have bash run the script: -o megatron_script=bash"
    )
