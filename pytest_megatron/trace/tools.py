"""The programs and functions of traces that workloads use."""

from __future__ import annotations

from pytest_megatron.trace.bits import compare_bits
from pytest_megatron.workloads.training.plan.trace_settings import TraceTools

TOOLS = TraceTools(
    record=("-m", "pytest_megatron.trace.run"),
    compare=("-m", "pytest_megatron.trace.compare"),
    compare_bits=compare_bits,
)
