"""The plugins of a session that runs workloads: one trains and judges, one keeps results.

The first lives in the controller, and under pytest-xdist in each of its workers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from dataclasses import replace

import pytest

from pytest_megatron.base.files import write_json_atomically
from pytest_megatron.errors import LaunchError, MegatronError
from pytest_megatron.features import ExtensionPoint
from pytest_megatron.runs.headline import reproduce_line
from pytest_megatron.runs.layout import make_own_dir
from pytest_megatron.runs.record import RecordedWorkload, to_json
from pytest_megatron.session.options import (
    LOCAL,
    TRAINING_PLUGIN,
    WORKLOADS_PLUGIN,
    Options,
    has_workers,
    least_repeats,
    usage_errors,
)
from pytest_megatron.session.run_file import (
    RecordCarrier,
    RunFile,
    put_record,
    record_on,
    register_history,
    run_file_of,
)
from pytest_megatron.session.state import RunSession, register_reporters, show_no_stacks
from pytest_megatron.workloads.engine.api import Describing
from pytest_megatron.workloads.golden.policy import policy_named
from pytest_megatron.workloads.golden.store import golden_path
from pytest_megatron.workloads.items.collect import WorkloadItem
from pytest_megatron.workloads.items.goldens import GoldenWriter
from pytest_megatron.workloads.items.queue import close_engine, engine_of, register_queue
from pytest_megatron.workloads.items.report import (
    ItemRetries,
    LiveTerminal,
    WorkersProgress,
    item_record,
    mismatch,
    plan_text,
    print_summary,
    show_findings,
    training_failure,
)
from pytest_megatron.workloads.recipe.model import Workload
from pytest_megatron.workloads.training.plan.plan import Replay, Setting, require_inputs
from pytest_megatron.workloads.verdict.attempt import Verdict, evaluate
from pytest_megatron.workloads.verdict.compare import Judgement, judge
from pytest_megatron.workloads.verdict.driver import train
from pytest_megatron.workloads.verdict.job import (
    CheckedJob,
    JobOptions,
    Training,
    WorkloadJob,
    make_job,
)


class ResultsPlugin:
    """Lives in the controller alone: a worker's records reach it on the reports."""

    def __init__(self, session: RunSession, golden_writer: GoldenWriter, file: RunFile) -> None:
        self._session = session
        self._goldens = golden_writer
        self._file = file
        self._records: dict[str, RecordedWorkload] = {}

    def pytest_report_header(self) -> str:
        """Print the GPUs or engine of the workloads, and the path of their results."""
        gpus = self._session.facts.host.gpus
        found = f"{len(gpus)} x {gpus[0].name}" if gpus else "no GPU"
        where = self._session.shorten(str(self._session.run_dir))
        engine = self._session.options.executor
        found = found if engine == LOCAL else f"engine {engine}"
        return f"megatron: {found}, goldens: {self._session.options.golden}, results in {where}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep `run.json` up to date."""
        record = record_on(report)
        if not isinstance(record, RecordedWorkload):
            return
        self._records[report.nodeid] = record
        self._file.keep(report.nodeid, record)
        self._file.update()

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write goldens, if all of the run was clean."""
        is_written = self._goldens.finish(self._records, session.exitstatus)
        is_whole = is_written and self._file.problem is None
        if not is_whole and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print a line for each workload, and the state of goldens."""
        lines = list(self._goldens.lines)
        if self._file.problem is not None:
            lines.append(f"run.json is not complete: {self._file.problem}")
        print_summary(terminalreporter, self._records, lines, self._session.shorten)


def register_training(config: pytest.Config, session: RunSession) -> None:
    """Register the plugins that run the workloads of a session.

    Raises:
        pytest.UsageError: The policy is wrong.
    """
    with usage_errors():
        policy = policy_named(session.options.golden_policy, root=session.root)
    goldens = GoldenWriter(session, policy)
    manager = config.pluginmanager
    is_fake = session.options.fake_ranks is not None
    make_plugin = _FAKE_TRAINING.first() if is_fake else TrainingPlugin
    assert make_plugin is not None  # its feature declares the option
    manager.register(make_plugin(config, session, goldens), TRAINING_PLUGIN)
    if not session.is_worker:
        results = ResultsPlugin(session, goldens, run_file_of(config, session))
        manager.register(results, f"{WORKLOADS_PLUGIN}-results")
        if not is_fake:
            register_history(config, session)
        register_reporters(config, session)
    register_queue(config, session)
    if has_workers(config) and not session.is_worker:
        manager.register(WorkersProgress(config, session.run_dir), f"{WORKLOADS_PLUGIN}-progress")


class TrainingPlugin(RecordCarrier):
    """Trains and judges, for the items of one session."""

    def __init__(
        self,
        config: pytest.Config,
        session: RunSession,
        golden_writer: GoldenWriter,
    ) -> None:
        self._config = config
        self._session = session
        self._goldens = golden_writer

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """With `--plan`, print the workloads instead of running them.

        Raises:
            pytest.UsageError: The run directory holds an earlier run, or a workload of the plan
                would be refused.
        """
        if self._config.option.collectonly or self._session.is_worker:
            return None
        if not self._session.options.is_plan:
            self._session.refuse_used_run_dir()
            return None
        workloads = [item for item in session.items if isinstance(item, WorkloadItem)]
        refused = [item.nodeid for item in workloads if not self._print_plan(item)]
        if refused:
            raise pytest.UsageError(f"{', '.join(refused)}: would be refused, see above")
        return True

    def pytest_sessionfinish(self) -> None:
        """Leave nothing of the engine behind."""
        close_engine(self._session)

    def prepare(self, item: WorkloadItem) -> CheckedJob:
        """Put a workload's job together and make its directory.

        Raises:
            MegatronError: It cannot be planned, or one of its requirements is missing.
        """
        checked = make_item_job(self._session, item.workload, item.nodeid)
        job = checked.job
        lacking = engine_of(self._session).lacks(checked.needed)
        if lacking is not None:
            raise LaunchError(job.node_id, f"{lacking}; nothing was run")
        self._goldens.require(job)
        self._goldens.refuse_early(checked, is_here=not engine_of(self._session).is_queue)
        self._make_run_dir(job)
        self._goldens.copy(job)
        return checked

    def set_up(self, item: WorkloadItem) -> None:
        """Train a workload, as the setup of its item.

        Raises:
            pytest.fail.Exception: Nothing is known about the code: the workload cannot be
                planned or started, or the infrastructure failed to the end.
        """
        text = None
        try:
            item.training = self._train(item) if item.finish is None else item.finish()
        except (MegatronError, OSError) as error:
            text = self._session.redactor.text(self._record_broken(item, error))
        else:
            if item.training.verdict is Verdict.BROKEN:
                problem = training_failure(item.training)
                record = self._result(item.training, None, problem, is_judged=False)
                self._record(item, record)
                text = self._with_way_back(str(record.problem), item.nodeid)
        if text is not None:  # outside of `except`: the user sees one error, not a chain
            pytest.fail(text, pytrace=False)

    def run_test(self, item: WorkloadItem) -> None:
        """Judge a training, as the call of its item.

        Raises:
            pytest.fail.Exception: The training failed, or a metric disagrees.
        """
        assert item.training is not None
        try:
            self._record(item, self._judged(item.training))
        except (MegatronError, OSError) as error:
            self._record_broken(item, error, Verdict.FAILED)
        assert item.record is not None
        problem = item.record.problem
        if problem is None:
            return
        if item.record.is_expected:
            pytest.xfail(problem.partition("\n")[0])
        text = self._with_way_back(problem, item.nodeid)
        pytest.fail(text, pytrace=False)  # with --runxfail, the expected one too

    def _train(self, item: WorkloadItem) -> Training:
        """Train a workload, and print its progress.

        Raises:
            MegatronError: It cannot be planned or started, or one of its requirements is missing.
        """
        checked = self.prepare(item)
        live = LiveTerminal(self._config, item.nodeid, note=self._session.progress_note)
        with contextlib.closing(live):
            show_findings(self._session, checked, live)
            retries = ItemRetries(self._session, live)
            facts, engine = self._session.facts, engine_of(self._session)
            return train(checked, facts, live, retries, engine)

    def _judged(self, training: Training) -> RecordedWorkload:
        """Compare what a training measured, and return the result.

        One that failed is compared too, if only what came after the training did.

        Raises:
            MegatronError: The golden cannot be read, or must not be written.
        """
        job, judgement, golden = training.job, None, None
        if job.case is not None and training.attempts[-1].is_whole:
            golden = self._goldens.read_copy(job)
            facts = training.facts(self._session.facts)
            judgement = judge(training, golden, self._goldens.policy, facts)
            write_json_atomically(job.dirs.comparison, to_json(judgement.record))
        problem, has_failed = None, training.verdict is Verdict.FAILED
        if judgement is not None and (has_failed or judgement.failed):
            problem = mismatch(training, judgement)
        elif has_failed:
            problem = training_failure(training)
        record = self._result(training, judgement, problem)
        if not job.is_compared or record.is_expected or has_failed:
            return record
        is_wanted = problem is None and self._goldens.wants(has_golden=golden is not None)
        if problem is None and not is_wanted:
            return record
        kept = self._goldens.keep(training)
        record = replace(record, golden=kept)
        if not is_wanted:
            return record
        refusal = self._goldens.refusal(job.node_id, record, job.dirs.root)
        if refusal is None:
            return replace(record, golden=replace(kept, is_offered=True))
        refused = self._result(training, judgement, refusal)
        return replace(refused, golden=kept, summary=f"{record.summary}, no new golden")

    def _with_way_back(self, problem: str, node_id: str) -> str:
        """Return why a workload that was trained did not pass, and last how to have it again."""
        shown = self._session.redactor.text(problem)
        return f"{shown}\n{reproduce_line(self._session.where, node_id)}"

    def _record_broken(
        self,
        item: WorkloadItem,
        error: MegatronError | OSError,
        verdict: Verdict = Verdict.BROKEN,
    ) -> str:
        """Record a workload that could not be run or judged at all; return why."""
        text = str(error) if isinstance(error, MegatronError) else self._session.cannot_write(error)
        problem = self._session.shorten(text.removeprefix(f"{item.nodeid}: "))
        record = RecordedWorkload(
            verdict=verdict.value,
            problem=problem,
            summary=problem.partition("\n")[0],
            platform=item.workload.platform,
        )
        self._record(item, record)
        return problem

    def _result(
        self,
        training: Training,
        judgement: Judgement | None,
        problem: str | None,
        *,
        is_judged: bool = True,
    ) -> RecordedWorkload:
        """Return the record of a workload, with the expectation of its case if it was judged."""
        job, is_expected = training.job, False
        problem = None if problem is None else self._session.shorten(problem)
        if is_judged:
            problem, is_expected = evaluate(job.case, problem)
        verdict = training.verdict if problem is None or not is_judged else Verdict.FAILED
        record = item_record(
            training,
            judgement,
            verdict=Verdict.PASSED if is_expected else verdict,
            problem=None if problem is None else self._session.shorten(problem),
            is_expected=is_expected,
            is_uncompared=job.case is not None
            and (self._session.options.golden == "off" or job.setting.is_lightweight),
        )
        has_failed = training.verdict in (Verdict.BROKEN, Verdict.FAILED)
        if not has_failed or not job.is_compared or is_expected:
            return record
        return replace(record, golden=self._goldens.record_of(job))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        """Have no `faulthandler_timeout` for a training: its own limit counts."""
        if isinstance(item, WorkloadItem):
            show_no_stacks()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Put a workload's record on its last report, on which it also crosses from a worker.

        The summary has a line for a failure, in CI one for all of its lines: it gets the first one,
        without the name of pytest's own exception.
        """
        report = yield
        crash = getattr(report.longrepr, "reprcrash", None)
        if isinstance(item, WorkloadItem) and crash is not None:
            crash.message = crash.message.removeprefix("Failed: ").partition("\n")[0]
        if isinstance(item, WorkloadItem) and report.when == "teardown" and item.record:
            put_record(report, item.record)
        return report

    def _make_run_dir(self, job: WorkloadJob) -> None:
        """Make the directories of the run and of a workload.

        Raises:
            LaunchError: They cannot be made, or hold an earlier run.
        """
        try:
            self._session.run_dir.mkdir(parents=True, exist_ok=True)
            if self._session.options.run_dir is None:
                make_own_dir(self._session.root)
            job.dirs.root.mkdir()
        except FileExistsError as error:
            raise LaunchError(
                str(error.filename), "holds an earlier run; give another --run-dir"
            ) from error
        except OSError as error:
            raise LaunchError(
                str(error.filename or job.dirs.root),
                f"{error.strerror}; give another --run-dir; nothing was run",
            ) from error

    def _print_plan(self, item: WorkloadItem) -> bool:
        """Print the plan of a workload; return whether it would be started."""
        skip = item.get_closest_marker("skip")
        skipped = "" if skip is None else f"  skipped: {skip.kwargs['reason']}"
        is_named = any("::" in argument for argument in self._config.args)
        if skipped and not is_named:
            self._config.get_terminal_writer().line(f"{item.nodeid}\n{skipped}\n")
            return True
        with usage_errors():
            checked = make_item_job(self._session, item.workload, item.nodeid)
            job, engine = checked.job, engine_of(self._session)
            is_compared = job.is_compared and self._session.options.golden != "off"
            golden = golden_path(job.setting.root, job.workload) if is_compared else None
            lines = [skipped] if skipped else []
            lines += [f"  {self._session.shorten(found.line)}" for found in checked.findings]
            if isinstance(engine, Describing):
                shown = engine.describe(checked.plan, checked.needed)
                lines += [f"  {job.redactor(checked.plan).text(line)}" for line in shown]
        is_refused = any(finding.is_error for finding in checked.findings)
        try:
            require_inputs(checked.plan)
        except LaunchError as problem:  # the plans of the others are wanted as well
            lines.append(f"  {self._session.shorten(str(problem))}")
            is_refused = True
        text = plan_text(job, checked.plan, golden)
        self._config.get_terminal_writer().line("\n".join([text, *lines, ""]))
        return bool(skipped) or not is_refused

    def _record(self, item: WorkloadItem, record: RecordedWorkload) -> None:
        """Keep the record of a workload, also as properties of its item."""
        workload = item.workload
        item.record = replace(record, num_devices=workload.nodes * workload.gpus)
        item.user_properties.append(("megatron.verdict", record.verdict))
        item.user_properties.append(("megatron.attempts", len(record.attempts)))
        if record.causes:
            item.user_properties.append(("megatron.causes", ", ".join(record.causes)))
        if record.directory is not None:
            item.user_properties.append(("megatron.directory", record.directory))


_FAKE_TRAINING: ExtensionPoint[type[TrainingPlugin]] = ExtensionPoint("fake_training")


def make_item_job(session: RunSession, workload: Workload, node_id: str) -> CheckedJob:
    """Make the job of an item from the options of the session.

    Raises:
        MegatronError: The job is refused, see `make_job`; or a variable of a replay is no number.
    """
    options = session.options
    num_repeats = _num_repeats(options, workload)
    if options.is_writing_goldens:
        num_repeats = max(num_repeats, least_repeats())
    setting = Setting(
        root=session.root,
        env=os.environ if options.decision is None else {**os.environ, **options.decision.env},
        tee_ranks=options.tee_ranks,
        is_lightweight=options.is_lightweight,
        trace=None if options.tensor_trace == "off" else options.tensor_trace,
    )
    job_options = JobOptions(
        setting=setting,
        run_dir=session.run_dir,
        project=session.project,
        max_attempts=options.max_attempts,
        backoff_s=options.retry_backoff_s,
        table=session.table,
        replay=Replay.of(os.environ),
    )
    return make_job(job_options, engine_of(session), workload, node_id, num_repeats=num_repeats)


def _num_repeats(options: Options, workload: Workload) -> int:
    """Return the number of repeats of a workload: the option wins, then labels, then the recipe."""
    if options.num_repeats is None and options.decision is not None:
        return options.decision.num_repeats(workload.n_repeat)
    return options.num_repeats or workload.n_repeat or 1
