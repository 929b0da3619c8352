"""The plugin that runs ranks of workloads on fake process groups, in place of training them."""

from __future__ import annotations

import time

import pytest
from typing_extensions import override

from pytest_megatron.errors import LaunchError, MegatronError
from pytest_megatron.layouts.model import Settings
from pytest_megatron.layouts.report import headline, problem_text, table
from pytest_megatron.layouts.start import memory_of, run_layout
from pytest_megatron.runs.record import RecordedLayout, RecordedWorkload
from pytest_megatron.workloads.items.collect import WorkloadItem
from pytest_megatron.workloads.items.training import TrainingPlugin, make_item_job
from pytest_megatron.workloads.training.plan.plan import PhasePlan, require_inputs

LAYOUT_DIR = "layout"


class FakeTrainingPlugin(TrainingPlugin):
    """Runs and compares ranks; judges no numbers."""

    @override
    def set_up(self, item: WorkloadItem) -> None:
        """Check that the workload can be planned."""

    @override
    def run_test(self, item: WorkloadItem) -> None:
        """Run ranks of the first phase, and fail if they disagree.

        Raises:
            pytest.fail.Exception: They do, or none could be run.
        """
        try:
            layout, duration_s, directory = self._run(item)
        except (MegatronError, OSError) as error:
            pytest.fail(
                self._session.redactor.text(self._record_broken(item, error)), pytrace=False
            )
        problem = problem_text(layout)
        record = RecordedWorkload(
            verdict="passed" if problem is None else "failed",
            problem=problem,
            summary=f"{headline(layout)}, {duration_s:.1f} s",
            duration_s=duration_s,
            directory=directory,
            platform=item.workload.platform,
            compared=False,
            layout=layout,
        )
        self._record(item, record)
        item.add_report_section("call", "ranks", table(layout))
        if problem is not None:
            pytest.fail(self._with_way_back(problem, item.nodeid), pytrace=False)

    def _run(self, item: WorkloadItem) -> tuple[RecordedLayout, float, str]:
        """Run single ranks of a workload, and return what they disagree on."""
        checked = make_item_job(self._session, item.workload, item.nodeid)
        require_inputs(checked.plan)
        phase, job = checked.plan.phases[0], checked.job
        program = _program(phase, item.nodeid)
        self._make_run_dir(job)
        phase.dirs.logs.mkdir(parents=True, exist_ok=True)
        phase.dirs.tensorboard.mkdir(exist_ok=True)
        assert self._session.options.fake_ranks is not None
        settings = Settings(
            directory=job.dirs.root / LAYOUT_DIR,
            world_size=phase.world_size,
            ranks_per_node=phase.world_size // phase.num_nodes,
        ).choose(self._session.options.fake_ranks)
        begin = time.monotonic()
        assert phase.start is not None
        layout = run_layout(
            settings,
            program,
            python=phase.start.python,
            env=phase.env,
            cwd=checked.plan.cwd,
            memory_bytes=memory_of(item.workload.platform),
        )
        return layout, round(time.monotonic() - begin, 3), str(job.dirs.root)


def _program(phase: PhasePlan, node_id: str) -> tuple[str, ...]:
    """Return the Python program of a phase.

    Raises:
        LaunchError: It has none.
    """
    if phase.start is None or phase.start.script is None:
        raise LaunchError(
            node_id,
            "--fake-ranks runs a Python program in each rank, and this row has a script or a "
            "command; name the program by training_script_path, or leave the row out",
        )
    return phase.start.program
