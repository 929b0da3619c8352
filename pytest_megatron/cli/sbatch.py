"""`pytest-megatron sbatch`: the script that a person would submit for a workload."""

from __future__ import annotations

import click
from typing_extensions import Unpack

from pytest_megatron.cli.slurm_item import SlurmOptions, item_options, prepare
from pytest_megatron.engines.slurm.script import kept_scripts
from pytest_megatron.engines.slurm.shape import shape_of


@click.command(name="sbatch")
@item_options
def command(item: str, **given: Unpack[SlurmOptions]) -> None:
    """Print the script that runs ITEM as a job of Slurm; needs no Slurm and submits nothing.

    ITEM is a node id, recipes/gpt.yaml::tp2[dev-dgx_h100], or what stands behind its ::. What the
    job is told and what it leaves goes into a run directory, which is named at the top.
    """
    found = prepare(item, given)
    (text,) = kept_scripts([shape_of(found.checked.needed, found.place, found.paths)], found.paths)
    found.write()
    shebang, _, rest = text.partition("\n")
    click.echo(
        "\n".join([shebang, f"# {found.checked.job.node_id}", *found.notes(), rest]), nl=False
    )
