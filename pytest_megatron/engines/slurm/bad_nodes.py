"""The nodes that failed under jobs of a project, remembered between its runs for some time."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from pytest_megatron.base.schema import SchemaError, parse
from pytest_megatron.runs.layout import OWN_DIR, make_own_dir

FILE = OWN_DIR / "bad_nodes.jsonl"
_MOST_BYTES = 1 << 20  # of the file, from its end
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class _BadNode:
    """A line of the file; `at` is in seconds since 1970."""

    host: str
    at: float
    why: str


class BadNodes:
    """Reads the file once, for one run, and adds to it."""

    def __init__(self, root: Path, *, lasts_s: float, now: Callable[[], float] = time.time) -> None:
        """Read nothing yet.

        Args:
            root: The project.
            lasts_s: How long a node is remembered; 0 is not at all.
            now: Seconds since 1970.
        """
        self._root = root
        self._lasts_s = lasts_s
        self._now = now
        self._known: dict[str, _BadNode] | None = None

    @property
    def hosts(self) -> frozenset[str]:
        """Those to keep away from."""
        return frozenset(self._entries)

    def text(self) -> str | None:
        """Return a text about them, or None if there are none."""
        found = [
            f"{host} ({entry.why}, {(self._now() - entry.at) / _HOUR_S:.1f} h ago)"
            for host, entry in sorted(self._entries.items())
        ]
        if not found:
            return None
        return f"keeps away from nodes that failed: {', '.join(found)}; to forget them: rm {FILE}"

    def add(self, hosts: Iterable[str], why: str) -> None:
        """Remember nodes for later runs; this one knows already what is to be avoided."""
        rows = [_BadNode(host, int(self._now()), why) for host in sorted({*hosts})]
        if not rows or not self._lasts_s:
            return
        with contextlib.suppress(OSError):  # a full disk; the next run finds out again
            make_own_dir(self._root)
            with (self._root / FILE).open("a", encoding="utf-8") as file:
                file.write("".join(f"{json.dumps(asdict(row))}\n" for row in rows))

    @property
    def _entries(self) -> dict[str, _BadNode]:
        if self._known is None:
            now, found = self._now(), self._read() if self._lasts_s else ()
            newest = {entry.host: entry for entry in found}
            self._known = {n: e for n, e in newest.items() if abs(now - e.at) < self._lasts_s}
        return self._known

    def _read(self) -> Iterator[_BadNode]:
        """Yield the rows, the newest of a host last; invalid rows are skipped."""
        try:
            with (self._root / FILE).open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - _MOST_BYTES))
                text = file.read()
        except OSError:
            return
        for line in text.splitlines():
            with contextlib.suppress(SchemaError):
                yield parse(_BadNode, line)
