"""`--labels` and `--ci-event`: what CI would select, for this session."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pytest_megatron.base.project import load_config
from pytest_megatron.ci.decide import Decision, Trigger, decide, parse_labels
from pytest_megatron.ci.table import load_table
from pytest_megatron.errors import MegatronError
from pytest_megatron.hooks import option_values as values
from pytest_megatron.recipe.load import project_words

_DECIDED = ("scope", "cadence", "environment")


def decision_of(config: pytest.Config, selection: Mapping[str, tuple[str, ...]]) -> Decision:
    """Return the decision for the labels and the event that are given.

    Args:
        config: The session's configuration.
        selection: The words that the user selected by; they win over labels.

    Raises:
        pytest.UsageError: The event is unknown, or the project's table is wrong.
    """
    given = {name: selection[name] for name in _DECIDED}
    asked = {name: words[0] for name, words in given.items() if len(words) == 1}
    try:
        table = load_table(load_config(config.rootpath), project_words(config.rootpath))
        trigger = Trigger(
            event=values.text(config, "ci-event", "pull_request"),
            labels=parse_labels(values.text(config, "labels", "")),
            cadence=asked.get("cadence"),
            environment=asked.get("environment"),
            option="--ci-event",
        )
        return decide(trigger, table)
    except MegatronError as error:
        raise pytest.UsageError(str(error)) from None


def header_of(decision: Decision) -> list[str]:
    """Return what the session's header says of a decision."""
    kind = ", lightweight" if decision.is_lightweight else ""
    repeats = f"{decision.n_repeat} repeat{'' if decision.n_repeat == 1 else 's'}"
    words = f"scope {','.join(decision.scope)}, cadence {','.join(decision.cadence) or 'any'}"
    what = f"{words}, {repeats}{kind}, environment {decision.environment}"
    lines = [f"megatron: {what}; {decision.reason}"]
    lines += [f"megatron: label {line}" for line in decision.label_effects]
    lines += [f"megatron: label {name}: nothing reads it" for name in decision.unknown_labels]
    return lines
