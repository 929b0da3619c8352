"""A workload: one row of a recipe, parsed once; the words of recipes, and their meaning. Pure.

A project adds its own words (`project_words`); nothing else here reads a file. Every selection is
exact equality, as Megatron-LM's: scope `L1` does not imply `L0`. Unlike there, an unknown
word and a selection without workloads are errors that name the nearest matches.
Source: Megatron-LM tests/test_utils/python_scripts/recipe_parser.py, load_workloads(), d98e8a64dd
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.project import (
    Quarantine,
    QuarantineError,
    load_config,
    parse_quarantine,
)
from pytest_megatron.base.text import counted, grouped, one_of
from pytest_megatron.errors import EmptySelectionError, RecipeError, SelectionError

if TYPE_CHECKING:
    from pytest_megatron.base.yaml import YamlDocument


# Scope as written -> the tier that CI asks for, and the cadence that the tier implies.
# Source: Megatron-LM tests/test_utils/python_scripts/recipe_parser.py, d98e8a64dd
SCOPE_ALIASES = {"mr-github-slim": "L0", "mr-github": "L1", "nightly": "L2", "weekly": "L3"}
ANY_SCOPE = "any"  # of a row that names none, where it may
IMPLIED_CADENCE: dict[str, tuple[str, ...]] = {"nightly": ("nightly",), "weekly": ("weekly",)}
DEFAULT_CADENCE: tuple[str, ...] = ("pr", "nightly", "mergegroup")
CADENCES = ("mergegroup", "nightly", "pr", "weekly")

# A scope that ends in one of these, or is one of those, matches no CI filter: that is how rows
# are switched off.
DISABLED_SUFFIXES = ("-broken", "-temp-disabled")
DISABLED_SCOPES = ("deprecated", "flaky")

# Megatron-LM's driver of functional tests.
DRIVER = "tests/functional_tests/shell_test_utils/run_ci_test.sh"
UNIT_MODEL = "unit-tests"  # of rows that are buckets of unit tests, and no workloads

_SCOPES = (
    *("L0", "L0-smoke", "L1", "L2", "L3", "cleanup", "deprecated", "flaky", "mr", "mr-github"),
    *("mr-github-slim", "mr-slim", "nightly", "release", "unit-tests", "weekly"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Every word that means something in a recipe or a selection option."""

    scopes: frozenset[str] = frozenset(_SCOPES)
    platforms: frozenset[str] = frozenset(
        {"cpu", "dgx_a100", "dgx_gb200", "dgx_h100", "dgx_h200"},
    )
    environments: frozenset[str] = frozenset({"dev", "lts"})
    cadences: frozenset[str] = frozenset(CADENCES)

    def known(self, key: str) -> frozenset[str] | None:
        """Return the words that a recipe key takes, None for a key that takes any value."""
        words = {
            "scope": self.scopes,
            "platforms": self.platforms,
            "environment": self.environments,
            "cadence": self.cadences,
        }
        return words.get(key)

    def knows(self, key: str, word: str) -> bool:
        """Return whether `word` means something for `key`; a disabled scope is a known one."""
        known = self.known(key)
        if known is None or word in known:
            return True
        return key == "scope" and enabled_scope(word) in self.scopes


BUILT_IN_WORDS = Vocabulary()


def project_words(root: Path) -> Vocabulary:
    """Return the vocabulary with the words of the project that `root` is in.

    Raises:
        ConfigError: The project's settings are wrong.
    """
    config = load_config(root)
    return replace(
        BUILT_IN_WORDS,
        scopes=BUILT_IN_WORDS.scopes.union(config.scopes),
        platforms=BUILT_IN_WORDS.platforms.union(config.platforms),
        environments=BUILT_IN_WORDS.environments.union(config.environments),
    )


def enabled_scope(scope: str) -> str:
    """Return a scope without the suffix that disables it."""
    for suffix in DISABLED_SUFFIXES:
        scope = scope.removesuffix(suffix)
    return scope


def disabled_reason(scope: str) -> str | None:
    """Return why rows of a scope do not run, None if they do."""
    if scope in DISABLED_SCOPES or scope.endswith(DISABLED_SUFFIXES):
        return f"scope {scope!r} disables the row"
    return None


_T = TypeVar("_T")
MAX_SHOWN = 60  # characters of a template in a message
DEFAULT_NAME = "{test_case}_{environment}_{platforms}"
DEFAULT_TRACE_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class OfDriver:
    """What a row has from a script that calls Megatron-LM's driver.

    Attributes:
        written: The row as its recipe has it.
        env: Variables that the script exports, or hands to the driver for the case.
        unset: Variables that it removes.
        directory: Where the program starts; relative to the project, if it is in there.
        is_lightweight: Whether it asks for few steps.
    """

    written: Workload
    env: Mapping[str, str]
    unset: tuple[str, ...]
    directory: str
    is_lightweight: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One expanded row: a test case on a platform in an environment for a scope.

    Attributes:
        file: The recipe, as given by the caller.
        line: Line of the inner product that the row comes from, from 1.
        spec: Every key of the row, as Megatron-LM's parser holds it: the file's `spec` without
            the keys that the row overrides, then the row's, then `test_case` and `cadence`.
        scope: After the alias table (`mr-github` is `L1`).
        cadence: When CI runs it; explicit, implied by the scope, or the default.
        nodes: Hosts.
        gpus: GPUs per node; 0 for a row without any.
        n_repeat: How often the recipe wants it run; None leaves that to the caller.
        time_limit_s: Seconds; None leaves that to the caller.
        script: Template of a bash script, None where we launch `training_script_path` ourselves.
        name: The recipe's name template, filled in.
        variant: Distinguishes the row from others of its file with the same test case,
            environment and platform; mostly empty.
        max_attempts: How often at most a repeat is started; None leaves that to the caller.
        transient: Ids of signatures that start another attempt of this row, whatever the table
            has.
        never_transient: Ids of signatures that do not.
        quarantine: Why its failure does not count for now, or None.
        trace_steps: Steps of which tensors are traced.
        own_case: The case of a row in the short form, with the lines of the recipe; None for one
            that has a file.
        of_driver: What it has from a script that was read; None for any other row.
        by_bash: Why bash runs a script that calls Megatron-LM's driver; None where it does not.
    """

    file: Path
    line: int
    spec: Mapping[str, JsonValue]
    model: str
    test_case: str
    environment: str
    platform: str
    scope: str
    cadence: tuple[str, ...]
    tag: str | None
    nodes: int
    gpus: int
    n_repeat: int | None
    time_limit_s: int | None
    script: str | None
    training_script_path: str | None
    data_path: str | None
    data_cache_path: str | None
    checkpoint_load_path: str | None
    name: str
    variant: tuple[str, ...]
    max_attempts: int | None = None
    transient: tuple[str, ...] = ()
    never_transient: tuple[str, ...] = ()
    quarantine: Quarantine | None = None
    trace_steps: int = DEFAULT_TRACE_STEPS
    own_case: YamlDocument | None = None
    of_driver: OfDriver | None = None
    by_bash: str | None = None

    @property
    def limits(self) -> Mapping[str, JsonValue]:
        """Metric, or a pattern of metrics, to limits of a row in the short form, unchecked."""
        found = None if self.own_case is None else self.spec.get("compare")
        return found if isinstance(found, dict) else {}

    @property
    def calls_driver(self) -> bool:
        """True if its script calls Megatron-LM's driver."""
        return self.script is not None and DRIVER in self.script

    @property
    def written(self) -> Workload:
        """The row as its recipe has it."""
        return self if self.of_driver is None else self.of_driver.written

    @property
    def where(self) -> str:
        """File and line, with which errors about it begin."""
        return f"{self.file}:{self.line}"

    @property
    def item_name(self) -> str:
        """The node id behind the `::`, such as `gpt3_tp2[dev-dgx_h100]`; unique in the file."""
        return item_name(self.test_case, (self.environment, self.platform, *self.variant))

    @property
    def node_id(self) -> str:
        """The node id of the row, its file as the row names it."""
        return f"{self.file.as_posix()}::{self.item_name}"

    @property
    def disabled_reason(self) -> str | None:
        """The reason that no CI runs the row (`mr-broken`, `flaky`), None where one does."""
        return disabled_reason(self.scope)

    def render(self, template: str, **magic: JsonValue) -> str:
        """Fill in a template with the row's keys and `magic`, which wins.

        Source: Megatron-LM tests/test_utils/python_scripts/launch_nemo_run_workload.py, d98e8a64dd

        Raises:
            RecipeError: A placeholder has no value, or a brace is not doubled.
        """
        try:
            return fill_in(template, {**self.spec, **magic})
        except RowError as problem:
            raise RecipeError(self.where, str(problem)) from problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row before it is parsed, as expansion yields it.

    Attributes:
        line: Line of the inner product.
        spec: The spec, for `Workload.spec`.
        axes: Keys of the product in file order; they may distinguish rows.
        case: For `Workload.own_case`.
    """

    line: int
    spec: Mapping[str, JsonValue]
    axes: tuple[str, ...]
    case: YamlDocument | None = None


def item_name(test_case: str, parts: tuple[str, ...]) -> str:
    """Return the name of a row in a node id."""
    return f"{test_case}[{'-'.join(parts)}]"


class RowError(Exception):
    """A row cannot be built; its text becomes a finding with file and line."""


def fill_in(template: str, values: Mapping[str, JsonValue]) -> str:
    """Fill in a `str.format` template.

    Raises:
        RowError: A placeholder has no value, or the braces do not match; names it.
    """
    shown = template if len(template) <= MAX_SHOWN else template[:MAX_SHOWN] + "..."
    try:
        return template.format_map(values)
    except KeyError as problem:
        raise RowError(
            f"{shown!r} uses {{{problem.args[0]}}}, which the row does not have; "
            "add the key, or double the braces"
        ) from problem
    except (ValueError, IndexError, AttributeError, TypeError) as problem:
        raise RowError(f"{shown!r} is no template: {problem}; double the braces") from problem


def parse_row(row: Row, *, file: Path, variant: tuple[str, ...]) -> Workload:
    """Turn a row of a recipe into a workload.

    Args:
        row: The row.
        file: Recipe that has the row.
        variant: See `Workload`.

    Raises:
        RecipeError: A key is missing or has a value of the wrong type.
    """
    keys, cadence = _Keys(f"{file}:{row.line}", row.spec), row.spec["cadence"]
    for key, instead in _FORMER.items():
        if row.spec.get(key) is not None:
            raise keys.error(f"{key} was removed; {instead}")
    return Workload(
        file=file,
        line=row.line,
        spec=row.spec,
        model=keys.required_text("model"),
        test_case=keys.required_text("test_case"),
        environment=keys.required_text("environment"),
        platform=keys.required_text("platforms"),
        scope=keys.required_text("scope"),
        cadence=tuple(map(str, cadence)) if isinstance(cadence, list) else (),
        tag=keys.text("tag"),
        nodes=keys.number("nodes") or 1,
        gpus=keys.number("gpus") or 0,
        n_repeat=keys.number("n_repeat"),
        time_limit_s=keys.number("time_limit"),
        max_attempts=keys.positive("max_attempts"),
        transient=keys.words("transient"),
        never_transient=keys.words("never_transient"),
        quarantine=keys.quarantine(),
        trace_steps=keys.positive("trace_steps") or DEFAULT_TRACE_STEPS,
        script=keys.text("script"),
        training_script_path=keys.text("training_script_path"),
        data_path=keys.text("data_path"),
        data_cache_path=keys.text("data_cache_path"),
        checkpoint_load_path=keys.text("checkpoint_load_path"),
        name=keys.name(),
        variant=variant,
        own_case=row.case,
    )


_FORMER = {
    "equivalent_to": "write pytest-megatron trace compare ROW ROW",
    "max_windows": "a release is one start; give it the time_limit that all of it takes",
}


class _Keys:
    """Typed values of a row's keys; an error names the key."""

    __slots__ = ("spec", "where")

    def __init__(self, where: str, spec: Mapping[str, JsonValue]) -> None:
        self.where = where
        self.spec = spec

    def error(self, problem: str) -> RecipeError:
        """Return an error at the row."""
        return RecipeError(self.where, problem)

    def _value(self, key: str, kind: type[_T], expected: str) -> _T | None:
        """Return a value of one type; None where the key is missing or null."""
        value = self.spec.get(key)
        if value is None or (isinstance(value, kind) and not isinstance(value, bool)):
            return value
        raise self.error(f"{key}: found {value!r}, expected {expected}")

    def text(self, key: str) -> str | None:
        """Return a string or None."""
        return self._value(key, str, "a string")

    def required_text(self, key: str) -> str:
        """Return a string that must be there."""
        if value := self.text(key):
            return value
        problem = "the row has none, expected a string; add it to the product or to spec"
        raise self.error(f"{key}: {problem}")

    def number(self, key: str) -> int | None:
        """Return an integer or None."""
        return self._value(key, int, "an integer")

    def positive(self, key: str) -> int | None:
        """Return an integer from 1 on, or None."""
        value = self.number(key)
        if value is not None and value < 1:
            raise self.error(f"{key}: found {value!r}, expected an integer from 1 on")
        return value

    def words(self, key: str) -> tuple[str, ...]:
        """Return a list of words; none where the key is missing or null."""
        value = self._value(key, list, "a list of ids") or []
        if not all(isinstance(word, str) for word in value):
            raise self.error(f"{key}: found {value!r}, expected a list of ids")
        return tuple(value)

    def quarantine(self) -> Quarantine | None:
        """Return why the row may fail, None where it may not."""
        value = self.spec.get("quarantine")
        try:
            return None if value is None else parse_quarantine(value)
        except QuarantineError as problem:
            raise self.error(f"quarantine: {problem}") from problem

    def name(self) -> str:
        """Return the row's name, filled in."""
        try:
            return fill_in(self.text("name") or DEFAULT_NAME, self.spec)
        except RowError as problem:
            raise self.error(f"name: {problem}") from problem


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
    problem = f"matches none of {counted(len(workloads), 'workload')}"
    nearest_by_filters = grouped(
        (names, workloads[index].item_name)
        for index, names in missed.items()
        if len(names) == fewest
    )
    for names, rows in sorted(nearest_by_filters.items()):
        without = _as_options({name: filters[name] for name in names})
        count = "1 workload matches" if len(rows) == 1 else f"{len(rows)} workloads match"
        listed = ", ".join(rows[:MAX_ROWS]) + (", ..." if len(rows) > MAX_ROWS else "")
        problem += f"; {count} without {without}: {listed}"
    return EmptySelectionError(where, problem)


def _as_options(filters: Filters) -> str:
    return " ".join(f"{option(name)} {','.join(words)}" for name, words in filters.items())
