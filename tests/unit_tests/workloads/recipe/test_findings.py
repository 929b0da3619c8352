from __future__ import annotations

from pathlib import Path

from pytest_megatron.base.findings import Finding, Severity, as_error


def finding(line: int | None, severity: Severity = Severity.ERROR) -> Finding:
    return Finding(
        file=Path("r.yaml"), line=line, rule="schema", message="is wrong", severity=severity
    )


def test_a_finding_names_file_and_line() -> None:
    assert (str(finding(3)), str(finding(None))) == ("r.yaml:3: is wrong", "r.yaml: is wrong")


def test_a_warning_is_no_error() -> None:
    found = [finding(1, Severity.WARNING), finding(2)]
    assert [each.is_error for each in found] == [False, True]


def test_an_error_says_how_many_more_there_are() -> None:
    assert str(as_error([finding(1)])) == "r.yaml:1: is wrong"
    assert str(as_error([finding(1), finding(2)])) == (
        "r.yaml:1: is wrong (and 1 more in this file: see `pytest-megatron lint`)"
    )
