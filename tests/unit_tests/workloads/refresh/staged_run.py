"""Run directories as a session leaves them, written in milliseconds, without any training."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml
from golden_files import write_golden

from pytest_megatron.base.files import JsonValue, digest_of
from pytest_megatron.workloads.golden.build import combine, spread_of
from pytest_megatron.workloads.golden.model import Golden, MetricMap, Provenance, Value, series_of
from pytest_megatron.workloads.golden.store import golden_text, write_metrics

NUM_STEPS = 100
COMMIT = "1b6a30e"
ORIGIN = Provenance(
    commit=COMMIT,
    is_dirty=False,
    host_class="a host",
    world_size=2,
    config_hash="c0ffee",
    date="2026-11-21T04:12:24Z",
    run="staged",
)


def curve(num_steps: int = NUM_STEPS, *, scale: float = 1.0) -> dict[int, Value]:
    """A loss that falls from 10 to about 2."""
    return {s: scale * (2 + 8 * math.exp(-s / 30)) for s in range(1, num_steps + 1)}


def metric_map(loss: Mapping[int, Value], **others: Mapping[int, Value]) -> MetricMap:
    named = {"lm loss": loss, **{k.replace("_", "-"): v for k, v in others.items()}}
    return {k: series_of(v, is_full_precision=True) for k, v in named.items()}


def digests_of(directory: Path) -> dict[str, JsonValue]:
    """Return the digests that a run notes of a workload's candidate and measured values."""
    files = [*directory.rglob("golden_candidate.json"), *directory.rglob("metrics.json")]
    return {f.relative_to(directory).as_posix(): digest_of(f) for f in files}


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A project and one run in it."""

    root: Path
    name: str = "run"
    items: dict[str, JsonValue] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        return self.root / self.name

    def target(self, case: str) -> str:
        return f"golden_values/gpt/{case}/golden_values_dev_cpu.json"

    def golden(
        self, case: str, metrics: MetricMap | None = None, origin: Provenance = ORIGIN
    ) -> Path:
        """Write the golden that is there before."""
        path = self.root / self.target(case)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_golden(path, metrics or metric_map(curve()), replace(origin, run="an earlier one"))
        return path

    def add(
        self,
        case: str,
        repeats: Sequence[MetricMap],
        *,
        origin: Provenance = ORIGIN,
        record: Mapping[str, JsonValue] | None = None,
        attempts: Sequence[Mapping[str, JsonValue]] | None = None,
        plan: Mapping[str, JsonValue] | None = None,
    ) -> Path:
        """Add a workload whose repeats measured that; return its directory."""
        node_id = f"recipes/r.yaml::{case}[dev-cpu]"
        directory = self.run_dir / f"r-{case}-dev-cpu"
        self._case(case)
        planned: dict[str, JsonValue] = {
            "node_id": node_id,
            "world_size": 2,
            "until_iteration": None,
            "is_lightweight": False,
            "phases": [{"last_iteration": NUM_STEPS}],
            **(plan or {}),
        }
        listed: list[JsonValue] = []
        for number, metrics in enumerate(repeats, start=1):
            attempt = directory / f"repeat_{number}" / "attempt_1"
            (attempt / "phase_1").mkdir(parents=True)
            write_metrics(attempt / "phase_1" / "metrics.json", metrics)
            (attempt / "plan.json").write_text(json.dumps(planned))
            listed.append({"repeat": number, "attempt": 1, "exit_codes": [0], "cause": None})
        for change, one in zip(attempts or [], listed, strict=False):
            assert isinstance(one, dict)
            one.update(change)
        (directory / "comparison.json").write_text('{"repeats": []}')
        golden = combine(repeats, ())
        origin = replace(origin, repeats=len(repeats), spread=spread_of(repeats, golden))
        text = golden_text(Golden(path="c", metrics=golden, provenance=origin))
        (directory / "golden_candidate.json").write_text(text)
        others = dict(record or {})
        golden_record = others.pop("golden", None)
        self.items[node_id] = {
            "verdict": "failed",
            "problem": "metrics disagree",
            "directory": f"/elsewhere/{directory.name}",
            "platform": "cpu",
            "attempts": listed,
            **others,
            "golden": {
                "target": self.target(case),
                "candidate": "/elsewhere/c.json",
                "digests": digests_of(directory),
                **(golden_record if isinstance(golden_record, dict) else {}),
            },
        }
        self.write()
        return directory

    def write(self) -> None:
        self.run_dir.mkdir(exist_ok=True)
        (self.run_dir / "run.json").write_text(
            json.dumps({"schema": 1, "ended": "now", "exit_code": 1, "items": self.items})
        )

    def _case(self, case: str) -> None:
        config = self.root / "tests/functional_tests/test_cases/gpt" / case / "model_config.yaml"
        config.parent.mkdir(parents=True, exist_ok=True)
        content = {"TEST_TYPE": "regular", "ENV_VARS": {}, "METRICS": ["lm loss"]}
        content["MODEL_ARGS"] = {"--train-iters": NUM_STEPS}
        config.write_text(yaml.safe_dump(content))
