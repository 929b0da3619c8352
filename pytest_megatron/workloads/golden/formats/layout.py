"""Layout of a golden's text: the lines that its JSON is broken into. Pure.

A reader sees the same JSON in every form, except that `list` leaves out the steps where start and
interval give them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import Enum

from pytest_megatron.base.files import JsonValue

PROVENANCE_KEY = "_provenance"
_INDENT = "  "
# Containers that are broken into lines: the fields of a request, and provenance with its objects.
_REQUEST_DEPTH = 2
_PROVENANCE_DEPTH = 3


class Form(Enum):
    """Layouts, by the content of a line."""

    COMPACT = "compact"
    STEPS = "steps"
    LIST = "list"
    MEGATRON = "megatron"


def lay_out(document: Mapping[str, JsonValue], form: Form) -> str:
    """Return the text of a golden, with a final newline; keys in the order given.

    `compact` has a line for each metric, each field of a request and each key of the provenance;
    `steps` and `megatron` have one for each step, the latter indented as Megatron-LM does it;
    `list` is `compact` without the steps of a metric that stand at equal distances.
    """
    match form:
        case Form.STEPS:
            text = json.dumps(document, indent=2, allow_nan=False)
        case Form.MEGATRON:
            text = json.dumps(document, indent=4, allow_nan=False)
        case Form.COMPACT:
            text = _compact(document)
        case Form.LIST:
            text = _compact({name: _without_steps(value) for name, value in document.items()})
    return text + "\n"


def is_block(value: JsonValue) -> bool:
    """Return True if a top-level value is a metric's block."""
    return isinstance(value, dict) and "values" in value


def _compact(document: Mapping[str, JsonValue]) -> str:
    parts = {name: _nested(value, 1, _depth(name, value)) for name, value in document.items()}
    return _braced(parts, 0)


def _depth(name: str, value: JsonValue) -> int:
    """Return how many levels of a key get lines of their own."""
    if name == PROVENANCE_KEY:
        return _PROVENANCE_DEPTH
    return 1 if is_block(value) else _REQUEST_DEPTH


def _nested(value: JsonValue, level: int, depth: int) -> str:
    """Return `value` with its objects broken into lines down to `depth`."""
    if level >= depth or not isinstance(value, dict) or not value:
        return json.dumps(value, allow_nan=False)
    return _braced({k: _nested(v, level + 1, depth) for k, v in value.items()}, level)


def _braced(parts: Mapping[str, str], level: int) -> str:
    """Return an object with a line for each key."""
    outer = _INDENT * level
    lines = [f"{outer}{_INDENT}{json.dumps(name)}: {text}" for name, text in parts.items()]
    return "{\n" + ",\n".join(lines) + f"\n{outer}}}" if lines else "{}"


def _without_steps(value: JsonValue) -> JsonValue:
    """Return a block with a list of values, if start and interval give every step of it."""
    if not isinstance(value, dict) or not isinstance(values := value.get("values"), dict):
        return value
    steps = list(map(int, values))
    interval = _interval(steps)
    if interval is None or value.get("start_step") != steps[0]:
        return value
    numbers: list[JsonValue] = list(values.values())
    return value | {"step_interval": interval, "values": numbers}


def _interval(steps: Sequence[int]) -> int | None:
    """Return the distance of the steps, None where it is not the same everywhere."""
    if len(steps) < 2:  # noqa: PLR2004 - a distance is between two
        return None
    interval = steps[1] - steps[0]
    is_regular = interval > 0 and steps == list(range(steps[0], steps[-1] + 1, interval))
    return interval if is_regular else None
