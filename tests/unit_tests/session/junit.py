"""Reads the JUnit XML of sessions that tests start."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path


def junit_results(path: Path) -> dict[str, tuple[str, str]]:
    """Return outcome and message of each test: `("failure", "rank 1 of 2 ...")`."""
    found = {}
    for case in ET.parse(path).iter("testcase"):  # noqa: S314 - the session's own
        kinds = [child for child in case if child.tag in ("failure", "error", "skipped")]
        kind = kinds[0] if kinds else None
        name = case.get("name", "")
        found[name] = ("passed", "") if kind is None else (kind.tag, kind.get("message", ""))
    return found
