"""Settings of a trace, as the variable `PYTEST_MEGATRON_TRACE` passes them to every rank.

The process that starts the ranks writes the variable, the recorder in each of them reads it. Must
not import torch: the controller imports this module.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias, cast

from pytest_megatron.errors import TraceError

VARIABLE = "PYTEST_MEGATRON_TRACE"
# Of a session: how the trainings that it traces begin, as JSON with the keys below.
BEGIN_VARIABLE = "PYTEST_MEGATRON_TRACE_BEGIN"
_BEGIN = ("weights_to", "weights_from", "noise_seed")
TraceValues: TypeAlias = Literal["hash", "full"]
VALUES: tuple[TraceValues, ...] = ("hash", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSettings:
    """What a trace holds and where it is written.

    Attributes:
        directory: Gets `rank_<r>.jsonl` of each rank, and `rank_<r>.bin` with `full`.
        steps: Optimizer steps that are recorded, from the first.
        values: `full` stores each tensor's local values too, `hash` its statistics only.
        weights_to: Directory that gets the initial weights.
        weights_from: Directory of the initial weights of another run, which replace those of
            this one; the parallel layout of that run may differ.
        noise_seed: Seed of a disturbance at rounding size; None disturbs nothing.
    """

    directory: Path
    steps: int = 2
    values: TraceValues = "hash"
    weights_to: Path | None = None
    weights_from: Path | None = None
    noise_seed: int | None = None

    @property
    def has_new_weights(self) -> bool:
        """The weights that the program made are not those that it trains."""
        return self.weights_from is not None or self.noise_seed is not None

    def to_json(self) -> str:
        """Return the value of the variable PYTEST_MEGATRON_TRACE."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> TraceSettings:
        """Read the variable PYTEST_MEGATRON_TRACE.

        Raises:
            TraceError: It is no JSON object with these keys and types.
        """
        try:
            found: object = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise TraceError(VARIABLE, f"{text!r} is not a JSON object; unset it")
        values = cast("dict[str, object]", found)
        unknown = sorted(values.keys() - cls.__dataclass_fields__.keys())
        if unknown:
            expected = ", ".join(cls.__dataclass_fields__)
            raise TraceError(VARIABLE, f"unknown key {unknown[0]!r}, expected some of {expected}")
        _check(values)
        directories = {
            key: Path(value)
            for key in ("weights_to", "weights_from")
            if isinstance(value := values.get(key), str)
        }
        return cls(
            directory=Path(str(values["directory"])),
            steps=cast("int", values.get("steps", 2)),
            values="full" if values.get("values") == "full" else "hash",
            noise_seed=cast("int | None", values.get("noise_seed")),
            **directories,
        )


def _check(values: Mapping[str, object]) -> None:
    """Raise for the first value that is none of its key's."""
    steps, seed = values.get("steps", 2), values.get("noise_seed")
    for key, is_right, expected in (
        ("directory", isinstance(values.get("directory"), str), "a path"),
        ("steps", type(steps) is int and steps > 0, "a whole number from 1"),
        ("values", values.get("values", "hash") in VALUES, "hash or full"),
        ("weights_to", isinstance(values.get("weights_to"), str | None), "a path or null"),
        ("weights_from", isinstance(values.get("weights_from"), str | None), "a path or null"),
        ("noise_seed", seed is None or type(seed) is int, "a whole number or null"),
    ):
        if not is_right:
            raise TraceError(VARIABLE, f"{key} is {values.get(key)!r}, expected {expected}")


def read_settings(env: Mapping[str, str] | None = None) -> TraceSettings | None:
    """Return the settings in the environment; None without the variable.

    Raises:
        TraceError: The settings are not sound.
    """
    text = (os.environ if env is None else env).get(VARIABLE)
    return TraceSettings.from_json(text) if text else None


def variables_of(
    directory: Path, steps: int, values: TraceValues, env: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of ranks that record, with the beginning that a session asks for.

    Args:
        directory: See `TraceSettings`, as for the next two.
        steps: Likewise.
        values: Likewise.
        env: The environment of the session.

    Raises:
        TraceError: The variable's value means nothing.
    """
    settings = TraceSettings(directory=directory, steps=steps, values=values)
    if text := env.get(BEGIN_VARIABLE):
        try:
            found: object = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict) or not found.keys() <= set(_BEGIN):
            raise TraceError(BEGIN_VARIABLE, f"{text!r} is no JSON object of a beginning; unset it")
        own = json.loads(settings.to_json())
        settings = TraceSettings.from_json(json.dumps({**own, **found}))
    return {VARIABLE: settings.to_json()}
