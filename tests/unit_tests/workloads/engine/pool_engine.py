"""An engine with a queue, as another package may bring it: so many processes at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pytest_megatron.workloads.engine.api import (
    EngineContext,
    Resources,
    Submission,
    SubmissionPhase,
    Update,
)
from pytest_megatron.workloads.engine.records import JobSpec, outcome_of, read_record, write_spec
from pytest_megatron.workloads.recipe.model import Workload
from pytest_megatron.workloads.training.plan.plan import Setting


class PoolEngine:
    """Runs the worker's line in processes of this machine."""

    name = "pool"
    is_queue = True
    interval_s = 0.05

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._size = int(context.env.get("POOL_SIZE", "2"))
        self._waiting: list[Submission] = []
        self._running: dict[str, tuple[Submission, subprocess.Popen[bytes]]] = {}

    def settle(self, setting: Setting, _workload: Workload) -> Setting:
        return setting

    def lacks(self, needed: Resources) -> str | None:
        return "the pool has no GPUs" if needed.gpus_per_node else None

    def submit(self, orders: Sequence[Submission]) -> None:
        self._waiting += orders
        self._note(f"submitted {' '.join(order.key for order in orders)}")

    def poll(self) -> Sequence[Update]:
        updates: list[Update] = []
        for key, (order, process) in list(self._running.items()):
            if process.poll() is not None:
                del self._running[key]
                record = read_record(self._outcome(order))
                assert record is not None
                outcome = outcome_of(record, order.planned(None), self._context.facts)
                updates.append(Update(key=key, phase=SubmissionPhase.ENDED, outcome=outcome))
        while self._waiting and len(self._running) < self._size:
            order = self._waiting.pop(0)
            self._running[order.key] = (order, self._start(order))
            updates.append(
                Update(key=order.key, phase=SubmissionPhase.RUNNING, detail="runs in the pool")
            )
        return updates

    def cancel(self, keys: Sequence[str]) -> None:
        self._note(f"cancelled {' '.join(keys)}")
        self._waiting = [order for order in self._waiting if order.key not in keys]
        for key in keys:
            if key in self._running:
                process = self._running.pop(key)[1]
                process.terminate()
                process.wait()

    def close(self) -> None:
        assert not self._waiting
        assert not self._running

    def _outcome(self, order: Submission) -> Path:
        return self._context.engine_dir / f"{order.key.replace('/', '-')}.outcome"

    def _start(self, order: Submission) -> subprocess.Popen[bytes]:
        planned = order.planned(None)
        outcome = self._outcome(order)
        spec = JobSpec(
            key=order.key,
            plan=planned.plan,
            outcome=outcome,
            root=self._context.root,
            description=json.dumps(planned.description),
            env={},
            watches_gpus=False,
            options={},
        )
        outcome.parent.mkdir(parents=True, exist_ok=True)
        path = outcome.with_suffix(".json")
        write_spec(path, spec)
        return subprocess.Popen(
            [sys.executable, "-m", "pytest_megatron.engines.worker", str(path)],
            env=dict(self._context.env),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _note(self, line: str) -> None:
        log = os.environ.get("POOL_LOG")
        if log:
            with Path(log).open("a") as file:
                file.write(f"{line}\n")
