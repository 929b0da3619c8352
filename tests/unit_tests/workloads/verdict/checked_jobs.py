"""The job of one row of a project on a disk."""

from __future__ import annotations

from pathlib import Path

from recipe_rows import row_of

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.project import ProjectConfig
from pytest_megatron.workloads.recipe.model import Workload
from pytest_megatron.workloads.training.plan.plan import Setting
from pytest_megatron.workloads.verdict.job import CheckedJob, JobOptions, JobPlace, make_job


class Here:
    """A place that changes nothing."""

    def settle(self, setting: Setting, _workload: Workload) -> Setting:
        return setting


def job_of(
    root: Path, case_text: str, *, place: JobPlace | None = None, **spec: JsonValue
) -> CheckedJob:
    """Write the case, and plan its row."""
    usual: dict[str, JsonValue] = {"platforms": "dgx_h100", "gpus": 1}
    workload = row_of(**{**usual, "training_script_path": "train.py", **spec})
    case = root / "tests/functional_tests/test_cases/gpt/tp1/model_config.yaml"
    case.parent.mkdir(parents=True)
    case.write_text(case_text)
    (root / "train.py").touch()
    env = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "5,6,7"}
    options = JobOptions(
        setting=Setting(root=root, env=env, is_lightweight=False),
        run_dir=root / "run",
        project=ProjectConfig(),
    )
    return make_job(options, place or Here(), workload, "recipes/r.yaml::tp1[dev-dgx_h100]")
