"""`pytest-megatron record`: from a command line to a row and its golden, without a changed line."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path, PurePath
from types import FrameType

import click
import yaml

from pytest_megatron.base.command import EXIT_FAILED, echo_error, root_option
from pytest_megatron.base.files import (
    JsonValue,
    write_json_atomically,
    write_text_atomically,
)
from pytest_megatron.base.text import counted, listed
from pytest_megatron.errors import LaunchError, MegatronError, RecipeError
from pytest_megatron.gpu.host import CPU_PLATFORM, Gpu, this_host
from pytest_megatron.process.tree import wake_at_death_of_parent
from pytest_megatron.runs.find import kept_runs
from pytest_megatron.runs.layout import BY_HAND, OWN_DIR, make_own_dir
from pytest_megatron.runs.redact import is_secret_name
from pytest_megatron.workloads.commands.by_hand import ByHand, RunByHand, in_this_environment
from pytest_megatron.workloads.commands.found import (
    Found,
    description,
    length_of,
)
from pytest_megatron.workloads.golden.build import combine, spread_of
from pytest_megatron.workloads.golden.model import Golden, MetricMap, Provenance, Series, to_float32
from pytest_megatron.workloads.golden.store import golden_text, metrics_to_json, read_metrics
from pytest_megatron.workloads.recipe.model import RowError, Vocabulary
from pytest_megatron.workloads.recipe.short_rows import read_command
from pytest_megatron.workloads.verdict.attempt import left_behind

_LEAST_LIMIT_S, _TIMES_AS_LONG, _WHOLE_S = 120, 5, 30
_NAME, _LONGEST_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*").fullmatch, 100
_OF_A_SHELL = re.compile(r"[|&;]{1,2}|(\d*|&)[<>]{1,3}(&[\d-]+)?|(\d+|&)>{1,2}[^=]\S*").fullmatch
_OWN_END_S = 2.0  # for the session to end by a Ctrl-C of its own
_PLATFORMS = Vocabulary().platforms
_SHOWN, _LISTED = 12, 40  # metrics
_ANY = ("main", "run", "train")  # names that say nothing


def name_of(words: Sequence[str], root: Path) -> str:
    """Return a name for a row: the program's, or the project's where that is any program's."""
    program = next((PurePath(word).stem for word in words if word.endswith(".py")), root.name)
    program = root.name if program in _ANY else program
    name = re.sub(r"[^A-Za-z0-9_.+-]", "-", program).lstrip("._+-")
    return name[:_LONGEST_NAME] or "training"


def choose(ran: RunByHand, wanted: Sequence[str], words: Sequence[str]) -> Found:
    """Return the place to read from, after all of them were shown.

    Raises:
        LaunchError: There is none, or its metrics end before the training should.
    """
    line = shlex.join(words)
    for text in ran.passed_over:
        click.echo(f"no metrics are read by step from {text}")
    places = (*ran.places, *ran.others) if wanted else ran.places
    if not places:
        raise LaunchError(line, f"ended with exit code 0{_why_no_metric(ran)}; nothing was written")
    best = next((p for p in places if set(wanted) <= p.metrics.keys()), None)
    if best is None:
        known = sorted({name for place in places for name in place.metrics})
        problem = f"is not among the metrics, expected some of {', '.join(known)}"
        raise LaunchError(f"--metric {' '.join(wanted)}", problem)
    best = replace(best, wanted=tuple(wanted))
    others = [place for place in ran.places if place.keys != best.keys]
    click.echo("\nmetrics:")
    for place in (best, *others):
        click.echo(f"  {place.where}")
        for name in place.names[:_SHOWN]:
            click.echo(f"    {description(name, place.metrics[name])}")
    best = best if wanted else replace(best, wanted=_lasting(best))
    _say_others(best, ran)
    length = length_of(words)
    if length is not None and best.last_step + _gap(best, best.names[0]) < length[1]:
        raise LaunchError(
            line,
            f"ended with exit code 0 at step {best.last_step} of its {best.names[0]}, and "
            f"{length[0]} is {length[1]}; nothing was written: fix it, or change {length[0]}",
        )
    _check_steps(ran, best, line)
    return best


def _why_no_metric(ran: RunByHand) -> str:
    """Describe a run that left nothing to compare."""
    cut = left_behind(ran.end.num_left)
    if ran.passed_over:
        return (
            f"{cut}, and its metrics cannot be told apart: {ran.passed_over[0]}; "
            f"have one rank write them, by a step that goes on"
        )
    names = dict.fromkeys(name for place in ran.others for name in place.metrics)
    others = f"; --metric NAME compares one of {listed([*names], _LISTED)}" if names else ""
    return (
        f" after {ran.end.duration_s:.0f} s{cut}, and wrote no metric, expected a loss in files of "
        f"TensorBoard, JSON or CSV, or in printed lines such as `step 3 loss 2.5`; have it "
        f"print one{others}"
    )


def _check_steps(ran: RunByHand, best: Found, line: str) -> None:
    """Say what cannot be told from a run: one that went on, or that has one step.

    Raises:
        LaunchError: It went on, and had one step by then.
    """
    cut, is_one = left_behind(ran.end.num_left), best.num_steps == 1
    if cut and is_one:
        problem = f"ended with exit code 0{cut} at the first step; start it in the foreground"
        raise LaunchError(line, f"{problem}; nothing was written")
    if cut:
        click.echo(f"it ended{cut}: what trains has to stay in the foreground")
    if is_one:
        names = ", ".join(best.names)
        click.echo(f"{names}: one step alone, which says little; have it log each step")


def _lasting(found: Found) -> tuple[str, ...]:
    """Return the metrics that go on to the last step."""
    ends = {name: found.metrics[name].steps[-1] + _gap(found, name) for name in found.names}
    return tuple(name for name, end in ends.items() if end >= found.last_step)


def _say_others(best: Found, ran: RunByHand) -> None:
    """Name the metrics that are not compared, and were not shown."""
    told = set(best.names)
    told.update(*(one.names[:_SHOWN] for one in ran.places if one.keys != best.keys))
    for place in (best, *ran.places, *ran.others):
        rest = [name for name in (*place.metrics, *place.unread) if name not in told]
        told.update(rest)
        if rest:
            click.echo(f"left out: {listed(rest, _LISTED)} of {place.where}; --metric compares one")


def _gap(found: Found, name: str) -> int:
    steps = found.metrics[name].steps
    return max((b - a for a, b in pairwise(steps)), default=1)


def env_of_row(names: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the shell that `--env` puts into a row, by name.

    Raises:
        LaunchError: A name is not set, or is that of a secret.
    """
    for name in names:
        if name not in env:
            raise LaunchError(f"--env {name}", "is not set here, expected a variable that is")
        if is_secret_name(name):
            raise LaunchError(
                f"--env {name}", "is a secret, which no file may hold; leave it in the shell"
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
    repeats. What was guessed is printed and stands in the row, to be changed.
    Exits with 0 if row and golden are written, with 1 if the runs differ or the golden is refused,
    with 2 if there is nothing to record.
    """
    root = root.resolve()
    _refuse_quoted(words)
    try:
        started = read_command(words)
    except RowError as problem:
        raise RecipeError(shlex.join(words), problem.args[0]) from problem
    assigned = words[: len(started.env)]
    program = in_this_environment(words[len(assigned) :])
    words = (*assigned, *program)
    row_name = name_of(program, root) if name is None else name
    _refuse_name(root, row_name)
    env = env_of_row(kept, os.environ)
    gpus, num_gpus = _gpus_of(started.ranks, is_alone=started.is_alone)
    sizes = {"ranks": started.ranks}
    if started.is_alone:
        sizes = {"gpus": num_gpus} if num_gpus > started.ranks else {}
    with tempfile.TemporaryDirectory(prefix="pytest-megatron-record-") as scratch:
        directory = Path(scratch)
        if not dry_run:
            own = root / OWN_DIR / "record"
            try:
                make_own_dir(root)
                own.mkdir(exist_ok=True)
            except OSError as error:
                why = f"cannot be written to: {error.strerror}; nothing was run"
                raise RecipeError(str(own), why) from error
            directory = Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=own))
        by_hand = ByHand(
            words=program,
            root=root,
            directory=directory,
            limit_s=limit_s,
            env=started.env,
            is_joint=started.is_alone and started.ranks > 1,
            gpus=gpus,
            num_gpus=num_gpus,
        )
        click.echo(f"running once as it is: {shlex.join(words)}")
        with _ended_by_signals():
            ran = by_hand.run("first")
            best = choose(ran, metrics, words)
            row = row_of(
                row_name,
                words,
                best,
                sizes=sizes,
                env=env,
                duration_s=ran.end.duration_s,
            )
            if dry_run:
                other = choose(by_hand.run("second"), metrics, words)
                click.echo(f"\nrecipes/{row_name}.yaml would be:\n\n{_text(row)}")
                sys.exit(_show_golden(best, other))
            sys.exit(_write(by_hand, row, best, name=row_name, reason=reason))


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Have a signal that ends this process first end what it started, and say so.

    One that is ignored (`nohup`) stays so.
    """

    def end(number: int, _: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, end)
    try:
        yield
    except KeyboardInterrupt as stopped:
        name = str(stopped) or signal.SIGINT.name
        echo_error(f"{name}: what it had started was ended; nothing was written")
        sys.exit(128 + signal.Signals[name])


def _gpus_of(ranks: int, *, is_alone: bool) -> tuple[tuple[Gpu, ...], int]:
    """Return the GPUs that the row may have here, and how many of them; none on the CPU.

    A program that is started alone has one, or all that CUDA_VISIBLE_DEVICES names.
    """
    platform = platform_here()
    gpus = () if platform == CPU_PLATFORM else this_host().fitting(platform)
    num_gpus = len(gpus) if is_alone and "CUDA_VISIBLE_DEVICES" in os.environ else ranks
    if len(gpus) < num_gpus:
        return (), 0
    if len(gpus) > num_gpus:
        more = "; set CUDA_VISIBLE_DEVICES to give it more" if is_alone else ""
        click.echo(f"it sees {num_gpus} of {len(gpus)} GPUs, as its row will{more}")
    return gpus, num_gpus


def _refuse_name(root: Path, name: str) -> None:
    """Refuse a name that no row can have, or that one has.

    Raises:
        RecipeError: It is such a name.
    """
    if not _NAME(name) or len(name.encode()) > _LONGEST_NAME:
        shown = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
        raise RecipeError(
            f"--name {shown!r}",
            f"is no name of a row, expected at most {_LONGEST_NAME} letters, digits and any of "
            f". _ + -, the first a letter or digit; nothing was run",
        )
    for there in (root / "recipes" / f"{name}.yaml", root / "golden_values" / name):
        if there.exists():
            raise RecipeError(str(there), "is there already; give another --name, or remove it")


def _refuse_quoted(words: Sequence[str]) -> None:
    """Refuse a whole line that quotes make one word, and a word that only a shell understands.

    Raises:
        RecipeError: It is one.
    """
    for word in filter(_OF_A_SHELL, words):
        line = " ".join(w if _OF_A_SHELL(w) else shlex.quote(w) for w in words)
        raise RecipeError(
            shlex.quote(word),
            f"is a word of the command because of its quotes, and no shell runs it; give "
            f"-- sh -c {shlex.quote(line)}; nothing was run",
        )
    line = words[0]
    if len(words) > 1 or not re.search(r"\s", line) or shutil.which(line):
        return
    fix = f"-- sh -c {shlex.quote(line)}" if re.search(r"[|&;<>$`]", line) else f"-- {line}"
    raise RecipeError(
        shlex.quote(line),
        f"is one word because of its quotes, and no shell runs it; give {fix}; nothing was run",
    )


def _text(recipe: Mapping[str, JsonValue]) -> str:
    return yaml.safe_dump(
        recipe, sort_keys=False, allow_unicode=True, width=1000, default_flow_style=None
    )


def _show_golden(best: Found, other: Found) -> int:
    """Print the golden of two runs, but for where it comes from; return the exit code."""
    is_equal = _compare_runs([best.metrics, other.metrics], best.names)
    click.echo("" if is_equal else _ADVICE)
    repeats = [best.metrics, other.metrics]
    metrics = combine(repeats, best.names)
    spread = spread_of(repeats, metrics)
    known = Provenance(
        repeats=2, deterministic=all(v == 0.0 for v in spread.values()), spread=spread
    )
    text = golden_text(Golden(path="", metrics=metrics, provenance=known))
    click.echo(f"its golden:\n\n{text}")
    return 0 if is_equal else EXIT_FAILED


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
    "false` to the row, whose golden is then compared with the spread of its repeats. If it "
    "repeats by hand, and as a row it differs: there the project is the first of PYTHONPATH, our "
    "launcher replaces torchrun, and `python` is that of pytest; see plan.json of the run"
)


def _write(
    by_hand: ByHand, recipe: dict[str, JsonValue], best: Found, *, name: str, reason: str | None
) -> int:
    """Write the row, have pytest record its golden, and return the exit code."""
    root, text = by_hand.root, _text(recipe)
    file = root / "recipes" / f"{name}.yaml"
    try:
        file.parent.mkdir(exist_ok=True)
        write_text_atomically(file, text)
    except OSError as error:
        raise RecipeError(str(file), f"cannot be written: {error.strerror}") from error
    try:
        return _record_golden(by_hand, file, best, text=text, reason=reason)
    except KeyboardInterrupt:
        file.unlink(missing_ok=True)
        shutil.rmtree(root / "golden_values" / name, ignore_errors=True)
        for directory in (file.parent, root / "golden_values"):
            with contextlib.suppress(OSError):  # it has others
                directory.rmdir()
        raise


def _record_golden(
    by_hand: ByHand, file: Path, best: Found, *, text: str, reason: str | None
) -> int:
    """Have pytest record the golden of a row, and return the exit code."""
    root = by_hand.root
    shown = file.relative_to(root)
    click.echo(f"\n{shown}:\n\n{text}\nrunning the row, which has to repeat it:")
    first = by_hand.directory / "by_hand.json"
    write_json_atomically(first, metrics_to_json(best.metrics))
    arguments = ["--golden", "record", "--allow-dirty"]
    arguments += [] if reason is None else ["--golden-reason", reason]
    session = [sys.executable, "-m", "pytest", "-p", "megatron", str(shown), *arguments]
    env = {**os.environ, BY_HAND: str(first)}
    code = _run_session(session, root, env)
    measured = _measured(root)
    is_equal = not measured or _compare_runs([best.metrics, *measured], best.names)
    if code == 0 and is_equal:
        click.echo(f"wrote {shown} and its golden; from now on: pytest -p megatron {shown}")
        return 0
    why = "the session says above why"
    if not is_equal:
        why = "the runs differ"
        click.echo(_ADVICE)
    click.echo(f"{shown} is written, but has no golden that can be relied on: {why}")
    return EXIT_FAILED


def _run_session(session: Sequence[str], root: Path, env: Mapping[str, str]) -> int:
    """Run pytest, and return its exit code; it ends with this process, however that ends."""
    process = subprocess.Popen(
        session,
        cwd=root,
        env=env,
        preexec_fn=wake_at_death_of_parent,  # noqa: PLW1509 - this process has one thread
    )
    try:
        return process.wait()
    except KeyboardInterrupt as stopped:
        is_told = not str(stopped)  # by the terminal, as this process was
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_OWN_END_S if is_told else 0.0)
        process.terminate()
        process.wait()
        raise
    finally:
        process.kill()


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
