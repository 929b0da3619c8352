"""From labels and an event to what CI runs. Pure; the rules are data.

Source: Megatron-LM .github/workflows/cicd-main.yml, job `configure`, d98e8a64dd
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.text import nearest, one_of
from pytest_megatron.ci.changes import matches_any
from pytest_megatron.ci.table import CiTable, DecisionRule, LabelEffect
from pytest_megatron.errors import SelectionError


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """The event, labels and options of a CI run.

    Attributes:
        event: Of the table's events.
        labels: Of the pull request, as they are.
        ref: `refs/heads/main`, "" where it is not known.
        cadence: What a schedule or a person asks for, None leaves it to the rule.
        environment: What a person asks for, None leaves it to labels.
        option: Where the event was given, for errors.
    """

    event: str = "pull_request"
    labels: tuple[str, ...] = ()
    ref: str = ""
    cadence: str | None = None
    environment: str | None = None
    option: str = "--event"


@dataclass(frozen=True, slots=True, kw_only=True)
class Considered:
    """A rule, whether it decided, and why or why not."""

    rule: str
    is_deciding: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The choice of scope, repeats and environment for a CI run.

    Attributes:
        scope, cadence: Words to select by; no cadence is no filter.
        rule: Name of the rule that decided.
        reason: Why it did, in a sentence.
        considered: All rules in their order.
        label_effects: What labels did beside the rule, a line for each.
        unknown_labels: Those that nothing here reads, each with the nearest that is.
        suites: Further test suites that labels ask for.
        env: Variables that labels set.
        may_repeat_less: Whether a row that asks for fewer repeats gets them.
    """

    scope: tuple[str, ...]
    cadence: tuple[str, ...]
    n_repeat: int
    is_lightweight: bool
    environment: str
    image: str
    rule: str
    reason: str
    considered: tuple[Considered, ...]
    label_effects: tuple[str, ...] = ()
    unknown_labels: tuple[str, ...] = ()
    suites: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    may_repeat_less: bool = True


def parse_labels(text: str) -> tuple[str, ...]:
    """Return labels of a list with commas, or of a JSON array; a blank text is none.

    Raises:
        SelectionError: It looks like JSON and is no array of strings.
    """
    if not text.strip().startswith("["):
        return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    problem = f"{text!r} is no list of labels, expected words with commas or a JSON array of words"
    try:
        found: JsonValue = json.loads(text)
    except json.JSONDecodeError:
        raise SelectionError("--labels", problem) from None
    if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
        raise SelectionError("--labels", problem)
    return tuple(dict.fromkeys(str(word).strip() for word in found if str(word).strip()))


def decide(trigger: Trigger, table: CiTable) -> Decision:
    """Return what CI runs: the first rule that matches, and what labels do besides.

    Raises:
        SelectionError: The event is unknown, or no rule matches.
    """
    if trigger.event not in table.events:
        problem = f"unknown event {trigger.event!r}, expected {one_of(trigger.event, table.events)}"
        raise SelectionError(trigger.option, problem)
    chosen: DecisionRule | None = None
    considered: list[Considered] = []
    for rule in table.rules:
        if chosen is not None:
            why = f"not looked at, {chosen.name!r} comes first"
            considered.append(Considered(rule=rule.name, is_deciding=False, why=why))
            continue
        holds, why = _holds(rule, trigger)
        chosen = rule if holds else None
        considered.append(Considered(rule=rule.name, is_deciding=holds, why=why))
    if chosen is None:
        raise SelectionError(
            f"{trigger.option} {trigger.event}",
            f"matches none of {len(table.rules)} rules; end the rules with one without 'when'",
        )
    why = next(one.why for one in considered if one.is_deciding)
    return _with_labels(chosen, why, trigger, table, tuple(considered))


def _holds(rule: DecisionRule, trigger: Trigger) -> tuple[bool, str]:
    """Return whether a rule matches, and why or why not."""
    labels = {label.casefold() for label in trigger.labels}
    when = rule.when
    attached = next((label for label in when.label if label.casefold() in labels), None)
    asked = trigger.cadence or "none"
    tests = (
        (when.event, trigger.event in when.event, f"event {trigger.event}", "event"),
        (when.label, attached is not None, f"label {attached!r}", "label"),
        (when.ref, matches_any(trigger.ref, when.ref), f"ref {trigger.ref or '-'}", "ref"),
        (when.cadence, asked in when.cadence, f"cadence {asked}", "cadence"),
    )
    used = [(words, holds, found, what) for words, holds, found, what in tests if words]
    for words, holds, found, what in used:
        if not holds:
            needs = " or ".join(map(repr, words))
            has = "it is not attached" if what == "label" else f"it is {found.partition(' ')[2]}"
            return False, f"needs {what} {needs}, {has}"
    return True, ", ".join(found for _, _, found, _ in used) or "no other rule matched"


def _with_labels(
    rule: DecisionRule,
    why: str,
    trigger: Trigger,
    table: CiTable,
    considered: tuple[Considered, ...],
) -> Decision:
    """Add to a rule what labels do besides."""
    known = {label.casefold() for label in table.known_labels}
    attached = {label.casefold() for label in trigger.labels}
    effects = [effect for effect in table.labels if effect.label.casefold() in attached]
    environments = [e.environment for e in effects if e.environment is not None]
    fallback = rule.environment or table.environment
    environment = trigger.environment or (environments or [fallback])[-1]
    return Decision(
        scope=rule.scope,
        cadence=rule.cadence if trigger.cadence is None else (trigger.cadence,),
        n_repeat=rule.n_repeat,
        is_lightweight=rule.is_lightweight,
        environment=environment,
        image=_image(environment, effects, trigger, table),
        rule=rule.name,
        reason=f"rule {rule.name!r}: {why}",
        considered=considered,
        label_effects=tuple(map(_effect_line, effects)),
        unknown_labels=tuple(
            label + nearest(label, table.known_labels)
            for label in trigger.labels
            if label.casefold() not in known
        ),
        suites=tuple(dict.fromkeys(suite for effect in effects for suite in effect.suites)),
        env={name: value for effect in effects for name, value in effect.env.items()},
        may_repeat_less=table.repeats == "at-most",
    )


def _image(
    environment: str, effects: Sequence[LabelEffect], trigger: Trigger, table: CiTable
) -> str:
    """Return the image: of a label that is attached, else the one that goes with the environment.

    Tests of one environment in the image of another would judge nothing.
    """
    attached = [effect.image for effect in effects if effect.image is not None]
    if attached and trigger.environment is None:
        return attached[-1]
    if environment == table.environment:
        return table.image
    going = [e.image for e in table.labels if e.environment == environment and e.image is not None]
    return going[-1] if going else environment


def _effect_line(effect: LabelEffect) -> str:
    """Return `container::lts: environment lts, image lts`."""
    parts = [f"environment {effect.environment}"] if effect.environment else []
    parts += [f"image {effect.image}"] if effect.image else []
    parts += [f"suite {suite}" for suite in effect.suites]
    parts += [f"{name}={value}" for name, value in effect.env.items()]
    return f"{effect.label}: {', '.join(parts)}"
