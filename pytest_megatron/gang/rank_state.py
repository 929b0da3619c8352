"""What the controller knows of one rank of a gang: pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from pytest_megatron.files import JsonValue
from pytest_megatron.gang.messages import Died, Done
from pytest_megatron.gang.spec import RankEnd


@dataclass(slots=True, kw_only=True)
class RankState:
    """What is known of one rank; some of it is of the running test alone.

    Attributes:
        is_lost: Whether it says no more, and nobody has said why.
        death: Its death in a test that was sent ahead and is not the running one yet.
    """

    rank: int
    log_dir: str
    is_ready: bool = False
    is_lost: bool = False
    death: Died | None = None
    exit_code: int | None = None
    is_closed: bool = False
    problem: str = ""
    missing: dict[str, str] = field(default_factory=dict)
    # Of the current run:
    done: Done | None = None
    early: list[JsonValue] = field(default_factory=list)
    at: float | None = None
    failed_phase: str = ""
    outcome: str = ""
    phase: str = ""
    stack: str = ""
    flight: str = ""

    def reset(self) -> None:
        """Forget the test that ended."""
        self.done, self.at, self.failed_phase, self.outcome, self.phase = None, None, "", "", ""
        self.problem = self.stack = self.flight = ""
        self.early = []

    def undo(self) -> None:
        """Take back that it ended the test: it was lost before the others did."""
        if self.done is not None:
            self.early = [
                report
                for report in self.done.reports
                if isinstance(report, dict) and report.get("outcome") != "passed"
            ]
            self.done = None

    @property
    def is_settled(self) -> bool:
        """Whether nothing more is to come of it in this test."""
        is_ended = self.done is not None or self.exit_code is not None or bool(self.problem)
        return is_ended and not self.is_lost

    def end(self) -> RankEnd:
        """Return how it ended the test."""
        return RankEnd(
            rank=self.rank,
            done=self.done,
            early=tuple(self.early),
            exit_code=self.exit_code,
            at=self.at,
            failed_phase=self.failed_phase,
            outcome=self.outcome,
            phase=self.phase,
            problem=self.problem,
            stack=self.stack,
            flight=self.flight,
            log_dir=self.log_dir,
        )
