"""`pytest-megatron interactive`: how to get a shell of Slurm in which a workload runs."""

from __future__ import annotations

import click
from typing_extensions import Unpack

from pytest_megatron.cli.slurm_item import SlurmOptions, item_options, prepare
from pytest_megatron.engines.slurm.interactive import allocation_lines, shell_lines


@click.command(name="interactive")
@item_options
def command(item: str, **given: Unpack[SlurmOptions]) -> None:
    """Print how to get nodes of Slurm for ITEM, and what to type there; needs no Slurm.

    ITEM is a node id, recipes/gpt.yaml::tp2[dev-dgx_h100], or what stands behind its ::. One that
    needs several nodes is described in a run directory, where its tasks find what to do.
    """
    found = prepare(item, given)
    if found.checked.needed.num_nodes == 1:
        assert found.place.python is not None
        inside = [found.place.python, "-m", "pytest", "-p", "megatron", found.checked.job.node_id]
        inside += ["--lightweight"] if given["lightweight"] else []
        lines = shell_lines(found.checked.needed, found.place, found.paths, inside)
    else:
        found.write()
        lines = allocation_lines(found.checked.needed, found.place, found.paths, found.notes())
    click.echo("\n".join(lines))
