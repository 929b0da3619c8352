"""`pytest-megatron record`: from a command line to a row and its golden, without a changed line."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path, PurePath

import click
import yaml

from pytest_megatron.base.command import EXIT_FAILED, root_option
from pytest_megatron.base.files import JsonValue, write_text_atomically
from pytest_megatron.base.text import counted, printable
from pytest_megatron.errors import LaunchError, MegatronError, RecipeError
from pytest_megatron.gpu.host import CPU_PLATFORM, this_host
from pytest_megatron.process.guarded import CommandEnd, GuardedProcess
from pytest_megatron.runs.find import kept_runs
from pytest_megatron.runs.layout import OWN_DIR, make_own_dir
from pytest_megatron.workloads.commands.found import (
    Found,
    MetricSearch,
    description,
    disagreement,
    length_of,
)
from pytest_megatron.workloads.golden.build import combine, spread_of
from pytest_megatron.workloads.golden.model import Golden, MetricMap, Provenance, Series, to_float32
from pytest_megatron.workloads.golden.store import golden_text, read_metrics
from pytest_megatron.workloads.recipe.model import RowError, Vocabulary
from pytest_megatron.workloads.recipe.short_rows import is_python, read_command
from pytest_megatron.workloads.training.run.last_words import tail
from pytest_megatron.workloads.training.run.runner import STOP_GRACE_S, FollowedFile

_LIMIT_S = 600.0
_POLL_S = 0.2
_LEAST_LIMIT_S, _TIMES_AS_LONG = 60, 5
_PLATFORMS = Vocabulary().platforms
_SHOWN = 12  # metrics
_ANY = ("main", "run", "train")  # names that say nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class _FirstRun:
    """One run of the command as it is.

    Attributes:
        places: Where it left metrics, the best first.
    """

    end: CommandEnd
    places: tuple[Found, ...]
    log: Path


@click.command(name="record", context_settings={"ignore_unknown_options": True})
@root_option
@click.option("--name", help="Name of the row.  [default: that of the program]")
@click.option("--metric", "metrics", multiple=True, help="Metric to compare; may be repeated.")
@click.option("--reason", help="Why the golden may be odd, such as a loss that does not fall.")
@click.option("--dry-run", is_flag=True, help="Run it twice, show row and golden, write nothing.")
@click.option(
    *("--time-limit", "limit_s"),
    type=click.FloatRange(min=1),
    default=_LIMIT_S,
    show_default=True,
    help="Seconds after which the command is ended.",
)
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
def command(  # noqa: PLR0913 - the options
    *,
    root: Path,
    name: str | None,
    metrics: tuple[str, ...],
    reason: str | None,
    dry_run: bool,
    limit_s: float,
    words: tuple[str, ...],
) -> None:
    """Run COMMAND as it is, find the metrics that it writes, and record a row and its golden.

    The command runs once by hand; its row then runs twice with `--golden record`, which shows
    whether it repeats. What was guessed is printed and stands in the row, to be changed. On a
    terminal it asks for name and metrics. Exits with 0 if row and golden are written, with 1 if the
    runs differ or the golden is refused, with 2 if there is nothing to record.
    """
    root = root.resolve()
    try:
        started = read_command(words)
    except RowError as problem:
        raise RecipeError(shlex.join(words), problem.args[0]) from problem
    assigned = words[: len(started.env)]
    program = _in_this_environment(words[len(assigned) :])
    words = (*assigned, *program)
    row_name = name or _name_of(program, root)
    ranks = None if started.is_alone else started.ranks
    with tempfile.TemporaryDirectory(prefix="pytest-megatron-record-") as scratch:
        directory = Path(scratch)
        if not dry_run:
            make_own_dir(root)
            directory = root / OWN_DIR / "record" / time.strftime("%Y%m%d-%H%M%S")
            directory.mkdir(parents=True)
        click.echo(f"running once as it is: {shlex.join(words)}")
        ran = _run(program, root, directory / "first.log", limit_s, started.env)
        best = _chosen(ran, metrics, words)
        if sys.stdin.isatty() and sys.stdout.isatty():
            row_name = name or click.prompt("name of the row", default=row_name)
            best = best if metrics else _asked(best)
        row = _row(row_name, words, best, ranks, ran.end.duration_s)
        if dry_run:
            again = _run(program, root, directory / "second.log", limit_s, started.env)
            other = _chosen(again, metrics, words)
            click.echo(f"\nrecipes/{row_name}.yaml would be:\n\n{_text(row)}")
            is_equal = _compare_runs([best.metrics, other.metrics], best.names)
            click.echo(_golden(best, other))
            sys.exit(0 if is_equal else EXIT_FAILED)
    sys.exit(_write(root, row, best, name=row_name, reason=reason))


def _in_this_environment(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command whose interpreter is named in full where it is not the one of pytest.

    Rows start `python` as the interpreter that pytest runs in.
    """
    found = shutil.which(words[0])
    if found is None:
        raise LaunchError(
            words[0], "is no command that can be found, expected a program; nothing was run"
        )
    is_ours = Path(found).parent == Path(sys.executable).parent
    if is_python(words[0]) is None or is_ours or _prefix_of(found) == sys.prefix:
        return words
    click.echo(f"{words[0]} is {found}, and pytest runs in {sys.prefix}: the row names it in full")
    return (found, *words[1:])


def _prefix_of(python: str) -> str:
    """Return the environment that a Python belongs to."""
    shown = subprocess.run(
        [python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=False
    )
    return shown.stdout.strip()


def _name_of(words: Sequence[str], root: Path) -> str:
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


def _run(
    words: Sequence[str], root: Path, log: Path, limit_s: float, more: Mapping[str, str]
) -> _FirstRun:
    """Run a command, with more variables, and copy its output.

    Raises:
        LaunchError: It did not end, or not well.
    """
    others = [Path(word.rpartition("=")[2]) for word in words]
    search = MetricSearch(
        root,
        tuple(
            {
                p
                for p in others
                if p.is_absolute()
                and not p.is_file()
                and not p.is_relative_to(root)
                and p.parent.is_dir()
            }
        ),
    )
    search.mark()
    env = {**os.environ, "PYTHONUNBUFFERED": "1", **more}
    followed, deadline = FollowedFile(log), time.monotonic() + limit_s
    with GuardedProcess(words, env=env, cwd=root, output=log, grace_s=STOP_GRACE_S) as process:
        while (end := process.poll(_POLL_S)) is None and time.monotonic() < deadline:
            _copy(followed)
        if end is None:
            process.stop()
            process.wait()
    _copy(followed)
    places = tuple(search.found(log))
    if end is None:
        raise LaunchError(
            shlex.join(words),
            f"did not end within {limit_s:g} s, {_how_far(places)}; give it an end, such as "
            f"--max_steps 20, or --time-limit; nothing was written",
        )
    if end.returncode:
        said = "; ".join(tail(log)[-2:])
        raise LaunchError(
            shlex.join(words),
            f"ended with exit code {end.returncode}, {_how_far(places)}: {said}; mend it, then "
            f"record it; nothing was written",
        )
    return _FirstRun(end=end, places=places, log=log)


def _copy(followed: FollowedFile) -> None:
    for line in followed.new_lines():
        click.echo(f"    {printable(line)}")


def _how_far(places: Sequence[Found]) -> str:
    """Describe how far a command was when it ended."""
    if not places:
        return "before it wrote any metric"
    return f"after step {places[0].last_step} ({places[0].names[0]})"


def _chosen(ran: _FirstRun, wanted: Sequence[str], words: Sequence[str]) -> Found:
    """Return the place to read from, after all of them were shown.

    Raises:
        LaunchError: There is none, or its metrics end before the training should.
    """
    line = shlex.join(words)
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


def _asked(best: Found) -> Found:
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


def _row(
    name: str, words: Sequence[str], found: Found, ranks: int | None, duration_s: float
) -> dict[str, JsonValue]:
    """Return the row; every guess is a key of its own."""
    limit_s = max(_LEAST_LIMIT_S, math.ceil(duration_s * _TIMES_AS_LONG / 60) * 60)
    row: dict[str, JsonValue] = {"name": name, "command": shlex.join(words)}
    if ranks is not None:
        row["ranks"] = ranks
    row["last_step"] = found.last_step
    if (length := length_of(words)) is not None:
        flag, _ = length
        joint = "=" if any(word.startswith(f"{flag}=") for word in words) else " "
        row["stop"] = f"{flag}{joint}{{steps}}"
    row["metrics"] = {**found.keys, "names": list(found.names)}
    row["platforms"] = _platform()
    row["time_limit"] = limit_s
    return {"rows": [row]}


def _platform() -> str:
    """Return the platform of this machine's GPUs; cpu without any, or of an unknown kind."""
    host = this_host()
    return next(
        (p for p in sorted(_PLATFORMS) if p != CPU_PLATFORM and host.fitting(p)), CPU_PLATFORM
    )


def _text(recipe: Mapping[str, JsonValue]) -> str:
    return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=1000)


def _golden(best: Found, other: Found) -> str:
    """Return the golden of two runs as it would be, but for where it comes from."""
    repeats = [best.metrics, other.metrics]
    metrics = combine(repeats, best.names)
    spread = spread_of(repeats, metrics)
    known = Provenance(
        repeats=2, deterministic=all(v == 0.0 for v in spread.values()), spread=spread
    )
    return f"its golden:\n\n{golden_text(Golden(path='', metrics=metrics, provenance=known))}"


def _compare_runs(runs: Sequence[MetricMap], names: Sequence[str]) -> bool:
    """Say whether runs measured the same; return if they did."""
    is_equal = True
    for name in names:
        series = [_float32(run[name]) if name in run else {} for run in runs]
        steps = sorted(set().union(*series))
        odd = [s for s in steps if len({repr(one.get(s)) for one in series}) > 1]
        if odd:
            is_equal = False
            values = " and ".join(str(one.get(odd[0], "nothing")) for one in series)
            num = f"{len(odd)} of {counted(len(steps), 'step')}"
            click.echo(f"{name} differs in {num}, first at step {odd[0]}: {values}")
        else:
            num = counted(len(steps), "step")
            click.echo(f"{name} repeats: {num} equal in {counted(len(runs), 'run')}")
    if not is_equal:
        click.echo(_ADVICE)
    return is_equal


def _float32(series: Series) -> dict[int, float]:
    """Return the numbers of a series as files of metrics keep them."""
    return {s: to_float32(v) for s, v in series.items() if isinstance(v, float)}


_ADVICE = (
    "no golden can say what a change does while a run does not repeat itself: give the command "
    "its seed, and on GPUs deterministic algorithms; if it cannot repeat, add `deterministic: "
    "false` to the row, whose golden is then compared with the spread of its repeats"
)


def _write(
    root: Path, recipe: dict[str, JsonValue], best: Found, *, name: str, reason: str | None
) -> int:
    """Write the row, have pytest record its golden, and return the exit code."""
    text = _text(recipe)
    file = root / "recipes" / f"{name}.yaml"
    if file.exists() and file.read_text(encoding="utf-8") != text:
        raise RecipeError(
            str(file), "is there already, with other content; give another --name, or remove it"
        )
    file.parent.mkdir(exist_ok=True)
    write_text_atomically(file, text)
    shown = file.relative_to(root)
    click.echo(f"\n{shown}:\n\n{text}\nrunning the row twice:")
    arguments = ["--golden", "record", "--n-repeat", "2", "--allow-dirty"]
    arguments += [] if reason is None else ["--golden-reason", reason]
    session = [sys.executable, "-m", "pytest", "-p", "megatron", str(shown), *arguments]
    code = subprocess.run(session, cwd=root, check=False).returncode
    runs = _measured(root)
    is_equal = not runs or _compare_runs([best.metrics, *runs], best.names)
    if code == 0 and is_equal:
        click.echo(f"wrote {shown} and its golden; from now on: pytest -p megatron {shown}")
        return 0
    why = "the runs differ" if not is_equal else "the session says above why"
    click.echo(f"{shown} is written, but has no golden that can be relied on: {why}")
    return EXIT_FAILED


def _measured(root: Path) -> list[MetricMap]:
    """Return what each repeat of the latest run measured."""
    latest = next(iter(kept_runs(root)), None)
    files = (
        []
        if latest is None
        else sorted(latest.directory.glob("*/repeat_*/attempt_*/phase_1/metrics.json"))
    )
    found: list[MetricMap] = []
    for file in files:
        try:
            found.append(read_metrics(file).metrics)
        except MegatronError:
            continue
    return found
