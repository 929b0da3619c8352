"""Gathers all facts of a machine and an environment."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import cast

from pytest_megatron.doctor.child import ask
from pytest_megatron.doctor.compat import compat
from pytest_megatron.doctor.devices import (
    SCRIPTS,
    look_at_devices,
    look_at_torch,
    try_collectives,
)
from pytest_megatron.doctor.facts import EnvironmentFacts, Python
from pytest_megatron.doctor.machine import (
    look_at_checkout,
    look_at_machine,
    look_at_slurm,
    look_at_toolkit,
)
from pytest_megatron.doctor.packages import (
    find_megatrons,
    find_shadows,
    read_extensions,
    read_packages,
)
from pytest_megatron.doctor.places import SystemView
from pytest_megatron.errors import HostError

_START_LIMIT_S = 30.0
# Source: glibc elf/rtld.c, do_preload; these words are not translated.
_NOT_PRELOADED = re.compile(
    r"^ERROR: ld\.so: object '(.+)' from LD_PRELOAD cannot be preloaded(?: \((.+)\))?: ignored\.",
    re.MULTILINE,
)


def gather(places: SystemView, *, with_collective: bool = True) -> EnvironmentFacts:
    """Return everything that is known.

    Args:
        places: Where to look.
        with_collective: Whether to try all_reduces, if torch can be imported.

    Raises:
        HostError: The environment's Python does not run.
    """
    python = _python(places)
    packages, doubles = read_packages(python.paths)
    table = compat().compiled
    installed = [row for row in table if {row.name, *row.also} & packages.keys()]
    modules = [module for row in installed for module in row.modules]
    facts = EnvironmentFacts(
        python=python,
        packages=packages,
        doubles=doubles,
        extensions=tuple(read_extensions(python.paths, table)),
        shadows=tuple(find_shadows(python.paths, packages, table)),
        megatrons=find_megatrons(python.paths, packages),
        torch=look_at_torch(places, packages.get("torch"), modules),
        devices=look_at_devices(places),
        machine=look_at_machine(places),
        slurm=look_at_slurm(places),
        git_mend=look_at_checkout(places),
    )
    lacks = len(installed) < len(table) and facts.torch is not None and bool(facts.torch.cuda)
    facts = replace(facts, toolkit=look_at_toolkit(places, ask_network=lacks))
    if with_collective and facts.torch is not None and facts.torch.problem is None:
        num_gpus = facts.torch.count if facts.torch.cuda_problem is None else 0
        facts = replace(facts, collectives=tuple(try_collectives(places, num_gpus)))
    return facts


def _python(places: SystemView) -> Python:
    answer = ask(
        places.python,
        SCRIPTS / "environment.py",
        limit_s=_START_LIMIT_S,
        env=places.env,
        cwd=places.project,
    )
    said = answer.values
    if answer.problem is not None or "tag" not in said:
        raise HostError(
            str(places.python),
            f"{answer.problem or 'says nothing of itself'}, expected the Python of an environment",
        )
    return Python(
        executable=Path(str(said["executable"])),
        version=str(said["version"]),
        tag=str(said["tag"]),
        soabi=str(said["soabi"]),
        machine=str(said["machine"]),
        prefix=Path(str(said["prefix"])),
        is_venv=bool(said["is_venv"]),
        paths=tuple(Path(path) for path in cast("list[str]", said["paths"])),
        encoding=str(said["encoding"]),
        not_preloaded={
            path: why or "it cannot be loaded" for path, why in _NOT_PRELOADED.findall(answer.text)
        },
        optimize=cast("int", said.get("optimize", 0)),
    )
