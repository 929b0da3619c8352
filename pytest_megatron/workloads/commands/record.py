"""`pytest-megatron record`: from a command line to a row and its golden, without a changed line."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import yaml

from pytest_megatron.base.command import EXIT_FAILED, root_option
from pytest_megatron.base.files import JsonValue, write_json_atomically, write_text_atomically
from pytest_megatron.base.text import counted
from pytest_megatron.errors import MegatronError, RecipeError
from pytest_megatron.runs.find import kept_runs
from pytest_megatron.runs.layout import BY_HAND, OWN_DIR, make_own_dir
from pytest_megatron.workloads.commands.by_hand import ByHand, in_this_environment
from pytest_megatron.workloads.commands.found import (
    Found,
)
from pytest_megatron.workloads.commands.proposal import ask, choose, kept_of, name_of, row_of
from pytest_megatron.workloads.golden.build import combine, spread_of
from pytest_megatron.workloads.golden.model import Golden, MetricMap, Provenance, Series, to_float32
from pytest_megatron.workloads.golden.store import golden_text, metrics_to_json, read_metrics
from pytest_megatron.workloads.recipe.model import RowError
from pytest_megatron.workloads.recipe.short_rows import read_command

_LIMIT_S = 600.0


@click.command(name="record", context_settings={"ignore_unknown_options": True})
@root_option
@click.option("--name", help="Name of the row.  [default: that of the program]")
@click.option("--metric", "metrics", multiple=True, help="Metric to compare; may be repeated.")
@click.option("--env", "kept", multiple=True, metavar="NAME", help="Variable that the row holds.")
@click.option(
    *("--golden-reason", "reason"), help="Why the golden may be odd: its loss does not fall."
)
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
    kept: tuple[str, ...],
    reason: str | None,
    dry_run: bool,
    limit_s: float,
    words: tuple[str, ...],
) -> None:
    """Run COMMAND as it is, find the metrics that it writes, and record a row and its golden.

    The command runs once by hand and once as a row with `--golden record`, which shows whether it
    repeats. What was guessed is printed and stands in the row, to be changed. On a
    terminal it asks for name and metrics. Exits with 0 if row and golden are written, with 1 if the
    runs differ or the golden is refused, with 2 if there is nothing to record.
    """
    root = root.resolve()
    try:
        started = read_command(words)
    except RowError as problem:
        raise RecipeError(shlex.join(words), problem.args[0]) from problem
    assigned = words[: len(started.env)]
    program = in_this_environment(words[len(assigned) :])
    words = (*assigned, *program)
    row_name = name or name_of(program, root)
    _refuse_known(root, row_name)
    env = kept_of(kept, os.environ, started.env)
    with tempfile.TemporaryDirectory(prefix="pytest-megatron-record-") as scratch:
        directory = Path(scratch)
        if not dry_run:
            make_own_dir(root)
            directory = root / OWN_DIR / "record" / time.strftime("%Y%m%d-%H%M%S")
            directory.mkdir(parents=True)
        by_hand = ByHand(
            words=program,
            root=root,
            directory=directory,
            limit_s=limit_s,
            env=started.env,
            is_joint=started.is_alone and started.ranks > 1,
        )
        click.echo(f"running once as it is: {shlex.join(words)}")
        ran = by_hand.run("first")
        best = choose(ran, metrics, words)
        if sys.stdin.isatty() and sys.stdout.isatty():
            row_name = name or click.prompt("name of the row", default=row_name)
            _refuse_known(root, row_name)
            best = best if metrics else ask(best)
        row = row_of(
            row_name,
            words,
            best,
            ranks=None if started.is_alone else started.ranks,
            env=env,
            duration_s=ran.end.duration_s,
        )
        if dry_run:
            other = choose(by_hand.run("second"), metrics, words)
            click.echo(f"\nrecipes/{row_name}.yaml would be:\n\n{_text(row)}")
            is_equal = _compare_runs([best.metrics, other.metrics], best.names)
            click.echo("" if is_equal else _ADVICE)
            click.echo(_golden(best, other))
            sys.exit(0 if is_equal else EXIT_FAILED)
        sys.exit(_write(by_hand, row, best, name=row_name, reason=reason))


def _refuse_known(root: Path, name: str) -> None:
    """Refuse a name that has a row.

    Raises:
        RecipeError: It has.
    """
    if (file := root / "recipes" / f"{name}.yaml").exists():
        raise RecipeError(str(file), "is there already; give another --name, or remove it")


def _text(recipe: Mapping[str, JsonValue]) -> str:
    return yaml.safe_dump(
        recipe, sort_keys=False, allow_unicode=True, width=1000, default_flow_style=None
    )


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
    return is_equal


def _float32(series: Series) -> dict[int, float]:
    """Return the numbers of a series as files of metrics keep them."""
    return {s: to_float32(v) for s, v in series.items() if isinstance(v, float)}


_ADVICE = (
    "no golden can say what a change does while a run does not repeat itself: give the command "
    "its seed, and on GPUs deterministic algorithms; if it cannot repeat, add `deterministic: "
    "false` to the row, whose golden is then compared with the spread of its repeats"
)
_AS_A_ROW = (
    "by hand it repeats, as a row it differs: it then sees one GPU a rank, or as many as `gpus` "
    "says, the project is the first of PYTHONPATH, our launcher replaces torchrun, and "
    "`python` is that of pytest; see plan.json of the run"
)


def _write(
    by_hand: ByHand, recipe: dict[str, JsonValue], best: Found, *, name: str, reason: str | None
) -> int:
    """Write the row, have pytest record its golden, and return the exit code."""
    root, text = by_hand.root, _text(recipe)
    file = root / "recipes" / f"{name}.yaml"
    file.parent.mkdir(exist_ok=True)
    write_text_atomically(file, text)
    shown = file.relative_to(root)
    click.echo(f"\n{shown}:\n\n{text}\nrunning the row, which has to repeat it:")
    first = by_hand.directory / "by_hand.json"
    write_json_atomically(first, metrics_to_json(best.metrics))
    arguments = ["--golden", "record", "--allow-dirty"]
    arguments += [] if reason is None else ["--golden-reason", reason]
    session = [sys.executable, "-m", "pytest", "-p", "megatron", str(shown), *arguments]
    env = {**os.environ, BY_HAND: str(first)}
    code = subprocess.run(session, cwd=root, env=env, check=False).returncode
    measured = _measured(root)
    is_equal = not measured or _compare_runs([best.metrics, *measured], best.names)
    if code == 0 and is_equal:
        click.echo(f"wrote {shown} and its golden; from now on: pytest -p megatron {shown}")
        return 0
    why = "the session says above why"
    if not is_equal:
        why = "the runs differ"
        click.echo("running once more by hand, to see which of them it is:")
        places = by_hand.run("third").places
        again = next((place.metrics for place in places if place.keys == best.keys), {})
        click.echo(_AS_A_ROW if _compare_runs([best.metrics, again], best.names) else _ADVICE)
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
