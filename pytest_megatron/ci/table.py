"""The decision table of CI: built in, or a project's own. Data, and its reader."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from annotated_types import Len, MinLen

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.project import ProjectConfig
from pytest_megatron.base.schema import (
    About,
    Count,
    Positive,
    SchemaError,
    Text,
    Texts,
    closed,
    dotted,
    json_schema,
    matches,
    trusted,
    validate,
)
from pytest_megatron.base.text import one_of
from pytest_megatron.errors import ConfigError
from pytest_megatron.session.decision import RowChoice
from pytest_megatron.workloads.recipe.model import SCOPE_ALIASES, Vocabulary

if TYPE_CHECKING:
    from pytest_megatron.workloads.recipe.expand import Profile

BUILT_IN = Path(__file__).with_name("table.toml")
HOSTED = "ubuntu-24.04"
TABLE_NAME = "ci"
_OF_GITHUB = re.compile(r"(?:macos|ubuntu|windows)-[\w.]+")

Cadence: TypeAlias = Literal["mergegroup", "nightly", "pr", "weekly"]
Variable: TypeAlias = Annotated[str, matches("^[A-Za-z_][A-Za-z0-9_]*$", "the name of a variable")]


@closed
@dataclass(frozen=True, slots=True, kw_only=True)
class RuleConditions:
    """Conditions of a rule: all keys must hold, each by one of its words."""

    event: Texts = ()
    label: Texts = ()
    ref: Annotated[Texts, About("Patterns of refs; ! takes away.")] = ()
    cadence: Annotated[tuple[Cadence, ...], MinLen(1)] = ()


@closed
@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRule(RowChoice):
    """One row of the decision; a rule without `when` always decides."""

    name: Text
    when: RuleConditions = RuleConditions()
    cadence: Annotated[tuple[Cadence, ...], About("Missing: no filter.")] = ()
    environment: Annotated[Text | None, About("Where no label says otherwise.")] = None


@closed
@dataclass(frozen=True, slots=True, kw_only=True)
class LabelEffect:
    """Effects of a label beside the rules."""

    label: Text
    environment: Text | None = None
    image: Text | None = None
    suites: Texts = ()
    env: dict[str, str] = field(default_factory=dict)
    testmon: Annotated[
        bool | None, About("Whether unit tests run with --testmon; false wins over true.")
    ] = None


@closed
@dataclass(frozen=True, slots=True, kw_only=True)
class MarkRule:
    """A mark whose tests are left out: in these environments, of these tags, on these platforms."""

    mark: Text
    environment: Texts = ()
    tag: Texts = ()
    platform: Texts = ()


@closed
@dataclass(frozen=True, slots=True, kw_only=True)
class PathClass:
    """A class of changed paths."""

    name: Text
    match: Texts
    status: Annotated[tuple[Literal["A", "D", "M"], ...], MinLen(1)] = ()
    label: Text | None = None
    also: Annotated[Texts, About("Labels besides.")] = ()


@closed
@dataclass(frozen=True, slots=True, kw_only=True)
class Workflow:
    """Settings of the files that `ci init` writes."""

    branches: Annotated[Texts, About("Pushes to these are tested.")] = ("main",)
    nightly: Annotated[Text, About("When, as cron has it, UTC.")] = "17 1 * * 1-6"
    weekly: Annotated[Text, About("The same.")] = "17 1 * * 0"
    python: Annotated[Text, About("Version for jobs without an image.")] = "3.12"
    setup: Annotated[Texts, About("Shell lines that install what a job needs.")] = ()
    plan_setup: Annotated[Texts, About("The same for plan and verdict.")] = ()
    plan: Annotated[tuple[Text, ...], About("Further arguments of the plan.")] = ()
    runners: Annotated[
        dict[str, Texts],
        About("Platform to labels of its runners; others are self-hosted and the platform."),
    ] = field(default_factory=dict)
    images: Annotated[
        dict[str, Text],
        About("A plan's image to a container's name; empty runs on the runner itself."),
    ] = field(default_factory=dict)
    retention_days: Annotated[Positive, About("How long artifacts are kept.")] = 14
    executor: Annotated[Text, About("Engine of workloads, as --executor.")] = ""
    executor_config: Annotated[Text, About("Its settings, as --executor-config.")] = ""
    pytest_arguments: Annotated[tuple[Text, ...], About("Further arguments of every job.")] = ()
    secrets: Annotated[tuple[Variable, ...], About("GitHub secrets that tests get.")] = ()
    registry_secrets: Annotated[
        tuple[Variable, ...], Len(2, 2), About("User and password of the registry.")
    ] = ()
    cache: Annotated[Texts, About("Paths kept from run to run.")] = ()
    keeps_history: Annotated[bool, About("Keep the history of runs.")] = False
    comments: Annotated[bool, About("Write the summary on the pull request of GitHub.")] = False

    @property
    def light_setup(self) -> tuple[str, ...]:
        """The setup of plan and verdict."""
        return self.plan_setup or self.setup

    @property
    def all_runners(self) -> dict[str, tuple[str, ...]]:
        """`runners`, and GitHub's own for the platform without GPUs."""
        return {"cpu": (HOSTED,), **self.runners}

    @property
    def hosted_runners(self) -> dict[str, tuple[str, ...]]:
        """Those of GitHub, each gone after its job: code of a stranger may run there."""
        return {
            platform: labels
            for platform, labels in self.all_runners.items()
            if len(labels) == 1 and _OF_GITHUB.fullmatch(labels[0])
        }


@closed
@dataclass(frozen=True, slots=True, kw_only=True)
class CiTable:
    """The decision table: scopes and jobs by label and event."""

    rules: Annotated[tuple[DecisionRule, ...], MinLen(1)]
    labels: tuple[LabelEffect, ...]
    marks: tuple[MarkRule, ...]
    paths: tuple[PathClass, ...]
    label_strength: Annotated[tuple[Text, ...], About("The weakest label first.")]
    events: Texts
    environment: Text
    image: Text
    tag: Annotated[str, About("Of unit-test rows; empty: no filter.")]
    recipes: Texts
    recipe_profile: Annotated[
        Literal["compat", "strict"] | None,
        About("Missing: compat below tests/test_utils/recipes, else strict."),
    ] = None
    unit_tests: Annotated[Texts, About("Folders whose test files buckets share out.")]
    repeats: Annotated[Literal["at-most", "exactly"], About("Whether a row may ask for fewer.")]
    default_time_limit_s: Annotated[Positive, About("Seconds, of rows without one.")]
    job_margin_minutes: Count
    workflow: Workflow = Workflow()
    opt_in_platforms: Annotated[
        tuple[Text, ...], About("Where only tests marked launch_on_<platform> run.")
    ]

    @property
    def profile(self) -> Profile | None:
        """The profile of all recipes; None where that is a matter of their place."""
        from pytest_megatron.workloads.recipe.expand import Profile  # noqa: PLC0415 - slow to import

        return None if self.recipe_profile is None else Profile(self.recipe_profile)

    @property
    def known_labels(self) -> tuple[str, ...]:
        """Every label that something here reads."""
        named = [label for rule in self.rules for label in rule.when.label]
        return tuple(dict.fromkeys((*named, *(effect.label for effect in self.labels))))


@functools.cache
def built_in_table() -> CiTable:
    """Return the table of this package."""
    return _without_aliases(trusted(CiTable, _built_in_keys()))


def load_table(config: ProjectConfig, vocabulary: Vocabulary) -> CiTable:
    """Return the table of a project; keys that it leaves out are as built in.

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
    try:
        table = _without_aliases(validate(CiTable, {**_built_in_keys(), **own}))
    except SchemaError as error:
        first, *others = error.problems
        more = f" (and {len(others)} more)" if others else ""
        raise ConfigError(f"{where} {dotted(first.path)}", first.text + more) from None
    _check_words(table, where, vocabulary)
    return table


def table_json_schema() -> dict[str, JsonValue]:
    """Return the JSON schema of a project's table, which may leave out any key."""
    found = json_schema(CiTable, "[tool.pytest-megatron.ci]")
    del found["required"]
    return found


def _built_in_keys() -> dict[str, JsonValue]:
    return tomllib.loads(BUILT_IN.read_text(encoding="utf-8"))


def _without_aliases(table: CiTable) -> CiTable:
    """Return the table with scopes in today's words: `mr-github` is `L1`."""
    rules = (
        replace(rule, scope=tuple(SCOPE_ALIASES.get(word, word) for word in rule.scope))
        for rule in table.rules
    )
    return replace(table, rules=tuple(rules))


def _check_words(table: CiTable, where: str, vocabulary: Vocabulary) -> None:
    """Refuse words that nothing knows: a rule that decides for nothing is silent.

    Raises:
        ConfigError: There is one; names its key.
    """
    environments, platforms = vocabulary.environments, vocabulary.platforms
    for index, rule in enumerate(table.rules):
        key = f"{where} rules[{index}]"
        _known(f"{key}.scope", rule.scope, vocabulary.scopes)
        _known(f"{key}.when.event", rule.when.event, table.events)
        _known(f"{key}.environment", (rule.environment,), environments)
    for index, effect in enumerate(table.labels):
        _known(f"{where} labels[{index}].environment", (effect.environment,), environments)
    _known(f"{where} environment", (table.environment,), environments)
    _known(f"{where} opt_in_platforms", table.opt_in_platforms, platforms)
    for index, mark in enumerate(table.marks):
        _known(f"{where} marks[{index}].environment", mark.environment, environments)
        _known(f"{where} marks[{index}].platform", mark.platform, platforms)
    if unreachable := _unreachable(table.rules):
        index, earlier = unreachable
        raise ConfigError(
            f"{where} rules[{index}]",
            f"can never decide, rules[{earlier}] always does; move it up",
        )


def _known(key: str, words: Sequence[str | None], choices: Collection[str]) -> None:
    """Refuse a word of the table that is none of the choices."""
    for word in words:
        if word is not None and word not in choices:
            raise ConfigError(key, f"unknown word {word!r}, expected {one_of(word, choices)}")


def _unreachable(rules: Sequence[DecisionRule]) -> tuple[int, int] | None:
    """Return the first rule behind one without conditions, and that one."""
    for index, rule in enumerate(rules[:-1]):
        if rule.when == RuleConditions():
            return index + 1, index
    return None
