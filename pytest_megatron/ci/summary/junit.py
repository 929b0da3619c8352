"""Reads JUnit XML that `pytest --junit-xml` wrote. XML is anybody's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

from pytest_megatron.base.files import read_bytes
from pytest_megatron.errors import CiError

_LOCATION = re.compile(r"^(\S+\.py:\d+): \S", re.MULTILINE)
_YAML = ("yaml", "yml")
_BAD = {"failure": "failed", "error": "broken", "skipped": "skipped"}


@dataclass(frozen=True, slots=True, kw_only=True)
class JUnitCase:
    """One `<testcase>`: an item, or one more of its phases that went wrong.

    Attributes:
        outcome: `passed`, `failed`, `broken` (an error in set-up or teardown) or `skipped`.
        text: The traceback, or the reason of a skip.
    """

    classname: str
    name: str
    outcome: str
    message: str
    text: str
    duration_s: float

    @property
    def node_id(self) -> str:
        """The node id, as far as the XML has it: modules begin in lower case, classes do not."""
        if not self.classname:  # a file that could not be collected
            return _file_of(self.name.split("."))
        parts = self.classname.split(".")
        if parts[-1] in _YAML:
            return f"{_file_of(parts)}::{self.name}"
        classes = next((i for i, part in enumerate(parts) if part[:1].isupper()), len(parts))
        module = _file_of(parts[:classes]) if classes else ""
        return "::".join([module, *parts[classes:], self.name])

    @property
    def location(self) -> str | None:
        """Place of the failure, `file.py:line`, by the last line of the traceback."""
        found = _LOCATION.findall(self.text)
        return str(found[-1]) if found else None


def read_junit(path: Path) -> tuple[JUnitCase, ...]:
    """Read the cases of a file that `pytest --junit-xml` wrote.

    Raises:
        CiError: It is not whole, is no JUnit XML, or holds declarations that no report needs.
    """
    try:
        data = read_bytes(path)
        if b"<!DOCTYPE" in data or b"<!ENTITY" in data:
            raise CiError(str(path), "declares entities, expected plain JUnit XML; refused")
        root = ET.fromstring(data)  # noqa: S314 - no entities, and no larger than tests make it
    except (OSError, ET.ParseError) as error:
        raise CiError(str(path), f"cannot be read as JUnit XML: {error}") from error
    if root.tag not in ("testsuites", "testsuite"):
        raise CiError(str(path), f"begins with <{root.tag[:40]}>, expected <testsuites>")
    return tuple(map(_read_case, root.iter("testcase")))


def _file_of(parts: Sequence[str]) -> str:
    """Return the file of a module or a recipe, of which the XML has dots for slashes."""
    if parts[-1] in _YAML:
        return f"{'/'.join(parts[:-1])}.{parts[-1]}"
    return f"{'/'.join(parts)}.py"


def _read_case(element: ET.Element) -> JUnitCase:
    """Return what a `<testcase>` holds."""
    found = next((c for c in element if c.tag in _BAD and c.get("type") != "pytest.xfail"), None)
    return JUnitCase(
        classname=element.get("classname", ""),
        name=element.get("name", ""),
        outcome="passed" if found is None else _BAD[found.tag],
        message="" if found is None else found.get("message", ""),
        text="" if found is None else found.text or "",
        duration_s=_seconds(element.get("time")),
    )


def _seconds(text: str | None) -> float:
    """Return a duration, 0 where the file has none."""
    try:
        return max(0.0, float(text or 0))
    except ValueError:
        return 0.0


def address(node_id: str) -> tuple[str, str]:
    """Return class name and name under which pytest's XML has a node id."""
    path, bracket, parameters = node_id.partition("[")
    names = path.split("::")
    names[0] = names[0].replace("/", ".").removesuffix(".py")
    names[-1] += bracket + parameters
    return ".".join(names[:-1]), names[-1]
