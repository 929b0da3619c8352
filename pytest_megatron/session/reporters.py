"""What rooms add to the reports of a session: pages, the log of a CI system."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import pytest

from pytest_megatron.rooms import ExtensionPoint
from pytest_megatron.session.state import RunSession

FOLDING_LOG = "megatron-ci-log"  # the name of the plugin that is one
_REPORTERS: ExtensionPoint[Callable[[pytest.Config, RunSession], None]] = ExtensionPoint("reporter")


class FoldingLog(Protocol):
    """A log whose sections can be folded."""

    def fold(self, title: str) -> None:
        """Begin a section."""

    def unfold(self) -> None:
        """End it."""


def register_reporters(config: pytest.Config, session: RunSession) -> None:
    """Register those of all rooms; each registers itself once."""
    for register in _REPORTERS.all():
        register(config, session)
