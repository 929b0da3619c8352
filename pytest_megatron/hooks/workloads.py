"""The role that selects, runs and records workloads in a pytest session.

Lives in the controller, and under pytest-xdist in each of its workers, which take the run directory
from the controller. Only the controller writes `run.json` and goldens.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from pytest_megatron.config import load_config
from pytest_megatron.errors import (
    CaseError,
    GoldenError,
    LaunchError,
    MegatronError,
    SelectionError,
)
from pytest_megatron.files import JsonValue, write_json_atomically
from pytest_megatron.golden.compare import Policy, policy_named
from pytest_megatron.golden.provenance import Golden
from pytest_megatron.golden.store import golden_path, read_golden
from pytest_megatron.hooks.goldens import GoldenWriter, make_own_dir
from pytest_megatron.hooks.item import WorkloadItem
from pytest_megatron.hooks.options import MIN_REFRESH_REPEATS, Options
from pytest_megatron.hooks.terminal import LiveTerminal, Quiet, print_plan, print_summary
from pytest_megatron.launch.case import Case, read_case
from pytest_megatron.launch.facts import Facts, gather_facts, utc_now
from pytest_megatron.launch.layout import item_dirs
from pytest_megatron.launch.plan import Setting
from pytest_megatron.recipe.places import case_path
from pytest_megatron.recipe.select import Selection, select
from pytest_megatron.recipe.vocabulary import Vocabulary
from pytest_megatron.report.record import item_record
from pytest_megatron.report.text import mismatch, training_failure
from pytest_megatron.verdict.attempt import Attempt
from pytest_megatron.verdict.decide import Verdict
from pytest_megatron.verdict.judge import judge
from pytest_megatron.verdict.training import Job, Training, plan_job, train

_RUNS_DIR = Path(".pytest_megatron/runs")
_ARGUMENTS_KEY = "megatron_arguments"
_RUN_DIR_KEY = "megatron_run_dir"
_USAGE_ERROR_KEY = "megatron_usage_error"


class WorkloadPlugin:
    """Everything about workloads that one session shares.

    Attributes:
        options: What the user asked for.
        run_dir: Made when the first workload starts.
        vocabulary: Words that recipes of this project may use.
    """

    def __init__(self, config: pytest.Config, options: Options) -> None:
        """Prepare a session; starts and writes nothing.

        Raises:
            pytest.UsageError: The project's settings or the policy are wrong.
        """
        self._config = config
        self._root = config.rootpath
        self.options = options
        worker: dict[str, str] | None = getattr(config, "workerinput", None)
        self._is_worker = worker is not None
        given = worker[_RUN_DIR_KEY] if worker is not None else None
        self.run_dir = Path(given) if given else self._new_run_dir()
        arguments = [str(a) for a in config.invocation_params.args]
        self._arguments: list[str] = (
            arguments if worker is None else json.loads(worker[_ARGUMENTS_KEY])
        )
        self._goldens = GoldenWriter(self._root, options, self._arguments)
        self._records: dict[str, JsonValue] = {}
        self._started = utc_now()
        self._usage_error: str | None = None  # of a worker
        self._record_problem: str | None = None  # why run.json lacks something
        if options.is_plan:
            config.option.dist = "no"  # pytest-xdist's workers have no terminal to print to
        # One malformed recipe is an error of this run and must not keep the others from running.
        config.option.continue_on_collection_errors = True
        try:
            words = load_config(self._root)
            self.vocabulary = Vocabulary().extended(
                scopes=words.scopes, platforms=words.platforms, environments=words.environments
            )
            self._policy: Policy = policy_named(options.golden_policy)
        except MegatronError as error:
            raise pytest.UsageError(str(error)) from None

    # selection

    @pytest.hookimpl(tryfirst=True)  # before -k and -m: an empty selection is about ours alone
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Keep the workloads that the options select; skip those that this host cannot run."""
        workloads = [item for item in items if isinstance(item, WorkloadItem)]
        try:
            chosen = {id(w) for w in self._selected(workloads)}
        except MegatronError as error:
            if not self._is_worker:
                raise pytest.UsageError(str(error)) from None
            # pytest-xdist would take an exception for a crash; the controller says it instead.
            workeroutput: dict[str, str] = config.workeroutput  # type: ignore[attr-defined]
            workeroutput[_USAGE_ERROR_KEY] = str(error)
            items.clear()
            return
        dropped = [item for item in workloads if id(item.workload) not in chosen]
        if dropped:
            gone = set(dropped)
            config.hook.pytest_deselected(items=dropped)
            items[:] = [item for item in items if item not in gone]
        if not self.options.selection["platform"]:
            for item in workloads:
                lacking = self._facts.host.lacks(item.workload.platform, item.workload.gpus)
                if lacking is not None:
                    item.add_marker(pytest.mark.skip(reason=lacking))

    def _selected(self, items: list[WorkloadItem]) -> list[object]:
        """Return the workloads that the options select."""
        workloads = [item.workload for item in items]
        if not self.options.has_selection:
            return list(workloads)
        words = {name.replace("-", "_"): w for name, w in self.options.selection.items()}
        wanted = Selection(**words)
        try:
            return list(select(workloads, wanted, self.vocabulary))
        except SelectionError:
            if self.options.is_empty_allowed:
                return []
            raise

    # running

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """With `--plan`, print what would run instead of running it.

        Raises:
            pytest.UsageError: The run directory holds an earlier run.
        """
        if self._config.option.collectonly or self._is_worker:
            return None
        if not self.options.is_plan:
            if (self.run_dir / "run.json").exists():
                where = self._shorten(str(self.run_dir))
                raise pytest.UsageError(f"--run-dir: {where} holds an earlier run; give another")
            return None
        if session.testsfailed:
            return None
        for item in session.items:
            if isinstance(item, WorkloadItem):
                self._print_plan(item)
        return True

    def train(self, item: WorkloadItem) -> Training:
        """Train a workload.

        Raises:
            MegatronError: It cannot be planned or started, or what it needs is missing.
        """
        job = self._job(item)
        lacking = self._facts.host.lacks(job.workload.platform, job.workload.gpus)
        if lacking is not None:
            raise LaunchError(job.node_id, f"{lacking}; nothing was run")
        self._golden_of(item, job)  # a missing golden is worth knowing before the training
        self._goldens.refuse_early(self._facts)
        self._make_run_dir(job)
        live = self._listener(item)

        def on_retry(attempt: Attempt, pause_s: float) -> None:
            assert attempt.cause is not None
            live.on_lines(
                [f"attempt {attempt.number}: {attempt.cause.text}; again in {pause_s:g} s"]
            )

        with contextlib.closing(live):
            return train(job, self._facts, live, on_retry=on_retry)

    def judge(self, item: WorkloadItem, training: Training) -> str | None:
        """Compare a training with its golden; return what disagrees, or None.

        Raises:
            MegatronError: The golden cannot be read, or must not be written.
        """
        job = training.job
        if job.case is None or job.metric_names is None:
            self._record(item, item_record(training, None))
            return None
        golden = self._golden_of(item, job)
        judgement = judge(training, golden, self._policy, self._facts)
        write_json_atomically(job.dirs.comparison, judgement.as_json())
        problem = self._shorten(mismatch(training, judgement)) if judgement.failed else None
        candidate: dict[str, JsonValue] = {}
        target = self._golden_path(job)
        if problem is None and job.is_compared and self._goldens.wants(target):
            candidate, problem = self._goldens.take(training, target, self._policy, self._facts)
        verdict = training.verdict if problem is None else Verdict.FAILED
        record = item_record(training, judgement, verdict=verdict, problem=problem)
        self._record(item, {**record, "golden": candidate})
        return problem

    def record_training(self, item: WorkloadItem, training: Training) -> str:
        """Record a training that failed or broke; return why."""
        problem = self._shorten(training_failure(training))
        self._record(item, item_record(training, None, problem=problem))
        return problem

    def record_broken(self, item: WorkloadItem, error: MegatronError | OSError) -> str:
        """Record a workload that could not be run or judged at all; return why."""
        text = str(error) if isinstance(error, MegatronError) else self._cannot_write(error)
        problem = self._shorten(text)
        self._record(
            item,
            {
                "verdict": Verdict.BROKEN.value,
                "problem": problem,
                "summary": problem,
                "attempts": [],
            },
        )
        return problem

    # results

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Put a workload's record on its last report, on which it also crosses from a worker."""
        report = yield
        if isinstance(item, WorkloadItem) and report.when == "teardown" and item.record:
            report.__dict__["megatron_workload"] = item.record  # pytest carries it along
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep `run.json` up to date, so that a run that is killed still says what it did."""
        record: JsonValue = getattr(report, "megatron_workload", None)
        if record is None or self._is_worker:
            return
        self._records[report.nodeid] = record
        try:
            self._write_run()
            self._record_problem = None
        except OSError as error:  # the disk is full; the terminal still says what it was
            self._record_problem = self._cannot_write(error)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write goldens, if all of the run was clean."""
        if not self._is_worker:
            is_written = self._goldens.finish(list(self._records.values()), session.exitstatus)
            is_written = is_written and self._record_problem is None
            if not is_written and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
            if self._usage_error is not None:
                session.exitstatus = pytest.ExitCode.USAGE_ERROR

    def pytest_report_header(self) -> str:
        """Say on what the workloads will run, and where their results go."""
        gpus = self._facts.host.gpus
        found = f"{len(gpus)} x {gpus[0].name}" if gpus else "no GPU"
        where = self._shorten(str(self.run_dir))
        return f"megatron: {found}, goldens: {self.options.golden}, results in {where}"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print a line for each workload, and what became of goldens."""
        lines = [self._shorten(line) for line in self._goldens.lines]
        if self._record_problem is not None:
            lines.append(f"run.json is not complete: {self._shorten(self._record_problem)}")
        print_summary(terminalreporter, self._records, lines)
        if self._usage_error is not None:
            terminalreporter.write_line(f"ERROR: {self._usage_error}", red=True)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: object) -> None:
        """Tell a worker of pytest-xdist where the run's directory is and what the user typed."""
        workerinput: dict[str, str] = node.workerinput  # type: ignore[attr-defined]
        workerinput[_RUN_DIR_KEY] = str(self.run_dir)
        workerinput[_ARGUMENTS_KEY] = json.dumps(self._arguments)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """Learn from a worker of pytest-xdist what is wrong with the selection."""
        workeroutput: dict[str, str] = getattr(node, "workeroutput", {})
        self._usage_error = workeroutput.get(_USAGE_ERROR_KEY, self._usage_error)

    # inside

    @property
    def _facts(self) -> Facts:
        return gather_facts(self._root)

    def _new_run_dir(self) -> Path:
        if self.options.run_dir is not None:
            return Path(self._config.invocation_params.dir, self.options.run_dir).absolute()
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        return self._root / _RUNS_DIR / name

    def _make_run_dir(self, job: Job) -> None:
        """Make the directories of the run and of a workload.

        Raises:
            LaunchError: They cannot be made, or hold an earlier run.
        """
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            if self.options.run_dir is None:
                make_own_dir(self._root)
            job.dirs.root.mkdir()
        except FileExistsError as error:
            raise LaunchError(
                str(error.filename), "holds an earlier run; give another --run-dir"
            ) from error
        except OSError as error:
            raise LaunchError(
                str(error.filename), f"{error.strerror}; give another --run-dir; nothing was run"
            ) from error

    def _job(self, item: WorkloadItem) -> Job:
        """Put together what the options and the row say.

        Raises:
            CaseError: The case cannot be read, or names no metric.
        """
        options, workload = self.options, item.workload
        num_repeats = options.num_repeats or workload.n_repeat or 1
        if self._goldens.is_writing:
            num_repeats = max(num_repeats, MIN_REFRESH_REPEATS)
        setting = Setting(
            root=self._root,
            env=os.environ,
            tee_ranks=options.tee_ranks,
            is_lightweight=options.is_lightweight,
            num_repeats=num_repeats,
        )
        return Job(
            node_id=item.nodeid,
            workload=workload,
            case=self._case(item),
            dirs=item_dirs(self.run_dir, item.nodeid),
            setting=setting,
            num_repeats=1 if options.is_lightweight else num_repeats,
            max_attempts=options.max_attempts,
        )

    def _case(self, item: WorkloadItem) -> Case | None:
        workload = item.workload
        if workload.script is not None:
            return None
        path = case_path(self._root, workload)
        case = read_case(path)
        if case.metrics == ():
            raise CaseError(
                str(path),
                "METRICS is empty, so nothing would be compared; name metrics, or leave it out",
            )
        return case

    def _golden_path(self, job: Job) -> Path:
        w = job.workload
        return golden_path(
            self._root,
            model=w.model,
            test_case=w.test_case,
            environment=w.environment,
            platform=w.platform,
        )

    def _golden_of(self, item: WorkloadItem, job: Job) -> Golden | None:
        """Return the golden to compare with; None where nothing is to be compared.

        Raises:
            GoldenError: It should be there and is not, or cannot be read.
        """
        if not job.is_compared or self.options.golden in ("off", "refresh"):
            return None
        path = self._golden_path(job)
        if not path.exists():
            if self.options.golden == "record":
                return None
            raise GoldenError(
                str(path),
                f"there is no golden for {item.nodeid}, nothing was run; write one with "
                f"`--golden record`, or run without comparing with `--golden off`",
            )
        return read_golden(path)

    def _print_plan(self, item: WorkloadItem) -> None:
        if (skip := item.get_closest_marker("skip")) is not None:
            self._config.get_terminal_writer().line(
                f"{item.nodeid}\n  skipped: {skip.kwargs['reason']}\n"
            )
            return
        try:
            job = self._job(item)
            print_plan(self._config, job, plan_job(job), self._golden_path(job))
        except MegatronError as error:
            raise pytest.UsageError(str(error)) from None

    def _listener(self, item: WorkloadItem) -> LiveTerminal | Quiet:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if self._is_worker or reporter is None:
            return Quiet()
        return LiveTerminal(self._config, reporter, item.nodeid)

    def _record(self, item: WorkloadItem, record: dict[str, JsonValue]) -> None:
        item.record = record
        item.user_properties.append(("megatron.verdict", record["verdict"]))
        attempts = record["attempts"]
        assert isinstance(attempts, list)
        item.user_properties.append(("megatron.attempts", len(attempts)))
        if "directory" in record:
            item.user_properties.append(("megatron.directory", record["directory"]))

    def _write_run(self) -> None:
        if not self.run_dir.is_dir():
            return  # nothing could be started
        run: dict[str, JsonValue] = {
            "schema": 1,
            "started": self._started,
            "updated": utc_now(),
            "arguments": list[JsonValue](self._arguments),
            **self._facts.as_json(),
            "items": self._records,
        }
        write_json_atomically(self.run_dir / "run.json", run)
        if self.options.run_dir is None:
            _link_latest(self.run_dir)

    def _cannot_write(self, error: OSError) -> str:
        where = error.filename or self.run_dir
        return f"{where}: {error.strerror}; make room, or give another --run-dir"

    def _shorten(self, text: str) -> str:
        """Name files as the user would type them here."""
        return text.replace(f"{self._config.invocation_params.dir}{os.sep}", "")


def _link_latest(run_dir: Path) -> None:
    """Point `latest` beside the run at it; the link is replaced, never missing."""
    new = run_dir.parent / f".latest-{run_dir.name}"
    new.unlink(missing_ok=True)
    new.symlink_to(run_dir.name)
    new.replace(run_dir.parent / "latest")
