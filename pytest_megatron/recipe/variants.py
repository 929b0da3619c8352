"""What tells rows of one file apart, for their node ids. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from pytest_megatron.files import JsonValue
from pytest_megatron.recipe.model import Row, item_name

_IN_EVERY_NAME = ("environment", "platforms", "test_case")


def variants_of(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return for each row the values that make its name unique in the file.

    Rows with the same test case, environment and platform get the values of those product keys
    that differ among them, in the order of the file; rows that are alike even so are numbered.
    """
    variants: list[tuple[str, ...]] = [()] * len(rows)
    for members in _groups(rows):
        keys = _differing_keys([rows[member] for member in members])
        for member in members:
            variants[member] = tuple(_word(rows[member].spec.get(key)) for key in keys)
    taken: set[str] = set()
    for index, row in enumerate(rows):
        parts = [str(row.spec.get(key)) for key in ("environment", "platforms")]
        test_case, variant, number = str(row.spec["test_case"]), variants[index], 1
        while (name := item_name(test_case, (*parts, *variants[index]))) in taken:
            number += 1
            variants[index] = (*variant, str(number))
        taken.add(name)
    return variants


def duplicates_of(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Return pairs of equal rows: the first of its kind and the later one."""
    pairs: list[tuple[Row, Row]] = []
    for members in _groups(rows):
        first: dict[str, Row] = {}
        keys = {key for member in members for key in rows[member].axes} | {"cadence"}
        for member in members:
            row = rows[member]
            same = first.setdefault(repr([row.spec.get(key) for key in keys]), row)
            if same is not row:
                pairs.append((same, row))
    return pairs


def _groups(rows: Sequence[Row]) -> list[list[int]]:
    """Return the indices of rows that share all that is in every name, groups of two or more."""
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        groups[tuple(str(row.spec.get(key)) for key in _IN_EVERY_NAME)].append(index)
    return [members for members in groups.values() if len(members) > 1]


def _differing_keys(rows: Sequence[Row]) -> list[str]:
    """Return the product keys, and the cadence if nothing else, whose values differ."""
    keys = dict.fromkeys(key for row in rows for key in row.axes if key not in _IN_EVERY_NAME)
    differing = [key for key in keys if _num_values(rows, [key]) > 1]
    with_cadence = [*differing, "cadence"]
    if _num_values(rows, differing) < _num_values(rows, with_cadence):
        return with_cadence
    return differing


def _num_values(rows: Sequence[Row], keys: Sequence[str]) -> int:
    """Return how many different values the rows have for some keys together."""
    return len({tuple(_word(row.spec.get(key)) for key in keys) for row in rows})


def _word(value: JsonValue) -> str:
    """Return a value as a part of a name."""
    return "+".join(map(str, value)) if isinstance(value, list) else str(value)
