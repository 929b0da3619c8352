"""Traces of a training: what each module and each parameter computes, step by step.

`python -m pytest_megatron.trace.run PROGRAM` records a program as it is. A program that is started
otherwise calls these two, which do nothing without the variable `PYTEST_MEGATRON_TRACE`:

    from pytest_megatron import trace

    trace.attach(model, optimizer)  # once, before the first step
    trace.step()  # after each optimizer step
"""

from __future__ import annotations

import atexit
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from pytest_megatron.trace.recorder import Recorder

__all__ = ["attach", "step"]

_recorder: Recorder | None = None


def start() -> Recorder | None:
    """Start the recorder that the environment asks for; the one that runs already, if it does.

    Raises:
        TraceError: The variable's value means nothing.
    """
    # The table of features imports this package at every start of pytest.
    from pytest_megatron.trace.settings import read_settings

    global _recorder  # noqa: PLW0603 - hooks of torch are global too
    settings = read_settings()
    if _recorder is None and settings is not None:
        from pytest_megatron.trace.recorder import Recorder

        _recorder = Recorder(settings)
        _recorder.start()
    return _recorder


def attach(
    model: torch.nn.Module, optimizer: object = None, *, batch_first: bool | None = None
) -> None:
    """Record a model and its optimizer from now on.

    Args:
        model: With or without wrappers; its weights are final.
        optimizer: Only needed if it is neither torch's nor megatron-core's.
        batch_first: Whether the batch comes before the sequence in the model's tensors, also where
            both are one axis; only needed where their sizes do not tell.

    Raises:
        TraceError: The variable's value means nothing, or the weights that it names do not fit.
    """
    is_new = _recorder is None
    recorder = start()
    if recorder is None:
        return
    recorder.attach(model, optimizer, batch_first=batch_first)
    if is_new:
        atexit.register(lambda: recorder.stop(is_whole=getattr(sys, "last_value", None) is None))


def step() -> None:
    """End a step: what was computed since the last one belongs to it."""
    if _recorder is not None:
        _recorder.step()
