"""The machine and its variables against what trainings need. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from pytest_megatron.doctor.facts import (
    UNKNOWN,
    Disk,
    EnvironmentFacts,
    MachineFacts,
    Slurm,
)
from pytest_megatron.workloads.training.checks.rules import RuleMatch

_LEAST_SHM_BYTES = 1 << 30
_LEAST_LIMIT = 4096
_LEAST_LIMITS = {"Max open files": "limit-nofile", "Max processes": "limit-nproc"}
_FULL_BYTES, _LOW_BYTES = 10**9, 10**10
_SLOW_LOOKUP_S = 1.0
_NEEDED_CAPABILITIES = {"compute", "utility"}
_SLURM_NEEDED = ("sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")


def check_machine(facts: EnvironmentFacts, env: Mapping[str, str]) -> Iterator[RuleMatch]:
    """Yield what is wrong with the machine."""
    machine = facts.machine
    yield from _limits(machine)
    for disk in machine.disks:
        yield from _disk(disk)
    value = env.get("NVIDIA_DRIVER_CAPABILITIES")
    words = {word.strip() for word in (value or "all").split(",")}
    if machine.container and "all" not in words and not words >= _NEEDED_CAPABILITIES:
        yield RuleMatch("driver-capabilities", value=repr(value), container=machine.container)
    yield from check_slurm(facts.slurm)


def check_communication(facts: EnvironmentFacts, env: Mapping[str, str]) -> Iterator[RuleMatch]:
    """Yield what keeps ranks from talking to one another."""
    machine = facts.machine
    for tried in facts.collectives:
        if tried.problem is not None:
            yield RuleMatch(
                "collective-fails",
                backend=tried.backend,
                ranks=tried.world_size,
                problem=tried.problem,
            )
    yield from _infiniband(machine, env)
    if machine.port_problem is not None:
        yield RuleMatch("port-taken", problem=machine.port_problem)
    if machine.host_problem is not None:
        yield RuleMatch("host-name", problem=machine.host_problem)
    if machine.lookup_s is not None and machine.lookup_s >= _SLOW_LOOKUP_S:
        yield RuleMatch("address-name", seconds=f"{machine.lookup_s:.1f}")


def _infiniband(machine: MachineFacts, env: Mapping[str, str]) -> Iterator[RuleMatch]:
    """Look at ports that are down, and at InfiniBand that is switched off."""
    active = [port for port, state in machine.infiniband.items() if state == "ACTIVE"]
    down = [f"{port} ({s.lower()})" for port, s in machine.infiniband.items() if s != "ACTIVE"]
    if down:
        yield RuleMatch(
            "infiniband-down", ports=f"{', '.join(down)} {'is' if len(down) == 1 else 'are'}"
        )
    value = env.get("NCCL_IB_DISABLE", "0")
    if active and value not in ("", "0"):
        verb = "is" if len(active) == 1 else "are"
        yield RuleMatch("infiniband-off", value=value, ports=f"{', '.join(active)} {verb}")


def _limits(machine: MachineFacts) -> Iterator[RuleMatch]:
    """Look at shared memory and at the limits of this user that are too low."""
    if machine.shm_bytes is not None and machine.shm_bytes < _LEAST_SHM_BYTES:
        yield RuleMatch("shm-small", size=shown_bytes(machine.shm_bytes))
    for name, rule in _LEAST_LIMITS.items():
        value = machine.limits.get(name)
        if value is not None and value < _LEAST_LIMIT:
            yield RuleMatch(rule, value=value)
    locked = machine.limits.get("Max locked memory")
    if locked is not None and machine.infiniband:
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
    if disk.free_bytes is not None and disk.free_bytes < _LOW_BYTES:
        rule = "disk-full" if disk.free_bytes < _FULL_BYTES else "disk-low"
        yield RuleMatch(rule, path=disk.path, use=disk.use, free=shown_bytes(disk.free_bytes))


def shown_bytes(number: int) -> str:
    """Return `64.0 MiB`, as sizes of mounts and limits are thought of."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:  # noqa: PLR2004 - of the next unit
            return f"{number:g} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024  # type: ignore[assignment]
    return f"{number:.1f} GiB"


def check_slurm(slurm: Slurm) -> Iterator[RuleMatch]:
    """Check Slurm's client programs, their versions and the controller."""
    if not slurm.programs:
        return
    if missing := [name for name in _SLURM_NEEDED if name not in slurm.programs]:
        there = ", ".join(sorted(slurm.programs))
        yield RuleMatch("slurm-partial", there=there, missing=", ".join(missing))
    if len(set(slurm.programs.values()) - {UNKNOWN}) > 1:  # a site's own wrapper may not say
        versions = ", ".join(f"{name} {v}" for name, v in sorted(slurm.programs.items()))
        yield RuleMatch("slurm-versions", versions=versions)
    if slurm.problem is not None:
        yield RuleMatch("slurm-silent", problem=slurm.problem)


def check_megatron(facts: EnvironmentFacts) -> Iterator[RuleMatch]:
    """Yield what is wrong with where megatron comes from."""
    if len(facts.megatrons) > 1:
        first, *others = facts.megatrons
        yield RuleMatch("megatron-twice", first=first, others=", ".join(map(str, others)))


# What a launcher gives to each of its ranks; MASTER_PORT alone chooses a port.
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
# Variable -> values that turn a transport off, and which one that is.
# Source: NCCL, environment variables; only a 1 disables.
_SLOW: Mapping[str, tuple[tuple[str, ...], str]] = {
    "NCCL_P2P_DISABLE": (("1",), "GPUs no longer copy to one another over NVLink or PCI"),
    "NCCL_P2P_LEVEL": (("LOC", "0"), "GPUs no longer copy to one another over NVLink or PCI"),
    "NCCL_SHM_DISABLE": (("1",), "ranks of one node talk over the network, not shared memory"),
    "CUDA_LAUNCH_BLOCKING": (("1",), "each kernel is waited for: nothing overlaps"),
}
_CONSUMER_GPU = re.compile(r"GeForce|\bRTX (?:30|40|50)\d\d\b")
# Source: NCCL src/os/linux.cc, ncclOsFindInterfaces, and src/transport/net_ib/init.cc.
_LEAST_LENGTH = 2  # of a list of interfaces; NCCL and gloo look at no shorter one


def check_variables(facts: EnvironmentFacts, env: Mapping[str, str]) -> Iterator[RuleMatch]:
    """Yield the variables that are wrong, or were left by somebody else."""
    preset = [f"{name}={env[name]}" for name in _OF_A_RANK if env.get(name)]
    if preset:
        yield RuleMatch("ranks-preset", variables=", ".join(preset))
    yield from _communication(facts, env)


def _communication(facts: EnvironmentFacts, env: Mapping[str, str]) -> Iterator[RuleMatch]:
    """Look at variables of NCCL and gloo, and at what slows them down."""
    yield from _interfaces(facts.machine, env)
    gpus = facts.devices.gpus
    for variable, (values, effect) in _SLOW.items():
        if env.get(variable) not in values:
            continue
        if "P2P" in variable and gpus and all(_CONSUMER_GPU.search(gpu.name) for gpu in gpus):
            continue  # these have no peer-to-peer copies, and some drivers need to be told so
        yield RuleMatch("slow-variable", variable=variable, value=env[variable], effect=effect)


def _interfaces(machine: MachineFacts, env: Mapping[str, str]) -> Iterator[RuleMatch]:
    """Look at whether the network interfaces that variables name are there."""
    if not machine.links:
        return  # the system does not say
    loopback = tuple(link for link in machine.links if link == "lo")
    shown = ", ".join(machine.interfaces + loopback)
    nccl, gloo = env.get("NCCL_SOCKET_IFNAME", ""), env.get("GLOO_SOCKET_IFNAME", "")
    problems = {}  # variable -> error that it leads to, and what to do
    if len(nccl) >= _LEAST_LENGTH and not _leaves_one(nccl, machine.interfaces + loopback):
        problems["NCCL_SOCKET_IFNAME"] = "no socket interface found", "name one of those"
    lost = [name for name in gloo.split(",") if name and name not in machine.links]
    if len(gloo) >= _LEAST_LENGTH and lost:
        advice = "name one of those in full: gloo knows no prefixes, no ^ and no ="
        problems["GLOO_SOCKET_IFNAME"] = f"Unable to find address for: {lost[0]}", advice
    for variable, (said, advice) in problems.items():
        yield RuleMatch(
            "interface-unknown",
            variable=variable,
            value=env[variable],
            interfaces=shown,
            said=said,
            advice=advice,
        )
    value = env.get("NCCL_IB_HCA", "")
    adapters = tuple(dict.fromkeys(port.partition("/")[0] for port in machine.infiniband))
    if value and adapters and not _leaves_one(value, adapters):
        yield RuleMatch("adapter-unknown", value=value, adapters=", ".join(adapters))


def _leaves_one(value: str, names: tuple[str, ...]) -> bool:
    """Return true if NCCL's list leaves a name: prefixes, `=` exact ones, `^` all but these.

    Source: NCCL's documentation of NCCL_SOCKET_IFNAME and NCCL_IB_HCA; src/misc/utils.cc,
    parseStringList and matchIfList.
    """
    is_exclusion, rest = value.startswith("^"), value.removeprefix("^")
    is_exact, rest = rest.startswith("="), rest.removeprefix("=")
    words = [word.partition(":")[0] for word in rest.split(",")]
    words = [word for word in words if word]
    named = {
        name
        for name in names
        if not words or any(name == w if is_exact else name.startswith(w) for w in words)
    }
    return len(named) < len(names) if is_exclusion else bool(named)
