"""What a test asks of its gang, and what became of one execution: plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from pytest_megatron.base.files import JsonValue
from pytest_megatron.gang.ipc.messages import Done, Run


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class GangSpec:
    """Which gang a test needs; tests of equal specs share one.

    Attributes:
        world_size: Ranks over all nodes.
        device: `cuda` or `cpu`.
        is_isolated: Whether the gang runs this one test only.
    """

    world_size: int
    device: str
    is_isolated: bool = False


class Reason(Enum):
    """Why an execution ended."""

    DONE = "every rank ended it"
    FAILED = "a rank failed, and others did not end in time"
    DIED = "a rank died"
    HUNG = "the time limit passed"
    NOT_STARTED = "the gang did not start"
    NOT_COLLECTED = "a rank has no such test"
    DESYNCHRONISED = "ranks took part in different collectives"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """How one rank ended one execution.

    Attributes:
        done: What it reported, or None if it did not come to that.
        early: Reports of phases that did not pass, told before the end of the test.
        exit_code: Of its process if that died by itself, as `Popen.returncode`.
        at: When it first failed, skipped or died, in seconds of the controller's monotonic clock;
            None if it did neither.
        failed_phase: The phase that it reported as failed or skipped, or "".
        outcome: `passed`, `failed` or `skipped` as far as it was reported, or "".
        phase: The phase that it died in or was stopped in, or "".
        problem: A traceback of pytest itself, or why the rank has no such test, or "".
        stack: Text of faulthandler where it had to be stopped, or "".
        flight: JSON of NCCL's flight recorder, or "".
        log_dir: Where its logs are.
    """

    rank: int
    done: Done | None = None
    early: tuple[JsonValue, ...] = ()
    exit_code: int | None = None
    at: float | None = None
    failed_phase: str = ""
    outcome: str = ""
    phase: str = ""
    problem: str = ""
    stack: str = ""
    flight: str = ""
    log_dir: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How an execution of a test ended on its gang.

    Attributes:
        ranks: By rank.
        limit_s: The time limit or the grace that passed; 0 where none did.
        duration_s: From its start on the gang.
        is_kept: Whether the gang may run the next test.
    """

    run: int
    reason: Reason
    ranks: tuple[RankResult, ...]
    limit_s: float
    duration_s: float
    is_kept: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRuns:
    """Send tests to every rank, in order."""

    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendClose:
    """Tell every rank to tear down and end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskForStacks:
    """Ask these ranks where they are."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KillGang:
    """Kill every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Tell whoever waits how the test ended."""

    end: RunEnd


Action: TypeAlias = SendRuns | SendClose | AskForStacks | KillGang | Finish
