"""Run directories as a session leaves them, written by the functions that sessions use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from golden_files import write_golden

from pytest_megatron.base.files import JsonValue, write_json_atomically
from pytest_megatron.runs.layout import item_dirs
from pytest_megatron.runs.record import to_json
from pytest_megatron.workloads.golden.compare.compare import compare
from pytest_megatron.workloads.golden.compare.result import recorded
from pytest_megatron.workloads.golden.model import MetricMap, Provenance, Series, Value, series_of
from pytest_megatron.workloads.golden.store import read_golden, write_metrics

METRICS = ("lm loss", "num-zeros", "iteration-time", "grad-norm", "mem-allocated-bytes")


def curve(num_steps: int, *, seed: int = 0, every: int = 1) -> Series:
    """A loss that falls and trembles."""
    steps = range(1, num_steps + 1, every)
    values: dict[int, Value] = {
        s: 10 / (1 + s / 50) + 0.2 * math.sin(s * 1.7 + seed) + seed for s in steps
    }
    return series_of(values, is_full_precision=True)


def changed(series: Series, changes: Mapping[int, Value | None]) -> Series:
    """Return a series with other values at some steps; None takes a step away."""
    values = {**dict(series.items()), **changes}
    kept = {s: v for s, v in values.items() if v is not None}
    return series_of(kept, is_full_precision=series.is_full_precision)


@dataclass(kw_only=True)
class MadeRun:
    """A run directory; `write` makes its `run.json`."""

    root: Path
    items: dict[str, JsonValue] = field(default_factory=dict)

    def item(
        self,
        node_id: str,
        measured: list[MetricMap],
        *,
        golden: MetricMap | None = None,
        failed: Mapping[int, MetricMap] | None = None,
        problem: str | None = None,
    ) -> Path:
        """Add a workload: its repeats, and attempts that failed before them (by repeat)."""
        dirs = item_dirs(self.root, node_id)
        attempts: list[JsonValue] = []
        rows: list[JsonValue] = []
        dirs.root.mkdir(parents=True)
        if golden is not None:
            write_golden(dirs.golden, golden, Provenance(deterministic=True, repeats=2))
        has_failed = False
        for repeat, metrics in enumerate(measured, start=1):
            tries = [(failed or {}).get(repeat), metrics]
            for number, one in enumerate((t for t in tries if t is not None), start=1):
                phase = dirs.attempt(repeat=repeat, attempt=number).phase(1)
                phase.root.mkdir(parents=True)
                write_metrics(phase.metrics, one)
                cause = "rank 1 of 2 raised RuntimeError" if one is not metrics else None
                attempts.append(_attempt(repeat, number, cause))
            if golden is not None:
                found = compare(read_golden(dirs.golden), metrics)
                has_failed |= not all(c.passed for c in found)
                rows.append(
                    {
                        "repeat": repeat,
                        "against": "golden",
                        "comparisons": [to_json(recorded(c)) for c in found],
                    }
                )
        if golden is not None:
            write_json_atomically(dirs.comparison, {"schema": 1, "repeats": rows})
        self.items[node_id] = {
            "verdict": "failed" if has_failed or problem else "passed",
            "problem": problem,
            "summary": "1.0 s, lm loss 9.8 -> 4.2 in 10 iterations",
            "duration_s": 1.0 + len(self.items),
            "platform": "cpu",
            "attempts": attempts,
        }
        return dirs.curves

    def test(
        self,
        node_id: str,
        verdict: str,
        ranks: Mapping[str, str] | None = None,
        report: Sequence[str] = (),
    ) -> None:
        """Add a distributed test; of its report each title is its text as well."""
        logs = self.root / "ranks" / "attempt_1"
        logs.mkdir(parents=True, exist_ok=True)
        is_bad = verdict == "failed"
        if is_bad:
            for rank in range(2):
                (logs / str(rank)).mkdir(exist_ok=True)
                (logs / str(rank) / "stdout.log").touch()
            (logs / "1/stderr.log").write_text("Fatal Python error")
        self.items[node_id] = {
            "verdict": verdict,
            "problem": "rank 1 of 2 was killed by SIGSEGV" if is_bad else None,
            "duration_s": 0.5,
            "world_size": 2,
            "ranks": dict(ranks or {}),
            "report": [[one, one] for one in report],
            "attempts": [{"directory": "elsewhere/ranks/attempt_1", "is_transient": False}],
        }

    def write(self) -> Path:
        run: dict[str, JsonValue] = {
            "schema": 1,
            "started": "2026-01-31T12:00:00Z",
            "arguments": ["-p", "megatron", "recipes"],
            "commit": "0123abc",
            "is_dirty": True,
            "versions": {"torch": "2.11.0"},
            "items": self.items,
        }
        self.root.mkdir(parents=True, exist_ok=True)
        write_json_atomically(self.root / "run.json", run)
        return self.root


def _attempt(repeat: int, number: int, cause: str | None) -> dict[str, JsonValue]:
    return {
        "repeat": repeat,
        "attempt": number,
        "duration_s": 1.5,
        "cause": cause,
        "root_rank": None if cause is None else 1,
        "signature": None if cause is None else "port_in_use",
        "is_transient": cause is not None,
    }
