"""`--labels` and `--ci-event`: what CI would select, for this session."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_megatron.ci.decide import Decision, Trigger, decide, parse_labels
from pytest_megatron.ci.table import load_table
from pytest_megatron.config import load_config
from pytest_megatron.errors import MegatronError
from pytest_megatron.hooks import option_values as values
from pytest_megatron.hooks.options import Options
from pytest_megatron.recipe.load import project_words

_DECIDED = ("scope", "cadence", "environment")


def with_labels(config: pytest.Config, options: Options) -> Options:
    """Return options with what labels and the event decide; what the user says wins.

    Raises:
        pytest.UsageError: The event is unknown, or the project's table is wrong.
    """
    given = {name: options.selection[name] for name in _DECIDED}
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
        decision = decide(trigger, table)
    except MegatronError as error:
        raise pytest.UsageError(str(error)) from None
    decided = {
        "scope": decision.scope,
        "cadence": decision.cadence,
        "environment": (decision.environment,),
    }
    selection = {name: words or decided.get(name, ()) for name, words in options.selection.items()}
    return replace(
        options,
        decision=decision,
        selection=selection,
        is_lightweight=options.is_lightweight or decision.is_lightweight,
    )


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
