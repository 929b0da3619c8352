"""Workloads whose sizes, durations and failures follow from one seed."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from pytest_megatron.base.files import JsonValue
from pytest_megatron.runs.environment import SessionFacts
from pytest_megatron.runs.layout import AttemptDirs, PhaseDirs
from pytest_megatron.triage.rank_log import End
from pytest_megatron.workloads.engine.records import JobRecord, write_record
from pytest_megatron.workloads.training.plan.plan import PhasePlan
from pytest_megatron.workloads.training.run.runner import PhaseEnd
from simulated.cluster import Fate, State

TRANSIENT = "RuntimeError: The server socket has failed to listen: EADDRINUSE"
NUM_STEPS = 10
_SIZES = [(1, 1)] * 20 + [(1, 2)] * 20 + [(1, 4)] * 15 + [(1, 8)] * 40 + [(2, 8)] * 3 + [(4, 8)] * 2
_MEDIAN_S, _SIGMA, _LONGEST_S = 600.0, 0.9, 4 * 3600.0
_LIMITS_S = (900, 1800, 3600, 7200, 18000)  # what people ask for
_KNOWN_WITHIN = 0.15  # how well the past tells how long one takes, log-normal too
_TRANSIENT, _REGRESSION = 0.04, 0.02  # of all attempts; of all workloads


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What becomes of one workload.

    Attributes:
        expected_s: What the past says of an attempt.
        num_transient: So many attempts fail for a cause that is not the code's.
        is_regression: Whether its loss is another than the golden's.
    """

    name: str
    num_nodes: int
    gpus: int
    duration_s: float
    expected_s: float
    limit_s: int
    num_transient: int
    is_regression: bool

    @property
    def verdict(self) -> str:
        """What it comes to where no machine fails."""
        if self.num_transient > 1:
            return "broken"  # twice at the same place is not by chance
        if self.is_regression:
            return "failed"
        return "flaky" if self.num_transient else "passed"

    def fate(self, attempt: int) -> Fate:
        """Return what becomes of an attempt, counted from 1."""
        if attempt <= self.num_transient:
            return Fate(duration_s=self.duration_s / 4, state=State.FAILED)
        return Fate(duration_s=self.duration_s)


def draw(number: int, seed: int) -> list[Simulated]:
    """Return so many workloads."""
    chance = random.Random(seed)
    found = []
    for index in range(number):
        num_nodes, gpus = chance.choice(_SIZES)
        duration_s = min(_LONGEST_S, _MEDIAN_S * chance.lognormvariate(0.0, _SIGMA))
        first, second = chance.random() < _TRANSIENT, chance.random() < _TRANSIENT
        found.append(
            Simulated(
                name=f"case_{index}",
                num_nodes=num_nodes,
                gpus=gpus,
                duration_s=duration_s,
                expected_s=duration_s * chance.lognormvariate(0.0, _KNOWN_WITHIN),
                limit_s=next(limit for limit in _LIMITS_S if duration_s < limit),
                num_transient=0 if not first else 1 + second,
                is_regression=chance.random() < _REGRESSION,
            )
        )
    return found


def write_project(root: Path, works: Sequence[Simulated]) -> Path:
    """Write the recipe, the cases and the goldens of workloads; return the recipe's path."""
    case: dict[str, JsonValue] = {
        "TEST_TYPE": "regular",
        "METRICS": ["lm loss"],
        "MODEL_ARGS": {"--train-iters": NUM_STEPS, "--tensorboard-dir": "${TENSORBOARD_PATH}"},
    }
    case_text = yaml.safe_dump(case)
    values = {str(step): _loss(step) for step in range(1, NUM_STEPS + 1)}
    block = {"start_step": 1, "end_step": NUM_STEPS, "step_interval": 1, "values": values}
    golden_text = json.dumps({"lm loss": block})
    (root / "train.py").touch()  # nothing starts it, and it must be there
    products = []
    for work in works:
        directory = root / "tests" / "functional_tests" / "test_cases" / "gpt" / work.name
        directory.mkdir(parents=True)
        (directory / "model_config.yaml").write_text(case_text)
        golden = root / "golden_values" / "gpt" / work.name / "golden_values_dev_dgx_h100.json"
        golden.parent.mkdir(parents=True)
        golden.write_text(golden_text)
        axes = {
            "environment": ["dev"],
            "scope": ["L0"],
            "nodes": [work.num_nodes],
            "gpus": [work.gpus],
            "time_limit": [work.limit_s],
        }
        products.append({"test_case": [work.name], "products": [axes]})
    spec = {
        "model": "gpt",
        "gpus": 1,
        "platforms": "dgx_h100",
        "training_script_path": "train.py",
    }
    recipe = {"type": "basic", "format_version": 1, "spec": spec, "products": products}
    path = root / "recipes" / "simulated.yaml"
    path.parent.mkdir()
    path.write_text(json.dumps(recipe))  # JSON is YAML, and faster to write
    return path


def leave(dirs: AttemptDirs, outcome: Path, record: JobRecord, *, off: float | None) -> None:
    """Leave the files of an attempt that ended by itself, as the worker and the training do.

    Args:
        dirs: Of the attempt.
        outcome: Where the record goes.
        record: The worker's.
        off: How much the loss is wrong by; None where the training failed.
    """
    phase = dirs.phase(1)
    phase.logs.mkdir(parents=True)
    if off is not None:
        rows = [{"step": s, "lm loss": _loss(s) + off} for s in range(1, NUM_STEPS + 1)]
        phase.metrics_lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        log = phase.logs / "0" / "stderr.log"
        log.parent.mkdir()
        log.write_text(f"Traceback (most recent call last):\n{TRANSIENT}\n")
    write_record(outcome, record)


def record_of(
    key: str, facts: SessionFacts, hosts: tuple[str, ...], lasted_s: float, *, is_good: bool
) -> JobRecord:
    """Return what the worker says of such an attempt."""
    dirs = PhaseDirs(root=Path("phase_1"))
    end = PhaseEnd(
        plan=PhasePlan(number=1, dirs=dirs, argv=(), env={}, own_env={}, last_iteration=None),
        end=End.EXITED,
        returncode=0 if is_good else 1,
        duration_s=lasted_s,
    )
    return JobRecord(key=key, ends=(end,), health=None, facts=facts, hosts=hosts, trouble=None)


def _loss(step: int) -> float:
    return 5.0 - 0.1 * step
