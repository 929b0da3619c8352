"""The `pytest-megatron` command.

The module of a subcommand is imported on its first use: `--help` must stay fast, so nothing but click is imported until a subcommand runs.
"""

from __future__ import annotations

import errno
import os
import sys

import click

from pytest_megatron.base.command import EXIT_UNUSABLE, LazyGroup, echo_error
from pytest_megatron.errors import MegatronError

SUBCOMMANDS = {
    "changed": ("ci.plan_command:changed", "Join records of what tests use, for --changed."),
    "ci": ("ci.command:command", "Write files for CI, and make one verdict of many jobs."),
    "cost": ("ci.plan_command:cost", "Print what items cost in GPU time, and what got dearer."),
    "culprit": ("culprit.command:command", "Find the commit from which on an item fails."),
    "demo": ("demo.command:command", "Write a small project into an empty directory, and run it."),
    "doctor": ("doctor.command:command", "Check this machine and environment."),
    "expand": (
        "workloads.commands.recipes:expand",
        "Print the workloads that recipe files expand to.",
    ),
    "flaky": ("flaky.command:command", "Count how often items passed only when run again."),
    "gangs": ("gangs.command:gangs", "List and stop the processes that --keep-gangs keeps."),
    "golden": ("workloads.commands.golden:command", "Compare observed metrics with golden values."),
    "interactive": (
        "engines.slurm.command:interactive",
        "Print how to get a shell of Slurm for a workload.",
    ),
    "lint": ("workloads.commands.recipes:lint", "Report errors in recipes, cases and goldens."),
    "plan": ("ci.plan_command:command", "Print the CI jobs for labels and an event."),
    "repro": ("repro.command:command", "Do a failing item of a run or artifact again, here."),
    "report": ("pages.command:report", "Write pages and pictures of finished runs."),
    "runs": ("pages.command:runs", "List and remove the runs that a project keeps."),
    "sbatch": ("engines.slurm.command:sbatch", "Print the script that runs a workload in Slurm."),
    "schema": (
        "workloads.commands.recipes:schema",
        "Print the JSON Schema of a kind of file, or its path.",
    ),
    "trace": ("trace.command:command", "Compare and print traces of tensors."),
    "triage": ("triage.command:command", "Find why a run failed, from its logs."),
    "watch": ("gangs.command:watch", "Run tests, and again after each edit, on kept gangs."),
}
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
        echo_error(error)
        sys.exit(EXIT_UNUSABLE)
    except OSError as error:
        if error.errno not in _NO_OUTPUT or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes what is left when it ends
        echo_error(f"standard output: {error.strerror}; make room")
        sys.exit(EXIT_UNUSABLE)
