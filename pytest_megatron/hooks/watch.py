"""Which code asks for its rank while tests are collected: then one import cannot serve all ranks.

Programs for `torch.distributed.run` may read `RANK` as they are imported. The controller collects
as rank 0 of the gang that was asked for, and notes such reads; what it finds decides whether ranks
can be forked off the controller or have to collect for themselves.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

from typing_extensions import override

RANK_VARIABLES = frozenset(
    (
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK"),
        *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "PMI_RANK", "PMIX_RANK"),
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    )
)
SIZE_VARIABLES = frozenset(
    (
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    )
)
_WORDS = re.compile(r"\b(?:[A-Z]+_)*(?:RANK|WORLD_SIZE|PROCID|LOCALID)\b")
# In a function: a module that loads it at its top has done so by now.
_LOADS_TORCH = re.compile(
    r"^[ \t]+(?:import|from)[ \t]+(?:torch|megatron)\b|\bimportorskip\([\"']torch\b", re.MULTILINE
)
_PACKAGE = str(Path(__file__).parents[1])
_READERS = ("<frozen", os.__file__)  # on behalf of others: `getenv`, `get`
_LIBRARIES = ("site-packages", "dist-packages")


class Watch:
    """Sets variables, and notes who reads those that tell ranks apart.

    Attributes:
        rank_readers: `VARIABLE in file:line`, each place once.
        size_readers: The same for variables that gangs of one size share.
    """

    def __init__(self, env: Mapping[str, str], on_rank_read: Callable[[], None]) -> None:
        """Prepare; nothing is set yet.

        Args:
            env: Variables to set; one of the caller's own is overwritten.
            on_rank_read: Called when a variable of RANK_VARIABLES is read for the first time.
        """
        self._env = dict(env)
        self._on_rank_read = on_rank_read
        self._before: dict[str, str | None] | None = None
        self.rank_readers: list[str] = []
        self.size_readers: list[str] = []

    def start(self, *, is_noting: bool = True) -> None:
        """Set the variables; a second call is none."""
        if self._before is not None:
            return
        self._before = {name: os.environ.get(name) for name in self._env}
        os.environ.update(self._env)
        if is_noting:
            os.environ.__class__ = _watched(self._note)

    def stop(self) -> None:
        """Put back what was there before, but what somebody else has set meanwhile."""
        if self._before is None:
            return
        os.environ.__class__ = os._Environ  # noqa: SLF001 - its class has no other name
        for name, value in self._before.items():
            if os.environ.get(name) != self._env[name]:
                continue
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        self._before = None

    def _note(self, name: str, place: str) -> None:
        readers = self.rank_readers if name in RANK_VARIABLES else self.size_readers
        text = f"{name} in {place}"
        if text in readers:
            return
        readers.append(text)
        if readers is self.rank_readers and len(readers) == 1:
            self._on_rank_read()


def find_rank_words(modules: Iterable[ModuleType], root: Path) -> str:
    """Return where the source of a project's modules speaks of ranks, or "".

    Args:
        modules: Those that are loaded.
        root: Of the project; libraries below it are left out.
    """
    for file, text in _sources(modules, root):
        if (found := _WORDS.search(text)) is not None:
            return f"{found[0]} in {file}:{text.count(chr(10), 0, found.start()) + 1}"
    return ""


def will_load_torch(modules: Iterable[ModuleType], root: Path) -> bool:
    """Whether functions in the source of a project's modules load torch when they are called.

    Args:
        modules: Those that are loaded.
        root: Of the project; libraries below it are left out.
    """
    return any(_LOADS_TORCH.search(text) for _, text in _sources(modules, root))


def _sources(modules: Iterable[ModuleType], root: Path) -> Iterator[tuple[str, str]]:
    """Yield file and text of a project's modules."""
    for module in modules:
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py"):
            continue
        path = Path(file)
        is_library = any(part in _LIBRARIES for part in path.parts) or file.startswith(_PACKAGE)
        if is_library or not path.is_relative_to(root):
            continue
        try:
            yield file, path.read_text(encoding="utf-8", errors="replace")
        except OSError:  # it went away after it was loaded
            continue


def _watched(note: Callable[[str, str], None]) -> type:
    """Return a class for `os.environ` that tells of reads by name.

    Copies of the whole environment are no reads: those ask for the keys first, then for each.
    """
    names = RANK_VARIABLES | SIZE_VARIABLES
    iterated: list[str] = []  # the key that a loop over the items is at
    copying: Iterator[str] = iter(())  # the keys that a copy still has to ask for

    class WatchedEnviron(os._Environ):  # type: ignore[type-arg]  # noqa: SLF001 - it has no other name
        @override
        def __getitem__(self, key: str) -> str:
            nonlocal copying
            if key not in iterated and next(copying, None) != key:
                copying = iter(())
                if key in names:
                    _tell(note, key)
            return str(super().__getitem__(key))

        @override
        def __iter__(self) -> Iterator[str]:
            nonlocal copying
            keys = list(super().__iter__())
            try:
                for key in keys:
                    iterated[:] = [key]
                    yield key
            finally:
                iterated.clear()
            copying = iter(keys)

    return WatchedEnviron


def _tell(note: Callable[[str, str], None], name: str) -> None:
    """Note a read, unless it is one of this package or of the standard library's own."""
    frame = sys._getframe(2)  # noqa: SLF001 - who reads is the question
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_READERS):
        frame = frame.f_back
    file = frame.f_code.co_filename
    if not file.startswith(_PACKAGE):
        note(name, f"{file}:{frame.f_lineno}")
