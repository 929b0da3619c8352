"""The files that run a plan in CI: a workflow for GitHub Actions, a pipeline for GitLab. Pure.

A job runs the command of the plan, so that it is the same at home. Actions are pinned by
commit; no text of a pull request becomes part of a script.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import yaml

from pytest_megatron.base.files import JsonValue, write_texts_together
from pytest_megatron.base.project import load_config
from pytest_megatron.base.templates import render
from pytest_megatron.ci.jobs import CiJob, PlanFile
from pytest_megatron.ci.table import HOSTED, CiTable, Workflow, load_table
from pytest_megatron.errors import CiError, ConfigError
from pytest_megatron.gpu.host import CPU_PLATFORM
from pytest_megatron.workloads.recipe.model import project_words

GITHUB_FILE = Path(".github/workflows/megatron.yml")
GITLAB_FILE = Path(".gitlab/megatron.yml")
_HISTORY = ".pytest_megatron/history.jsonl"
_GITLAB_TIMEOUT = 24 * 60  # minutes; a project's own limit may be lower


def _arguments(workflow: Workflow, kind: str) -> str:
    """Return further arguments for the command of a job, `unit` or `workload`, for a shell."""
    words = list(workflow.pytest_arguments)
    if kind == "workload" and workflow.executor:
        words += ["--megatron-executor", workflow.executor]
        words += (
            ["--megatron-executor-config", workflow.executor_config]
            if workflow.executor_config
            else []
        )
    words += ["-o", f"megatron_history={_HISTORY}"] if workflow.keeps_history else []
    return "".join(f" {shlex.quote(word)}" for word in words)


def github_workflow(workflow: Workflow, labels: Sequence[str]) -> str:
    """Return the text of a workflow for GitHub Actions.

    Args:
        workflow: Settings of the project.
        labels: Those that the decision reads; any other label starts and cancels nothing.
    """
    return render(
        "github.yml",
        workflow=workflow,
        labels=list(labels),
        hosted=HOSTED,
        history=_HISTORY,
        arguments={kind: _arguments(workflow, kind) for kind in ("unit", "workload")},
    )


def gitlab_pipeline(workflow: Workflow) -> str:
    """Return the text of the parent pipeline for GitLab, which plans and starts the child."""
    return render(
        "gitlab.yml",
        workflow=workflow,
        file=GITLAB_FILE.as_posix(),
        push_branches=_branch_pattern(workflow.branches),
    )


def _branch_pattern(branches: Sequence[str]) -> str:
    """Return GitHub's patterns of branches as a regular expression of GitLab."""
    wild = {r"\*\*": ".*", r"\*": "[^/]*", r"\?": "[^/]"}
    patterns = []
    for branch in branches:
        pattern = re.escape(branch).replace("/", r"\/")
        for glob, regex in wild.items():
            pattern = pattern.replace(glob, regex)
        patterns.append(pattern)
    return f"/^({'|'.join(patterns)})$/"


def child_pipeline(plan: PlanFile, workflow: Workflow, where: str) -> str:
    """Return GitLab's child pipeline of a plan: a job for each of its jobs, and the verdict.

    Args:
        plan: Output of `pytest-megatron plan --format json`.
        workflow: Settings of the project.
        where: Name of the plan, for errors.

    Raises:
        CiError: It has no jobs, or one without a command.
    """
    image = workflow.images.get(plan.image)
    jobs: dict[str, JsonValue] = {"stages": ["plan", "jobs", "verdict"]}
    jobs["plan"] = _fetch_plan(workflow)
    for job in plan.jobs:
        if not job.command:
            raise CiError(where, f"job {job.id!r} has no command; expected what 'plan' prints")
        if f"test {job.id}" in jobs:
            raise CiError(where, f"has two jobs with the id {job.id!r}, expected each once")
        jobs[f"test {job.id}"] = {
            **_child_job(job, workflow, image),
            "interruptible": plan.event == "pull_request",
            "retry": {"max": 1, "when": ["runner_system_failure", "scheduler_failure"]},
        }
    if len(jobs) == 2:  # noqa: PLR2004 - stages and the plan's own
        raise CiError(where, "has no jobs, expected what 'plan --format json' prints")
    jobs["verdict"] = {
        "stage": "verdict",
        "image": f"python:{workflow.python}",
        "timeout": "20 minutes",
        "when": "always",
        "script": [
            *workflow.light_setup,
            "mkdir -p megatron-jobs",
            "pytest-megatron ci summary megatron-jobs --expect plan.json --output summary",
        ],
        "artifacts": {
            "when": "always",
            "paths": ["summary"],
            "expire_in": f"{workflow.retention_days} days",
        },
    }
    return yaml.safe_dump(jobs, sort_keys=False, width=1000)


def _fetch_plan(workflow: Workflow) -> dict[str, JsonValue]:
    """Return the job that hands the parent's plan on to the verdict."""
    return {
        "stage": "plan",
        "timeout": "20 minutes",
        "needs": [{"pipeline": "$MEGATRON_PARENT_PIPELINE", "job": "megatron:plan"}],
        "variables": {"GIT_STRATEGY": "none"},
        "script": ["test -s plan.json"],
        "artifacts": {"paths": ["plan.json"], "expire_in": f"{workflow.retention_days} days"},
    }


def _child_job(planned: CiJob, workflow: Workflow, image: str | None) -> dict[str, JsonValue]:
    """Return a job of GitLab's child pipeline."""
    platform = planned.platform or CPU_PLATFORM
    labels = workflow.all_runners.get(platform, (platform,))
    minutes = min(planned.timeout_minutes, _GITLAB_TIMEOUT)
    directory = "megatron-jobs/$CI_JOB_ID"
    private = "megatron-private/$CI_JOB_ID"  # uploaded under the other name, without secrets
    job = shlex.join([planned.id, "--test-case", planned.test_case or planned.id])
    found: dict[str, JsonValue] = {"stage": "jobs", "timeout": f"{minutes} minutes"}
    if platform != CPU_PLATFORM or labels != (HOSTED,):
        found["tags"] = list(labels)
    if image is not None:
        found["image"] = image
        found["variables"] = {"PYTEST_MEGATRON_IMAGE": image}
    elif platform == CPU_PLATFORM:
        found["image"] = f"python:{workflow.python}"
    command = planned.command + _arguments(workflow, planned.kind)
    line = f'{command} --megatron-run-dir "{private}/run" --junit-xml "{private}/junit.xml"'
    line += f' 2>&1 | tee "{private}/pytest.log"'
    found["script"] = [
        *workflow.setup,
        f'pytest-megatron ci job {job} --directory "{private}"',
        f"bash -euo pipefail -c {shlex.quote(line)}",
    ]
    found["after_script"] = [  # also of a killed job; where it fails, nothing is uploaded
        f'pytest-megatron ci redact "{private}"',
        f'mkdir -p megatron-jobs && mv "{private}" "{directory}"',
    ]
    found["artifacts"] = {
        "when": "always",
        "name": f"logs-{planned.id}-$CI_PIPELINE_ID-$CI_JOB_ID",
        "paths": [directory],
        "exclude": [f"{directory}/run/**/checkpoints/**/*", f"{directory}/run/**/data_cache/**/*"],
        "reports": {"junit": f"{directory}/junit.xml"},
        "expire_in": f"{workflow.retention_days} days",
    }
    return found


_TABLE = "[tool.pytest-megatron.ci.workflow]"


def project_workflow(root: Path) -> Workflow:
    """Return the settings of a project for its workflow.

    Raises:
        ConfigError: A key of `[tool.pytest-megatron.ci]` is unknown, or its value is wrong.
    """
    return _read_table(root).workflow


def _read_table(root: Path) -> CiTable:
    return load_table(load_config(root), project_words(root))


def write_files(root: Path, kind: str, *, is_forced: bool) -> list[str]:
    """Write the file for `github` or `gitlab`; return lines for the user.

    Raises:
        ConfigError: The project's table is wrong.
        CiError: The file is there and is not to be replaced, or cannot be written.
    """
    table = _read_table(root)
    workflow = table.workflow
    if not workflow.setup:
        raise ConfigError(
            f"pyproject.toml: {_TABLE} setup",
            "is missing, expected the shell lines that install the project and pytest-megatron on "
            "a runner, such as setup = [\"python -m pip install -e '.[test]'\"]; add it",
        )
    is_github = kind == "github"
    path = GITHUB_FILE if is_github else GITLAB_FILE
    file = root / path
    if (file.exists() or file.is_symlink()) and not is_forced:
        raise CiError(path.as_posix(), "is there already; --force replaces it")
    text = github_workflow(workflow, table.known_labels) if is_github else gitlab_pipeline(workflow)
    try:
        write_texts_together({file: text})
    except OSError as error:
        raise CiError(path.as_posix(), f"cannot be written: {error.strerror}") from error
    include = f"include it in .gitlab-ci.yml: include: [{{local: {GITLAB_FILE.as_posix()}}}]"
    return [
        f"wrote {path.as_posix()}",
        f"after a change of {_TABLE}, write it again with --force",
        "then require the check 'megatron verdict' on the branch" if is_github else include,
    ]
