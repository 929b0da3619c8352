"""Buckets and marks of python tests in a session; each function loads the rest if asked to."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import pytest

from pytest_megatron.errors import SelectionError
from pytest_megatron.session.options import (
    early_given,
    early_size,
    early_words,
    given,
    read_options,
    typed,
)

# Where a plan is made, plugins of the tests need not be installed.
_ARGUMENTS = ("-p", "megatron", "-o", "required_plugins=")
_ALSO_ABOUT_UNITS = ("environment", "platform", "tag", "labels", "ci-event")


def may_ask_for_units(config: pytest.Config) -> bool:
    """Return true if an option is given that leaves out python tests by file or by mark.

    Words that also choose among workloads have to be typed: their default in an ini file must not
    leave out tests of a plain pytest.
    """
    is_theirs = any(given(config, name) is not None for name in ("bucket", "experimental-tests"))
    return is_theirs or any(typed(config, name) is not None for name in _ALSO_ABOUT_UNITS)


def begin(early_config: pytest.Config, args: list[str]) -> None:
    """Have pytest start in the folders of `--bucket`."""
    words = early_words(early_config, "bucket")
    if words:
        from pytest_megatron.ci.test_selection import add_folders

        add_folders(early_config, args, words)


def configure(config: pytest.Config) -> None:
    """Register the role that leaves out tests by file or by mark."""
    if may_ask_for_units(config):
        from pytest_megatron.ci.test_selection import register_units

        register_units(config, read_options(config))


@dataclass(frozen=True, slots=True)
class GangSize:
    """The gang of tests without a mark, by pytest's settings; no ranks is none.

    Attributes:
        gpus: Of each node, as `ranks` is.
    """

    nodes: int = 1
    gpus: int = 0
    ranks: int = 0


class _HasReadError(Exception):
    """Ends pytest as soon as it knows its settings, before it imports anything of the project."""


class _SizeReader:
    """Reads the size of gangs where a session does: from the ini file, `addopts` and arguments."""

    def __init__(self) -> None:
        self.size = GangSize()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_load_initial_conftests(self, early_config: pytest.Config) -> Generator[None]:
        """Read it, and end pytest before this hook of anything else."""
        self._read(early_config)
        yield

    def _read(self, early_config: pytest.Config) -> None:
        """Read it, and end pytest.

        Raises:
            SelectionError: Only the machine that runs the tests knows the number, or none does.
        """
        found = {name: early_given(early_config, name) for name in ("gpus", "ranks")}
        name, value = next(((n, v) for n, v in found.items() if v), ("", None))
        size = early_size(early_config) if name else None
        if name and (size is None or value == "all"):
            raise SelectionError(
                f"--{name} of pytest's settings",
                f"{value!r} is no number that a plan can know; give {name} to the plan: --{name} N",
            )
        if size is not None:
            ranks, nodes = size
            self.size = GangSize(nodes=nodes, ranks=ranks, gpus=ranks if name == "gpus" else 0)
        raise _HasReadError


def gang_of_settings(arguments: Sequence[str]) -> GangSize:
    """Return the gang that pytest's settings ask for here, beside further arguments of a job.

    Raises:
        SelectionError: Pytest refuses its settings, or they have no number of ranks.
    """
    reader = _SizeReader()
    way_out = "give the plan --ranks N or --gpus N"
    try:
        with warnings.catch_warnings(action="ignore"):  # pluggy's, that hooks of old pytest raised
            code = pytest.main([*_ARGUMENTS, *arguments], plugins=[reader])
    except _HasReadError:
        return reader.size
    except ImportError as error:  # of a plugin that the settings name
        raise SelectionError("pytest's settings", f"{error}; install it, or {way_out}") from None
    raise SelectionError("pytest's settings", f"pytest refuses them (exit code {code}); {way_out}")
