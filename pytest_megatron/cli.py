"""The `pytest-megatron` command.

The features bring the subcommands; the module of one is imported on its first use, as `--help` must
stay fast.
"""

from __future__ import annotations

import errno
import os
import sys

import click

from pytest_megatron.base.command import EXIT_UNUSABLE, LazyGroup, echo_error
from pytest_megatron.errors import MegatronError
from pytest_megatron.features import features

_NO_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # of a write to a full disk, or a lost one


class _MainCommands(LazyGroup):
    lazy = {  # noqa: RUF012 - the base class says what it is
        word: (f"{name}.{module}", text)
        for name, feature in features()
        for word, (module, text) in feature.commands.items()
    }


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
