"""`--labels` and `--ci-event`: selects in this session as CI would."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pytest_megatron.base.project import load_config
from pytest_megatron.ci.decide import Decision, Trigger, decide, parse_labels
from pytest_megatron.ci.table import load_table
from pytest_megatron.errors import MegatronError
from pytest_megatron.recipe.load import project_words


def decision_of(
    config: pytest.Config, event: str, labels: str, selection: Mapping[str, tuple[str, ...]]
) -> Decision:
    """Return the decision for the labels and the event that are given.

    Args:
        config: The session's configuration.
        event: What CI runs for.
        labels: Of the pull request.
        selection: Words that the user selected by; they win over labels.

    Raises:
        pytest.UsageError: The event is unknown, or the project's table is wrong.
    """
    try:
        table = load_table(load_config(config.rootpath), project_words(config.rootpath))
        trigger = Trigger(
            event=event,
            labels=parse_labels(labels),
            cadence=_only(selection["cadence"]),
            environment=_only(selection["environment"]),
            option="--ci-event",
        )
        return decide(trigger, table)
    except MegatronError as error:
        raise pytest.UsageError(str(error)) from None


def _only(words: tuple[str, ...]) -> str | None:
    return words[0] if len(words) == 1 else None


def header_of(decision: Decision) -> list[str]:
    """Return the lines of the session's header about a decision."""
    kind = ", lightweight" if decision.is_lightweight else ""
    repeats = f"{decision.n_repeat} repeat{'' if decision.n_repeat == 1 else 's'}"
    words = f"scope {','.join(decision.scope)}, cadence {','.join(decision.cadence) or 'any'}"
    what = f"{words}, {repeats}{kind}, environment {decision.environment}"
    lines = [f"megatron: {what}; {decision.reason}"]
    lines += [f"megatron: label {line}" for line in decision.label_effects]
    lines += [f"megatron: label {name}: nothing reads it" for name in decision.unknown_labels]
    return lines
