"""The nodes that failed under jobs of a project, remembered between its runs for some time."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from pytest_megatron.base.files import json_objects
from pytest_megatron.runs.layout import OWN_DIR, make_own_dir

FILE = OWN_DIR / "bad_nodes.jsonl"
_MOST_BYTES = 1 << 20  # of the file, from its end
_HOUR_S = 3600.0


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
        self._known: dict[str, tuple[float, str]] | None = None

    @property
    def hosts(self) -> frozenset[str]:
        """Those to keep away from."""
        return frozenset(self._entries)

    def text(self) -> str | None:
        """Return a text about them, or None if there are none."""
        found = [
            f"{host} ({why}, {(self._now() - at) / _HOUR_S:.1f} h ago)"
            for host, (at, why) in sorted(self._entries.items())
        ]
        if not found:
            return None
        return f"keeps away from nodes that failed: {', '.join(found)}; to forget them: rm {FILE}"

    def add(self, hosts: Iterable[str], why: str) -> None:
        """Remember nodes for later runs; this one knows already what is to be avoided."""
        rows = [{"host": host, "at": int(self._now()), "why": why} for host in sorted({*hosts})]
        if not rows or not self._lasts_s:
            return
        with contextlib.suppress(OSError):  # a full disk; the next run finds out again
            make_own_dir(self._root)
            with (self._root / FILE).open("a", encoding="utf-8") as file:
                file.write("".join(f"{json.dumps(row)}\n" for row in rows))

    @property
    def _entries(self) -> dict[str, tuple[float, str]]:
        if self._known is None:
            self._known = dict(_newest(self._read())) if self._lasts_s else {}
            now = self._now()
            self._known = {
                host: entry
                for host, entry in self._known.items()
                if abs(now - entry[0]) < self._lasts_s
            }
        return self._known

    def _read(self) -> str:
        try:
            with (self._root / FILE).open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - _MOST_BYTES))
                return file.read().decode(errors="replace")
        except OSError:
            return ""


def _newest(text: str) -> Iterable[tuple[str, tuple[float, str]]]:
    """Yield the rows, the newest of a host last; invalid rows are skipped."""
    for row in json_objects(text):
        host, at, why = row.get("host"), row.get("at"), row.get("why")
        if isinstance(host, str) and isinstance(at, int | float) and isinstance(why, str):
            yield host, (at, why)
