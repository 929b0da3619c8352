"""Lines about gangs: what they are, before; what became of them, afterwards. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pytest_megatron.files import JsonValue
from pytest_megatron.gang.spec import GangSpec, Reason
from pytest_megatron.host import Gpu

_BACKENDS = {"cuda": "NCCL", "cpu": "gloo"}
_REPLACED = {
    Reason.DONE: "a test that left ranks out of step",
    Reason.FAILED: "a failure after which ranks did not end",
    Reason.DIED: "a death",
    Reason.HUNG: "a hang",
    Reason.NOT_STARTED: "a start that failed",
    Reason.DESYNCHRONISED: "collectives that did not match",
}


def header_line(spec: GangSpec, gpus: Sequence[Gpu] | None, where: str) -> str:
    """Return what gangs of tests without a mark are.

    Args:
        spec: Such a gang.
        gpus: Of this host; None where nobody asked.
        where: The directory of their logs.
    """
    found = ""
    if gpus is not None and not gpus:
        found = ", no GPU found"
    elif gpus:
        found = f", {len(gpus)} x {gpus[0].name} found"
    device = f"{spec.device} ({_BACKENDS[spec.device]})"
    return f"megatron: gangs of {_ranks(spec.world_size)} on {device}{found}; logs in {where}"


def no_limit_line(source: str) -> str:
    """Return that a test which hangs is not ended.

    Args:
        source: What was set so.
    """
    return f"megatron: tests of gangs have no time limit ({source} is 0): a hang does not end"


def unused_nodes_line(num_nodes: int) -> str:
    """Return how a session is started on all nodes of an allocation of Slurm."""
    return (
        f"megatron: this allocation has {num_nodes} nodes, and the session uses this host only; "
        f"for all: srun --ntasks={num_nodes} --ntasks-per-node=1 pytest ..."
    )


def plan_lines(specs: Iterable[GangSpec | None]) -> list[str]:
    """Return which gangs would run how many tests.

    Args:
        specs: Of each test, None for one of the controller.
    """
    counts = Counter(specs)
    lines = []
    for spec in sorted((s for s in counts if s is not None), reverse=True):
        alone = ", a gang for each" if spec.is_isolated else ""
        gang = f"gangs of {_ranks(spec.world_size)} on {spec.device}{alone}"
        lines.append(f"{gang}: {_tests(counts[spec])}")
    if counts[None]:
        lines.append(f"in this process: {_tests(counts[None])}")
    return lines


def flaky_lines(records: Mapping[str, Mapping[str, JsonValue]]) -> list[str]:
    """Return a line for each test that passed after it was run again.

    Args:
        records: Node id -> what `run.json` says of the test.
    """
    lines = []
    for node_id, record in records.items():
        if record["verdict"] != "flaky":
            continue
        causes = [str(a["signature"]) for a in _attempts(record) if a["is_transient"]]
        lines.append(f"flaky   {node_id}  passed at rerun {len(causes)}, after {', '.join(causes)}")
    return lines


def replaced_line(records: Iterable[Mapping[str, JsonValue]]) -> str | None:
    """Return how many gangs had to be replaced and why, or None."""
    ends: Counter[str] = Counter()
    for record in records:
        if not record["is_isolated"]:
            ends.update(str(a["end"]) for a in _attempts(record) if not a["is_gang_kept"])
    if not ends:
        return None
    words = {reason.name.lower(): text for reason, text in _REPLACED.items()}
    parts = ", ".join(f"{count} after {words[end]}" for end, count in ends.most_common())
    number = ends.total()
    return f"{number} {'gang was' if number == 1 else 'gangs were'} replaced: {parts}"


def _attempts(record: Mapping[str, JsonValue]) -> list[dict[str, JsonValue]]:
    attempts = record["attempts"]
    assert isinstance(attempts, list)
    return [attempt for attempt in attempts if isinstance(attempt, dict)]


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _tests(number: int) -> str:
    return "1 test" if number == 1 else f"{number} tests"
