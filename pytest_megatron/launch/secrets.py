"""Keeps secrets out of what we write: by a name, by a value anywhere, by their shape. Pure.

A secret is known by the name of the variable or the option that holds it, as the password in a URL,
or by the form that its issuer gives it. What is encoded (base64) or cut in two is not recognised.
"""

from __future__ import annotations

import fnmatch
import html
import json
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from pytest_megatron.files import JsonValue

REDACTED = "***"
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:API|KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|CREDS|AUTH|COOKIE"
    r"|NETRC|BEARER|PAT|PASS|APIKEY|JWT|DSN|CONNECTION_STRING|CONN_STR)(?:_|$)|_PWD$|WEBHOOK"
    r"|(?:TOKEN|SECRET|PASSWORD|APIKEY|ACCESSKEY|CONNECTIONSTRING)$",
    re.IGNORECASE,
)
# What a variable with a secret name may hold without a secret.
_PLAIN = frozenset(
    {"anonymous", "default", "disabled", "enabled", "offline", "online", "optional", "password"}
    | {"public", "required", "secret", "unknown"}
)
_SHORTEST_VALUE = 6  # a shorter secret would turn every "1" and "true" of a plan into stars
_URL_PASSWORD = re.compile(r"(?<=://)([^\s/:@'\"]*):([^\s/@'\"]+)@")
# What issuers give a form of its own, whoever printed it.
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{30,}|gh[oprsu]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}"
    r"|nvapi-[\w-]{30,}|sk-[A-Za-z0-9_-]{20,}|xox[abprs]-[\w-]{20,}|AKIA[A-Z0-9]{16})\b"
)
# A text without any of these has nothing that is known by its form.
MARKS = (
    *("://", "hf_", "ghp_", "gho_", "ghr_", "ghs_", "ghu_", "github_pat_", "glpat-", "nvapi-"),
    "sk-",
    *("xoxa-", "xoxb-", "xoxp-", "xoxr-", "xoxs-", "AKIA", "uthorization", "UTHORIZATION"),
)
_MARK = re.compile("|".join(MARKS))
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
            env: Variables; those whose names say so hold secrets, and any may hold a URL.
            words: `--wandb-key VALUE` and `--wandb-key=VALUE` hold one.
            names: As in `Redactor`.
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
                return [self.json(element) for element in value]
            case dict():
                return {self.text(key): self.json(element) for key, element in value.items()}
            case _:
                return value


def is_secret_name(name: str, own: Sequence[str] = ()) -> bool:
    """Whether a name says that its value is a secret (`HF_TOKEN`, `--wandb-api-key`).

    Args:
        name: Of a variable or an option.
        own: Patterns of names beside the usual ones, `MY_*`.
    """
    plain = name.lstrip("-").replace("-", "_").replace(".", "_")
    is_own = any(fnmatch.fnmatchcase(plain.upper(), pattern.upper()) for pattern in own)
    return is_own or _SECRET_NAME.search(plain) is not None


def _options(words: Sequence[str], own: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield index and value of words that hold what an option with a secret name takes."""
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
