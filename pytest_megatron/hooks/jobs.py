"""From an item and the options to a job: what exactly is trained, and what it is compared with."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from pytest_megatron.ci.jobs import num_repeats_of
from pytest_megatron.errors import GoldenError, LaunchError
from pytest_megatron.golden.provenance import Golden
from pytest_megatron.golden.store import golden_path, new_golden_path, read_golden
from pytest_megatron.hooks.options import MIN_REFRESH_REPEATS, Options
from pytest_megatron.hooks.session import RunSession
from pytest_megatron.launch.case import Evaluation
from pytest_megatron.launch.layout import item_dirs
from pytest_megatron.launch.plan import Setting
from pytest_megatron.launch.project_copy import look_at_machine
from pytest_megatron.launch.replay import Replay
from pytest_megatron.launch.script_row import Machine
from pytest_megatron.launch.starter import FT_PACKAGE
from pytest_megatron.recipe.model import Workload
from pytest_megatron.verdict.job import Job
from pytest_megatron.verdict.modes import check_golden_kind
from pytest_megatron.verdict.retry import policy_of
from pytest_megatron.verdict.row_case import read_case_of


def make_job(session: RunSession, workload: Workload, node_id: str) -> Job:
    """Put together what the options and the row say.

    Raises:
        CaseError: The case cannot be read, or names no metric.
        LaunchError: What is to be done again is not said in numbers.
        RecipeError: What the row says about retries means nothing.
    """
    options, replay = session.options, Replay.of(os.environ)
    workload = replay.resized(workload)
    num_repeats = _num_repeats(options, workload)
    if options.is_writing_goldens:
        num_repeats = max(num_repeats, MIN_REFRESH_REPEATS)
    setting = Setting(
        root=session.root,
        env=os.environ if options.decision is None else {**os.environ, **options.decision.env},
        tee_ranks=options.tee_ranks,
        is_lightweight=options.is_lightweight,
        has_ft_launcher=importlib.util.find_spec(FT_PACKAGE) is not None,
        machine=Machine() if workload.script is None else look_at_machine(os.environ),
        secret_names=session.project.secret_names,
        kept_variables=session.project.kept_variables,
    )
    return Job(
        node_id=node_id,
        workload=workload,
        case=read_case_of(session.root, workload),
        dirs=item_dirs(session.run_dir, node_id),
        setting=session.engine.settle(setting, workload),
        num_repeats=1 if options.is_lightweight else num_repeats,
        retry=policy_of(
            workload,
            max_attempts=options.max_attempts,
            backoff_s=options.retry_backoff_s,
            table=session.table,
        ),
        table=session.table,
        replay=replay,
    )


def _num_repeats(options: Options, workload: Workload) -> int:
    """Return how often a workload is trained: what is typed wins, then labels, then the recipe."""
    if options.num_repeats is None and options.decision is not None:
        return num_repeats_of(workload, options.decision)
    return options.num_repeats or workload.n_repeat or 1


def golden_path_of(job: Job) -> Path:
    """Return where the golden of a job is, or would be."""
    return golden_path(job.setting.root, job.workload)


def new_golden_path_of(job: Job) -> Path:
    """Return where a new golden of a job is written."""
    return new_golden_path(job.setting.root, job.workload)


def read_golden_of(session: RunSession, job: Job) -> Golden | None:
    """Return the golden to compare with; None where nothing is to be compared.

    Raises:
        GoldenError: It should be there and is not, or cannot be read.
    """
    mode = session.options.golden
    if not job.is_compared or mode in ("off", "refresh"):
        return None
    path = golden_path_of(job)
    if not path.exists():
        is_to_fail = job.case is not None and job.case.evaluation is Evaluation.XPASS
        if mode == "record" or is_to_fail:
            return None
        raise GoldenError(
            str(path),
            f"there is no golden for {job.node_id}, nothing was run; write one with "
            f"`--golden record`, or run without comparing with `--golden off`",
        )
    golden = read_golden(path)
    if job.case is not None:
        check_golden_kind(job.case, golden)
    return golden


def keep_golden(session: RunSession, job: Job) -> None:
    """Copy the golden into the workload's directory: its page must show what was compared with.

    Raises:
        LaunchError: It cannot be copied.
    """
    path = golden_path_of(job)
    if job.is_compared and session.options.golden != "off" and path.is_file():
        try:
            shutil.copyfile(path, job.dirs.golden)
        except OSError as error:
            raise LaunchError(
                str(job.dirs.golden),
                f"{error.strerror}; give another --run-dir, or make room; nothing was run",
            ) from error
