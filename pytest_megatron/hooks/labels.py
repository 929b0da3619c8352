"""`--labels` and `--ci-event`: selects in this session as CI would."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_megatron.base.project import load_config
from pytest_megatron.ci.decide import Decision, Trigger, decide, parse_labels
from pytest_megatron.ci.table import load_table
from pytest_megatron.errors import MegatronError
from pytest_megatron.recipe.load import project_words

if TYPE_CHECKING:
    from pytest_megatron.hooks.options import Options


def decision_of(config: pytest.Config, options: Options) -> Decision:
    """Return the decision for the labels and the event that are given.

    Args:
        config: The session's configuration.
        options: The session's; a cadence and an environment in them win over labels.

    Raises:
        pytest.UsageError: The event is unknown, or the project's table is wrong.
    """
    try:
        table = load_table(load_config(config.rootpath), project_words(config.rootpath))
        trigger = Trigger(
            event=options.ci_event,
            labels=parse_labels(options.labels),
            cadence=_only(options.cadence),
            environment=_only(options.environment),
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
