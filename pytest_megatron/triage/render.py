"""Text and Markdown of a triage. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_megatron.markdown import code, escaped
from pytest_megatron.triage.triage import Group, Triage

_INDENT = "    "
_MOST_LISTED = 5


def as_text(found: Triage) -> str:
    """Return a paragraph for each cause, with its evidence and what to do."""
    if not found.groups:
        lines = [f"nothing failed in {_launches(found.num_units)}"]
        return "\n".join([*lines, *_notes(found)])
    blocks = ["\n".join(_text_block(group)) for group in found.groups]
    return "\n\n".join([*blocks, *_notes(found)])


def as_markdown(found: Triage) -> str:
    """Return the same for a pull request or a step summary."""
    if not found.groups:
        return "\n".join([f"Nothing failed in {_launches(found.num_units)}.", *_notes(found)])
    lines = []
    for group in found.groups:
        first = group.first
        kind = "transient" if first.is_transient else "not transient"
        lines += [f"### {first.signature.family} ({kind})", "", escaped(first.text), ""]
        lines += [f"- `{e.file}:{e.line}`: {code(e.text)}" for e in first.evidence]
        lines += [f"- {first.reason}", f"- signature `{first.signature.id}`: {_advice(group)}"]
        if first.command is not None:
            lines.append(f"- next: {code(first.command)}")
        if len(group.diagnoses) > 1:
            lines.append(f"- {_also(group)}")
        lines.append("")
    return "\n".join([*lines, *_notes(found)]).rstrip()


def _text_block(group: Group) -> Iterator[str]:
    first = group.first
    yield f"{first.unit}: {first.signature.family}"
    yield f"{_INDENT}{first.text}"
    for evidence in first.evidence:
        yield f"{_INDENT}{evidence.file}:{evidence.line}: {evidence.text}"
    yield f"{_INDENT}{first.reason}"
    yield f"{_INDENT}known as {first.signature.id}: {_advice(group)}"
    if first.command is not None:
        yield f"{_INDENT}next: {first.command}"
    if first.again is not None:
        yield f"{_INDENT}again: {first.again}"
    if len(group.diagnoses) > 1:
        yield f"{_INDENT}{_also(group)}"


def _advice(group: Group) -> str:
    signature = group.first.signature
    return signature.advice + (f" ({signature.source})" if signature.source is not None else "")


def _also(group: Group) -> str:
    others = [d.unit for d in group.diagnoses[1:]]
    more = f" and {len(others) - _MOST_LISTED} more" if len(others) > _MOST_LISTED else ""
    return f"the same in {', '.join(others[:_MOST_LISTED])}{more}"


def _notes(found: Triage) -> list[str]:
    return [f"note: {note}" for note in found.notes]


def _launches(number: int) -> str:
    return f"{number} {'launch' if number == 1 else 'launches'}"
