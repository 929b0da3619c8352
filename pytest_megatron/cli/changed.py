"""`pytest-megatron changed`: the records of `--record-changed`."""

from __future__ import annotations

from pathlib import Path

import click

from pytest_megatron.base.text import counted
from pytest_megatron.changed.record import FILE_NAME, merge_records, read_record, write_record
from pytest_megatron.errors import ConfigError


@click.group(name="changed")
def command() -> None:
    """Records of the code and the files that tests use."""


@command.command(name="merge")
@click.argument(
    "files",
    nargs=-1,
    required=True,
    metavar="FILE...",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path(".pytest_megatron") / FILE_NAME,
    show_default=True,
    help="The file to write.",
)
def merge(files: tuple[Path, ...], output: Path) -> None:
    """Join the records of several jobs; of a test that two of them have, the later one counts."""
    record = merge_records([read_record(file) for file in files])
    try:
        write_record(output, record)
    except OSError as error:
        raise ConfigError(str(output), f"cannot be written: {error.strerror}") from error
    click.echo(f"{output}: {counted(len(record.tests), 'test')} of {counted(len(files), 'record')}")
