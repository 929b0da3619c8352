"""The table of signatures: what a known cause looks like, and whether running again can help.

The rows are data, in `signatures.toml` beside this file; users append theirs. A row has
literal texts, which are searched first, and the pattern that a line with one must match.
Default is "do not run again": a row is transient only if the machine or the network caused it.
"""

from __future__ import annotations

import builtins
import functools
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, cast

from annotated_types import MinLen

from pytest_megatron.base.files import JsonValue, read_text
from pytest_megatron.base.schema import Pattern, SchemaError, Text, Texts, closed, trusted, validate
from pytest_megatron.base.text import one_of
from pytest_megatron.errors import TriageError
from pytest_megatron.gpu.health import xid_pattern

__all__ = ["Signature", "is_exception", "is_named", "is_raised", "match_signature"]


_MOST_MESSAGE = 1 << 13  # characters of an exception that are matched; patterns look back and forth
_LEAST_LITERAL = 4  # of fewer characters, every log is full
TABLE = Path(__file__).parent / "signatures.toml"
# No network and no machine raises these, whatever their texts quote.
_OWN_MISTAKE = re.compile(
    r"(?:^|^E +| - )(?:Failed: |assert )|\b(?:\w+\.)*(?:\w*Assertion|Arithmetic|Attribute"
    r"|FloatingPoint|Import|Indentation|Index|Key|Lookup|ModuleNotFound|Name|NotImplemented"
    r"|Overflow|Recursion|Syntax|Type|UnboundLocal|Unicode\w*|Value|ZeroDivision)Error\b"
)
_BARE_NAME = re.compile(r"([A-Za-z_]\w*)(?::|$)")
# What begins before the words of a signature: a string, the arguments of a test, a command that a
# shell traces. A field's string, as of JSON, quotes nobody.
_OPEN_QUOTE = re.compile(
    r"(?:^|(?<!:)[\s(\[{,])[fFrRbBuU]{0,2}([\"'`])(?:(?!\1).)*$|::\w+\[[^\]]*$|^\++ "
)
_HOST = re.compile(
    r"host='([^']+)'|://([^/\s:'\"]+)|\bhost:? ([\w.-]+\.[\w.-]+)"
    r"|\b(?:connecting|connect|connection|reach) (?:to )?\(?'?([\w.-]+\.[\w.-]+|localhost)"
)
_THIS_HOST = re.compile(r"^(?:localhost|127\.[\d.]+|::1|0\.0\.0\.0)$")
# What is said not to be there, right before the words of a signature.
_DENIED = re.compile(r"(?i)\b(?:no|not|never|without|zero|0)\s+(?:[a-z]+\s+){0,2}$")


class LineRole(Enum):
    """Meaning of a line that matches a signature."""

    CAUSE = "cause"  # may be what everything began with
    CASCADE = "cascade"  # follows from another rank's end, unless nothing else is found
    ADVICE = "advice"  # says nothing about what happened
    CONFIRMATION = "confirmation"  # goes with a cause, is none by itself
    OUTCOME = "outcome"  # says that a step or process failed, and not why


class SearchedText(Enum):
    """Texts that a signature is looked for in."""

    LINE = "line"  # in every line of every log
    RAISED = "raised"  # in what an exception that ended a rank says
    EXIT = "exit"  # in how a rank ended: `SIGKILL`, `exit code 3`
    ENGINE = "engine"  # in no file: what an engine says of a job, `node_fail`


class RetryAdvice(Enum):
    """Next step after a failure; only a transient cause is retried automatically."""

    NEVER = "never"
    DIAGNOSE = "diagnose"  # once more with diagnostics; hides nothing
    OTHER_NODE = "other_node"
    NEW_PORT = "new_port"  # at once
    BACKOFF = "backoff"
    FREE = "free"  # at once; costs no attempt


@closed
@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A log pattern with a cause and a consequence.

    Attributes:
        id: Stable name, used in files.
        family: What kind of failure it is; the words are in the table's `[families]`.
        literals: One of them is in every line that matches; only for `SearchedText.LINE`.
        pattern: Regular expression; `(?P<rank>...)` in it names the rank that a line is about.
        is_transient: Whether an unchanged run is expected to pass.
        advice: What a person should do, lower case.
        command: What to type next, with `{file}`, `{line}` or `{directory}`; or None.
        source: Where the rule comes from, or None.
        is_fatal: Whether such a line is only written when a process or a job ends.
        explains: Families that are consequences where such a line is.
        frames: Regular expression; where there is one, a frame of the traceback must match it:
            `EOFError` alone means nothing, `EOFError` in `torch.load` does. Only for
            `SearchedText.RAISED`.
        seen: Where each of the examples was seen, or is documented.
    """

    id: Text
    family: Text
    role: LineRole = LineRole.CAUSE
    where: SearchedText = SearchedText.RAISED
    literals: tuple[Annotated[str, MinLen(_LEAST_LITERAL)], ...] = ()
    pattern: Pattern = ""
    is_transient: bool = False
    policy: RetryAdvice = RetryAdvice.NEVER
    advice: Text
    command: Text | None = None
    source: Text | None = None
    is_fatal: bool = False
    explains: tuple[Text, ...] = ()
    frames: Pattern | None = None
    seen: tuple[Text, ...] = ()
    examples: Texts
    counterexamples: tuple[Text, ...] = ()

    def __post_init__(self) -> None:
        if not self.pattern and not self.literals:
            raise ValueError("lacks both 'literals' and 'pattern'; add one")

    @property
    def is_from_outside(self) -> bool:
        """True if no exception of a program's own has this cause."""
        return self.is_transient or bool(self.explains) or self.role is LineRole.CASCADE

    def search(self, text: str) -> re.Match[str] | None:
        """Search a line, or an exception's message, for the pattern."""
        return _compiled(self.pattern).search(text)

    def match_line(self, text: str) -> re.Match[str] | None:
        """Return the match of a line that also holds one of the literals."""
        if not any(literal in text for literal in self.literals):
            return None
        match = self.search(text)
        if match is not None and _DENIED.search(text, 0, match.start()) is not None:
            return None
        return match

    def match_raised(self, message: str, frames: Sequence[str] = ()) -> re.Match[str] | None:
        """Match an exception's message; a line of it may match as one of a log."""
        if self.frames is not None and not any(map(_compiled(self.frames).search, frames)):
            return None
        match self.where:
            case SearchedText.RAISED:
                return self.search(message)
            case SearchedText.LINE if self.role is not LineRole.OUTCOME:  # says less than it
                for line in message.splitlines():
                    match = self.match_line(line)
                    if match is not None and not (self.explains and is_quoted(line, match.start())):
                        return match
                return None
            case _:
                return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Signatures in the order in which they are tried, and what their families mean.

    Attributes:
        users: Ids of the rows that are no rows of the package.
    """

    signatures: tuple[Signature, ...]
    families: Mapping[str, str]
    users: frozenset[str] = frozenset()

    def __getitem__(self, name: str) -> Signature:
        """Return the row with an id that the code itself needs."""
        return next(row for row in self.signatures if row.id == name)

    def raised(self, message: str, frames: Sequence[str] = ()) -> Signature | None:
        """Return the first row that matches an exception.

        Args:
            message: `Type: text`, of several lines perhaps. The text of an exception that only a
                program's own mistake raises may quote anything: no row of ours looks for a
                machine's or a network's failure in it.
            frames: `file:line in name` of its traceback, as far as they are known.
        """
        message = message[:_MOST_MESSAGE]
        own = _OWN_MISTAKE.search(message)
        before = message if own is None else message[: own.start()]
        if is_own_mistake(message, frames):
            before = ""
        for row in self.signatures:
            is_of_machine = row.is_from_outside and row.id not in self.users
            if row.match_raised(before if is_of_machine else message, frames):
                return row
        return None

    def exit(self, ended: str) -> Signature | None:
        """Return the first row that matches how a rank ended: `SIGKILL`, `exit code 3`."""
        return self._first(SearchedText.EXIT, ended)

    def engine(self, kind: str) -> Signature | None:
        """Return the first row that matches an engine's report of a job: `node_fail`."""
        return self._first(SearchedText.ENGINE, kind)

    def _first(self, where: SearchedText, text: str) -> Signature | None:
        rows = (row for row in self.signatures if row.where is where)
        return next((row for row in rows if row.search(text)), None)

    @property
    def lines(self) -> tuple[Signature, ...]:
        """The rows that are looked for in every line."""
        return tuple(row for row in self.signatures if row.where is SearchedText.LINE)


@closed
@dataclass(frozen=True, slots=True, kw_only=True)
class SignatureFile:
    """A file of rows, and of families that they add."""

    families: dict[str, str] = field(default_factory=dict)
    signature: Annotated[tuple[Signature, ...], MinLen(1)]


@functools.cache
def builtin_table() -> Table:
    """Return the table that the package ships."""
    file = trusted(SignatureFile, _data(TABLE))
    return Table(signatures=file.signature, families=file.families)


def load_table(own: Iterable[Path] = ()) -> Table:
    """Return the table; rows of users come first, and replace built-in ones of the same id.

    Raises:
        TriageError: A file cannot be read, or a row means nothing.
    """
    table = builtin_table()
    for path in own:
        file = _read(path, table.families)
        ids = {row.id for row in file.signature}
        kept = (row for row in table.signatures if row.id not in ids)
        table = Table(
            signatures=(*file.signature, *kept),
            families={**table.families, **file.families},
            users=table.users | ids,
        )
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleProblem:
    """A row that contradicts itself, or an example of it.

    Attributes:
        example: The one that does not fit, "" if it is the row.
    """

    signature: Signature
    example: str
    problem: str


def check_rules(table: Table) -> tuple[RuleProblem, ...]:
    """Try every row, and its examples on the whole table; return what does not fit."""
    found: list[RuleProblem] = []
    for row in table.signatures:
        problems = () if row.id in table.users else _wrong_row(row)
        found += (RuleProblem(signature=row, example="", problem=problem) for problem in problems)
        for example in row.examples:
            problem = _wrong_example(table, row, example)
            if problem is not None:
                found.append(RuleProblem(signature=row, example=example, problem=problem))
        for example in row.counterexamples:
            if _matches(row, example):
                problem = f"{row.id} matches it, expected not"
                found.append(RuleProblem(signature=row, example=example, problem=problem))
    return tuple(found)


def is_own_mistake(message: str, frames: Sequence[str] = ()) -> bool:
    """Return true if no network and no machine raises an exception of this type.

    Args:
        message: `Type: text`.
        frames: Of its traceback. Python names the module of a type in one, but of its own and of
            the program itself.
    """
    name = _BARE_NAME.match(message) if frames else None
    is_of_program = name is not None and not hasattr(builtins, name[1])
    return is_of_program or _OWN_MISTAKE.match(message) is not None


def is_quoted(text: str, at: int) -> bool:
    """Return true if what a line says from `at` on is in a string, or in an own mistake's text."""
    before = text[:at]
    return _OWN_MISTAKE.search(before) is not None or _OPEN_QUOTE.search(before) is not None


def names_another_host(message: str) -> bool:
    """Return true if an exception names an unanswering host other than this one."""
    hosts = [next(name for name in found if name) for found in _HOST.findall(message)]
    return any(_THIS_HOST.match(host) is None for host in hosts)


def match_line(table: Table, line: str) -> tuple[Signature, re.Match[str]] | None:
    """Return the first row that matches a line of a log, and how."""
    for row in table.lines:
        match = row.match_line(line)
        if match is not None:
            return row, match
    return None


def _wrong_row(row: Signature) -> Iterator[str]:
    """Yield what is wrong with a row of the package by itself."""
    if row.is_transient == (row.policy in (RetryAdvice.NEVER, RetryAdvice.DIAGNOSE)):
        words = "is" if row.is_transient else "is not"
        yield f"{words} transient, and its policy {row.policy.value} does not go with that"
    if len(row.seen) != len(row.examples):
        yield f"seen: found {len(row.seen)} addresses, expected one for each of its examples"
    if not all(address.startswith("https://") for address in row.seen):
        yield "seen: expected addresses that begin with https://"


def _wrong_example(table: Table, signature: Signature, example: str) -> str | None:
    """Return what is wrong with an example of a signature, None if nothing."""
    if not _matches(signature, example):
        return f"{signature.id} does not match it"
    match signature.where:
        case SearchedText.LINE:
            found = match_line(table, example)
            first = None if found is None else found[0]
        case SearchedText.RAISED:
            first = table.raised(
                example, () if signature.frames is None else (_a_frame(signature.frames),)
            )
        case SearchedText.EXIT:
            first = table.exit(example)
        case SearchedText.ENGINE:
            first = table.engine(example)
    assert first is not None
    return None if first.id == signature.id else f"{first.id}, an earlier row, takes it"


def _a_frame(pattern: str) -> str:
    """Return a frame that a row's pattern matches: rows write theirs as `file|file`."""
    return f"{pattern.partition('|')[0].replace(chr(92), '')}1 in f"


def _matches(signature: Signature, example: str) -> bool:
    match = (
        signature.match_line(example)
        if signature.where is SearchedText.LINE
        else signature.search(example)
    )
    return match is not None


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.MULTILINE)


def _data(path: Path) -> dict[str, JsonValue]:
    """Return what a file of rows holds; a row with literals is looked for in lines.

    Raises:
        TriageError: It cannot be read.
    """
    try:
        data = cast("dict[str, JsonValue]", tomllib.loads(read_text(path)))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TriageError(str(path), f"cannot be read as a table of signatures: {error}") from error
    rows = data.get("signature")
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict) and row.get("literals"):
            row.setdefault("where", SearchedText.LINE.value)
            if isinstance(pattern := row.get("pattern"), str):
                row["pattern"] = pattern.replace("{xid}", xid_pattern(str(row.get("id"))))
    return data


def _read(path: Path, families: Mapping[str, str]) -> SignatureFile:
    """Read one file of rows.

    Raises:
        TriageError: It cannot be read, or a row means nothing.
    """
    data = _data(path)
    try:
        file = validate(SignatureFile, data)
    except SchemaError as error:
        first = error.problems[0]
        match first.path:
            case ("signature", int() as index, *inner):
                where = _place(path, index, cast("list[JsonValue]", data["signature"])[index])
                raise TriageError(where, replace(first, path=tuple(inner)).message) from None
            case _:
                raise TriageError(str(path), first.message) from None
    known = {**families, **file.families}
    ids = [row.id for row in file.signature]
    for index, row in enumerate(file.signature):
        where = _place(path, index, {"id": row.id})
        if row.family not in known:
            problem = f"unknown family {row.family!r}, expected {one_of(row.family, known)}"
            raise TriageError(where, f"{problem}; add it to [families]")
        if row.id in ids[:index]:
            raise TriageError(str(path), f"signature {row.id!r} is there twice")
    return file


def _place(path: Path, index: int, row: JsonValue) -> str:
    """Return `own.toml: signature 3 (dns)`."""
    name = row.get("id") if isinstance(row, dict) else None
    return f"{path}: signature {index + 1}" + (f" ({name})" if isinstance(name, str) else "")


_EXCEPTION = re.compile(
    r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|error|Timeout)\b(?::|$)"
)
_NAMELESS = frozenset({"exception", "exit_code", "silent_exit", "terminated", "unknown", "usage"})


def is_named(signature: Signature) -> bool:
    """Return true if a row names a cause."""
    return signature.id not in _NAMELESS


def is_exception(line: str) -> bool:
    """Return true if a line of a traceback or a log names an exception."""
    return _EXCEPTION.match(line.strip()) is not None


def is_raised(line: str, table: Table | None = None) -> bool:
    """Return true if a line is an exception, or one that a row looks for in every line."""
    return is_exception(line) or (match_line(table or builtin_table(), line.strip()) is not None)


def match_signature(lines: Iterable[str], table: Table | None = None) -> Signature | None:
    """Return the row that some line matches; genuine causes come first.

    For lines of which nothing is known. Whoever has the logs asks `triage`, which knows what ended
    a rank and what only stands there.
    """
    table = table or builtin_table()
    texts = [line.strip() for line in lines]
    found = [row for text in texts if (row := table.raised(text)) is not None]
    causes = [row for row in found if row.role is LineRole.CAUSE and is_named(row)]
    if any(map(is_own_mistake, texts)):
        causes = [row for row in causes if not row.is_transient or row.id in table.users]
    genuine = (row for row in causes if not row.is_transient)
    return next(genuine, causes[0] if causes else None)
