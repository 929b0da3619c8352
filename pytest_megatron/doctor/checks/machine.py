"""The machine and its variables against what trainings need. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pytest_megatron.doctor.facts import Disk, EnvironmentFacts, MachineFacts
from pytest_megatron.workloads.training.checks.rules import RuleMatch

_LEAST_SHM_BYTES = 1 << 30
_LEAST_LIMIT = 4096
_LEAST_LIMITS = {"Max open files": "limit-nofile", "Max processes": "limit-nproc"}
_FULL_BYTES = 10**9


def check_machine(facts: EnvironmentFacts) -> Iterator[RuleMatch]:
    """Yield what is wrong with the machine."""
    machine = facts.machine
    yield from _limits(machine)
    for disk in machine.disks:
        yield from _disk(disk)
    if facts.slurm.problem is not None:
        yield RuleMatch("slurm-silent", problem=facts.slurm.problem)


def check_communication(facts: EnvironmentFacts) -> Iterator[RuleMatch]:
    """Yield what keeps ranks from talking to one another."""
    for tried in facts.collectives:
        if tried.problem is not None:
            yield RuleMatch(
                "collective-fails",
                backend=tried.backend,
                ranks=tried.world_size,
                problem=tried.problem,
            )
    if facts.machine.host_problem is not None:
        yield RuleMatch("host-name", problem=facts.machine.host_problem)


def _limits(machine: MachineFacts) -> Iterator[RuleMatch]:
    """Look at shared memory and at the limits of this user that are too low."""
    if machine.shm_bytes is not None and machine.shm_bytes < _LEAST_SHM_BYTES:
        yield RuleMatch("shm-small", size=shown_bytes(machine.shm_bytes))
    for name, rule in _LEAST_LIMITS.items():
        value = machine.limits.get(name)
        if value is not None and value < _LEAST_LIMIT:
            yield RuleMatch(rule, value=value)
    locked = machine.limits.get("Max locked memory")
    if locked is not None and machine.has_infiniband:
        yield RuleMatch("limit-memlock", value=shown_bytes(locked))


def _disk(disk: Disk) -> Iterator[RuleMatch]:
    """Look at whether a directory can be written to, and has room."""
    if disk.problem is not None:
        advice = "mount it writable, or choose another place"
        if disk.variable:
            advice = f"set {disk.variable} to a directory that can be written to"
        yield RuleMatch(
            "not-writable", path=disk.path, use=disk.use, problem=disk.problem, advice=advice
        )
        return
    if disk.free_bytes is not None and disk.free_bytes < _FULL_BYTES:
        yield RuleMatch(
            "disk-full", path=disk.path, use=disk.use, free=shown_bytes(disk.free_bytes)
        )


def shown_bytes(number: int) -> str:
    """Return `64.0 MiB`, as sizes of mounts and limits are thought of."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:  # noqa: PLR2004 - of the next unit
            return f"{number:g} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024  # type: ignore[assignment]
    return f"{number:.1f} GiB"


def check_megatron(facts: EnvironmentFacts) -> Iterator[RuleMatch]:
    """Yield what is wrong with where megatron comes from."""
    if len(facts.megatrons) > 1:
        first, *others = facts.megatrons
        yield RuleMatch("megatron-twice", first=first, others=", ".join(map(str, others)))


# What a launcher gives to each of its ranks; MASTER_PORT alone chooses a port.
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")


def check_variables(env: Mapping[str, str]) -> Iterator[RuleMatch]:
    """Yield the variables of a launcher that are left of another job."""
    preset = [f"{name}={env[name]}" for name in _OF_A_RANK if env.get(name)]
    if preset:
        yield RuleMatch("ranks-preset", variables=", ".join(preset))
