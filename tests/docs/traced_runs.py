"""Makes two run directories with traces, of a training before and after a change. No torch.

    python traced_runs.py

Every tensor from the second layer's `linear_fc2` on differs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from pytest_megatron.runs.layout import RUN_FILE, item_dirs
from pytest_megatron.trace.equivalence import Phase
from pytest_megatron.trace.files import (
    TraceEnd,
    TraceHeader,
    TraceLayout,
    TraceRecord,
    TraceWriter,
)

ITEM = "recipes/gpt.yaml::tp2[dev-cpu]"
MODULES = [
    f"decoder.layers.{layer}.{name}"
    for layer in (0, 1)
    for name in ("self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
]
CHANGED = MODULES[-1]
COMMITS = {"before": "1f0c2a7d9b64", "after": "8be51f30c2ad"}
NUM_RANKS, NUM_STEPS = 2, 2


def record(step: int, phase: Phase, module: str, tensor: str) -> TraceRecord:
    return TraceRecord(
        order=0,
        step=step,
        microbatch=0,
        phase=phase,
        module=module,
        kind="ColumnParallelLinear",
        tensor=tensor,
        shape=(64, 64),
        dtype="bfloat16",
        norm=4.0,
        mean=0.0,
        hash="c3dc8af5f80408b7",
        not_finite=0,
    )


def records() -> Iterator[TraceRecord]:
    for step in range(1, NUM_STEPS + 1):
        for module in MODULES:
            yield record(step, "forward", module, "input.0")
            yield record(step, "forward", module, "output.0")
        for module in reversed(MODULES):
            yield record(step, "backward", module, "grad_output.0")
        for module in MODULES:
            yield record(step, "gradient", module, "weight")


def write_trace(directory: Path, *, is_changed: bool, num_ranks: int = NUM_RANKS) -> None:
    """Write the trace of a training; every record from the changed one on has another hash."""
    for rank in range(num_ranks):
        writer = TraceWriter(directory, rank, has_values=False)
        writer.write_header(
            TraceHeader(
                rank=rank,
                world_size=num_ranks,
                device="cpu",
                torch="2.13.0+cpu",
                megatron_core="0.16.1",
                layout=TraceLayout(tp=(rank, num_ranks)),
                values="hash",
            )
        )
        differs = False
        for order, one in enumerate(records()):
            is_first = (one.module, one.tensor) == (CHANGED, "output.0")
            differs = differs or (is_changed and is_first)
            changed = replace(one, hash="7f0964ccbd25f5cf", norm=4.002) if differs else one
            writer.write_record(replace(changed, order=order))
        writer.close(TraceEnd(steps=NUM_STEPS))


def write_run(
    directory: Path,
    commit: str,
    *items: str,
    is_changed: bool = False,
    phase: int = 1,
    env: Mapping[str, str] | None = None,
    num_ranks: int = NUM_RANKS,
) -> Path:
    """Write a run directory whose items have traces."""
    facts = {"commit": commit, "versions": {"torch": "2.13.0+cpu"}}
    for item in items:
        attempt = item_dirs(directory, item).attempt(repeat=1, attempt=1)
        write_trace(attempt.phase(phase).trace, is_changed=is_changed, num_ranks=num_ranks)
        argv = ["python", "train.py", "--seed", "1234", "--save", str(attempt.checkpoints)]
        planned = {"number": phase, "name": f"phase {phase}", "argv": argv, "env": env or {}}
        plan = {"node_id": item, "phases": [planned], **facts}
        attempt.plan.write_text(json.dumps(plan))
    run = {"items": {item: {"verdict": "passed"} for item in items}, **facts}
    (directory / RUN_FILE).write_text(json.dumps(run))
    return directory


if __name__ == "__main__":
    for name, commit in COMMITS.items():
        write_run(Path(name), commit, ITEM, is_changed=name == "after")
