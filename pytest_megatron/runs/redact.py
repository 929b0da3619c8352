"""Keeps secrets out of written files: by a name, by a value anywhere, by their shape. Pure.

A secret is known by the name of the variable or the option that holds it, as the password in a URL,
or by the form that its issuer gives it. A secret that is encoded (base64) or cut in two is missed.
"""

from __future__ import annotations

import fnmatch
import html
import json
import os
import re
import stat
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct
from xml.sax.saxutils import escape

import ahocorasick_rs

from pytest_megatron.base.crc32c import masked_crc32c
from pytest_megatron.base.files import (
    JsonValue,
    parse_json,
    rewrite_lines_atomically,
    write_text_atomically,
)

REDACTED = "***"
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:API|KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|CREDS|AUTH|COOKIE"
    r"|NETRC|BEARER|PAT|PASS|APIKEY|JWT|DSN|CONNECTION_STRING|CONN_STR)(?:_|$)|_PWD$|WEBHOOK"
    r"|(?:TOKEN|SECRET|PASSWORD|APIKEY|ACCESSKEY|CONNECTIONSTRING)$",
    re.IGNORECASE,
)
# Values without a secret of variables with a secret name.
_PLAIN = frozenset(
    {"anonymous", "default", "disabled", "enabled", "offline", "online", "optional", "password"}
    | {"public", "required", "secret", "unknown"}
)
_SHORTEST_VALUE = 6  # a shorter secret would turn every "1" and "true" of a plan into stars
_URL_PASSWORD = re.compile(r"(?<=://)([^\s/:@'\"]*):([^\s/@'\"]+)@")
# Secrets to which issuers give a form of their own.
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{30,}|gh[oprsu]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}"
    r"|nvapi-[\w-]{30,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|sk-[A-Za-z0-9_-]{20,}|xox[abprs]-[\w-]{20,}|AKIA[A-Z0-9]{16})\b"
)
# A text without any of these has nothing that is known by its form.
MARKS = (
    *("://", "hf_", "ghp_", "gho_", "ghr_", "ghs_", "ghu_", "github_pat_", "glpat-", "nvapi-"),
    *("sk-", "npm_", "pypi-", "_auth", "password", "PRIVATE KEY", "aws_se"),
    *("xoxa-", "xoxb-", "xoxp-", "xoxr-", "xoxs-", "AKIA", "uthorization", "UTHORIZATION"),
)
_MARK = re.compile("|".join(MARKS))
# Of .npmrc, .netrc, where a password may stand in a line of its own, and credentials of AWS.
_OF_FILES = re.compile(
    r"(?:(?<=:)_(?:authToken|auth|password)|^[+ \t]*_(?:authToken|auth|password)) *= *"
    r"(?P<npm>[^\s\\\"']{6,})"
    r"|\b(?:machine|login|account)\s+\S+\s+password\s+(?P<netrc>\S+)"
    r"|^[+ \t]*password[ \t]+(?P<alone>(?=[a-zA-Z]*[^a-zA-Z\s])\S{6,})[ \t]*$"
    r"|\baws_secret_access_key *= *(?P<aws>[A-Za-z0-9/+]{40})(?![\w/+])",
    re.MULTILINE,
)
_BEGIN = re.compile(r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----")
_END = re.compile(r"-----END (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----")
# A line of a key may have a prefix; in JSON, all of a key is in one line.
_PREFIX, _AFTER = r"(?:.*[\s|>:+])?", r"[\"',]*\s*"
_KEY_LINE = re.compile(rf"{_PREFIX}(?:[A-Za-z0-9+/=]|\\[nr]){{32,}}{_AFTER}").fullmatch
_LAST_OF_KEY = re.compile(rf"{_PREFIX}[A-Za-z0-9+/=]{{1,31}}{_AFTER}").fullmatch
_NO_KEY_LINE = re.compile(rf"{_PREFIX}(?:(?:Proc-Type|DEK-Info|Version|Comment): .*)?\s*").fullmatch
_HEADER = re.compile(
    r"(?i)\b(authorization['\"]?\s*[:=]\s*['\"]?(?:bearer|basic|token)\s+)[^\s'\"]+"
)


@dataclass(frozen=True, slots=True)
class Redactor:
    """Replaces secrets by `***`.

    Attributes:
        values: The secret values that are looked for in every text, longest first.
        names: Patterns of names that hold secrets, beside those that everybody has.
    """

    values: tuple[str, ...]
    names: tuple[str, ...] = field(default=())

    @classmethod
    def of(
        cls, env: Mapping[str, str], words: Sequence[str] = (), names: Sequence[str] = ()
    ) -> Redactor:
        """Take the secrets from variables and from the words of a command line.

        Args:
            env: Variables; those with a secret name hold secrets, and any may hold a URL.
            words: `--wandb-key VALUE` and `--wandb-key=VALUE` hold one.
            names: Patterns of names, for `Redactor`.
        """
        found = [value for name, value in env.items() if is_secret_name(name, names)]
        found += [value for _, value in _options(words, names)]
        for text in (*env.values(), *words):
            found += [urllib.parse.unquote(m[2]) for m in _URL_PASSWORD.finditer(text)]
        return cls((), tuple(names)).knowing(found)

    def knowing(self, values: Iterable[str]) -> Redactor:
        """Return a redactor that looks for these values as well.

        A value of several lines is looked for line by line, as it stands in a log; every value
        also as JSON, HTML, XML and a URL write it.
        """
        found = set(self.values)
        for line in (line.strip() for value in values for line in value.splitlines()):
            if len(line) >= _SHORTEST_VALUE and line.lower() not in _PLAIN:
                found.update((line, urllib.parse.quote(line, safe=""), json.dumps(line)[1:-1]))
                found.update((html.escape(line), escape(line), escape(line, {'"': "&quot;"})))
        return Redactor(tuple(sorted(found, key=lambda v: (-len(v), v))), self.names)

    def text(self, text: str) -> str:
        """Return `text` without any secret."""
        for value in self.values:
            text = text.replace(value, REDACTED)
        if _MARK.search(text) is None:
            return text
        if _BEGIN.search(text) is not None:
            text = "".join(map(KeyFilter(), text.splitlines(keepends=True)))
        text = _OF_FILES.sub(_without_value, text)
        text = _URL_PASSWORD.sub(rf"\1:{REDACTED}@", text)
        return _HEADER.sub(rf"\1{REDACTED}", _SHAPES.sub(REDACTED, text))

    def words(self, words: Sequence[str]) -> list[str]:
        """Return the words of a command line without any secret."""
        secret = dict(_options(words, self.names))
        return [
            f"{word.removesuffix(secret[index])}{REDACTED}" if index in secret else self.text(word)
            for index, word in enumerate(words)
        ]

    def env(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return variables sorted by name, those with a secret name or value redacted."""
        return {
            name: REDACTED if is_secret_name(name, self.names) else self.text(value)
            for name, value in sorted(env.items())
        }

    def json(self, value: JsonValue) -> JsonValue:
        """Return JSON without any secret in its texts and keys."""
        match value:
            case str():
                return self.text(value)
            case list():
                without_keys = KeyFilter()  # of a list of lines
                lines = (without_keys(e) if isinstance(e, str) else e for e in value)
                return [self.json(element) for element in lines]
            case dict():
                return {self.text(key): self.json(element) for key, element in value.items()}
            case _:
                return value


class KeyFilter:
    """Takes private keys out of the lines of a text; a key may go over several of them.

    One whose end is missing ends with the last line that could be of it.
    """

    def __init__(self) -> None:
        self._is_inside = False
        self._may_end = False  # the last lines of a key may be short

    def __call__(self, line: str) -> str:
        """Return the next line without what it has of a key."""
        kept, rest = "", line
        while True:
            if not self._is_inside:
                begin = _BEGIN.search(rest)
                if begin is None:
                    return kept + rest
                kept, rest = kept + rest[: begin.end()], rest[begin.end() :]
                self._is_inside, self._may_end = True, False
            if (end := _END.search(rest)) is not None:
                self._is_inside = False
                kept, rest = kept + REDACTED, rest[end.start() :]
            elif _KEY_LINE(rest) or (self._may_end and _LAST_OF_KEY(rest)):
                self._may_end = _KEY_LINE(rest) is not None
                return f"{kept}{REDACTED}{rest[len(rest.rstrip()) :]}"
            elif _NO_KEY_LINE(rest):
                return kept + rest
            else:
                self._is_inside = False


def _without_value(match: re.Match[str]) -> str:
    """Return what was found with stars for its secret."""
    start, end = match.span(str(match.lastgroup))
    return f"{match.string[match.start() : start]}{REDACTED}{match.string[end : match.end()]}"


def is_secret_name(name: str, own: Sequence[str] = ()) -> bool:
    """Return true for the name of a secret (`HF_TOKEN`, `--wandb-api-key`).

    Args:
        name: Name of a variable or an option.
        own: Patterns of names beside the usual ones, `MY_*`.
    """
    plain = name.lstrip("-").replace("-", "_").replace(".", "_")
    is_own = any(fnmatch.fnmatchcase(plain.upper(), pattern.upper()) for pattern in own)
    return is_own or _SECRET_NAME.search(plain) is not None


def _options(words: Sequence[str], own: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield index and value of words that are the value of an option with a secret name."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if re.fullmatch(r"[\w.-]+", name) is None or not is_secret_name(name, own):
            continue
        if equals:
            yield index, value
        elif name.startswith("-") and index + 1 < len(words):
            following = words[index + 1]
            if not following.startswith("-"):
                yield index + 1, following


# Tensors and files in a format of the training's own; they are neither printed nor uploaded.
LEFT_ALONE = frozenset(
    (
        *("checkpoints", "data_cache", "no_checkpoint", "frozen_checkpoint", "coverage"),
        "tensor_trace",
    )
)
_PIECE_BYTES = 16 << 20
_LONGEST_URL = 512
_URL = re.compile(rb"://[^\s/:@'\"]{0,100}:[^\s/@'\"]{1,300}@")
_HEADER_LINE = Struct("<QI")
_CRC = Struct("<I")


def redact_tree(root: Path, redactor: Redactor) -> tuple[str, ...]:
    """Take secrets out of every file below a directory.

    Follows no link, and leaves checkpoints and data caches alone.

    Returns:
        The files that could not be cleaned, with the reasons.
    """
    problems: list[str] = []
    search = _Search(redactor)
    for path in _files(root):
        try:
            if search.finds(path):
                _redact(path, redactor)
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
    return tuple(problems)


def redact_file(path: Path, redactor: Redactor) -> None:
    """Take secrets out of one file that a secret may be in.

    Raises:
        OSError: It cannot be read or replaced.
    """
    if stat.S_ISREG(path.lstat().st_mode) and _Search(redactor).finds(path):
        _redact(path, redactor)


def _files(root: Path) -> Iterator[Path]:
    """Yield the files that may hold secrets."""
    for directory, names, files in os.walk(root):
        names[:] = [name for name in names if name not in LEFT_ALONE]
        for name in files:
            path = Path(directory, name)
            if stat.S_ISREG(path.lstat().st_mode):
                yield path


def _redact(path: Path, redactor: Redactor) -> None:
    """Remove secrets from a file, by its kind."""
    if "tfevents" in path.name:
        path.write_bytes(_redact_events(path.read_bytes(), redactor))
    elif path.suffix == ".json":
        text = path.read_text(encoding="utf-8", errors="replace")
        write_text_atomically(path, _redact_json(text, redactor))
    elif path.suffix == ".jsonl":
        rewrite_lines_atomically(path, lambda line: _redact_json(line, redactor))
    elif _is_binary(path):
        path.write_bytes(_blank(path.read_bytes(), redactor))
    elif _changes(path, redactor):
        rewrite_lines_atomically(path, _line_filter(redactor))


class _Search:
    """Search of bytes for secrets and their marks: a gigabyte in a second or two."""

    def __init__(self, redactor: Redactor) -> None:
        words = [word.encode() for word in (*redactor.values, *MARKS) if word != "://"]
        self._longest = max(map(len, words))
        self._words = ahocorasick_rs.BytesAhoCorasick(words)

    def finds(self, path: Path) -> bool:
        """Return true if a file has any of them."""
        before = b""
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                data = before + piece
                if self._words.find_matches_as_indexes(data) or _URL.search(data) is not None:
                    return True
                before = data[-max(self._longest, _LONGEST_URL) :]
        return False


def _line_filter(redactor: Redactor) -> Callable[[str], str]:
    """Return what takes secrets out of each line of a file in turn."""
    without_keys = KeyFilter()
    return lambda line: redactor.text(without_keys(line))


def _changes(path: Path, redactor: Redactor) -> bool:
    """Return true if any line holds a secret; marks of secrets are in many files."""
    clean = _line_filter(redactor)
    with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        return any(clean(line) != line for line in file)


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" in file.read(1 << 16)


def _redact_json(text: str, redactor: Redactor) -> str:
    """Return JSON with its texts redacted and its numbers as they are; other text redacted."""
    try:
        found = parse_json(text)
        changed = redactor.json(found)
    except (ValueError, RecursionError):
        return redactor.text(text)
    if changed == found:
        return text
    is_one_line = "\n" not in text.strip()
    return json.dumps(changed, indent=None if is_one_line else 2) + "\n"


def _blank(data: bytes, redactor: Redactor) -> bytes:
    """Replace secret values by as many stars, so that everything else stays in its place."""
    for value in redactor.values:
        found = value.encode()
        data = data.replace(found, b"*" * len(found))
    return data


def _redact_events(data: bytes, redactor: Redactor) -> bytes:
    """Blank secrets in TensorBoard's records, and make their check sums right again."""
    pieces, at = [], 0
    while at + _HEADER_LINE.size <= len(data):
        (length, _) = _HEADER_LINE.unpack_from(data, at)
        start = at + _HEADER_LINE.size
        payload = data[start : start + length]
        blank = _blank(payload, redactor)
        pieces.append(data[at:start])
        if blank == payload:
            pieces.append(data[start : start + length + _CRC.size])
        else:
            pieces.append(blank + _CRC.pack(masked_crc32c(blank)))
        at = start + length + _CRC.size
    return b"".join((*pieces, data[at:]))
