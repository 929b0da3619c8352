"""The table that decides what CI runs: built in, or a project's own. Data, and its reader."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pytest_megatron.base.project import ProjectConfig
from pytest_megatron.errors import ConfigError
from pytest_megatron.recipe.vocabulary import SCOPE_ALIASES, Vocabulary, nearest

if TYPE_CHECKING:
    from pytest_megatron.ci.schema import CiKeys, LabelKeys, MarkKeys, PathKeys, RuleKeys

BUILT_IN = Path(__file__).with_name("table.toml")
TABLE_NAME = "ci"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRule:
    """One row of the decision.

    Attributes:
        events, labels, refs, cadences: When it decides: one word of each that has any.
        scope: Words of the selection; aliases are resolved.
        cadence: None is no filter.
        environment: None leaves it to the table.
        n_repeat: How often a workload is trained.
    """

    name: str
    events: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    refs: tuple[str, ...] = ()
    cadences: tuple[str, ...] = ()
    scope: tuple[str, ...]
    cadence: tuple[str, ...] | None
    environment: str | None = None
    n_repeat: int
    is_lightweight: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelEffect:
    """What a label does beside the rules; None changes nothing."""

    label: str
    environment: str | None = None
    image: str | None = None
    suites: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkRule:
    """A mark whose tests are left out, where one word of each that has any is the session's."""

    mark: str
    environments: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    platforms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PathClass:
    """A class of changed paths, and the labels that it asks for.

    Attributes:
        statuses: `A`, `M` or `D`; empty is any.
        label: None asks for none.
        also: Labels that are asked for besides.
    """

    name: str
    patterns: tuple[str, ...]
    statuses: tuple[str, ...] = ()
    label: str | None = None
    also: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CiTable:
    """Everything that decides what CI runs.

    Attributes:
        label_strength: Labels that paths ask for, the weakest first.
        environment, image: Where no label says otherwise.
        tag: Of unit-test rows and python tests; "" is no filter.
        recipes: Where recipes are, from the project's root.
        unit_tests: Folders whose test files buckets share out.
        may_repeat_less: Whether a row that asks for fewer repeats than the rule gets them.
        opt_in_platforms: Where only tests with the mark `launch_on_<platform>` run.
    """

    rules: tuple[DecisionRule, ...]
    labels: tuple[LabelEffect, ...]
    marks: tuple[MarkRule, ...]
    paths: tuple[PathClass, ...]
    label_strength: tuple[str, ...]
    events: tuple[str, ...]
    environment: str
    image: str
    tag: str
    recipes: tuple[str, ...]
    recipe_profile: str
    unit_tests: tuple[str, ...]
    may_repeat_less: bool
    default_time_limit_s: int
    job_margin_minutes: int
    opt_in_platforms: tuple[str, ...]

    @property
    def known_labels(self) -> tuple[str, ...]:
        """Every label that something here reads."""
        named = [label for rule in self.rules for label in rule.labels]
        return tuple(dict.fromkeys((*named, *(effect.label for effect in self.labels))))


@functools.cache
def built_in_table() -> CiTable:
    """Return the table of this package."""
    return _parse(_built_in_keys())


def load_table(config: ProjectConfig, vocabulary: Vocabulary) -> CiTable:
    """Return the table of a project; what it leaves out is as built in.

    Args:
        config: The project's settings.
        vocabulary: The scopes that its rules may name.

    Raises:
        ConfigError: A key is unknown, or its value is wrong; names file and key.
    """
    own = config.tables.get(TABLE_NAME)
    if own is None:
        return built_in_table()
    where = f"{config.file}: [tool.pytest-megatron.{TABLE_NAME}]"
    if not isinstance(own, dict):
        raise ConfigError(where, f"found {own!r}, expected a table")
    from pytest_megatron.ci import schema  # noqa: PLC0415  pydantic is slow to import

    problems = schema.check(own)
    if problems:
        key, text = problems[0]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigError(f"{where} {key}", text + more)
    table = _parse(cast("CiKeys", {**_built_in_keys(), **own}))
    _check_words(table, where, vocabulary)
    return table


def _built_in_keys() -> CiKeys:
    return cast("CiKeys", tomllib.loads(BUILT_IN.read_text(encoding="utf-8")))


def _parse(keys: CiKeys) -> CiTable:
    return CiTable(
        rules=tuple(map(_rule, keys["rules"])),
        labels=tuple(map(_label, keys["labels"])),
        marks=tuple(map(_mark, keys["marks"])),
        paths=tuple(map(_path, keys["paths"])),
        label_strength=tuple(keys["label_strength"]),
        events=tuple(keys["events"]),
        environment=keys["environment"],
        image=keys["image"],
        tag=keys["tag"],
        recipes=tuple(keys["recipes"]),
        recipe_profile=keys["recipe_profile"],
        unit_tests=tuple(keys["unit_tests"]),
        may_repeat_less=keys["repeats"] == "at-most",
        default_time_limit_s=keys["default_time_limit"],
        job_margin_minutes=keys["job_margin_minutes"],
        opt_in_platforms=tuple(keys["opt_in_platforms"]),
    )


def _rule(keys: RuleKeys) -> DecisionRule:
    when = keys.get("when", {})
    cadence = keys.get("cadence")
    return DecisionRule(
        name=keys["name"],
        events=tuple(when.get("event", ())),
        labels=tuple(when.get("label", ())),
        refs=tuple(when.get("ref", ())),
        cadences=tuple(when.get("cadence", ())),
        scope=tuple(SCOPE_ALIASES.get(word, word) for word in keys["scope"]),
        cadence=None if not cadence else tuple(cadence),
        environment=keys.get("environment"),
        n_repeat=keys["n_repeat"],
        is_lightweight=keys["lightweight"],
    )


def _label(keys: LabelKeys) -> LabelEffect:
    return LabelEffect(
        label=keys["label"],
        environment=keys.get("environment"),
        image=keys.get("image"),
        suites=tuple(keys.get("suites", ())),
        env=dict(keys.get("env", {})),
    )


def _mark(keys: MarkKeys) -> MarkRule:
    return MarkRule(
        mark=keys["mark"],
        environments=tuple(keys.get("environment", ())),
        tags=tuple(keys.get("tag", ())),
        platforms=tuple(keys.get("platform", ())),
    )


def _path(keys: PathKeys) -> PathClass:
    return PathClass(
        name=keys["name"],
        patterns=tuple(keys["match"]),
        statuses=tuple(keys.get("status", ())),
        label=keys.get("label"),
        also=tuple(keys.get("also", ())),
    )


def _check_words(table: CiTable, where: str, vocabulary: Vocabulary) -> None:
    """Refuse words that nothing knows: a rule that decides for nothing is silent.

    Raises:
        ConfigError: There is one; names its key.
    """
    environments = vocabulary.environments
    for index, rule in enumerate(table.rules):
        key = f"{where} rules[{index}]"
        _known(f"{key}.scope", rule.scope, vocabulary.scopes)
        _known(f"{key}.when.event", rule.events, table.events)
        own = () if rule.environment is None else (rule.environment,)
        _known(f"{key}.environment", own, environments)
    for index, effect in enumerate(table.labels):
        given = () if effect.environment is None else (effect.environment,)
        _known(f"{where} labels[{index}].environment", given, environments)
    _known(f"{where} environment", (table.environment,), environments)
    _known(f"{where} opt_in_platforms", table.opt_in_platforms, vocabulary.platforms)
    for index, rule_of_mark in enumerate(table.marks):
        _known(f"{where} marks[{index}].environment", rule_of_mark.environments, environments)
        _known(f"{where} marks[{index}].platform", rule_of_mark.platforms, vocabulary.platforms)
    if unreachable := _unreachable(table.rules):
        index, earlier = unreachable
        raise ConfigError(
            f"{where} rules[{index}]",
            f"can never decide, rules[{earlier}] always does; move it up",
        )


def _known(key: str, words: Sequence[str], choices: Sequence[str] | frozenset[str]) -> None:
    for word in words:
        if word not in choices:
            raise ConfigError(
                key,
                f"unknown word {word!r}, expected one of {', '.join(sorted(choices))}"
                + nearest(word, choices),
            )


def _unreachable(rules: Sequence[DecisionRule]) -> tuple[int, int] | None:
    """Return the first rule behind one without conditions, and that one."""
    for index, rule in enumerate(rules[:-1]):
        if not (rule.events or rule.labels or rule.refs or rule.cadences):
            return index + 1, index
    return None
