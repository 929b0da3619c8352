"""Select workloads by the words of options. Pure.

Every filter is exact equality, as Megatron-LM's: scope `L1` does not imply `L0`. Unlike there, a
unknown word and a selection without workloads are errors that name the nearest matches.
Source: Megatron-LM tests/test_utils/python_scripts/recipe_parser.py, load_workloads(), d98e8a64dd
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from pytest_megatron.base.text import one_of
from pytest_megatron.errors import EmptySelectionError, SelectionError
from pytest_megatron.workloads.recipe.model import (
    ANY_SCOPE,
    SCOPE_ALIASES,
    Vocabulary,
    Workload,
    enabled_scope,
)

MAX_CHOICES = 12  # listed in one message
MAX_ROWS = 3
_RECIPE_KEYS = {"platform": "platforms"}  # filter -> recipe key, where they differ


# Field of a workload to the words that it may have; without words, everything passes.
Filters: TypeAlias = Mapping[str, tuple[str, ...]]


def select(
    workloads: Sequence[Workload], filters: Filters, vocabulary: Vocabulary
) -> tuple[Workload, ...]:
    """Return the workloads that pass every filter, in their order.

    Raises:
        SelectionError: A word is unknown, or no workload passes; names the nearest.
    """
    filters = {name: words for name, words in filters.items() if words}
    for name, words in filters.items():
        _check_words(name, words, workloads, vocabulary)
    if "scope" in filters:
        scopes = tuple(SCOPE_ALIASES.get(word, word) for word in filters["scope"])
        filters |= {"scope": scopes}
    selected = tuple(w for w in workloads if not failing(w, filters))
    if not selected:
        raise _nothing(workloads, filters)
    return selected


def option(name: str) -> str:
    """Return the command-line option of a filter."""
    return "--" + name.replace("_", "-")


def values(workload: Workload, name: str) -> tuple[str, ...]:
    """Return the values of a workload for a filter."""
    match name:
        case "cadence":
            return workload.cadence
        case "tag":
            return () if workload.tag is None else (workload.tag,)
        case _:
            return (str(getattr(workload, name)),)


def failing(workload: Workload, filters: Filters) -> tuple[str, ...]:
    """Return the filters that a workload does not pass; scopes are without aliases."""
    return tuple(
        name
        for name, words in filters.items()
        if words
        and not {*words, *((ANY_SCOPE,) if name == "scope" else ())} & set(values(workload, name))
    )


def _check_words(
    name: str, words: Iterable[str], workloads: Sequence[Workload], vocabulary: Vocabulary
) -> None:
    """Refuse a word that is neither in the vocabulary nor in a workload."""
    choices = {value for workload in workloads for value in values(workload, name)}
    choices |= vocabulary.known(_RECIPE_KEYS.get(name, name)) or frozenset()
    for word in words:
        if word in choices or (name == "scope" and enabled_scope(word) in choices):
            continue
        what = name.replace("_", " ")
        if not choices:
            problem = f"unknown {what} {word!r}, no workload has a {what}; drop the option"
        elif len(choices) <= MAX_CHOICES or vocabulary.known(_RECIPE_KEYS.get(name, name)):
            problem = f"unknown {what} {word!r}, expected {one_of(word, choices)}"
        else:
            close = difflib.get_close_matches(word, sorted(choices), MAX_ROWS, 0.5)
            problem = f"unknown {what} {word!r}, expected one of {len(choices)}"
            problem += f"; the nearest are {', '.join(sorted(close))}" if close else ""
        raise SelectionError(option(name), problem)


def _nothing(workloads: Sequence[Workload], filters: Filters) -> SelectionError:
    """Return the error for a selection without workloads; names the filters to drop."""
    where = _as_options(filters) or "the selection"
    if not workloads:
        return EmptySelectionError(where, "there are no workloads, expected recipes with some")
    missed = {index: failing(workload, filters) for index, workload in enumerate(workloads)}
    fewest = min(len(names) for names in missed.values())
    problem = f"matches none of {len(workloads)} workloads"
    nearest_by_filters: dict[tuple[str, ...], list[str]] = {}
    for index, names in missed.items():
        if len(names) == fewest:
            nearest_by_filters.setdefault(names, []).append(workloads[index].item_name)
    for names, rows in sorted(nearest_by_filters.items()):
        without = _as_options({name: filters[name] for name in names})
        count = "1 workload matches" if len(rows) == 1 else f"{len(rows)} workloads match"
        listed = ", ".join(rows[:MAX_ROWS]) + (", ..." if len(rows) > MAX_ROWS else "")
        problem += f"; {count} without {without}: {listed}"
    return EmptySelectionError(where, problem)


def _as_options(filters: Filters) -> str:
    return " ".join(f"{option(name)} {','.join(words)}" for name, words in filters.items())
