"""A golden as data, and where it came from: the `_provenance` key of its file. Pure.

Every field is optional: Megatron-LM's goldens have no provenance, and other tools may write less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TypeAlias

from pytest_megatron.base.files import JsonValue
from pytest_megatron.errors import GoldenError
from pytest_megatron.golden.model import Generation, MetricMap, Series, Value, kind_of, series_of

# The relative standard deviation of one metric over the repeats, |golden| = 1: one number for all
# steps, or a series of its own.
Spread: TypeAlias = float | Series

_TEXTS = (
    *("commit", "config_hash", "date", "driver", "gpu", "host_class", "image", "layout", "policy"),
    *("precision", "reason", "run", "supersedes"),
)
_FLAGS = ("deterministic", "is_dirty")
_COUNTS = ("repeats", "seed", "world_size")
# Megatron-LM's reader takes every top-level key of a metric map for a metric and refuses a file
# where one lacks these; with them, empty, it takes a file of ours and never looks at the values.
# Source: Megatron-LM tests/functional_tests/python_test_utils/common.py, d98e8a64dd.
AS_BLOCK: Mapping[str, JsonValue] = {
    "start_step": 0,
    "end_step": 0,
    "step_interval": 1,
    "values": {},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The origin of a golden's values.

    Attributes:
        command: (num_arguments,) the command line.
        commit: Of the repository that holds the golden.
        config_hash: The `fingerprint` of case and recipe row.
        is_dirty: True if there were uncommitted changes.
        image: The container image with its digest.
        gpu: Model and count, as in `8x NVIDIA H100 80GB HBM3`.
        host_class: Machines of one class are as fast as one another; time and memory are judged
            only within one class.
        precision: The number format of the model: fp32, bf16 or fp16.
        versions: Package or tool to its version.
        date: ISO 8601, UTC.
        repeats: Number of runs that the spread was learned from.
        deterministic: True if the repeats agreed bit for bit.
        spread: Metric to its spread over the repeats.
        directions: Metric to `lower_is_better`, `higher_is_better` or `either`.
        layout: How the model was spread over the ranks, as in `tp2 pp2`.
        policy: The one under which the repeats agreed.
        reason: The typed reason for replacing the golden although a figure got worse.
        run: The directory of the run, or the page of a CI system that shows it.
        seed: `--seed` of the case.
        supersedes: SHA-256 of the file that this one replaced.
        world_size: Ranks of the training.
        extra: Keys that this version does not know, kept when the golden is written again.
    """

    command: tuple[str, ...] | None = None
    commit: str | None = None
    config_hash: str | None = None
    is_dirty: bool | None = None
    image: str | None = None
    gpu: str | None = None
    driver: str | None = None
    host_class: str | None = None
    precision: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    date: str | None = None
    repeats: int | None = None
    deterministic: bool | None = None
    spread: Mapping[str, Spread] = field(default_factory=dict)
    directions: Mapping[str, str] = field(default_factory=dict)
    layout: str | None = None
    policy: str | None = None
    reason: str | None = None
    run: str | None = None
    seed: int | None = None
    supersedes: str | None = None
    world_size: int | None = None
    extra: Mapping[str, JsonValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """The committed series of one workload.

    Attributes:
        path: The file, as messages name it.
        provenance: None in a golden that Megatron-LM wrote.
        notes: Unusual things about the file and how they were read.
        generation: In a golden of an inference program, which has no series.
    """

    path: str
    metrics: MetricMap
    provenance: Provenance | None = None
    notes: tuple[str, ...] = ()
    generation: Generation | None = None


def parse_provenance(value: JsonValue, where: str) -> Provenance:
    """Return the provenance that the JSON value of `_provenance` describes.

    Raises:
        GoldenError: The value or one of the known fields has another type than it must have.
    """
    if not isinstance(value, dict):
        raise GoldenError(where, f"_provenance is {kind_of(value)}, expected an object")
    known = {f.name for f in fields(Provenance)} - {"extra"} | AS_BLOCK.keys()
    found: dict[str, str | bool | int] = {}
    for names, kind, expected in (
        (_TEXTS, str, "text"),
        (_FLAGS, bool, "true or false"),
        (_COUNTS, int, "a count"),
    ):
        for name in names:
            part = value.get(name)
            if part is not None and type(part) is not kind:
                problem = f"_provenance: {name!r} is {kind_of(part)}, expected {expected}"
                raise GoldenError(where, problem)
            if isinstance(part, kind):
                found[name] = part
    return Provenance(
        command=_command(value.get("command"), where),
        versions=_texts_by_name(value.get("versions"), "versions", where),
        directions=_texts_by_name(value.get("directions"), "directions", where),
        spread=_spread(value.get("spread"), where),
        extra={key: kept for key, kept in value.items() if key not in known},
        **found,  # type: ignore[arg-type] # by name, of the types above
    )


def provenance_to_json(provenance: Provenance) -> dict[str, JsonValue]:
    """Return the JSON form, keys sorted; unknown fields are left out."""
    values: dict[str, JsonValue] = dict(provenance.extra)
    for name in (*_TEXTS, *_FLAGS, *_COUNTS):
        value = getattr(provenance, name)
        if value is not None:
            values[name] = value
    if provenance.command is not None:
        values["command"] = list(provenance.command)
    for name, table in (("directions", provenance.directions), ("versions", provenance.versions)):
        if table:
            values[name] = dict(sorted(table.items()))
    if provenance.spread:
        values["spread"] = {
            metric: _spread_to_json(spread) for metric, spread in sorted(provenance.spread.items())
        }
    return dict(sorted(values.items()))


def _spread_to_json(spread: Spread) -> JsonValue:
    if isinstance(spread, Series):
        return {str(step): value for step, value in spread.items()}
    return spread


def _command(value: JsonValue, where: str) -> tuple[str, ...] | None:
    """Return the command's words; a command given as one text is one word."""
    if value is None:
        return None
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list):
        words = tuple(word for word in value if isinstance(word, str))
        if len(words) == len(value):
            return words
    raise GoldenError(where, f"_provenance: 'command' is {kind_of(value)}, expected a list of text")


def _texts_by_name(value: JsonValue, name: str, where: str) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, dict):
        texts = {key: text for key, text in value.items() if isinstance(text, str)}
        if len(texts) == len(value):
            return texts
    raise GoldenError(where, f"_provenance: {name!r} is not an object of texts")


def _spread(value: JsonValue, where: str) -> dict[str, Spread]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise GoldenError(where, f"_provenance: 'spread' is {kind_of(value)}, expected an object")
    return {metric: _spread_of(spread, metric, where) for metric, spread in value.items()}


def _spread_of(value: JsonValue, metric: str, where: str) -> Spread:
    number = _deviation(value)
    if number is not None:
        return number
    if isinstance(value, dict) and all(step.isdecimal() for step in value):
        deviations: dict[int, Value] = {
            int(step): sd for step, text in value.items() if (sd := _deviation(text)) is not None
        }
        if len(deviations) == len(value):
            return series_of(deviations, is_full_precision=True)
    raise GoldenError(
        where,
        f"_provenance: the spread of {metric!r} is neither a number from 0 up nor an object of "
        "step to such a number",
    )


def _deviation(value: JsonValue) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < float("inf") else None
