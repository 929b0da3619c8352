"""What a fork server needs: somebody who starts ranks, and somebody who keeps stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pytest_megatron.gang.messages import RankConfig
from pytest_megatron.gang.rank_ends import RankPipes


class RankStarter(Protocol):
    """How ranks come into being."""

    def start(
        self, order: RankConfig, ends: RankPipes, inherited: Sequence[int], unwanted: Sequence[int]
    ) -> int:
        """Start a rank; return its process.

        Args:
            order: What it has to know.
            ends: What it shares with the fork server.
            inherited: Descriptors that it holds as long as it lives.
            unwanted: Descriptors of the fork server's own that it must not hold.
        """

    def open_store(self, host: str) -> int:
        """Return the port of a new key-value store.

        Raises:
            LaunchError: There can be none.
        """

    def close_store(self, port: int) -> None:
        """Close the store of a gang that is gone."""

    def is_own(self, pid: int) -> bool:
        """Return whether a process belongs to the fork server itself and not to a gang."""

    def take_note_of_end(self, pid: int) -> None:
        """Replace a process of the fork server's own that ended; any other is no matter."""


class Keeper(Protocol):
    """Opens stores that outlive ranks.

    Attributes:
        pid: Its process, or None before the first store.
    """

    pid: int | None

    def open_store(self, host: str) -> int:
        """Return the port of a new store."""

    def close_store(self, port: int) -> None:
        """Close the store of a gang that is gone."""

    def take_note_of_end(self, pid: int) -> None:
        """Replace its process if that is the one that ended."""

    def forget(self) -> None:
        """Let go of it in a forked child."""
