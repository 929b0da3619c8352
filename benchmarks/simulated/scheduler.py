"""Runs workloads through the real scheduler and the real Slurm engine, on a clock that is not real.

Trainings are the package's own generators: they plan, read what an attempt left, look failures up
and ask for the next attempt. Nothing but the cluster and what its jobs do is made up.
"""

from __future__ import annotations

import functools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_megatron.engines.slurm.engine import SlurmEngine
from pytest_megatron.engines.slurm.journal import Journal
from pytest_megatron.engines.slurm.states import JobFiles
from pytest_megatron.engines.slurm.submit import SlurmSettings
from pytest_megatron.runs.environment import SessionFacts, gather_facts
from pytest_megatron.runs.layout import AttemptDirs, item_dirs
from pytest_megatron.workloads.engine.api import EngineContext
from pytest_megatron.workloads.golden.policy import policy_named
from pytest_megatron.workloads.golden.store import golden_path, read_golden
from pytest_megatron.workloads.recipe.case import case_path, read_case
from pytest_megatron.workloads.recipe.load import load_recipe
from pytest_megatron.workloads.recipe.model import Workload
from pytest_megatron.workloads.training.plan.plan import Setting
from pytest_megatron.workloads.training.run.runner import Progress
from pytest_megatron.workloads.verdict.attempt import Attempt, Verdict
from pytest_megatron.workloads.verdict.compare import judge
from pytest_megatron.workloads.verdict.driver import Repeat, begin
from pytest_megatron.workloads.verdict.job import Training, WorkloadJob, check_job
from pytest_megatron.workloads.verdict.retry import RetryPolicy
from pytest_megatron.workloads.verdict.scheduler import QueuedWorkload, WorkEnd, WorkloadScheduler
from simulated.cluster import Cluster, Fate, SimulatedJob, State
from simulated.slurm import SimulatedScripts, SimulatedSlurm
from simulated.workloads import Simulated, leave, record_of, write_project

INTERVAL_S = 30.0
_DOWN_S = 1800.0
_MAX_ATTEMPTS = 6
_REGRESSION = 0.5  # of a loss of 4 to 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What happens to the cluster, on the average.

    Attributes:
        node_s: Between two failures of one node.
        preemption_s: Between two preemptions of a job, times the number of nodes.
    """

    node_s: float = 150_000.0
    preemption_s: float = 112_500.0


@dataclass(kw_only=True)
class Found:
    """What came of a simulation.

    Attributes:
        makespan_s: From the first submission to the last end that was noticed.
        gpu_seconds: That jobs had, whatever came of them.
        chain_s: The longest time that the attempts of one workload took together.
        verdicts: By workload.
        executions: Jobs that started, by order.
        ends: Of jobs that had started, by state.
        hit: Workloads of which the cluster ended an attempt.
    """

    makespan_s: float = 0.0
    gpu_seconds: float = 0.0
    chain_s: float = 0.0
    num_queries: int = 0
    num_intervals: int = 0
    num_submissions: int = 0
    verdicts: dict[str, str] = field(default_factory=dict)
    executions: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    hit: set[str] = field(default_factory=set)

    def bound_s(self, num_gpus: int) -> float:
        """Return what no schedule of the same jobs can be faster than."""
        return max(self.gpu_seconds / num_gpus, self.chain_s)


class _Silent:
    def on_lines(self, lines: list[str]) -> None:
        """Drop the lines."""

    def on_progress(self, phase: str, progress: Progress) -> None:
        """Drop it."""


class _Retries:
    """Further attempts of one workload, all of which the run grants."""

    def claim(self, attempt: Attempt) -> str | None:
        """Take one."""
        return None if attempt.cause is not None else "it was clean"

    def on_retry(self, attempt: Attempt, pause_s: float) -> None:
        """Take no notice."""


class Simulation:
    """One run of many workloads."""

    def __init__(
        self, root: Path, works: Sequence[Simulated], *, num_nodes: int, seed: int, trouble: Trouble
    ) -> None:
        """Write the project and make the cluster.

        Args:
            root: An empty directory.
            works: What is to be run.
            num_nodes: Of 8 GPUs each.
            seed: Of what happens to the cluster.
            trouble: How often.
        """
        self._root = root
        self._by_name = {work.name: work for work in works}
        self._by_item: dict[str, Simulated] = {}
        self._lost: Counter[str] = Counter()  # attempts of an item that the cluster ended
        self._records: dict[str, Path] = {}
        self._recipe = write_project(root, works)
        self._facts: SessionFacts = gather_facts(root)
        self._chance = random.Random(seed)
        self._trouble = trouble
        self._chains: defaultdict[str, float] = defaultdict(float)
        self._begun: dict[str, WorkloadJob] = {}
        run_dir = root / "run"
        run_dir.mkdir()
        self._context = EngineContext(root=root, run_dir=run_dir, facts=self._facts, env={})
        self._journal = Journal.open(self._context.engine_dir)
        self._policy = policy_named("strict")
        self.found = Found()
        self.cluster = Cluster(num_nodes, 8, self._fate_of, self._on_end)

    def run(self, most_submissions: int) -> Found:
        """Run it all.

        Args:
            most_submissions: As of the scheduler.
        """
        scripts = SimulatedScripts(self._context.run_dir)
        slurm = SimulatedSlurm(self.cluster, scripts, self._key_of)
        engine = SlurmEngine(
            self._context,
            slurm,
            scripts,
            SlurmSettings(interval_s=INTERVAL_S),
            self._journal,
            (lambda: self.cluster.now, self.cluster.pass_by),
        )
        scheduler = WorkloadScheduler(
            engine, most_submissions=most_submissions, clock=lambda: self.cluster.now
        )
        scheduler.add(self._works())
        self._plan_trouble()
        self._drive(scheduler)
        engine.close()
        found = self.found
        found.gpu_seconds, found.chain_s = self.cluster.gpu_seconds, max(self._chains.values())
        found.num_queries, found.num_submissions = slurm.num_queries, slurm.num_submissions
        return found

    def _drive(self, scheduler: WorkloadScheduler) -> None:
        """Let time pass until all is done."""
        polled_at = -1.0
        while not scheduler.is_done:
            if self.cluster.now > polled_at:
                self.found.num_intervals += 1
            polled_at = self.cluster.now
            for end in scheduler.step():
                name = end.name.split("::")[1].partition("[")[0]
                self.found.verdicts[name] = self._verdict(end)
                self.found.makespan_s = self.cluster.now
            self.cluster.pass_by(scheduler.pause_s())

    def _works(self) -> Iterator[QueuedWorkload]:
        for workload in load_recipe(self._recipe):
            work = self._by_name[workload.test_case]
            name = f"recipes/simulated.yaml::{workload.item_name}"
            self._by_item[item_dirs(self._context.run_dir, name).root.name] = work
            yield QueuedWorkload(
                name=name,
                begin=functools.partial(self._begin, name, workload),
                expected_s=work.expected_s,
                num_gpus=work.num_nodes * work.gpus,
            )

    def _begin(self, name: str, workload: Workload) -> Sequence[Repeat]:
        """Do what a session does before a workload is submitted."""
        setting = Setting(root=self._root, env={}, tee_ranks=(), is_lightweight=False)
        job = WorkloadJob(
            node_id=name,
            workload=workload,
            case=read_case(case_path(self._root, workload)),
            dirs=item_dirs(self._context.run_dir, name),
            setting=setting,
            num_repeats=1,
            retry=RetryPolicy(max_attempts=_MAX_ATTEMPTS),
        )
        job.dirs.root.mkdir()
        self._begun[name] = job
        return begin(check_job(job), self._facts, _Silent(), _Retries())

    def _verdict(self, end: WorkEnd) -> str:
        """Judge a workload that ended, as a session does."""
        if end.error is not None:
            raise end.error
        job = self._begun.pop(end.name)
        training = Training(job=job, attempts=end.attempts)
        if training.verdict in (Verdict.PASSED, Verdict.FLAKY):
            golden = read_golden(golden_path(self._root, job.workload))
            if judge(training, golden, self._policy, self._facts).failed:
                return Verdict.FAILED.value
        return training.verdict.value

    def _key_of(self, spec: Path) -> str:
        """Return the order that a spec's file is of, as the journal has it."""
        assert spec.is_file()
        batch = int(spec.stem)
        key = self._journal.batches[batch].key
        assert key is not None
        self._records[key] = JobFiles.of(self._context.engine_dir, batch).record
        return key

    def _fate_of(self, job: SimulatedJob) -> Fate:
        """Return what becomes of a job that starts."""
        item, _, attempt = job.key.split("/")
        self.found.executions[job.key] += 1
        number = int(attempt.removeprefix("attempt_")) - self._lost[item]
        return self._by_item[item].fate(number)

    def _on_end(self, job: SimulatedJob) -> None:
        """Leave what a job leaves; one that the cluster ended leaves nothing."""
        assert job.started is not None
        assert job.ended is not None
        item = job.key.split("/")[0]
        work, lasted_s = self._by_item[item], job.ended - job.started
        self._chains[item] += lasted_s
        self.found.ends[job.state.value] += 1
        if job.state not in (State.COMPLETED, State.FAILED):
            self._lost[item] += 1
            self.found.hit.add(work.name)
            return
        is_good = job.state is State.COMPLETED
        record = record_of(job.key, self._facts, job.nodes, lasted_s, is_good=is_good)
        dirs = AttemptDirs(root=self._context.run_dir / job.key)
        off = _REGRESSION if work.is_regression else 0.0
        leave(dirs, self._records.pop(job.key), record, off=off if is_good else None)

    def _plan_trouble(self) -> None:
        """Have nodes fail and jobs be preempted, again and again."""
        cluster, chance = self.cluster, self._chance

        def fail() -> None:
            cluster.take_down(chance.choice(cluster.nodes), _DOWN_S)
            again(self._trouble.node_s, fail)

        def preempt() -> None:
            running = [job.number for job in cluster.jobs() if job.state is State.RUNNING]
            if running:
                cluster.preempt(chance.choice(running))
            again(self._trouble.preemption_s, preempt)

        def again(mean_s: float, event: Callable[[], None]) -> None:
            rate = len(cluster.nodes) / mean_s
            cluster.at(cluster.now + chance.expovariate(rate), event)

        again(self._trouble.node_s, fail)
        again(self._trouble.preemption_s, preempt)
