"""Findings of the lint commands as text, JSON and GitHub's commands, and their options."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.text import counted
from pytest_megatron.cli.formats import format_option
from pytest_megatron.recipe.findings import Finding

findings_option = format_option(
    *("text", "json", "github"),
    about="github prints workflow commands, which annotate a pull request.",
)


def _as_text(findings: Sequence[Finding]) -> str:
    lines = [
        f"{found.where}: {found.severity.value}: {found.message} [{found.rule}]"
        for found in findings
    ]
    num_errors = sum(finding.is_error for finding in findings)
    num_warnings = len(findings) - num_errors
    lines.append(f"{counted(num_errors, 'error')}, {counted(num_warnings, 'warning')}")
    return "".join(f"{line}\n" for line in lines)


def _as_json(findings: Sequence[Finding]) -> str:
    rows: list[JsonValue] = [
        {
            "file": str(found.file),
            "line": found.line,
            "severity": found.severity.value,
            "rule": found.rule,
            "message": found.message,
        }
        for found in findings
    ]
    return json.dumps(rows, indent=1) + "\n"


def _as_github(findings: Sequence[Finding]) -> str:
    lines = []
    for found in findings:
        places = {"file": str(found.file), "line": found.line, "title": found.rule}
        properties = ",".join(
            f"{key}={_escaped(str(value), ',:')}" for key, value in places.items() if value
        )
        lines.append(f"::{found.severity.value} {properties}::{_escaped(found.message)}")
    return "".join(f"{line}\n" for line in lines)


def _escaped(text: str, special: str = "") -> str:
    """Escape text for a workflow command of GitHub."""
    for character in "%\r\n" + special:
        text = text.replace(character, f"%{ord(character):02X}")
    return text


FORMATS = {"text": _as_text, "json": _as_json, "github": _as_github}
