"""Copy of the output of chosen ranks to the terminal, each line with its rank."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pytest_megatron.gang.rank.logs import Tail
from pytest_megatron.gang.supervisor.supervisor import Gang
from pytest_megatron.hooks.options import Options

_EVERY_S = 0.05


class Tee:
    """Follows the logs of chosen ranks of every gang on this node.

    Attributes:
        is_on: Whether output is copied: with `-s`, or with `--tee-ranks`.
    """

    def __init__(self, config: pytest.Config, options: Options, *, is_worker: bool) -> None:
        self._config = config
        self._options = options
        is_wanted = config.getoption("capture", "no") == "no" or "tee-ranks" in options.typed
        has_terminal = config.pluginmanager.has_plugin("terminalreporter")
        self.is_on = is_wanted and options.tee_ranks != () and not is_worker and has_terminal
        self._tails: dict[int, list[Tail]] = {}
        self._next_at = 0.0

    def wait_s(self, most_s: float) -> float:
        """Return the time that the controller may sleep."""
        return min(most_s, _EVERY_S) if self.is_on else most_s

    def follow(self, gang: Gang) -> None:
        """Follow a new gang."""
        chosen = self._options.tee_ranks
        if self.is_on:
            self._tails[gang.number] = [
                Tail(Path(rank_config.log_dir), rank_config.rank)
                for rank_config in gang.configs
                if rank_config.node_rank == self._options.node_rank
                and (chosen is None or rank_config.rank in chosen)
            ]

    def poll(self) -> None:
        """Copy new output, if it is time to."""
        if self._tails and time.monotonic() >= self._next_at:
            for tails in self._tails.values():
                self._copy(tails, is_ended=False)
            self._next_at = time.monotonic() + _EVERY_S

    def catch_up(self, gang: Gang) -> None:
        """Copy all output of a gang, before the result of its test."""
        self._copy(self._tails.get(gang.number, []), is_ended=True)

    def forget(self, gang: Gang) -> None:
        """Copy the rest of the output of a gang that is gone."""
        self.catch_up(gang)
        self._tails.pop(gang.number, None)

    def _copy(self, tails: list[Tail], *, is_ended: bool) -> None:
        if not tails:
            return
        writer = self._config.get_terminal_writer()
        for tail in tails:
            for line in tail.new_lines(is_ended=is_ended):
                if writer.width_of_current_line:
                    writer.line()
                writer.line(line, flush=True)
