"""Decide by labels, changed paths and an event on the runs of CI. Pure but for asking git.

Source: Megatron-LM .github/workflows/cicd-main.yml, job `configure`, and
skills/mcore-cicd/SKILL.md, "Which label to attach", d98e8a64dd
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.base.project import ask_git, load_config
from pytest_megatron.base.schema import SchemaError, parse, shown
from pytest_megatron.base.text import listed, nearest, one_of
from pytest_megatron.ci.table import CiTable, DecisionRule, LabelEffect, PathClass, load_table
from pytest_megatron.errors import SelectionError
from pytest_megatron.session.decision import Considered, Decision
from pytest_megatron.workloads.recipe.model import project_words

_PART = re.compile(r"\*\*/|/\*\*$|\*\*|\*|\?|\{[^{}]*\}|[^*?{}/]+|.")


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(_translated(pattern))


def _translated(pattern: str) -> str:
    """Return the regular expression of a pattern for paths."""
    text = ""
    for part in _PART.findall(pattern):
        match part:
            case "**/":
                text += "(?:.*/)?"
            case "/**":
                text += "/.*"
            case "**":
                text += ".*"
            case "*":
                text += "[^/]*"
            case "?":
                text += "[^/]"
            case _ if part[0] == "{" and part[-1] == "}":
                text += f"(?:{'|'.join(_translated(word) for word in part[1:-1].split(','))})"
            case _:
                text += re.escape(part)
    return text


def matches(path: str, pattern: str) -> bool:
    """Return whether a pattern matches a path, which has `/` between its parts."""
    return _compiled(pattern).fullmatch(path) is not None


def matches_any(path: str, patterns: Iterable[str]) -> bool:
    """Return whether one of the patterns matches the path; `!pattern` excludes its matches.

    Patterns that all have `!` match everything else.
    """
    wanted = [pattern for pattern in patterns if not pattern.startswith("!")]
    unwanted = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    if any(matches(path, pattern) for pattern in unwanted):
        return False
    return not wanted or any(matches(path, pattern) for pattern in wanted)


NO_CLASS = "unknown"
DOCS = "docs"
_OF_PULL_REQUESTS = ("pull_request", "push")  # pushes to copies of them, as Megatron-LM's CI has it
_TESTMON = {None: [], True: ["unit tests with --testmon"], False: ["all unit tests"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class PathChange:
    """One changed path.

    Attributes:
        status: `A` added, `D` deleted, `M` everything else.
    """

    path: str
    status: str = "M"


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """The label to attach, under the keys of `plan --format json`.

    Attributes:
        label: None: none is needed.
        labels: It, and labels besides.
        reason: Which paths ask for it.
        docs_only: Whether nothing but documentation changed.
        classes: Name of a class -> its paths, in the table's order.
    """

    label: str | None
    labels: tuple[str, ...]
    reason: str
    docs_only: bool
    classes: dict[str, tuple[str, ...]]


def suggest(changes: Sequence[PathChange], table: CiTable) -> Suggestion:
    """Return the strongest label that a changed path asks for."""
    classes: dict[str, tuple[str, ...]] = {}
    asked: dict[str, PathClass] = {}
    also: list[str] = []
    for change in changes:
        found = _class_of(change, table)
        name = NO_CLASS if found is None else found.name
        classes[name] = (*classes.get(name, ()), change.path)
        if found is not None:
            also += found.also
            if found.label is not None:
                asked.setdefault(found.label, found)
    order = [one.name for one in table.paths]
    strength = {label: rank for rank, label in enumerate(table.label_strength)}
    label = max(asked, key=lambda word: strength.get(word, -1), default=None)
    return Suggestion(
        label=label,
        labels=(*(() if label is None else (label,)), *dict.fromkeys(also)),
        reason=_reason(classes, None if label is None else asked[label].name),
        docs_only=bool(classes) and classes.keys() <= {DOCS},
        classes={name: classes[name] for name in (*order, NO_CLASS) if name in classes},
    )


def _class_of(change: PathChange, table: CiTable) -> PathClass | None:
    """Return the class of a changed path, None without one."""
    for one in table.paths:
        is_status = not one.status or change.status in one.status
        if is_status and matches_any(change.path, one.match):
            return one
    return None


def _reason(classes: dict[str, tuple[str, ...]], deciding: str | None) -> str:
    """Describe which changed path decided on the label."""
    if not classes:
        return "nothing changed"
    if deciding is None:
        return f"only {', '.join(sorted(classes))} changed"
    return f"{deciding} changed: {listed(classes[deciding], 1)}"


def changes_since(root: Path, revision: str) -> tuple[PathChange, ...]:
    """Return the changes in a working tree since it left a revision.

    Raises:
        SelectionError: git does not know the revision, or there is no repository.
    """
    where = f"--diff {revision}"
    if revision.startswith("-"):
        raise SelectionError(where, "is no revision, expected a branch, a tag or a commit")
    base = _git(root, where, "merge-base", "HEAD", revision)
    tracked = _git(root, where, "diff", "--name-status", "--no-renames", "-z", base)
    words = iter(tracked.split("\0"))
    changed = [
        PathChange(path=path, status=status if status in ("A", "D") else "M")
        for status, path in zip(words, words, strict=False)
    ]
    new = _git(root, where, "ls-files", "--others", "--exclude-standard", "-z").split("\0")
    return (*changed, *(PathChange(path=path, status="A") for path in new if path))


def _git(root: Path, where: str, *arguments: str) -> str:
    """Return what git prints; it has to know the revision."""
    found = ask_git(root, *arguments)
    if found is None:
        raise SelectionError(
            where,
            "git does not know it here, expected a revision with a commit in common; fetch it",
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """The event, labels and options of a CI run.

    Attributes:
        event: One of the table's events.
        labels: Labels of the pull request, as they are.
        ref: `refs/heads/main`, "" where it is not known.
        cadence: Asked for by a schedule or a person, None leaves it to the rule.
        environment: Asked for by a person, None leaves it to labels.
        option: Where the event was given, for errors.
    """

    event: str = "pull_request"
    labels: tuple[str, ...] = ()
    ref: str = ""
    cadence: str | None = None
    environment: str | None = None
    option: str = "--event"


def parse_labels(text: str) -> tuple[str, ...]:
    """Return labels of a list with commas, or of a JSON array; a blank text is none.

    Raises:
        SelectionError: It looks like JSON and is no array of strings.
    """
    if not text.strip().startswith("["):
        return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    expected = "words with commas or a JSON array of words"
    problem = f"{shown(text)} is no list of labels, expected {expected}"
    try:
        found = parse(list[str], text)
    except SchemaError:
        raise SelectionError("--labels", problem) from None
    return tuple(dict.fromkeys(word.strip() for word in found if word.strip()))


def decide_for(
    root: Path, labels: str, event: str, cadence: str | None, environment: str | None
) -> Decision:
    """Return the decision of a project's table for the options of a session.

    Raises:
        MegatronError: The event is unknown, or the table is wrong.
    """
    trigger = Trigger(
        event=event,
        labels=parse_labels(labels),
        cadence=cadence,
        environment=environment,
        option="--ci-event",
    )
    return decide(trigger, load_table(load_config(root), project_words(root)))


def decide(trigger: Trigger, table: CiTable) -> Decision:
    """Return the decision of the first rule that matches, with the effects of labels.

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
            considered.append(Considered(rule=rule.name, decides=False, why=why))
            continue
        holds, why = _holds(rule, trigger)
        chosen = rule if holds else None
        considered.append(Considered(rule=rule.name, decides=holds, why=why))
    if chosen is None:
        raise SelectionError(
            f"{trigger.option} {trigger.event}",
            f"matches none of {len(table.rules)} rules; end the rules with one without 'when'",
        )
    why = next(one.why for one in considered if one.decides)
    return decision_by(chosen, why, trigger, table, tuple(considered))


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


def decision_by(
    rule: DecisionRule,
    why: str,
    trigger: Trigger,
    table: CiTable,
    considered: tuple[Considered, ...] = (),
) -> Decision:
    """Return the decision of a rule, with the effects of labels."""
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
        is_selective=_is_selective(effects, trigger),
        may_repeat_less=table.repeats == "at-most",
    )


def _is_selective(effects: Sequence[LabelEffect], trigger: Trigger) -> bool:
    """Return whether labels ask for a part of the unit tests; a merge queue runs all of them."""
    wishes = {effect.testmon for effect in effects} - {None}
    return wishes == {True} and trigger.event in _OF_PULL_REQUESTS


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
    parts += _TESTMON[effect.testmon]
    return f"{effect.label}: {', '.join(parts)}"
