"""Settings of a run of ranks, as the controller gives them to the process that runs them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pytest_megatron.errors import LaunchError

NUM_RANKS = 12
_OPTION = "--fake-ranks"


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

    def choose(self, text: str) -> Settings:
        """Return these settings with the ranks that `--fake-ranks` names.

        Raises:
            LaunchError: It names none, or one that is not of the world.
        """
        chosen = read_ranks(text)
        if chosen is None:
            return replace(self, ranks=tuple(range(self.world_size)))
        if isinstance(chosen, int):
            return replace(self, count=chosen)
        if chosen[-1] >= self.world_size:
            raise LaunchError(
                _OPTION,
                f"rank {chosen[-1]} of {self.world_size}, expected 0 to {self.world_size - 1}",
            )
        return replace(self, ranks=chosen)

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


def read_ranks(text: str) -> int | tuple[int, ...] | None:
    """Return how many ranks `--fake-ranks` asks for, or which, ascending; None for all.

    Raises:
        LaunchError: It names none.
    """
    words = [word.strip() for word in text.removesuffix(",").split(",")]
    if text == "all":
        return None
    if not all(word.isdecimal() for word in words) or text.strip() == "0":
        raise LaunchError(
            _OPTION, f"{text!r} names no ranks, expected all, how many (12), or which (0,8,511)"
        )
    numbers = sorted({int(word) for word in words})
    return tuple(numbers) if "," in text else numbers[0]
