"""A golden that may be written, with the record of its measurement. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath

from pytest_megatron.runs.record import RecordedAttempt
from pytest_megatron.workloads.golden.model import Golden, MetricMap


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One attempt.

    Attributes:
        record: What the run has of it.
        repeated_steps: Metric to a step that its files hold more than once.
    """

    record: RecordedAttempt
    repeated_steps: tuple[str, ...] = ()

    @property
    def repeat(self) -> int:
        """Number of the repeat; 0 where it is not known."""
        return self.record.repeat or 0

    @property
    def number(self) -> int:
        """Number of the attempt in its repeat; 0 where it is not known."""
        return self.record.attempt or 0

    @property
    def exit_codes(self) -> tuple[int, ...]:
        """Exit codes of the launcher that count, one for each phase; negative for a signal."""
        return self.record.exit_codes if self.record.note is None else ()

    @property
    def faults(self) -> tuple[str, ...]:
        """Failures of the hardware meanwhile."""
        return () if self.record.health is None else self.record.health.faults


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One workload of a run that measured values for a golden.

    Attributes:
        target: Where the golden belongs, relative to the project.
        directory: Directory of the workload, in the run or in an unpacked artifact of it.
        verdict: The run's word: `passed`, `failed`, `flaky` or `broken`.
        problem: Why it did not pass, as the run printed it.
        golden: Values and provenance, None where the run left none.
        repeats: The values of each clean repeat.
        first_step: The iteration that the training begins with; None where that is not known.
        last_step: The iteration that the plan trains to; None where it names none.
        has_cross_entropy: Whether a loss of it is one: not negative, and falling with training.
        num_ranks: Ranks in the plan.
        platform: Platform of the row.
        spread: Differences between repeats that the policy does not allow, a line each.
        disagreements: Comparisons that failed, but for the golden's: a resumed training, gradients.
        is_expected_to_fail: `TEST_EVALUATION: xpass`, and it did.
        is_quarantined: True if a failure of it does not count.
        damage: Missing or wrong parts of the run's files.
    """

    node_id: str
    target: PurePosixPath
    directory: Path
    verdict: str
    problem: str | None = None
    golden: Golden | None = None
    attempts: tuple[Ran, ...] = ()
    repeats: tuple[MetricMap, ...] = ()
    first_step: int | None = None
    last_step: int | None = None
    has_cross_entropy: bool = True
    num_ranks: int | None = None
    platform: str | None = None
    spread: tuple[str, ...] = ()
    disagreements: tuple[str, ...] = ()
    is_expected_to_fail: bool = False
    is_quarantined: bool = False
    is_lightweight: bool = False
    damage: tuple[str, ...] = ()


class GateRule(Enum):
    """Reasons to refuse a golden; the value is the name that is printed."""

    # Never.
    DAMAGED = "damaged-run"
    NOT_TRAINED = "not-trained"
    SIGNAL = "signal"
    WATCHDOG = "watchdog"
    EXIT_CODE = "exit-code"
    RETRY = "retry"
    HARDWARE = "hardware"
    EXPECTED_FAILURE = "expected-failure"
    QUARANTINE = "quarantine"
    LIGHTWEIGHT = "lightweight"
    DISAGREES = "disagrees"
    REPEATS = "repeats"
    SPREAD = "spread"
    NOT_FINITE = "not-finite"
    UNEQUAL = "unequal-steps"
    DUPLICATE = "duplicate-steps"
    TRUNCATED = "truncated"
    FROZEN = "frozen"
    FEWER_METRICS = "fewer-metrics"
    OTHER_KIND = "other-kind"
    NOT_COMMITTED = "not-committed"
    DIRTY = "dirty"
    PLATFORM = "platform"
    GPU = "gpu"
    WORLD_SIZE = "world-size"
    # Only with a reason; `_SOFT` holds all from here on.
    LATE_START = "late-start"
    MISSING = "missing-steps"
    CONSTANT = "constant"
    NOT_FALLING = "not-falling"
    IMPLAUSIBLE = "implausible"
    ROUNDED = "rounded"
    CONFIG = "config-changed"
    FEWER_STEPS = "fewer-steps"
    STEP_1 = "step-1"
    LOSS = "loss-worse"
    BETTER = "loss-better"
    OUTSIDE = "outside-band"
    MEMORY = "memory"
    TIME = "time"
    MASS = "one-direction"

    @property
    def is_soft(self) -> bool:
        """True if a typed reason is enough."""
        return self in _SOFT


_RULES = list(GateRule)
_SOFT = frozenset(_RULES[_RULES.index(GateRule.LATE_START) :])


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason to refuse one golden, or a set of them.

    Attributes:
        text: The value found, the expected one and the remedy.
    """

    rule: GateRule
    text: str

    @property
    def line(self) -> str:
        """The rule by name, then the text."""
        return f"[{self.rule.value}] {self.text}"


def hard(refusals: Sequence[Refusal]) -> tuple[Refusal, ...]:
    """Return those that no reason outweighs."""
    return tuple(refusal for refusal in refusals if not refusal.rule.is_soft)
