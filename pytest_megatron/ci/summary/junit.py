"""Reads JUnit XML that jobs left, and writes one of all jobs. No pytest; XML is anybody's."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree as ET

from pytest_megatron.base.files import read_bytes
from pytest_megatron.base.text import plain
from pytest_megatron.errors import CiError

_LOCATION = re.compile(r"^(\S+\.py:\d+): \S", re.MULTILINE)
_YAML = ("yaml", "yml")
_ATTACHMENT = "[[ATTACHMENT|"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Junit:
    """One file.

    Attributes:
        elements: The `<testcase>` elements, for a file of all jobs.
    """

    cases: tuple[JUnitCase, ...]
    elements: tuple[ET.Element, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseDetails:
    """Details that a case gets in the XML of all jobs.

    Source: docs.gitlab.com, Unit test reports: `file` is a link, `system-out` is shown, and
    `[[ATTACHMENT|...]]` in it is a link to a file of the artifact.

    Attributes:
        reproduce: Command that shows the failure again.
        attachment: A picture, from the directory of the checkout.
    """

    file: str
    reproduce: str | None = None
    attachment: str | None = None

    def add_to(self, case: ET.Element) -> None:
        """Write it into a case, whose own attributes stay."""
        case.attrib.setdefault("file", plain(self.file))
        lines = [] if self.attachment is None else [f"{_ATTACHMENT}{self.attachment}]]"]
        if self.reproduce is not None:
            command = plain(self.reproduce).replace(_ATTACHMENT, "[ [ATTACHMENT|")
            lines.append(f"reproduce: {command}")
            properties = case.find("properties")
            if properties is None:
                properties = ET.Element("properties")
                case.insert(0, properties)
            value = {"name": "megatron.reproduce", "value": plain(self.reproduce)}
            ET.SubElement(properties, "property", value)
        if lines:
            output = case.find("system-out")
            output = ET.SubElement(case, "system-out") if output is None else output
            output.text = "\n".join([*lines, output.text or ""]).rstrip("\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Part of one job in the XML of all jobs.

    Attributes:
        others: Items that the files lack, as those of a killed run do.
        problems: Why the job counts as failed beside its tests; each becomes an error.
        details: (class name, name) of a case -> what else is to stand there.
    """

    name: str
    junits: Sequence[Junit]
    others: Sequence[JUnitCase] = ()
    problems: Sequence[str] = ()
    details: Mapping[tuple[str, str], CaseDetails] = field(default_factory=dict)


def read_junit(path: Path) -> Junit:
    """Read a file that `pytest --junit-xml` wrote.

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
    elements = tuple(root.iter("testcase"))
    return Junit(cases=tuple(_case(element) for element in elements), elements=elements)


def _file_of(parts: Sequence[str]) -> str:
    """Return the file of a module or a recipe, of which the XML has dots for slashes."""
    if parts[-1] in _YAML:
        return f"{'/'.join(parts[:-1])}.{parts[-1]}"
    return f"{'/'.join(parts)}.py"


def _case(element: ET.Element) -> JUnitCase:
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


def join(suites: Iterable[Suite]) -> str:
    """Return one XML of all jobs: a suite for each, and an error for each job without tests."""
    root = ET.Element("testsuites", {"name": "pytest-megatron"})
    for suite in suites:
        element = ET.SubElement(root, "testsuite", {"name": plain(suite.name)})
        for junit in suite.junits:
            element.extend(copy.deepcopy(junit.elements))
        element.extend(_element(case) for case in suite.others)
        for problem in suite.problems:
            element.append(_element(_job_case(suite.name, problem)))
        for case in element:
            found = suite.details.get((case.get("classname", ""), case.get("name", "")))
            if found is not None:
                found.add_to(case)
        cases = [_case(case) for case in element]
        element.attrib.update(
            tests=str(len(cases)),
            failures=str(sum(case.outcome == "failed" for case in cases)),
            errors=str(sum(case.outcome == "broken" for case in cases)),
            skipped=str(sum(case.outcome == "skipped" for case in cases)),
            time=f"{sum(case.duration_s for case in cases):.3f}",
        )
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _job_case(name: str, problem: str) -> JUnitCase:
    return JUnitCase(
        classname="job", name=name, outcome="broken", message=problem, text=problem, duration_s=0.0
    )


def _element(case: JUnitCase) -> ET.Element:
    """Return a case as XML, without characters that XML must not have."""
    attributes = {"classname": plain(case.classname), "name": plain(case.name)}
    element = ET.Element("testcase", {**attributes, "time": f"{case.duration_s:.3f}"})
    tag = next((tag for tag, outcome in _BAD.items() if outcome == case.outcome), None)
    if tag is not None:
        ET.SubElement(element, tag, {"message": plain(case.message)}).text = plain(case.text)
    return element
