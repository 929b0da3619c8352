"""A decision about what CI runs, as the options `--labels` and `--ci-event` ask for one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_megatron.base.schema import Positive, Texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Considered:
    """A rule, whether it decided, and why or why not."""

    rule: str
    decides: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RowChoice:
    """The scopes that CI runs, how often, and how much of each row."""

    scope: Texts
    n_repeat: Positive
    is_lightweight: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision(RowChoice):
    """The choice of rows, repeats and environment for a CI run.

    Attributes:
        cadence: Words to select by; none is no filter.
        rule: Name of the rule that decided.
        reason: Why it did, in a sentence.
        considered: All rules in their order.
        label_effects: Effects of labels beside the rule, a line for each.
        unknown_labels: Those that no rule reads, each with the nearest that is.
        suites: Further test suites that labels ask for.
        env: Variables that labels set.
        is_selective: Whether unit tests run with `--testmon`.
        may_repeat_less: Whether a row that asks for fewer repeats gets them.
    """

    cadence: tuple[str, ...]
    environment: str
    image: str
    rule: str
    reason: str
    considered: tuple[Considered, ...]
    label_effects: tuple[str, ...] = ()
    unknown_labels: tuple[str, ...] = ()
    suites: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    is_selective: bool = False
    may_repeat_less: bool = True

    def num_repeats(self, of_row: int | None) -> int:
        """Return how often a row is trained: as the rule has it, fewer where the row has fewer."""
        if self.is_lightweight:
            return 1
        if self.may_repeat_less and of_row is not None:
            return min(self.n_repeat, of_row)
        return self.n_repeat
