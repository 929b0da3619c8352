"""Exchange of initial weights between runs of different parallel layouts (next slice)."""

from __future__ import annotations

import torch

from pytest_megatron.trace.settings import TraceSettings


def exchange(model: torch.nn.Module, settings: TraceSettings) -> None:
    """Write the model's weights, or replace them by another run's, as the settings ask for."""
