"""The row that is proposed for a command: its name, metrics and limits, each a guess."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path, PurePath

import click

from pytest_megatron.base.files import JsonValue
from pytest_megatron.errors import LaunchError
from pytest_megatron.gpu.host import CPU_PLATFORM, this_host
from pytest_megatron.runs.environment import kept_variables
from pytest_megatron.runs.redact import is_secret_name
from pytest_megatron.workloads.commands.by_hand import RunByHand
from pytest_megatron.workloads.commands.found import Found, description, disagreement, length_of
from pytest_megatron.workloads.recipe.model import Vocabulary

_LEAST_LIMIT_S, _TIMES_AS_LONG, _WHOLE_S = 120, 5, 30
_PLATFORMS = Vocabulary().platforms
_SHOWN = 12  # metrics
_ANY = ("main", "run", "train")  # names that say nothing


def name_of(words: Sequence[str], root: Path) -> str:
    """Return a name for a row: the program's, or the project's where that is any program's."""
    rest = [word for word in words if "=" not in word or word.startswith("-")]
    program = next((PurePath(word).stem for word in rest if word.endswith(".py")), None)
    if program is None and "-m" in rest[:-1]:
        modules = [after for word, after in pairwise(rest) if word == "-m"]
        program = modules[-1].rpartition(".")[2]
    if program is None:
        program = "-".join([PurePath(rest[0]).name, *(w for w in rest[1:2] if w.isalnum())])
    if program in _ANY:
        program = root.name
    return re.sub(r"[^\w.+-]", "-", program).lstrip("._-") or "training"


def choose(ran: RunByHand, wanted: Sequence[str], words: Sequence[str]) -> Found:
    """Return the place to read from, after all of them were shown.

    Raises:
        LaunchError: There is none, or its metrics end before the training should.
    """
    line = shlex.join(words)
    for text in ran.passed_over:
        click.echo(f"no metrics are read by step from {text}")
    if not ran.places and ran.passed_over:
        raise LaunchError(
            line,
            f"ended with exit code 0, and its metrics cannot be told apart: {ran.passed_over[0]}; "
            f"have one rank write them, by a step that goes on; nothing was written",
        )
    if not ran.places:
        raise LaunchError(
            line,
            f"ended with exit code 0 after {ran.end.duration_s:.0f} s and wrote no metric, "
            f"expected a loss in files of TensorBoard, JSON, CSV or wandb, or in printed lines "
            f"such as `step 3 loss 2.5`; have it print one; nothing was written",
        )
    click.echo("\nmetrics:")
    for place in ran.places:
        click.echo(f"  {place.where}")
        for name in place.names[:_SHOWN]:
            click.echo(f"    {description(name, place.metrics[name])}")
    best = next((p for p in ran.places if not wanted or set(wanted) <= p.metrics.keys()), None)
    if best is None:
        known = sorted({name for place in ran.places for name in place.metrics})
        problem = f"is not among the metrics, expected some of {', '.join(known)}"
        raise LaunchError(f"--metric {' '.join(wanted)}", problem)
    best = replace(best, wanted=tuple(wanted) or _lasting(best))
    if (odd := disagreement(best, ran.places)) is not None:
        click.echo(f"two sources disagree: {odd}; the row reads {best.where}")
    length = length_of(words)
    if length is not None and best.last_step + _gap(best, best.names[0]) < length[1]:
        raise LaunchError(
            line,
            f"ended with exit code 0 at step {best.last_step} of its {best.names[0]}, and "
            f"{length[0]} is {length[1]}; nothing was written: mend it, or change {length[0]}",
        )
    return best


def _lasting(found: Found) -> tuple[str, ...]:
    """Return the metrics that go on to the last step, after the others were named."""
    lasting = []
    if single := [name for name in found.single if name not in found.names]:
        click.echo(f"left out: {', '.join(single)}, one value each; --metric compares it")
    for name in found.names:
        last, last_step = found.metrics[name].steps[-1], found.last_step
        if last + _gap(found, name) < last_step:
            click.echo(
                f"left out: {name} ends at step {last}, others go on to {last_step}; --metric "
                f"compares it"
            )
        else:
            lasting.append(name)
    return tuple(lasting)


def ask(best: Found) -> Found:
    """Return a place with the metrics that the user wants compared."""
    answer = click.prompt("metrics to compare", default=", ".join(best.names))
    wanted = [name.strip() for name in answer.split(",")]
    unknown = [name for name in wanted if name not in best.metrics]
    if unknown:
        known = ", ".join(best.metrics)
        raise LaunchError(unknown[0], f"is no metric that was found, expected some of {known}")
    return replace(best, wanted=tuple(wanted))


def _gap(found: Found, name: str) -> int:
    steps = found.metrics[name].steps
    return max((b - a for a, b in pairwise(steps)), default=1)


# Of the families below, what a shell or an image sets on every machine.
_EVERYWHERE = re.compile(
    r"PATH|LD_.*|VIRTUAL_ENV.*|CUDA_(HOME|PATH)|.*_(VERSION|ARCH_LIST|SHA256)"
    r"|PYTHON(UNBUFFERED|DONTWRITEBYTECODE|FAULTHANDLER)"
).fullmatch
_FAMILIES = (
    *("ACCELERATE_*", "DS_*", "KMP_*", "TOKENIZERS_*", "TRANSFORMERS_*", "XLA_*"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE"),
)


def kept_of(names: Sequence[str], env: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a row is to hold, after others that a training may read are told.

    Args:
        names: Those asked for.
        env: Those of the shell.
        own: Those that stand before the command.

    Raises:
        LaunchError: One is not set, or is a secret.
    """
    for name in names:
        if name not in env:
            raise LaunchError(f"--env {name}", "is not set here, expected a variable that is")
        if is_secret_name(name):
            raise LaunchError(
                f"--env {name}", "is a secret, which no file may hold; leave it in the shell"
            )
    others = {
        name: value
        for name, value in sorted(kept_variables(env, names=_FAMILIES).items())
        if name not in names and name not in own and not _EVERYWHERE(name)
    }
    if others:
        said = [n if is_secret_name(n) else f"{n}={shlex.quote(v)}" for n, v in others.items()]
        click.echo(
            f"set in this shell, and not in the row: {' '.join(said)}; --env NAME keeps one there"
        )
    return {name: env[name] for name in names}


def row_of(
    name: str,
    words: Sequence[str],
    found: Found,
    *,
    sizes: Mapping[str, int],
    env: Mapping[str, str],
    duration_s: float,
) -> dict[str, JsonValue]:
    """Return the row; every guess is a key of its own.

    Args:
        name: Of the row.
        words: The command.
        found: Its metrics.
        sizes: `ranks`, or `gpus` of a program that is started alone, where it is not 1.
        env: Variables that the row keeps.
        duration_s: Of one run, in seconds.
    """
    limit_s = max(_LEAST_LIMIT_S, math.ceil(duration_s * _TIMES_AS_LONG / _WHOLE_S) * _WHOLE_S)
    row: dict[str, JsonValue] = {"name": name, "command": shlex.join(words), **sizes}
    if env:
        row["env"] = dict(env)
    row["last_step"] = found.last_step
    if (length := length_of(words)) is not None:
        flag, _ = length
        joint = "=" if any(word.startswith(f"{flag}=") for word in words) else " "
        row["stop"] = f"{flag}{joint}{{steps}}"
    row["metrics"] = {**found.keys, "names": list(found.names)}
    row["platforms"] = platform_here()
    row["time_limit"] = limit_s
    return {"rows": [row]}


def platform_here() -> str:
    """Return the platform of this machine's GPUs; cpu without any, or of an unknown kind."""
    host = this_host()
    return next(
        (p for p in sorted(_PLATFORMS) if p != CPU_PLATFORM and host.fitting(p)), CPU_PLATFORM
    )
