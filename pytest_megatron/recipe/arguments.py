"""From the values of a `model_config.yaml` to the words of a command line, without a shell.

Megatron-LM builds a string and lets a shell evaluate it; here the same values become the same
words, but nothing is expanded, split or run on the way. Pure.

Source: Megatron-LM tests/functional_tests/shell_test_utils/_run_training.sh, d98e8a64dd.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pytest_megatron.errors import CaseError

_REFERENCE = re.compile(
    r"\$(?:\{(?P<braced>[A-Za-z_]\w*)(?::-(?P<default>[^{}]*))?\}|(?P<bare>[A-Za-z_]\w*))"
)
_COMMAND_SUBSTITUTION = "$("


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One entry of MODEL_ARGS.

    Attributes:
        name: The key as written, `--train-iters` or `trainer.max_steps`.
        text: The value as written (a number keeps its spelling); None for YAML's null.
        words: The elements where the value is a YAML list; None otherwise.
        is_text: The value was quoted, so `"true"` is a word and not a switch.
        line: Where it stands in its file, counted from 1.
    """

    name: str
    text: str | None
    words: tuple[str, ...] | None = None
    is_text: bool = False
    line: int


def command_words(arguments: Iterable[Argument], env: Mapping[str, str], *, file: str) -> list[str]:
    """Return the words that a training program gets for `arguments`.

    A name with a leading dash makes `--flag value`; any other makes `key=value`, as NeMo and
    Megatron Bridge take them.

    Args:
        arguments: In the order of the file.
        env: Values for `${NAME}`.
        file: Named in errors, with the line of the argument.

    Raises:
        CaseError: A value refers to a name that is not set, or has an unmatched quote.
    """
    return [word for a in arguments for word in _words(a, _values(a, env, f"{file}:{a.line}"))]


def with_argument(arguments: Iterable[Argument], name: str, text: str) -> tuple[Argument, ...]:
    """Return `arguments` with `name` set to `text`, in its old place or at the end."""
    kept = list(arguments)
    for index, argument in enumerate(kept):
        if argument.name == name:
            kept[index] = replace(argument, text=text, words=None)
            return tuple(kept)
    return (*kept, Argument(name=name, text=text, line=0))


def substitute(text: str, env: Mapping[str, str], *, where: str) -> str:
    """Replace `${NAME}`, `$NAME` and `${NAME:-default}` in `text`; nothing else of a shell.

    Raises:
        CaseError: A name is not set and has no default, or `text` asks for a command to be run.
    """

    def value_of(match: re.Match[str]) -> str:
        name = match["braced"] or match["bare"]
        value = env.get(name)
        if match["default"] is not None:
            return value or match["default"]
        if value is None:
            raise CaseError(
                where,
                f"{match[0]} is not set, expected it in ENV_VARS, in the recipe (data_path, "
                f"checkpoint_load_path, data_cache_path) or in the environment; "
                f"export {name}=... or write ${{{name}:-default}}",
            )
        return value

    if _COMMAND_SUBSTITUTION in text:
        raise CaseError(where, f"{text!r} asks a shell to run a command; write its result instead")
    return _REFERENCE.sub(value_of, text)


def unquote(text: str, *, where: str) -> str:
    """Trim `text` and take one level of quotes and backslashes off, as `xargs` does.

    Words are joined by one blank; inside quotes blanks stay as they are.

    Raises:
        CaseError: A quote has no partner.
    """
    words: list[str] = []
    word: list[str] | None = None
    position = 0
    while position < len(text):
        char = text[position]
        position += 1
        if char.isspace():
            if word is not None:
                words.append("".join(word))
            word = None
            continue
        word = [] if word is None else word
        if char in "\"'":
            end = text.find(char, position)
            if end < 0:
                raise CaseError(where, f"{text!r} has an unmatched {char}; close or escape it")
            word.append(text[position:end])
            position = end + 1
        elif char == "\\" and position < len(text):
            word.append(text[position])
            position += 1
        else:
            word.append(char)
    return " ".join(words if word is None else [*words, "".join(word)])


def _values(argument: Argument, env: Mapping[str, str], where: str) -> list[str] | None:
    """Return the words of an argument's value; None for null."""
    if argument.words is not None:
        joined = " ".join(argument.words)
        return unquote(substitute(joined, env, where=where), where=where).split()
    if argument.text is None:
        return None
    text = unquote(substitute(argument.text, env, where=where), where=where)
    if text.startswith("[") and text.endswith("]"):
        return text[1:-1].split()
    return [text]


def _words(argument: Argument, values: list[str] | None) -> list[str]:
    if values == [""]:
        return []  # the harness that we stay compatible with drops such an entry
    if values == ["true"] and not argument.is_text:
        return [argument.name]
    if argument.name.startswith("-"):
        return [argument.name, *(["null"] if values is None else values)]
    return [f"{argument.name}={'null' if values is None else ' '.join(values)}"]


class ModelArgs:
    """The arguments of one start of a training; of two with one name the last one counts."""

    def __init__(self, arguments: Iterable[Argument]) -> None:
        self._last = {argument.name: argument for argument in arguments}

    def __contains__(self, name: str) -> bool:
        """Return whether the argument is there, with whatever value."""
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
        """Return whether one of these switches is set."""
        return any(self.text(name) == "true" for name in names)

    def line(self, *names: str) -> int | None:
        """Return the line of the first of these arguments that is there."""
        return next((self._last[name].line for name in names if name in self._last), None)

    def has_any(self, *names: str) -> bool:
        """Return whether one of these arguments is there."""
        return any(name in self._last for name in names)
