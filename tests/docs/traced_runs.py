"""Makes two run directories with traces, of a training before and after a change. No torch.

    python traced_runs.py

Every tensor from the second layer's `linear_fc2` on differs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pytest_megatron.runs.layout import RUN_FILE, item_dirs
from pytest_megatron.trace.files import (
    Phase,
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


def write_trace(directory: Path, *, is_changed: bool) -> None:
    for rank in range(NUM_RANKS):
        writer = TraceWriter(directory, rank, has_values=False)
        writer.write_header(
            TraceHeader(
                rank=rank,
                world_size=NUM_RANKS,
                device="cpu",
                torch="2.13.0+cpu",
                megatron_core="0.16.1",
                layout=TraceLayout(tp=(rank, NUM_RANKS)),
                values="hash",
            )
        )
        differs = False
        for order, one in enumerate(records()):
            is_first = (one.module, one.tensor) == (CHANGED, "output.0")
            differs = differs or (is_changed and is_first)
            changes = {"hash": "7f0964ccbd25f5cf", "norm": 4.002} if differs else {}
            writer.write_record(replace(one, order=order, **changes))  # type: ignore[arg-type]
        writer.close(TraceEnd(steps=NUM_STEPS))


def main() -> None:
    for name, commit in COMMITS.items():
        attempt = item_dirs(Path(name), ITEM).attempt(repeat=1, attempt=1)
        write_trace(attempt.phase(1).trace, is_changed=name == "after")
        facts = {"commit": commit, "versions": {"torch": "2.13.0+cpu"}}
        phase = {"number": 1, "name": "phase 1", "argv": ["train.py", "--seed", "1234"]}
        plan = {"node_id": ITEM, "phases": [phase], **facts}
        attempt.plan.write_text(json.dumps(plan))
        run = {"items": {ITEM: {"verdict": "passed"}}, **facts}
        Path(name, RUN_FILE).write_text(json.dumps(run))


if __name__ == "__main__":
    main()
