"""Variables by which a pytest that a test starts would ask for the plugin as this session does."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterator, Sequence

import pytest

from pytest_megatron.session.options import OPTION_ROWS
from pytest_megatron.session.short_names import PREFIX

_ADDOPTS, _PLUGINS = "PYTEST_ADDOPTS", "PYTEST_PLUGINS"
_NAMES = ("megatron", "pytest_megatron.plugin")
_TAKING_ANOTHER = ("-p", "-o", "--override-ini")
_OURS = re.compile(
    rf"-p ?(?:{'|'.join(map(re.escape, _NAMES))})|(?:-o ?|--override-ini[ =])megatron_.*", re.DOTALL
)


def leave_out_of_environment(config: pytest.Config, taken: Collection[str]) -> None:
    """Take what is ours out of the variables of pytest until the session ends.

    Args:
        config: Configuration of a session that has parsed its options.
        taken: Short names of options that others have.
    """
    words = shlex.split(os.environ.get(_ADDOPTS, ""))
    plugins = [name for name in os.environ.get(_PLUGINS, "").split(",") if name]
    asked = [name for name in plugins if name in _NAMES]
    if asked:  # workers of pytest-xdist take the names from here
        config.option.plugins = [*config.option.plugins, *asked]
    others = [name for name in plugins if name not in _NAMES]
    _set(config, _ADDOPTS, shlex.join(_without_ours(words, taken)), is_changed=bool(words))
    _set(config, _PLUGINS, ",".join(others), is_changed=bool(asked))


def _set(config: pytest.Config, name: str, value: str, *, is_changed: bool) -> None:
    """Set a variable until the session ends."""
    if not is_changed:
        return
    before = os.environ[name]

    def restore() -> None:
        os.environ[name] = before

    config.add_cleanup(restore)
    if value:
        os.environ[name] = value
    else:
        del os.environ[name]


def _without_ours(words: Sequence[str], taken: Collection[str]) -> Iterator[str]:
    """Yield words of a command line without the plugin, its options and their values."""
    rows = {f"--{PREFIX}{row.name}": row for row in OPTION_ROWS.values()}
    rows |= {f"--{row.name}": row for row in OPTION_ROWS.values() if row.name not in taken}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, has_value = word.partition("=")[:2]
        value = rest[0] if rest else ""
        if name in rows:
            row = rows[name]
            is_optional = row.kind.bare is not None
            if row.metavar and not has_value and rest and not (is_optional and value[:1] == "-"):
                del rest[0]
        elif word in _TAKING_ANOTHER and _OURS.fullmatch(f"{word} {value}"):
            del rest[0]
        elif not _OURS.fullmatch(word):
            yield word
