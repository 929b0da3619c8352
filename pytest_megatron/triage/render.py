"""Text and Markdown of a triage. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_megatron.base.templates import render
from pytest_megatron.base.text import listed
from pytest_megatron.triage.api import FailureGroup, Triage, Unclear

_INDENT = "    "
_MOST_LISTED = 5


def as_text(found: Triage) -> str:
    """Return a paragraph for each cause, with its evidence and what to do."""
    blocks = ["\n".join(_text_block(group)) for group in found.groups]
    blocks += ["\n".join(_unclear_block(unclear)) for unclear in found.unclear[:_MOST_LISTED]]
    if not blocks:
        lines = [f"nothing failed in {_launches(found.num_units)}"]
        return "\n".join([*lines, *_notes(found)])
    return "\n\n".join([*blocks, *_notes(found)])


def as_markdown(found: Triage) -> str:
    """Return the same for a pull request or a step summary."""
    page = render(
        "triage.md",
        groups=[(group.first, _advice(group), _also(group)) for group in found.groups],
        unclear=found.unclear[:_MOST_LISTED],
        notes=_notes(found),
        launches=_launches(found.num_units),
    )
    return page.rstrip()


def _text_block(group: FailureGroup) -> Iterator[str]:
    first = group.first
    yield f"{first.unit}: {first.family}"
    yield f"{_INDENT}{first.text}"
    for evidence in first.evidence:
        yield f"{_INDENT}{evidence.file}:{evidence.line}: {evidence.text}"
    yield f"{_INDENT}{first.reason}"
    yield f"{_INDENT}known as {first.signature}: {_advice(group)}"
    if first.next is not None:
        yield f"{_INDENT}next: {first.next}"
    if first.again is not None:
        yield f"{_INDENT}again: {first.again}"
    if also := _also(group):
        yield f"{_INDENT}{also}"


def _unclear_block(unclear: Unclear) -> Iterator[str]:
    yield f"{unclear.unit}: unknown"
    yield f"{_INDENT}{unclear.text}"
    for evidence in unclear.last_words:
        yield f"{_INDENT}{evidence.file}:{evidence.line}: {evidence.text}"


def _advice(group: FailureGroup) -> str:
    first = group.first
    return f"{first.advice} ({first.source})" if first.source is not None else f"{first.advice}"


def _also(group: FailureGroup) -> str:
    others = [diagnosis.unit for diagnosis in group.diagnoses[1:]]
    return f"the same in {listed(others, _MOST_LISTED)}" if others else ""


def _notes(found: Triage) -> list[str]:
    notes = [f"note: {note}" for note in found.notes]
    if len(found.unclear) > _MOST_LISTED:
        rest = len(found.unclear) - _MOST_LISTED
        notes.append(f"note: {_launches(rest)} more show neither a failure nor a good end")
    return notes


def _launches(number: int) -> str:
    return "1 launch" if number == 1 else f"{number} launches"
