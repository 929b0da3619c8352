"""Writes one JUnit XML of all jobs."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from xml.etree import ElementTree as ET

from pytest_megatron.base.text import plain
from pytest_megatron.runs.junit import BAD, Junit, JUnitCase, read_case

_ATTACHMENT = "[[ATTACHMENT|"


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
        """Write the details into a JUnit case, whose own attributes stay."""
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
        cases = [read_case(case) for case in element]
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
    """Return the JUnit case of a problem of a job."""
    return JUnitCase(
        classname="job", name=name, outcome="broken", message=problem, text=problem, duration_s=0.0
    )


def _element(case: JUnitCase) -> ET.Element:
    """Return a case as XML, without characters that XML must not have."""
    attributes = {"classname": plain(case.classname), "name": plain(case.name)}
    element = ET.Element("testcase", {**attributes, "time": f"{case.duration_s:.3f}"})
    tag = next((tag for tag, outcome in BAD.items() if outcome == case.outcome), None)
    if tag is not None:
        ET.SubElement(element, tag, {"message": plain(case.message)}).text = plain(case.text)
    return element
