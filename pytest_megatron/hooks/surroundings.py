"""What of a session is needed to do its tests again: seeds, options, variables, what differs."""

from __future__ import annotations

import os

import pytest

from pytest_megatron.files import JsonValue, write_text_atomically
from pytest_megatron.hooks.markers import limit_of_session
from pytest_megatron.hooks.neighbours import seed_of_examples
from pytest_megatron.hooks.options import Options
from pytest_megatron.hooks.session import RunSession
from pytest_megatron.launch import patch
from pytest_megatron.launch.kept import kept_variables


def surroundings(config: pytest.Config, session: RunSession) -> dict[str, JsonValue]:
    """Return what `run.json` keeps of a session beside its items."""
    redactor = session.redactor
    decision = session.options.decision
    own = {} if decision is None else decision.env
    kept = kept_variables({**os.environ, **own}, own, names=session.project.kept_variables)
    return {
        "directory": _below(config, session),
        "positional": list[JsonValue](redactor.words(_positional(config))),
        "env": dict[str, JsonValue](redactor.env(kept)),
        "seeds": _seeds(config, session.run_dir.name),
        "options": _options(config, session.options),
    }


def keep_patch(session: RunSession) -> JsonValue:
    """Write what the working tree has beside its commit into the run directory.

    Returns:
        `file` and `problem`, each null where there is none; None for a tree that is its commit.

    Raises:
        OSError: It cannot be written.
    """
    if not session.facts.is_dirty:
        return None
    made = patch.make_patch(session.root)
    if made.text:
        path = session.run_dir / patch.NAME
        write_text_atomically(path, session.redactor.text(made.text))
    return {"file": patch.NAME if made.text else None, "problem": made.problem}


def _below(config: pytest.Config, session: RunSession) -> str:
    """Return the directory that the user was in, from the project's root."""
    return os.path.relpath(config.invocation_params.dir, session.root)


def _positional(config: pytest.Config) -> list[str]:
    found = getattr(config.known_args_namespace, "file_or_dir", None)
    return [str(word) for word in found or ()]


def _seeds(config: pytest.Config, run_id: str) -> dict[str, JsonValue]:
    """Return the seeds that pytest's plugins and Python have, each null if it has none."""
    seeds: dict[str, JsonValue] = {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED")}
    for name in ("randomly_seed", "random_order_seed"):
        value = getattr(config.option, name, None)
        if value is not None and not str(value).startswith("default"):  # one that is not in use
            seeds[name] = str(value)
    if hasattr(config.option, "hypothesis_seed"):
        seeds["hypothesis_seed"] = str(config.option.hypothesis_seed or seed_of_examples(run_id))
    return seeds


def _options(config: pytest.Config, options: Options) -> dict[str, JsonValue]:
    """Return those of our options that change how an item runs or is judged."""
    return {
        "golden": options.golden,
        "golden_policy": options.golden_policy,
        "lightweight": options.is_lightweight,
        "rank_timeout": _rank_timeout_s(config, options),
        "rank_grace": options.rank_grace_s,
        "gang_start": options.gang_start,
        "ranks_per_gpu": options.ranks_per_gpu,
        "signatures": [str(path) for path in options.signatures],
    }


def _rank_timeout_s(config: pytest.Config, options: Options) -> float:
    """Return the limit of tests on gangs, whoever set it; one that is wrong limited none."""
    try:
        return limit_of_session(config, options).seconds
    except pytest.UsageError:
        return options.rank_timeout_s
