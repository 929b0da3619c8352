"""Commands in the text of shell scripts, Makefiles and CI steps. Pure; nothing is executed.

Words keep their quotes, so that what is suggested can be pasted into the same file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

_SEPARATORS = ";&|\n)"
_CLOSING = {"(": ")", "{": "}"}
_NAME = r"[A-Za-z_]\w*"
_ASSIGNMENT = re.compile(rf"({_NAME})\+?=(.*)", re.DOTALL)
_MAKE_ASSIGNMENT = re.compile(rf"^(?:export +)?({_NAME}) *[:?+]{{0,2}}= *(.*)$", re.MULTILINE)
_REFERENCE = re.compile(
    rf"\"?\$(?:({_NAME})|\{{({_NAME})(?:\[@\])?(?::?[-=]([^}}]*))?\}}|\(({_NAME})\))\"?"
)
_MOST_EXPANSIONS = 4


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command.

    Attributes:
        raw: As it is written, with quotes.
        line: Index of the line that it begins on.
    """

    raw: str
    line: int

    @property
    def value(self) -> str:
        """The word without its quotes; variables are not replaced."""
        return unquote(self.raw)


Command = tuple[Word, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellText:
    """Commands in the order of lines, in which variables that the text assigns are replaced."""

    commands: tuple[Command, ...]
    variables: Mapping[str, str]


def read_shell(
    text: str, variables: Mapping[str, str] | None = None, *, is_makefile: bool = False
) -> ShellText:
    """Return the commands of a shell text.

    Args:
        text: A script, a Makefile, or a part of one.
        variables: Of the text around it.
        is_makefile: Whether `$(NAME)` is a variable.
    """
    if is_makefile:
        text = re.sub(r"^\t[@+-]*", "\t", text, flags=re.MULTILINE)
    found = tuple(_split(text))
    known = {**_assigned(found), **(variables or {})}
    if is_makefile:
        known |= {name: value for name, value in _MAKE_ASSIGNMENT.findall(text) if value}
    return ShellText(commands=tuple(_expanded(one, known) for one in found), variables=known)


def unquote(raw: str) -> str:
    """Return a word without quotes and backslashes."""
    parts = re.findall(r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.|[^'\"\\]+|.", raw, re.DOTALL)
    return "".join(map(_unquoted, parts))


def _unquoted(part: str) -> str:
    if len(part) > 1 and part[0] == part[-1] and part[0] in "'\"":
        inner = part[1:-1]
        return inner if part[0] == "'" else re.sub(r"\\(.)", r"\1", inner, flags=re.DOTALL)
    return part[1:] if part[0] == "\\" else part


def nested(word: Word, variables: Mapping[str, str]) -> ShellText:
    """Return the commands in a word that is a whole script, as after `bash -c`."""
    inner = read_shell(word.value, variables)
    moved = (tuple(replace(w, line=w.line + word.line) for w in one) for one in inner.commands)
    return replace(inner, commands=tuple(moved))


def _assigned(found: tuple[Command, ...]) -> dict[str, str]:
    """Return the variables of a text with their first values."""
    variables: dict[str, str] = {}
    for command in found:
        for word in command:
            match = _ASSIGNMENT.fullmatch(word.raw)
            if match is not None:
                value = match[2]
                is_array = value.startswith("(") and value.endswith(")")
                variables.setdefault(match[1], value[1:-1] if is_array else unquote(value))
            elif word.raw not in ("export", "local", "declare", "readonly", "env"):
                break
    return variables


def _expanded(command: Command, variables: Mapping[str, str]) -> Command:
    """Replace words that are nothing but a variable by the words of its value."""
    for _ in range(_MOST_EXPANSIONS):
        words: list[Word] = []
        for word in command:
            match = _REFERENCE.fullmatch(word.raw)
            name = next(filter(None, match.group(1, 2, 4)), "") if match is not None else ""
            value = variables.get(name) or str((match and match[3]) or "")
            if value.startswith("$(") or not re.search(r"[\s/]|pytest|run|exec|\.py", value):
                words.append(word)
            else:
                inner = next(_split(value), ())
                words += [replace(part, line=word.line) for part in inner]
        if tuple(words) == command:
            break
        command = tuple(words)
    return command


def _split(text: str) -> Iterator[Command]:
    """Yield the commands of a text without replacing anything."""
    reader = _Reader(text)
    words: list[Word] = []
    while reader.position < len(text):
        character = text[reader.position]
        if character == "\n" or character in _SEPARATORS:
            if words:
                yield tuple(words)
            words = []
            reader.advance(1)
        elif character in " \t\r(":
            reader.advance(1)
        elif text.startswith("\\\n", reader.position):
            reader.advance(2)
        elif character == "#":
            reader.skip_to("\n")
        elif character in "<>":
            reader.skip_redirection()
        else:
            start, line = reader.position, reader.line
            reader.skip_word()
            raw = text[start : reader.position]
            is_redirected = text[reader.position : reader.position + 1] in ("<", ">")
            if not (raw.isdecimal() and is_redirected):
                words.append(Word(raw.replace("\\\n", ""), line))
    if words:
        yield tuple(words)


class _Reader:
    """A position in a text, which moves forward only."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.position = 0
        self.line = 0

    def advance(self, count: int) -> None:
        """Move on by that many characters."""
        self.line += self._text.count("\n", self.position, self.position + count)
        self.position = min(self.position + count, len(self._text))

    def skip_to(self, end: str) -> None:
        """Move to the next `end`, or to the end of the text."""
        found = self._text.find(end, self.position)
        self.advance((found if found >= 0 else len(self._text)) - self.position)

    def skip_redirection(self) -> None:
        """Move behind `> file`, `2>&1` or `<<EOF`."""
        while self._text[self.position : self.position + 1] in ("<", ">", "&", " "):
            self.advance(1)
        self.skip_word()

    def skip_word(self) -> None:
        """Move to the end of a word; quotes and brackets hold it together."""
        while self.position < len(self._text):
            character = self._text[self.position]
            if character.isspace() or character in ";&|)<>":
                return
            pair = self._text[self.position : self.position + 2]
            before = self._text[self.position - 1 : self.position]
            if character == "\\":
                self.advance(2)
            elif character in "'\"`":
                self._skip_quoted(character)
            elif pair in ("$(", "${"):
                self.advance(1)
                self._skip_bracket()
            elif character == "(" and before == "=":
                self._skip_bracket()
            elif character == "(":
                return
            else:
                self.advance(1)

    def _skip_quoted(self, quote: str) -> None:
        self.advance(1)
        if quote not in self._text[self.position :]:
            return  # an apostrophe of prose
        while self.position < len(self._text) and self._text[self.position] != quote:
            self.advance(2 if self._text[self.position] == "\\" and quote != "'" else 1)
        self.advance(1)

    def _skip_bracket(self) -> None:
        """Move behind the bracket that closes the one here."""
        opening = self._text[self.position]
        closing = _CLOSING[opening]
        depth = 0
        while self.position < len(self._text):
            character = self._text[self.position]
            if character in "'\"":
                self._skip_quoted(character)
                continue
            depth += (character == opening) - (character == closing)
            self.advance(1)
            if depth == 0:
                return
