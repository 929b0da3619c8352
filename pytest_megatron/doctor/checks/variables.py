"""Variables of the environment that lead trainings astray. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from packaging.version import Version

from pytest_megatron.doctor.facts import EnvironmentFacts, MachineFacts, version_of
from pytest_megatron.workload.checks.rules import RuleMatch

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
