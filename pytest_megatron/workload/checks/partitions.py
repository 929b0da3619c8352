"""Limits of a cluster's partitions, parsed from the output of Slurm's client. Pure.

Source: scontrol(1), show partition --oneliner; sinfo(1).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_megatron.base.text import nearest
from pytest_megatron.workload.checks.rules import RuleMatch

SINFO_FORMAT = "%R|%D|%G|%n"
_FIELD = re.compile(r"(\w+)=(\S*)")
_GPUS = re.compile(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)")
_NO_LIMIT = ("UNLIMITED", "NONE", "INFINITE", "(null)", "N/A", "")
_MINUTES_OF_DAY = 24 * 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """One partition; a limit that there is not is None.

    Attributes:
        gpus: For each kind of node, how many nodes there are with how many GPUs.
        accounts: That may use it; None for all, `queues` (QOS) alike.
        denied_accounts: That may not; `denied_queues` alike.
        state: `UP`, or why it takes or starts nothing.
    """

    name: str
    is_default: bool
    max_minutes: int | None
    min_nodes: int
    max_nodes: int | None
    num_nodes: int
    gpus: tuple[tuple[int, int], ...]
    accounts: frozenset[str] | None
    queues: frozenset[str] | None
    denied_accounts: frozenset[str]
    denied_queues: frozenset[str]
    state: str

    def nodes_with(self, gpus: int) -> int:
        """Return how many nodes have at least so many GPUs."""
        if not gpus:
            return self.num_nodes
        return sum(number for number, each in self.gpus if each >= gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster.

    Attributes:
        hosts: Names of the machines that its nodes are.
    """

    partitions: tuple[Partition, ...]
    hosts: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Request of a job.

    Attributes:
        partitions: By name, any of them; none takes the default.
        minutes: Its time limit.
        gpus: On each node.
        where: The settings that request it.
    """

    partitions: tuple[str, ...]
    minutes: int
    nodes: int
    gpus: int
    account: str | None
    queue: str | None
    where: str


def parse_cluster(partitions: str, nodes: str) -> Cluster:
    """Return a cluster.

    Args:
        partitions: What `scontrol show partition --oneliner` prints.
        nodes: What `sinfo --noheader --format SINFO_FORMAT` prints.
    """
    gpus: dict[str, list[tuple[int, int]]] = {}
    hosts: set[str] = set()
    for line in nodes.splitlines():
        name, _, rest = line.partition("|")
        number, _, rest = rest.partition("|")
        resources, _, host = rest.rpartition("|")
        if number.isdecimal():
            each = sum(int(match[1]) for match in _GPUS.finditer(resources))
            gpus.setdefault(name, []).append((int(number), each))
            hosts.add(host.strip())
    found = []
    for line in partitions.splitlines():
        fields = dict(_FIELD.findall(line))
        if "PartitionName" in fields:
            found.append(_partition(fields, tuple(gpus.get(fields["PartitionName"], ()))))
    return Cluster(partitions=tuple(found), hosts=frozenset(hosts))


def check_partition(cluster: Cluster, wanted: Wanted) -> Iterator[RuleMatch]:
    """Yield why none of the partitions that a job may go to takes it."""
    known = {partition.name: partition for partition in cluster.partitions}
    if not known:
        return
    for name in wanted.partitions:
        if name not in known:
            there = ", ".join(sorted(known)) + nearest(name, sorted(known))
            yield RuleMatch("partition-unknown", wanted.where, name=repr(name), there=there)
    chosen = [known[name] for name in wanted.partitions if name in known]
    if not wanted.partitions:
        chosen = [partition for partition in cluster.partitions if partition.is_default]
    refusals = [[*_refusals(partition, wanted)] for partition in chosen]
    if refusals and all(refusals):
        yield from refusals[0]


def _refusals(partition: Partition, wanted: Wanted) -> Iterator[RuleMatch]:
    name, where = partition.name, wanted.where
    if partition.state != "UP":
        yield RuleMatch("partition-down", where, partition=name, state=partition.state)
    if partition.max_minutes is not None and wanted.minutes > partition.max_minutes:
        asked, most = time_text(wanted.minutes), time_text(partition.max_minutes)
        yield RuleMatch("partition-time", where, partition=name, asked=asked, most=most)
    if partition.max_nodes is not None and wanted.nodes > partition.max_nodes:
        limit = f"at most {partition.max_nodes}"
        yield RuleMatch("partition-nodes", where, partition=name, nodes=wanted.nodes, limit=limit)
    elif wanted.nodes < partition.min_nodes:
        limit = f"at least {partition.min_nodes}"
        yield RuleMatch("partition-nodes", where, partition=name, nodes=wanted.nodes, limit=limit)
    elif wanted.nodes > partition.num_nodes:
        limit = f"has {partition.num_nodes}"
        yield RuleMatch("partition-nodes", where, partition=name, nodes=wanted.nodes, limit=limit)
    elif partition.gpus and wanted.nodes > partition.nodes_with(wanted.gpus):
        have = ", ".join(f"{number} with {each}" for number, each in _merged(partition.gpus))
        values = {"nodes": wanted.nodes, "gpus": wanted.gpus, "have": have}
        yield RuleMatch("partition-gpus", where, partition=name, **values)
    yield from _members(partition, wanted)


def _members(partition: Partition, wanted: Wanted) -> Iterator[RuleMatch]:
    """Yield accounts and QOS that may not use a partition."""
    for what, value, allowed, denied in (
        ("account", wanted.account, partition.accounts, partition.denied_accounts),
        ("QOS", wanted.queue, partition.queues, partition.denied_queues),
    ):
        if value is None or (value not in denied and (allowed is None or value in allowed)):
            continue
        rest = "all but " + ", ".join(sorted(denied)) if allowed is None else None
        takes = rest or ", ".join(sorted(allowed or ()))
        values = {"what": what, "value": value, "takes": takes}
        yield RuleMatch("partition-member", wanted.where, partition=partition.name, **values)


def time_text(minutes: int) -> str:
    """Return minutes as Slurm writes them: `1-02:30:00`."""
    days, rest = divmod(minutes, _MINUTES_OF_DAY)
    hours, minutes = divmod(rest, 60)
    return f"{f'{days}-' if days else ''}{hours:02}:{minutes:02}:00"


def _merged(gpus: Iterable[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """Return nodes by their number of GPUs, the fullest first."""
    found: dict[int, int] = {}
    for number, each in gpus:
        found[each] = found.get(each, 0) + number
    return [(found[each], each) for each in sorted(found, reverse=True)]


def _partition(fields: Mapping[str, str], gpus: tuple[tuple[int, int], ...]) -> Partition:
    return Partition(
        name=fields["PartitionName"],
        is_default=fields.get("Default") == "YES",
        max_minutes=_minutes(fields.get("MaxTime", "")),
        min_nodes=_number(fields.get("MinNodes", "")) or 0,
        max_nodes=_number(fields.get("MaxNodes", "")),
        num_nodes=_number(fields.get("TotalNodes", "")) or 0,
        gpus=gpus,
        accounts=_names(fields.get("AllowAccounts", "ALL")),
        queues=_names(fields.get("AllowQos", "ALL")),
        denied_accounts=_names(fields.get("DenyAccounts", "")) or frozenset(),
        denied_queues=_names(fields.get("DenyQos", "")) or frozenset(),
        state=fields.get("State", "UP"),
    )


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _names(text: str) -> frozenset[str] | None:
    return None if text in ("ALL", *_NO_LIMIT) else frozenset(text.split(","))


def _minutes(text: str) -> int | None:
    """Return `[DAYS-]HH:MM:SS` in minutes, rounded down; None for no limit."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes = (int(number or 0) for number in match.groups()[:3])
    return days * _MINUTES_OF_DAY + hours * 60 + minutes
