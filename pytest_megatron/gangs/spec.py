"""Requirements of a test for its gang, and results of one execution: frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from pytest_megatron.base.files import JsonValue
from pytest_megatron.gangs.ipc.messages import Done, Run
from pytest_megatron.gangs.phase_report import JsonObject, Outcome, PhaseReport
from pytest_megatron.runs.headline import make_headline


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class GangSpec:
    """Gang that a test needs; tests of equal specs share one.

    Attributes:
        world_size: Ranks over all nodes.
        device: `cuda` or `cpu`.
        is_isolated: Whether the gang runs this one test only.
    """

    world_size: int
    device: str
    is_isolated: bool = False


class Reason(Enum):
    """Reason why an execution ended."""

    DONE = "every rank ended it"
    FAILED = "a rank failed, and others died or did not end in time"
    DIED = "a rank died"
    HUNG = "the time limit passed"
    NOT_STARTED = "the gang did not start"
    NOT_COLLECTED = "a rank has no such test"
    DESYNCHRONISED = "ranks took part in different collectives"


@dataclass(slots=True, kw_only=True)
class RankResult:
    """Result of one execution on one rank.

    Attributes:
        done: The rank's message at the end of the test, or None.
        reports: Of each phase and subtest; without `done` only those that did not pass.
        exit_code: `Popen.returncode` of its process if that died by itself.
        at: When it first failed, skipped or died, in seconds of the controller's monotonic clock;
            None if it did neither.
        failed_phase: The phase that it reported as failed or skipped, or "".
        outcome: `passed`, `failed` or `skipped` if it was reported, else "".
        phase: The phase in which it died or was stopped, or "".
        problem: A traceback of pytest itself, or the reason why the rank lacks the test, or "".
        stack: Text of faulthandler if it crashed or had to be stopped, or "".
        flight: JSON of NCCL's flight recorder, or "".
        log_dir: Directory of its logs.
        log_start: Size of its stderr.log when the test began, if that may be rerun.
    """

    rank: int
    done: Done | None = None
    reports: tuple[PhaseReport, ...] = ()
    exit_code: int | None = None
    at: float | None = None
    failed_phase: str = ""
    outcome: str = ""
    phase: str = ""
    problem: str = ""
    stack: str = ""
    flight: str = ""
    log_dir: str = ""
    log_start: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """One report for pytest.

    Attributes:
        when: The phase.
        base: The report of the rank in the headline, as pytest serialised it; None where no rank
            has one.
        message: What failed, if it did, and on which rank.
        where: Where that was, as far as it is known.
        blocks: Title and text of sections of the report beside `base`.
        sections: Captured output, by name.
        start: Earliest of all ranks, seconds since the epoch.
        stop: Latest of all ranks.
        ranks: Outcome of each rank, for tools.
    """

    when: str
    outcome: Outcome
    base: JsonObject | None = None
    message: str = ""
    where: str = ""
    blocks: tuple[tuple[str, str], ...] = ()
    sections: tuple[tuple[str, str], ...] = ()
    properties: tuple[tuple[str, JsonValue], ...] = ()
    start: float = 0.0
    stop: float = 0.0
    ranks: Mapping[str, str] = field(default_factory=dict)

    @property
    def headline(self) -> str:
        """The line that every place shows of a failure."""
        return make_headline("", self.message, where=self.where)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """Result of an execution of a test on its gang.

    Attributes:
        ranks: Results by rank.
        limit_s: The time limit or grace period that passed; 0 without one.
        duration_s: Time since its start on the gang.
        is_kept: Whether the gang may run the next test.
        merged: One report of all ranks for each phase and subtest.
    """

    run: int
    reason: Reason
    ranks: tuple[RankResult, ...]
    limit_s: float
    duration_s: float
    is_kept: bool
    merged: tuple[Merged, ...] = ()

    @property
    def may_end_session(self) -> bool:
        """True if the test has to be reported before another one starts."""
        is_stopped = any(rank.done is not None and rank.done.stop for rank in self.ranks)
        return is_stopped or any(m.outcome == "failed" for m in self.merged)

    def phase(self, when: str) -> Merged:
        """Return the report of a phase; subtests come before their call."""
        return [m for m in self.merged if m.when == when][-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRuns:
    """Send tests to every rank, in order."""

    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendClose:
    """Send `Close` to every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskForStacks:
    """Request the stacks of these ranks."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KillGang:
    """Kill every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Hand the result of the test to the controller."""

    end: RunEnd


Action: TypeAlias = SendRuns | SendClose | AskForStacks | KillGang | Finish
