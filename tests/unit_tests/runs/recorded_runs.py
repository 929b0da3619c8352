"""Run directories as sessions leave them, for tests that start nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pytest_megatron.base.files import JsonValue
from pytest_megatron.runs.history import HistoryEntry
from pytest_megatron.runs.layout import item_dirs

TEST = "test_a.py::test_x"
ROW = "recipes/a.yaml::line[dev-cpu]"
ENTRY = HistoryEntry(
    time="2026-01-01T00:00:00Z",
    run="r1",
    node_id="recipes/r.yaml::a[dev-cpu]",
    kind="workload",
    verdict="passed",
    num_attempts=1,
    causes=(),
    duration_s=1.5,
    commit="c1",
    is_dirty=False,
    platform="cpu",
)


def execution(run: int, gang: int = 1) -> dict[str, JsonValue]:
    directory = f"/ci/run/ranks/attempt_{gang}"
    return {"gang": gang, "run": run, "directory": directory, "end": "done"}


def a_test(verdict: str = "failed", **more: JsonValue) -> dict[str, JsonValue]:
    return {
        "verdict": verdict,
        "problem": "[rank 1] AssertionError: no" if verdict == "failed" else None,
        "fingerprint": "done|AssertionError: no" if verdict == "failed" else None,
        "world_size": 2,
        "device": "cpu",
        "attempts": [execution(3)],
        **more,
    }


def a_row(verdict: str = "failed", **more: JsonValue) -> dict[str, JsonValue]:
    attempt: JsonValue = {"repeat": 1, "attempt": 1, "directory": "/ci/x", "fingerprint": "abc"}
    return {
        "verdict": verdict,
        "problem": "rank 0 failed\nsee x.log",
        "fingerprint": "exception|f",
        "platform": "cpu",
        "attempts": [attempt],
        **more,
    }


def write_run(directory: Path, items: Mapping[str, JsonValue], **more: JsonValue) -> Path:
    """Write `run.json`, and a plan for every attempt of a workload."""
    directory.mkdir(parents=True, exist_ok=True)
    run = {"schema": 1, "commit": None, "items": dict(items), **more}
    (directory / "run.json").write_text(json.dumps(run))
    for node_id in items:
        if node_id.startswith("recipes/"):
            write_plan(directory, node_id)
    return directory


def write_plan(run_dir: Path, node_id: str, **more: JsonValue) -> None:
    plan = item_dirs(run_dir, node_id).attempt(repeat=1, attempt=1).plan
    plan.parent.mkdir(parents=True, exist_ok=True)
    argv = ["/ci/python", "-m", "torch.distributed.run", "train.py", "--train-iters", "10"]
    phase = {"number": 1, "argv": argv, "env": {}, "world_size": 2}
    content = {"schema": 1, "node_id": node_id, "cwd": "/ci", "phases": [phase], "world_size": 2}
    plan.write_text(json.dumps({**content, **more}))
