"""Keeps secrets out of what we write: by a variable's name, and by its value anywhere. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

REDACTED = "***"
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:API|KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|AUTH|COOKIE|NETRC)(?:_|$)",
    re.IGNORECASE,
)
_SHORTEST_VALUE = 6  # a shorter secret would turn every "1" and "true" of a plan into stars


@dataclass(frozen=True, slots=True)
class Redactor:
    """Replaces secrets by `***`.

    Attributes:
        values: The secret values that are looked for in every text, longest first.
    """

    values: tuple[str, ...]

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Redactor:
        """Take the secrets from the variables of `env` whose names say so."""
        found = {v for name, v in env.items() if is_secret_name(name) and len(v) >= _SHORTEST_VALUE}
        return cls(tuple(sorted(found, key=len, reverse=True)))

    def text(self, text: str) -> str:
        """Return `text` without any secret value."""
        for value in self.values:
            text = text.replace(value, REDACTED)
        return text

    def words(self, words: Sequence[str]) -> list[str]:
        """Return the words of a command line without any secret value."""
        return [self.text(word) for word in words]

    def env(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return variables sorted by name, those with a secret name or value redacted."""
        return {
            name: REDACTED if is_secret_name(name) else self.text(value)
            for name, value in sorted(env.items())
        }


def is_secret_name(name: str) -> bool:
    """Whether a variable's name says that its value is a secret (`HF_TOKEN`, `WANDB_API_KEY`)."""
    return _SECRET_NAME.search(name) is not None
