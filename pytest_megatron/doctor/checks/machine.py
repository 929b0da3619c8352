"""The machine and its variables against what trainings need. Pure."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator, Mapping, Sequence

from packaging.version import Version

from pytest_megatron.doctor.facts import (
    UNKNOWN,
    Clock,
    Disk,
    EnvironmentFacts,
    MachineFacts,
    Slurm,
    version_of,
)
from pytest_megatron.workloads.training.checks.rules import RuleMatch

_LEAST_SHM_BYTES = 1 << 30
_LEAST_LIMIT = 4096
_LEAST_LIMITS = {"Max open files": "limit-nofile", "Max processes": "limit-nproc"}
_FULL_BYTES, _LOW_BYTES = 10**9, 10**10
_LEAST_PORTS = 4096
_SLOW_LOOKUP_S = 1.0
_RELEASED_S = dt.datetime(2026, 1, 1, tzinfo=dt.UTC).timestamp()  # not before that
_MOST_SKEW_S = 30.0  # between this host and the one that keeps its files
_MOST_AHEAD_S = 600.0
_ZONE_STEP_S, _FARTHEST_ZONE_S = 900.0, 14 * 3600.0 + _MOST_SKEW_S
_NEEDED_CAPABILITIES = {"compute", "utility"}
_SLURM_NEEDED = ("sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")


def check_machine(facts: EnvironmentFacts, env: Mapping[str, str]) -> Iterator[RuleMatch]:
    """Yield what is wrong with the machine."""
    machine = facts.machine
    yield from _limits(machine)
    has_triton = any("triton" in name for name in facts.packages)  # by several names
    for disk in machine.disks:
        yield from _disk(disk, has_triton=has_triton)
    if machine.lost_temporary is not None:
        variable, directory = machine.lost_temporary
        yield RuleMatch("temporary-lost", variable=variable, value=directory)
    if machine.clock is not None:
        yield from _clock(machine.clock)
    yield from _locale(facts, env)
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
    if machine.ephemeral_ports is not None:
        first, last = machine.ephemeral_ports
        if last - first + 1 < _LEAST_PORTS:
            yield RuleMatch("few-ports", first=first, last=last, count=last - first + 1)


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


def _disk(disk: Disk, *, has_triton: bool) -> Iterator[RuleMatch]:
    """Look at whether a directory can be written to, has room, and may hold code."""
    if disk.problem is not None:
        advice = "mount it writable, or choose another place"
        if disk.variable:
            advice = f"set {disk.variable} to a directory that can be written to"
        yield RuleMatch(
            "not-writable", path=disk.path, use=disk.use, problem=disk.problem, advice=advice
        )
        return
    if disk.is_noexec and (has_triton or disk.variable != "TRITON_CACHE_DIR"):
        yield RuleMatch("mounted-noexec", path=disk.path, use=disk.use, variable=disk.variable)
    if disk.free_bytes is not None and disk.free_bytes < _LOW_BYTES:
        rule = "disk-full" if disk.free_bytes < _FULL_BYTES else "disk-low"
        yield RuleMatch(rule, path=disk.path, use=disk.use, free=shown_bytes(disk.free_bytes))


def _clock(clock: Clock) -> Iterator[RuleMatch]:
    """Yield the first reason to think that the clock is off."""
    today = dt.datetime.fromtimestamp(clock.now_s, tz=dt.UTC).strftime("%Y-%m-%d %H:%M")
    problem = None
    if clock.now_s < _RELEASED_S:
        problem = "this version of pytest-megatron is newer"
    elif clock.fresh_s is not None and abs(clock.fresh_s) > _MOST_SKEW_S:
        side = "ahead of" if clock.fresh_s > 0 else "behind"
        problem = f"a file that is made now has a time {abs(clock.fresh_s):.0f} s {side} it"
    elif clock.hardware_s is not None and not _is_zone(clock.hardware_s):
        side = "ahead of" if clock.hardware_s > 0 else "behind"
        problem = f"the hardware's clock is {abs(clock.hardware_s) / 60:.0f} min {side} it"
    else:
        for path, ahead in clock.ahead_s.items():
            if ahead > _MOST_AHEAD_S:
                problem = f"{path} was last changed {ahead / 60:.0f} min ahead of it"
                break
    if problem is not None:
        yield RuleMatch("clock-off", now=today, problem=problem)


def _is_zone(difference_s: float) -> bool:
    """Return true if both clocks may be right: the hardware's may be in local time, and drifts."""
    if abs(difference_s) <= _MOST_AHEAD_S:
        return True
    off_s = abs(difference_s - round(difference_s / _ZONE_STEP_S) * _ZONE_STEP_S)
    return abs(difference_s) <= _FARTHEST_ZONE_S and off_s <= _MOST_SKEW_S


def shown_bytes(number: int) -> str:
    """Return `64.0 MiB`, as sizes of mounts and limits are thought of."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:  # noqa: PLR2004 - of the next unit
            return f"{number:g} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024  # type: ignore[assignment]
    return f"{number:.1f} GiB"


def _locale(facts: EnvironmentFacts, env: Mapping[str, str]) -> Iterator[RuleMatch]:
    """Look at whether Python prints UTF-8."""
    encoding = facts.python.encoding
    if encoding.lower().replace("-", "") not in ("utf8", "utf8sig"):
        yield RuleMatch(
            "locale",
            encoding=encoding,
            lc_all=env.get("LC_ALL", ""),
            lang=env.get("LANG", ""),
            io=env.get("PYTHONIOENCODING", ""),
        )


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
_LARGEST_PORT = 65535
# Source: NCCL src/init.cc, ncclFuncStr, ncclAlgoStr and ncclProtoStr, v2.5 to v2.30.
_FUNCTIONS = {"allgather", "allreduce", "broadcast", "reduce", "reducescatter"}
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "NCCL_ALGO": ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT"),
    "NCCL_PROTO": ("LL", "LL128", "Simple"),
}
_OLD_ALGORITHM, _OLD_UNTIL = "collnet", Version("2.14")
_PER_FUNCTION_SINCE = Version("2.24")
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
    port = env.get("MASTER_PORT")
    if port and not (port.isascii() and port.isdigit() and 0 < int(port) <= _LARGEST_PORT):
        yield RuleMatch("port-not-a-number", value=repr(port))
    threads = env.get("OMP_NUM_THREADS")
    if threads is not None and not _is_thread_count(threads):
        yield RuleMatch("omp-threads", value=repr(threads))
    for path, why in facts.python.not_preloaded.items():
        yield RuleMatch("preload-ignored", path=path, problem=why)
    if facts.python.optimize:
        yield RuleMatch("assertions-off", level=facts.python.optimize)
    if facts.toolkit.lost_home is not None:
        variable, value = facts.toolkit.lost_home
        yield RuleMatch("cuda-home", variable=variable, value=value)
    yield from _communication(facts, env)


def _is_thread_count(text: str) -> bool:
    """Return true if OpenMP takes a value: positive numbers, one for each level.

    Source: OpenMP API specification, OMP_NUM_THREADS.
    """
    return all(re.fullmatch(r"\s*\+?0*[1-9]\d*\s*", word, re.ASCII) for word in text.split(","))


def _communication(facts: EnvironmentFacts, env: Mapping[str, str]) -> Iterator[RuleMatch]:
    """Look at variables of NCCL and gloo, and at what slows them down."""
    yield from _interfaces(facts.machine, env)
    for variable, choices in _CHOICES.items():
        problem = _problem_of_list(variable, env.get(variable, ""), choices, facts)
        if problem is not None:
            names = ", ".join(choices)
            value = repr(env[variable])
            yield RuleMatch(
                "nccl-choice", variable=variable, value=value, problem=problem, names=names
            )
    gpus = facts.devices.gpus
    for variable, (values, effect) in _SLOW.items():
        if env.get(variable) not in values:
            continue
        if "P2P" in variable and gpus and all(_CONSUMER_GPU.search(gpu.name) for gpu in gpus):
            continue  # these have no peer-to-peer copies, and some drivers need to be told so
        yield RuleMatch("slow-variable", variable=variable, value=env[variable], effect=effect)


def _problem_of_list(
    variable: str, value: str, choices: Sequence[str], facts: EnvironmentFacts
) -> str | None:
    """Return the first word of a list that NCCL does not know, None where it knows all.

    Source: NCCL src/graph/tuning.cc, parseList: `ring,nvls;allreduce:^tree`, in any case.
    """
    nccl = version_of(facts.torch.nccl if facts.torch is not None else None)
    known = {name.lower() for name in choices}
    if variable == "NCCL_ALGO" and (nccl is None or nccl < _OLD_UNTIL):
        known.add(_OLD_ALGORITHM)
    entries = [entry for entry in value.split(";") if entry]
    for index, entry in enumerate(entries):
        function, colon, names = entry.rpartition(":")
        if colon and nccl is not None and nccl < _PER_FUNCTION_SINCE:
            return f"NCCL {nccl} has no lists for single functions, 2.24 is the first that has"
        if colon and function.lower() not in _FUNCTIONS:
            return f"{function!r} is no function"
        if not colon and index:
            return f"{entry!r} lacks a function, which all but the first need"
        for name in names.removeprefix("^").split(","):
            if name and name.lower() not in known:
                return f"{name!r} is none of its names"
    return None


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
