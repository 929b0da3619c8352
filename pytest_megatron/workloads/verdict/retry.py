"""Decision about another attempt after one that failed, and its pause.

The default is no: another attempt needs a transient root cause, which `FailureCause` has from that
attempt's files alone. What disagrees with a golden never comes here: it is no cause of an attempt.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_megatron.base.text import nearest
from pytest_megatron.errors import RecipeError
from pytest_megatron.triage.signatures import RetryAdvice, Table, builtin_table
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
        is_own = name in _own_signatures()
        if is_own or name in workload.never_transient:
            why = "is never transient" if is_own else "is in never_transient too"
            raise RecipeError(workload.where, f"transient: {name!r} {why}; remove it")
    return RetryPolicy(
        max_attempts=max_attempts or workload.max_attempts or DEFAULT_MAX_ATTEMPTS,
        backoff_s=backoff_s,
        transient=frozenset(workload.transient),
        never_transient=frozenset(workload.never_transient),
    )


@functools.cache
def _own_signatures() -> frozenset[str]:
    return frozenset(row.id for row in builtin_table().signatures if row.family in _OWN_FAMILIES)


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
