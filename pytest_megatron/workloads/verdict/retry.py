"""Decision about another attempt after one that failed, its pause, and the budget of a whole run.

The default is no: another attempt needs a transient root cause, which `FailureCause` has from that
attempt's files alone. What disagrees with a golden never comes here: it is no cause of an attempt.

The budget is one file in the run directory, which all processes of the run share under a lock. It
stays there as the record of what was run again and why not more. Each process reads only what is
new in it: a run may have many thousands of items.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_megatron.base.files import JsonValue, json_objects
from pytest_megatron.base.text import nearest
from pytest_megatron.errors import RecipeError
from pytest_megatron.triage.signatures import SIGNATURES, RetryAdvice, Table, builtin_table
from pytest_megatron.workloads.recipe.model import Workload

if TYPE_CHECKING:  # sessions without workloads need none
    from pytest_megatron.workloads.verdict.attempt import Attempt, FailureCause


DEFAULT_MAX_ATTEMPTS = 3
DEFAULT_BACKOFF_S = 5.0
BACKOFF_LIMIT_S = 120.0
# Waiting helps nobody here: the next attempt has another port, and other GPUs where there are any.
_AT_ONCE = frozenset((RetryAdvice.NEW_PORT, RetryAdvice.OTHER_NODE, RetryAdvice.FREE))
# The code or its environment is the cause of these; no row may say otherwise.
_OWN_FAMILIES = frozenset(
    {"assert", "config", "cuda_oom", "device_assert", "golden_mismatch", "illegal_access"}
    | {"import", "mismatch", "nonfinite_loss"}
)
NEVER_TRANSIENT = frozenset(row.id for row in SIGNATURES if row.family in _OWN_FAMILIES)
# Of these, each has a cause of its own outside of the run, however alike their texts are.
_FROM_OUTSIDE = frozenset(
    {"engine_boot_fail", "engine_cancelled", "engine_node_fail", "engine_preempted"}
    | {"engine_requeued", "slurm_node_fail", "slurm_preempted"}
)
# A failed assertion may quote any line of the table; it is the code's all the same.
_ASSERTION = re.compile(r"(?:AssertionError|ImportError|ModuleNotFoundError)\b")
_PATH = re.compile(r"(?<![\w:/])/[^\s;,:']+")
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d{4,}")  # addresses, ports, process ids, times
_FINGERPRINT_LENGTH = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Rules for further attempts of a workload.

    Attributes:
        max_attempts: How often at most a repeat is started.
        backoff_s: Pause before the second attempt; doubled for each further one.
        transient: Ids of signatures that count as transient for this workload.
        never_transient: Ids of signatures that do not.
    """

    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    backoff_s: float = DEFAULT_BACKOFF_S
    transient: frozenset[str] = frozenset()
    never_transient: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Run it again after a pause."""

    pause_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRetrying:
    """Do not run it again.

    Attributes:
        reason: Why not, although the cause was transient; None where it was not, or there is none.
    """

    reason: str | None = None


def policy_of(
    workload: Workload, *, max_attempts: int | None, backoff_s: float, table: Table | None = None
) -> RetryPolicy:
    """Return how a row is run again.

    Args:
        workload: May have a limit and lists of its own.
        max_attempts: What the user asked for; it wins over the row.
        backoff_s: Seconds between attempts, see `RetryPolicy`.
        table: The signatures; None takes those of the package.

    Raises:
        RecipeError: The row names an id that no signature has, or one that is never transient.
    """
    known = {row.id for row in (table or builtin_table()).signatures}
    for key, ids in (
        ("transient", workload.transient),
        ("never_transient", workload.never_transient),
    ):
        for name in ids:
            if name not in known:
                raise RecipeError(
                    workload.where,
                    f"{key}: unknown signature {name!r}, expected some of "
                    f"{', '.join(sorted(known))}{nearest(name, known)}",
                )
    for name in workload.transient:
        if name in NEVER_TRANSIENT or name in workload.never_transient:
            why = "is never transient" if name in NEVER_TRANSIENT else "is in never_transient too"
            raise RecipeError(workload.where, f"transient: {name!r} {why}; remove it")
    return RetryPolicy(
        max_attempts=max_attempts or workload.max_attempts or DEFAULT_MAX_ATTEMPTS,
        backoff_s=backoff_s,
        transient=frozenset(workload.transient),
        never_transient=frozenset(workload.never_transient),
    )


def with_policy(cause: FailureCause | None, policy: RetryPolicy) -> FailureCause | None:
    """Return a cause as the policy of its workload sees it: transient or not."""
    if cause is None or cause.signature is None:
        return cause
    is_transient = cause.signature.is_transient
    is_assertion = any(_ASSERTION.match(line) for line in cause.evidence)
    if is_assertion or cause.signature.id in policy.never_transient:
        is_transient = False
    elif cause.signature.id in policy.transient:
        is_transient = True
    return replace(cause, signature=replace(cause.signature, is_transient=is_transient))


def fingerprint(cause: FailureCause) -> str:
    """Return what two attempts have in common that failed in the same way at the same place.

    The signature, the rank, the message and the iteration; no paths, ports or process ids.
    """
    text = _VARYING.sub("N", _PATH.sub("PATH", cause.text))
    known = "" if cause.signature is None else cause.signature.id
    digest = hashlib.sha256(f"{known}\0{cause.rank}\0{text}".encode())
    return digest.hexdigest()[:_FINGERPRINT_LENGTH]


def next_step(
    attempts: Sequence[Attempt], policy: RetryPolicy, draw: float
) -> Retry | StopRetrying:
    """Decide what follows the last of a repeat's attempts.

    Args:
        attempts: Attempts of this repeat alone, at least one.
        policy: The workload's.
        draw: From [0, 1): pauses differ by it, so that runs which failed together do not all
            come back together.
    """
    cause = attempts[-1].cause
    if cause is None or not cause.is_transient:
        return StopRetrying()
    earlier = {fingerprint(a.cause): a.number for a in attempts[:-1] if a.cause is not None}
    same = earlier.get(fingerprint(cause))
    assert cause.signature is not None
    if same is not None and cause.signature.id not in _FROM_OUTSIDE:
        return StopRetrying(
            reason=f"it failed as attempt {same} did, at the same place: not by chance"
        )
    if len(attempts) >= policy.max_attempts:
        return StopRetrying(reason=f"it was the last of {policy.max_attempts} attempts")
    return Retry(pause_s=_pause_s(cause, len(attempts), policy, draw))


def _pause_s(cause: FailureCause, number: int, policy: RetryPolicy, draw: float) -> float:
    """Return the pause after the attempt `number`, counted from 1."""
    assert cause.signature is not None
    if cause.signature.policy in _AT_ONCE:
        return 0.0
    grown = min(BACKOFF_LIMIT_S, policy.backoff_s * 2.0 ** (number - 1))
    return round(grown * (0.75 + 0.5 * draw), 1)


DEFAULT_MAX_RETRIES = 10
_FILE = "retries.jsonl"
_MOSTLY_BROKEN = "more than half of the run failed for causes of the machine or the network"
_LEAST_ENDED = 3  # before that, "more than half" says nothing about the machine


class RunLedger:
    """Further attempts that a run has used."""

    def __init__(
        self,
        *,
        run_dir: Path,
        max_retries: int = DEFAULT_MAX_RETRIES,
        is_attached: bool = False,
    ) -> None:
        """Read nothing yet.

        Args:
            run_dir: Is there before the first call.
            max_retries: How many incidents all items of the run together may be run again for. One
                that is a machine's is one for all items under which that machine failed so.
            is_attached: Whether all that a controller did which is gone is gone through again:
                attempts that it claimed are claimed already.
        """
        self._path = run_dir / _FILE
        self._max_retries = max_retries
        self._is_attached = is_attached
        self._counts = _RetryCounts()
        self._granted: Counter[str] | None = None

    def claim(self, node_id: str, signature: str, hosts: Sequence[str] = ()) -> str | None:
        """Take one further attempt for an item; return why it cannot have one, or None.

        Args:
            node_id: The item.
            signature: Id of what the last attempt failed of.
            hosts: The machines that failed under it; none where it was not theirs.
        """
        row: dict[str, JsonValue] = {"event": "retry", "node_id": node_id, "signature": signature}
        if hosts:
            row["hosts"] = list[JsonValue](sorted(hosts))
        try:
            with self._open() as counts:
                if self._is_granted(node_id):
                    return None
                if counts.is_infrastructure:
                    return _MOSTLY_BROKEN
                if counts.num_incidents_with(row) > self._max_retries:
                    return f"the run's {self._max_retries} further attempts are used up"
                counts.append(row)
        except OSError as error:  # the disk is full, most likely
            return f"{self._path}: {error.strerror}"
        return None

    def note_end(self, node_id: str, broken_by: str | None) -> str | None:
        """Count an item that ended; return a text about the whole run, once, or None.

        Args:
            node_id: The item.
            broken_by: Id of the transient cause that it failed with to the end, or None.
        """
        with contextlib.suppress(OSError), self._open() as counts:
            if not (self._is_attached and node_id in counts.ended):
                counts.append({"event": "end", "node_id": node_id, "broken_by": broken_by})
            if counts.is_infrastructure and not counts.was_said:
                counts.append({"event": "infrastructure"})
                return counts.text
        return None

    def infrastructure(self) -> str | None:
        """Return the text about the run, if it was printed already, else None."""
        if not self._path.exists():
            return None
        with contextlib.suppress(OSError), self._open() as counts:
            return counts.text if counts.was_said else None
        return None

    def _is_granted(self, node_id: str) -> bool:
        """Take back a claim of the controller that is gone."""
        assert self._granted is not None
        self._granted[node_id] -= 1
        return self._granted[node_id] >= 0

    @contextmanager
    def _open(self) -> Iterator[_RetryCounts]:
        """Have the file locked and all of it counted."""
        counts = self._counts
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        with os.fdopen(descriptor, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(counts.num_bytes)
            text = file.read()
            if text and not text.endswith(b"\n"):  # a writer was killed within a line
                text += b"\n"
                os.write(descriptor, b"\n")
            counts.take(text)
            if self._granted is None:
                self._granted = counts.retries_of.copy() if self._is_attached else Counter()
            counts.descriptor = descriptor
            yield counts


class _RetryCounts:
    """Sums of the rows of the file.

    Attributes:
        num_bytes: That were counted.
        ended: Items that ended.
        retries_of: Item to the number of its further attempts.
        descriptor: Descriptor of the file while it is locked.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._num_alone = 0
        self._of_hosts: set[tuple[str, str]] = set()
        self.num_ended = 0
        self.was_said = False
        self.ended: set[str] = set()
        self.retries_of: Counter[str] = Counter()
        self.descriptor = -1
        self._broken: Counter[str] = Counter()

    def num_incidents_with(self, row: dict[str, JsonValue]) -> int:
        """Return how many incidents there are with one more further attempt."""
        alone, of_hosts = _incidents(row)
        return self._num_alone + alone + len(self._of_hosts | of_hosts)

    @property
    def is_infrastructure(self) -> bool:
        """True if the machine or the network is the matter of the run."""
        return self.num_ended >= _LEAST_ENDED and 2 * self._broken.total() > self.num_ended

    @property
    def text(self) -> str:
        """Text for the user in that case."""
        known = ", ".join(sorted(self._broken))
        return (
            f"infrastructure: {self._broken.total()} of {self.num_ended} workloads failed for "
            f"causes of the machine or the network ({known}); nothing more is run again"
        )

    def append(self, row: dict[str, JsonValue]) -> None:
        """Add a row to the file and to what was counted."""
        line = json.dumps(row).encode() + b"\n"
        os.write(self.descriptor, line)
        self.take(line)

    def take(self, lines: bytes) -> None:
        """Count rows; those that were not finished are left out."""
        self.num_bytes += len(lines)
        for row in json_objects(lines):
            self._count(row)

    def _count(self, row: dict[str, JsonValue]) -> None:
        node_id = str(row.get("node_id"))
        match row.get("event"):
            case "retry":
                alone, of_hosts = _incidents(row)
                self._num_alone += alone
                self._of_hosts |= of_hosts
                self.retries_of[node_id] += 1
            case "end":
                self.num_ended += 1
                self.ended.add(node_id)
                if row["broken_by"] is not None:
                    self._broken[str(row["broken_by"])] += 1
            case "infrastructure":
                self.was_said = True
            case _:
                pass


def _incidents(row: dict[str, JsonValue]) -> tuple[int, set[tuple[str, str]]]:
    """Return what a further attempt counts: one, or machines and what they failed of."""
    hosts = row.get("hosts")
    if not isinstance(hosts, list) or not hosts:
        return 1, set()
    return 0, {(str(row.get("signature")), str(host)) for host in hosts}
