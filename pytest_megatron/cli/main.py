"""The `pytest-megatron` command: finds a subcommand's module when it is asked for, not before.

`--help` must stay fast, so nothing but click is imported until a subcommand runs.
"""

from __future__ import annotations

import errno
import os
import sys

import click

from pytest_megatron.base.text import printable
from pytest_megatron.cli.lazy import LazyGroup
from pytest_megatron.errors import MegatronError

# name -> (module with a click command named `command`, one line of help)
SUBCOMMANDS = {
    "ci": ("pytest_megatron.cli.ci", "Write files for CI, and make one verdict of many jobs."),
    "doctor": ("pytest_megatron.cli.doctor", "Say what is wrong with this environment."),
    "expand": ("pytest_megatron.cli.expand", "Print the workloads that recipe files expand to."),
    "flaky": ("pytest_megatron.cli.flaky", "Tell how often items passed only when run again."),
    "golden": ("pytest_megatron.cli.golden", "Compare observed metrics with golden values."),
    "interactive": (
        "pytest_megatron.cli.interactive",
        "Print how to get a shell of Slurm for a workload.",
    ),
    "lint": ("pytest_megatron.cli.lint", "Report what is wrong in recipes, cases and goldens."),
    "plan": ("pytest_megatron.cli.plan", "Print what CI runs for labels and an event."),
    "repro": ("pytest_megatron.cli.repro", "Do a failing item of a run or artifact again, here."),
    "report": ("pytest_megatron.cli.report", "Write pages and pictures of finished runs."),
    "runs": ("pytest_megatron.cli.runs", "List and remove the runs that a project keeps."),
    "sbatch": ("pytest_megatron.cli.sbatch", "Print the script that runs a workload in Slurm."),
    "triage": ("pytest_megatron.cli.triage", "Say why a run failed, from its logs."),
}
EXIT_UNUSABLE = 2
_NO_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # of a write to a full disk, or a lost one


class _MainCommands(LazyGroup):
    lazy = SUBCOMMANDS


@click.command(cls=_MainCommands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pytest-megatron")
def group() -> None:
    """Recipes, goldens and runs of pytest-megatron, outside pytest."""


def main() -> None:
    """Run the command; an error of ours is one line on stderr and exit code 2."""
    try:
        group.main(prog_name="pytest-megatron", standalone_mode=True)
    except MegatronError as error:
        click.echo(printable(f"pytest-megatron: {error}"), err=True)
        sys.exit(EXIT_UNUSABLE)
    except OSError as error:
        if error.errno not in _NO_OUTPUT or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes what is left when it ends
        click.echo(f"pytest-megatron: standard output: {error.strerror}; make room", err=True)
        sys.exit(EXIT_UNUSABLE)
