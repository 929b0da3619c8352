"""Whether CUDA_DEVICE_MAX_CONNECTIONS is what hardware and parallelism need. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pytest_megatron.gpu.host import CPU_PLATFORM
from pytest_megatron.workload.checks.rules import RuleMatch
from pytest_megatron.workload.checks.start import CheckedStart
from pytest_megatron.workload.plan.cuda_connections import (
    CP,
    EXPERT_OVERLAP,
    FSDP,
    MOST_CONNECTIONS,
    TP,
    VARIABLE,
    Connections,
    connections_of,
)


def check_connections(start: CheckedStart, env: Mapping[str, str]) -> Iterator[RuleMatch]:
    """Yield a value that the training cannot have; one that nobody set is set by the plan.

    Args:
        start: What is started.
        env: What the user has set; the case wins.
    """
    if start.platform == CPU_PLATFORM or VARIABLE in start.scripts:
        return
    value = start.env.get(VARIABLE, env.get(VARIABLE))
    if value is None:
        return
    where = start.at_variable(VARIABLE)
    if not value.isdecimal() or not 1 <= int(value) <= MOST_CONNECTIONS:
        yield RuleMatch("connections-number", where, value=repr(value))
        return
    given, needs = start.arguments, connections_of(start.arguments, start.platform)
    is_one = int(value) == 1
    if needs is Connections.ONE and value != "1":
        names = {"TP": given.size(TP), "CP": given.size(CP)}
        split = " and ".join(f"{name} {size}" for name, size in names.items() if (size or 1) > 1)
        yield RuleMatch("connections-one", where, value=value, split=split, platform=start.platform)
    elif needs is Connections.NOT_ONE and is_one:
        option = next(name for name in FSDP if given.is_on(name))
        yield RuleMatch("connections-fsdp", where, option=option)
    elif needs is Connections.MANY and is_one:
        yield RuleMatch(
            "connections-overlap", where, option=EXPERT_OVERLAP, platform=start.platform
        )
