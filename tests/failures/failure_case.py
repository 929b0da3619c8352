"""What a case is, and the families that cases name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Form = Literal["torch", "ours", "mixed", "single", "srun", "tasks", "zip", "session"]
# Whether an unchanged rerun may pass; `either` where the logs cannot tell.
Chance = Literal["genuine", "transient", "either", "innocent"]
Root = Literal["guilty", "none", "any"]
GUILTY = (2,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One staged failure, or one sound run.

    Attributes:
        id: Its name.
        fault: The way that the training goes wrong.
        families: The right answers; several where the logs allow them; none for a sound run.
        may_be_silent: Whether the logs need not show that anything failed.
        root: Whether the guilty rank must be named, no rank may be named, or anything goes.
        guilty: Ranks that do it; `()` is all of them.
        program: Another program than the training.
        rendezvous: Words for the agent's rendezvous; `{port}` is a port that is free, or taken.
        limit_s: When the step or session is ended from outside.
        limit_reason: What Slurm says of it.
        is_golden_other: Whether a session's golden is not what the training gives.
        devices: Where it applies.
        needs_full_disk: Whether it needs a small disk to be mounted.
    """

    id: str
    fault: str = ""
    families: tuple[str, ...]
    may_be_silent: bool = False
    chance: Chance = "genuine"
    root: Root = "guilty"
    guilty: tuple[int, ...] = GUILTY
    form: Form = "torch"
    arguments: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    program: str | None = None
    rendezvous: tuple[str, ...] = ()
    is_port_taken: bool = False
    limit_s: float | None = None
    limit_reason: str = ""
    is_golden_other: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")
    needs_full_disk: bool = False

    @property
    def guilty_text(self) -> str:
        return ",".join(map(str, self.guilty)) or "all"


# Rows of the catalogue that no rule should be asked to tell apart from one another.
RAISED = ("exception",)
ASSERTED = ("assert", "exception")
CONFIGURED = ("config", "exception")
MISMATCHED = ("mismatch", "exception")
HUNG = ("nccl_timeout",)
DESYNCED = ("desync", "nccl_timeout")
MISFIT = (*DESYNCED, "mismatch")
PEER_GONE = ("nccl_timeout", "nccl_system", "exit")
NETWORK = ("network", "http_read", "hf_hub", "service", "dns")
HTTP = ("hf_hub", "service", "http_read", "network")
DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
