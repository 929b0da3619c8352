"""Process groups of a project in the process that collects for all ranks, which is no rank.

Setting one up before tests run would wait for others until torch gives up, so it is refused; there
is none to destroy when they have run. Imports only pytest.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, cast
from urllib.parse import parse_qs, urlsplit

import pytest
from typing_extensions import override

from pytest_megatron.gangs.rank.collectives import install_from_import_on

_RENDEZVOUS = "torch.distributed.rendezvous"


class _Handler(Protocol):
    """Function of torch for the addresses of one scheme."""

    def __call__(self, url: str, **settings: object) -> Iterator[object]: ...


class _GroupMember(Protocol):
    """Torch's class of that name."""

    WORLD: object
    NON_GROUP_MEMBER: object


class NoGroups:
    """Has torch refuse to set up groups of several ranks, whichever function is called.

    Source: torch/distributed/rendezvous.py, _rendezvous_helper(), 2.13.
    """

    def __init__(self) -> None:
        self._handlers: dict[str, _Handler] = {}
        self._originals: dict[str, _Handler] = {}
        self._is_over = False

    def start(self) -> None:
        """Refuse from now on, or from the import of torch.distributed on."""
        install_from_import_on(self._install)

    def stop(self) -> None:
        """Let groups be set up again."""
        self._is_over = True
        self._handlers.update(self._originals)

    def let_destroy_nothing(self) -> None:
        """Have torch destroy the default group without an error where there is none.

        Hooks of the session and functions of atexit destroy that of ranks, which run them, too.
        """
        c10d = sys.modules.get("torch.distributed.distributed_c10d")
        member = getattr(c10d, "GroupMember", None)
        if member is not None and not isinstance(member.NON_GROUP_MEMBER, _NoMember):
            member.NON_GROUP_MEMBER = _NoMember(member)

    def _install(self) -> bool:
        """Put functions that refuse groups of several ranks in place; return whether done."""
        module = sys.modules.get(_RENDEZVOUS)
        if self._is_over or module is None or not hasattr(module, "rendezvous"):
            return self._is_over
        # Anything but a table of functions is of another torch, which then waits.
        self._handlers = cast("dict[str, _Handler]", vars(module).get("_rendezvous_handlers", {}))
        self._originals = dict(self._handlers)
        for scheme, original in self._originals.items():
            self._handlers[scheme] = functools.partial(_refuse, original, os.getpid())
        return True


class _NoMember:
    """Stands for the group of others, and for the default group as long as there is none.

    Source: torch/distributed/distributed_c10d.py, destroy_process_group(), 2.13.
    """

    def __init__(self, member: _GroupMember) -> None:
        self._member, self._original = member, member.NON_GROUP_MEMBER

    @override
    def __eq__(self, other: object) -> bool:
        is_other = other is self or other is self._original
        return is_other or (other is None and self._member.WORLD is None)

    __hash__ = object.__hash__


def _refuse(original: _Handler, pid: int, url: str, **settings: object) -> Iterator[object]:
    """Refuse a group of several ranks, unless a fork of the process sets it up.

    Raises:
        pytest.UsageError: The group has several ranks.
    """
    __tracebackhide__ = True
    sizes = parse_qs(urlsplit(url).query).get("world_size", ["-1"])
    size = os.environ.get("WORLD_SIZE", "1") if sizes == ["-1"] else sizes[0]
    if size == "1" or os.getpid() != pid:
        return original(url, **settings)
    raise pytest.UsageError(
        f"{_place_of_call()}: a process group of {size} ranks is set up before tests run, in the "
        "process that collects them, which is no rank, expected in a fixture or a test; move it "
        'to one, such as to an autouse fixture with scope="module" or "session", or leave the file '
        "out (--ignore)"
    )


def _place_of_call() -> str:
    """Return file and line of the code that called torch."""
    frame = sys._getframe(2)
    torch = str(Path(str(sys.modules["torch"].__file__)).parent)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(torch):
        frame = frame.f_back
    return f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}"
