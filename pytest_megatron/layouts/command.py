"""`pytest-megatron layout`: runs single ranks of any program on fake process groups.

Thin: errors go up to `main`, which ends with exit code 2.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import click

from pytest_megatron.base.command import EXIT_FAILED, PATH, echo_json, format_option
from pytest_megatron.base.text import printable
from pytest_megatron.layouts.model import NUM_RANKS, Settings
from pytest_megatron.layouts.report import headline, problem_text, table
from pytest_megatron.layouts.start import memory_of, run_layout


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("-n", "--world-size", type=click.IntRange(1), required=True, help="All ranks.")
@click.option("--ranks-per-node", type=click.IntRange(1), default=8, show_default=True)
@click.option(
    "--fake-ranks",
    default=str(NUM_RANKS),
    show_default=True,
    metavar="all|N|LIST",
    help="How many that can differ are run, or which.",
)
@click.option("--steps", type=click.IntRange(1), default=2, show_default=True)
@click.option("--platform", default="", help="GPUs whose memory a rank may use, as dgx_h100.")
@click.option("--dir", "directory", type=PATH, help="Keep logs and records of ranks there.")
@format_option("text", "json")
def command(  # noqa: PLR0913 - one for each option
    *,
    program: tuple[str, ...],
    world_size: int,
    ranks_per_node: int,
    fake_ranks: str,
    steps: int,
    platform: str,
    directory: Path | None,
    form: str,
) -> None:
    """Run single ranks of PROGRAM for two steps on fake process groups, and compare them.

    PROGRAM is a Python program with its arguments, or -m and a module. Each rank has its number and
    the whole world size. Exit code 1 if ranks disagree, or if that cannot be decided.
    """
    with ExitStack() as stack:
        if directory is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings = Settings(
            directory=directory.absolute(),
            world_size=world_size,
            ranks_per_node=min(ranks_per_node, world_size),
            steps=steps,
        )
        layout = run_layout(settings.choose(fake_ranks), program, memory_bytes=memory_of(platform))
    problem = problem_text(layout)
    if form == "json":
        echo_json(asdict(layout))
    else:
        click.echo(printable(problem or headline(layout)))
        click.echo(printable(table(layout)))
    sys.exit(0 if problem is None else EXIT_FAILED)
