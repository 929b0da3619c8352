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


@dataclass(frozen=True, slots=True)
class _WordPart:
    """Part of a word: a text, or what the shell puts in its place.

    Attributes:
        kind: `text`, `variable`, `array`, `command` or `odd`.
        text: The text, or the name of a variable.
        default: What follows the operator of `${NAME:-default}`.
        is_kept: Whether the variable keeps that default.
    """

    kind: str
    text: str
    default: str | None = None
    is_kept: bool = False


_Word = tuple[_WordPart, ...]


@dataclass(slots=True)
class _Statement:
    """A simple command, in a line of its own or before `;`.

    Attributes:
        line: Where it begins, from 0.
        words: With the lines on which they stand.
        array: Elements of the array that its only word fills, or None.
        operators: What a pipe, a list or a redirection has between its words.
    """

    line: int
    words: list[tuple[int, _Word]] = field(default_factory=list)
    array: list[tuple[int, _Word]] | None = None
    operators: list[str] = field(default_factory=list)


_BLANK = re.compile(r"(?:[ \t]|\\\n)+").match
_OPERATOR = re.compile(r"\|\||&&|;;|<<|>>|[|&<>()]").match
_PLAIN = re.compile(r"[^ \t\n;|&<>()\"'\\$`]+").match
_PLAIN_QUOTED = re.compile(r"[^\"\\$`]+").match
_VARIABLE = re.compile(
    r"\$(?:(?P<bare>[A-Za-z_]\w*|[$?])"
    r"|\{(?P<name>[A-Za-z_]\w*)(?P<all>\[@\])?(?::?(?P<operator>[-=])(?P<default>(?:[^{}\"'`$]|\$\$)*))?\})"
).match
_NAMED = re.compile(r"([A-Za-z_]\w*)=").match


class _Lexer:
    """Splits a script into statements."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._is_in_array = False

    def statements(self) -> list[_Statement]:
        """Return all statements; what follows a here-document is not looked at.

        Raises:
            ScriptError: A quote or a parenthesis is not closed.
        """
        found = [_Statement(0)]
        while self._at < len(self._text):
            char = self._text[self._at]
            if (blank := _BLANK(self._text, self._at)) is not None:
                self._at = blank.end()
            elif char == "#":
                self._skip_comment()
            elif char == "\n" or (char == ";" and not self._text.startswith(";;", self._at)):
                self._at += 1
                found.append(_Statement(self._line()))
            elif (operator := _OPERATOR(self._text, self._at)) is not None:
                self._at = operator.end()
                found[-1].operators.append(operator[0])
                if operator[0] == "<<":
                    break
            else:
                self._take_word(found[-1])
        return [one for one in found if one.words or one.operators]

    def _take_word(self, statement: _Statement) -> None:
        """Add a word, and the elements of the array that it fills."""
        line = self._line()
        if not statement.words:
            statement.line = line
        word = self._word()
        statement.words.append((line, word))
        name = _NAMED(word[0].text) if len(word) == 1 else None
        if name is not None and name.end() == len(word[0].text) and self._is_at("("):
            statement.array = self._array()

    def _array(self) -> list[tuple[int, _Word]]:
        """Return the elements in parentheses."""
        opened, found = self._line(), list[tuple[int, _Word]]()
        self._at += 1
        self._is_in_array = True
        while not self._is_at(")"):
            if self._at >= len(self._text):
                raise ScriptError(opened, "the parenthesis of an array is not closed; close it")
            if self._is_at("#"):
                self._skip_comment()
            elif self._text[self._at].isspace() or self._text.startswith("\\\n", self._at):
                self._at += 1 + (self._text[self._at] == "\\")
            elif (operator := _OPERATOR(self._text, self._at)) or self._is_at(";"):
                text = ";" if operator is None else operator[0]
                raise ScriptError(self._line(), f"an array has {text!r}; quote it")
            else:
                found.append((self._line(), self._word()))
        self._at += 1
        self._is_in_array = False
        return found

    def _word(self) -> _Word:
        found: list[_WordPart] = []
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == "'":
                end = self._end_of("'")
                self._check_line(self._at, end)
                found.append(_WordPart("text", self._text[self._at + 1 : end]))
                self._at = end + 1
            elif char == '"':
                found += self._quoted()
            elif char in "$`":
                found.append(self._expansion())
            elif char == "\\" and not self._text.startswith("\\\n", self._at):
                found.append(_WordPart("text", self._text[self._at + 1 : self._at + 2]))
                self._at += 2
            elif (plain := _PLAIN(self._text, self._at)) is not None:
                found.append(_WordPart("text", plain[0]))
                self._at = plain.end()
            else:
                break
        return tuple(found) or (_WordPart("text", ""),)

    def _quoted(self) -> list[_WordPart]:
        """Return what double quotes hold."""
        opened, found = self._line(), [_WordPart("text", "")]
        self._at += 1
        while not self._is_at('"'):
            if self._at >= len(self._text):
                raise ScriptError(opened, 'the quote " is not closed; close it')
            char = self._text[self._at]
            if char == "\\":
                escaped = self._text[self._at + 1 : self._at + 2]
                kept = escaped if escaped in '"\\$`' else f"\\{escaped}"
                found.append(_WordPart("text", "" if escaped == "\n" else kept))
                self._at += 2
            elif (plain := _PLAIN_QUOTED(self._text, self._at)) is not None:
                self._check_line(self._at, plain.end())
                found.append(_WordPart("text", plain[0]))
                self._at = plain.end()
            else:
                found.append(self._expansion())
        self._at += 1
        return found

    def _check_line(self, begin: int, end: int) -> None:
        """Refuse quotes over several lines in an array: one of them has no end."""
        if self._is_in_array and "\n" in self._text[begin:end]:
            raise ScriptError(self._line(), "a quote is not closed on its line; close it")

    def _expansion(self) -> _WordPart:
        """Return what begins with a dollar sign or a backquote."""
        if (match := _VARIABLE(self._text, self._at)) is not None:
            self._at = match.end()
            name = match["bare"] or match["name"]
            if match["all"]:
                return _WordPart("array" if match["default"] is None else "odd", name)
            return _WordPart("variable", name, match["default"], match["operator"] == "=")
        at = self._at
        pair = {"$(": "()", "${": "{}"}.get(self._text[at : at + 2])
        if pair is not None:
            self._at = self._end_of_pair(pair)
        elif self._is_at("`"):
            self._at = self._end_of("`") + 1
        else:  # a dollar sign of its own, or a quote in which backslashes count
            self._at += 1
            return _WordPart("odd" if self._is_at("'") or self._is_at('"') else "text", "$")
        text = self._text[at : self._at]
        return _WordPart("odd" if text.startswith("${") else "command", text)

    def _end_of_pair(self, pair: str) -> int:
        """Return the place behind the parenthesis or brace that closes the one here."""
        opened, at, depth = self._line(), self._at + 1, 0
        while at < len(self._text):
            char = self._text[at]
            depth += (char == pair[0]) - (char == pair[1])
            at += 2 if char == "\\" else 1
            if not depth:
                return at
            if char in "'\"":
                end = self._text.find(char, at)
                at = len(self._text) if end < 0 else end + 1
        raise ScriptError(opened, f"'${pair[0]}' is not closed, or a quote in it; close it")

    def _end_of(self, quote: str) -> int:
        """Return the place of the quote that closes the one here."""
        end = self._text.find(quote, self._at + 1)
        if end < 0:
            raise ScriptError(self._line(), f"the quote {quote} is not closed; close it")
        return end

    def _skip_comment(self) -> None:
        end = self._text.find("\n", self._at)
        self._at = len(self._text) if end < 0 else end

    def _is_at(self, char: str) -> bool:
        return self._text.startswith(char, self._at)

    def _line(self) -> int:
        return self._text.count("\n", 0, self._at)


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverCall:
    """What a script hands to the driver.

    Attributes:
        arguments: Key to line, from 0, and value, as the driver takes them.
        env: Variables that the script exports, likewise.
        unset: Variables that it removes.
        directory: Where it calls the driver; the checkout is `CODE`.
        removed: Directories that it removes afterwards.
        unknown: Line and text of the first statement that only bash can run, or None.
    """

    arguments: Mapping[str, tuple[int, str]]
    env: Mapping[str, tuple[int, str]]
    unset: frozenset[str]
    directory: str
    removed: tuple[str, ...] = ()
    unknown: tuple[int, str] | None = None


def read_script(text: str, env: Mapping[str, str]) -> DriverCall:
    """Read a script, its placeholders filled in, that calls the driver.

    Args:
        text: The script.
        env: The environment in which it would run.

    Raises:
        ScriptError: It cannot be read, calls the driver twice, or hands a command's output to it.
    """
    return _Reader(text, env).read()


class _UnknownError(Exception):
    """A statement is none that has a meaning here."""


_QUIET = ("echo", "ls", "pwd", "set", "true")  # what they do is over when they end
_CONTROL = ("case", "do", "for", "function", "if", "select", "until", "while", "{", "[[")
_PURE = re.compile(r"[$`(]*\s*(?:basename|date|dirname|echo|hostname|pwd)\b[^;&<>`]*[)`]").fullmatch


class _Reader:
    """Follows the statements of one script."""

    def __init__(self, text: str, env: Mapping[str, str]) -> None:
        self._lines = text.splitlines()
        self._statements = _Lexer(text).statements()
        self._env = env
        self._variables: dict[str, str] = {}
        self._arrays: dict[str, list[tuple[int, _Word]]] = {}
        self._exported: dict[str, tuple[int, str]] = {}
        self._unset: set[str] = set()
        self._removed: list[str] = []
        self._directory = CODE
        self._is_strict = False  # `set -u`
        self._unknown: tuple[int, str] | None = None
        self._call: DriverCall | None = None

    def read(self) -> DriverCall:
        """Return the call; one without arguments if only bash can make it."""
        has_control = any(self._is_control(one) for one in self._statements)
        calls = [one for one in self._statements if self._calls_driver(one)]
        if len(calls) > 1 and not has_control:
            raise ScriptError(
                calls[1].line,
                f"calls the driver a second time, after line {calls[0].line + 1} of the script; "
                f"give each call a recipe of its own",
            )
        for one in self._statements:
            try:
                self._take(one)
            except _UnknownError:
                self._unknown = self._unknown or (one.line, self._lines[one.line].strip())
        call = self._call or DriverCall(
            arguments={}, env={}, unset=frozenset(), directory=self._directory
        )
        unknown = self._unknown
        if self._call is None and unknown is None:
            unknown = (0, f"no plain call of {DRIVER}")
        return DriverCall(
            arguments=call.arguments,
            env=call.env,
            unset=call.unset,
            directory=call.directory,
            removed=tuple(self._removed),
            unknown=unknown,
        )

    def _is_control(self, statement: _Statement) -> bool:
        first = statement.words[0][1] if statement.words else ()
        return _text_of(first) in _CONTROL or "(" in statement.operators

    def _calls_driver(self, statement: _Statement) -> bool:
        return any(_text_of(word).endswith(DRIVER) for _, word in statement.words)

    def _take(self, statement: _Statement) -> None:
        """Follow a statement.

        Raises:
            _UnknownError: It has no meaning here.
        """
        words = [word for _, word in statement.words]
        if statement.operators:
            # `rm -rf ... || true` alone
            if statement.operators != ["||"] or _text_of(words[-1]) != "true":
                raise _UnknownError
            words = words[:-1]
        if self._calls_driver(statement):
            self._take_call(statement, statement.words)
            return
        name = _text_of(words[0]) if words else ""
        if statement.array is not None and len(words) == 1:
            self._arrays[name.removesuffix("=")] = statement.array
        elif _NAMED(name):
            for word in words:
                self._assign(word, statement.line)
        else:
            taken: Callable[[Sequence[_Word], int], None] | None
            taken = getattr(self, f"_take_{name}", None) if name.isalpha() else None
            if name == ":":
                taken = self._take_echo
            if taken is None:
                raise _UnknownError
            taken(words[1:], statement.line)

    def _assign(self, word: _Word, line: int) -> str:
        """Follow `NAME=value`, and return the name."""
        named = _NAMED(word[0].text)
        if named is None or word[0].kind != "text":
            raise _UnknownError
        rest = (_WordPart("text", word[0].text[named.end() :]), *word[1:])
        value = self._value(rest, line)
        if named[1] in self._exported:
            self._exported[named[1]] = line, value
        self._variables[named[1]] = value
        return named[1]

    def _take_export(self, words: Sequence[_Word], line: int) -> None:
        for word in words:
            name = self._assign(word, line) if _NAMED(_text_of(word)) else _text_of(word)
            if name.startswith("-"):
                raise _UnknownError
            value = self._variables.get(name, self._env.get(name, ""))
            if _STATUS in value or _COMPUTED in value or OWN in value:
                raise _UnknownError
            self._exported[name] = line, value
            self._unset.discard(name)

    def _take_unset(self, words: Sequence[_Word], _line: int) -> None:
        for name in map(_text_of, words):
            self._exported.pop(name, None)
            self._variables.pop(name, None)
            self._unset.add(name)

    def _take_echo(self, words: Sequence[_Word], line: int) -> None:
        for word in words:
            self._value(word, line)

    _take_ls = _take_pwd = _take_true = _take_echo

    def _take_set(self, words: Sequence[_Word], line: int) -> None:
        for word in words:
            text = self._value(word, line)
            if "u" in text and text.startswith(("-", "+")):
                self._is_strict = text.startswith("-")

    def _take_cd(self, words: Sequence[_Word], line: int) -> None:
        if len(words) != 1 or (path := self._value(words[0], line)).startswith(("-", "~")):
            raise _UnknownError
        self._directory = posixpath.normpath(posixpath.join(self._directory, path))

    def _take_exit(self, words: Sequence[_Word], line: int) -> None:
        is_of_driver = len(words) == 1 and self._value(words[0], line) == _STATUS
        if self._call is None or not is_of_driver:
            raise _UnknownError

    def _take_rm(self, words: Sequence[_Word], line: int) -> None:
        home = self._env.get("HOME", "")
        for word in words:
            path = self._value(word, line)
            if path.startswith("-") or path == f"{home}/.netrc":
                continue
            if self._call is None or not path.startswith("/"):
                raise _UnknownError
            self._removed.append(path)

    def _take_call(self, statement: _Statement, words: Sequence[tuple[int, _Word]]) -> None:
        """Follow `NAME=value bash .../run_ci_test.sh ${ARGUMENTS[@]}`."""
        names = [_text_of(word) for _, word in words]
        at = next(i for i, name in enumerate(names) if name.endswith(DRIVER))
        before = [i for i in range(at) if not _NAMED(names[i])]
        place = posixpath.normpath(posixpath.join(self._directory, names[at]))
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
            if len(kinds := [p for p in word if p != _WordPart("text", "")]) != 1 or (
                kinds[0].kind != "array"
            ):
                self._add_argument(found, line, word)
                continue
            for inner_line, inner in self._arrays.get(kinds[0].text, ()):
                self._add_argument(found, inner_line, inner)
        self._call = DriverCall(
            arguments=found,
            env=env,
            unset=frozenset(self._unset),
            directory=self._directory,
        )

    def _add_argument(self, found: dict[str, tuple[int, str]], line: int, word: _Word) -> None:
        """Add a word of the driver's, as it takes it: without a layer of quotes."""
        command = next((piece.text for piece in word if piece.kind == "command"), None)
        if command is not None:
            raise ScriptError(line, _not_a_value(command))
        text = self._value(word, line)
        key, is_there, value = text.partition("=")
        if not is_there or not key.isidentifier():
            raise ScriptError(line, f"{text!r} is no argument of the driver, expected KEY=VALUE")
        if _COMPUTED in value or _STATUS in value:
            raise ScriptError(line, _not_a_value(key))
        for quote in "\"'":
            value = value.removesuffix(quote).removeprefix(quote)
        if "`" in value or "$(" in value:  # the driver evaluates what it is given
            raise ScriptError(line, _not_a_value(value))
        if set(value) & set("$;|&<>()*?~[]{}\"'\\!#"):
            raise _UnknownError
        found[key] = (line, value)

    def _value(self, word: _Word, line: int) -> str:
        """Return a word as the shell would expand it.

        Raises:
            ScriptError: A variable is not set, and the script demands it.
            _UnknownError: Only a shell knows.
        """
        return "".join(self._expanded(piece, line) for piece in word)

    def _expanded(self, piece: _WordPart, line: int) -> str:
        if piece.kind == "text":
            return piece.text
        if piece.kind == "command" and _PURE(piece.text) is not None:
            return _COMPUTED
        if piece.kind != "variable":
            raise _UnknownError
        if piece.text in "$?":
            return OWN if piece.text == "$" else _STATUS
        is_known = piece.text not in self._unset
        value = self._variables.get(piece.text, self._env.get(piece.text) if is_known else None)
        if not value and piece.default is not None:
            value = piece.default.replace("$$", OWN)
            if piece.is_kept:
                self._variables[piece.text] = value
        if value is None and self._is_strict:
            raise ScriptError(
                line, f"${piece.text} is not set, and the script ends there (set -u); export it"
            )
        return value or ""


def _text_of(word: _Word) -> str:
    """Return the text of a word up to the first thing that the shell replaces."""
    found = ""
    for piece in word:
        if piece.kind != "text":
            break
        found += piece.text
    return found


def _not_a_value(text: str) -> str:
    return (
        f"the driver is given the output of a command, {text!r}, expected a value; write the "
        f"value, or have bash run the script: -o megatron_script=bash"
    )
