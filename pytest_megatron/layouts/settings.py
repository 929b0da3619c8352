"""Settings of a run of ranks, as the controller gives them to the process that runs them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

NUM_RANKS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Which ranks run, and where they write.

    Attributes:
        directory: Gets `rank_<r>.json` and `rank_<r>.log` of each rank.
        ranks: Those to run; None chooses them by the groups of rank 0.
        count: How many are chosen.
        steps: Optimizer steps of each.
        jobs: Ranks side by side.
        time_limit_s: For one rank.
    """

    directory: Path
    world_size: int
    ranks_per_node: int = 8
    ranks: tuple[int, ...] | None = None
    count: int = NUM_RANKS
    steps: int = 2
    jobs: int = 2
    time_limit_s: float = 300.0

    def to_json(self) -> str:
        """Return the settings as an argument."""
        return json.dumps({**asdict(self), "directory": str(self.directory)})

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Read settings from the JSON of an argument."""
        found = json.loads(text)
        ranks = found.pop("ranks")
        return cls(
            **{**found, "directory": Path(found["directory"])},
            ranks=None if ranks is None else tuple(ranks),
        )
