"""What the state machine of a gang asks for; the supervisor carries it out: data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from pytest_megatron.gang.messages import Run
from pytest_megatron.gang.spec import RunEnd


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
