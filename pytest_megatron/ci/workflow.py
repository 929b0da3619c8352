"""The files that run a plan in CI: a workflow for GitHub Actions, a pipeline for GitLab. Pure.

A job runs the command of the plan, so that it is the same at home. Actions are pinned by
commit; no text of a pull request becomes part of a script.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from pytest_megatron.base.files import JsonValue, write_texts_together
from pytest_megatron.base.project import load_config
from pytest_megatron.ci.jobs import CiJob, PlanFile
from pytest_megatron.ci.table import HOSTED, CiTable, Workflow, load_table
from pytest_megatron.errors import CiError, ConfigError, RecipeError
from pytest_megatron.gpu.host import CPU_PLATFORM
from pytest_megatron.workloads.recipe.expand import Profile
from pytest_megatron.workloads.recipe.load import find_recipes, read_recipe
from pytest_megatron.workloads.recipe.model import Vocabulary, project_words

GITHUB_FILE = Path(".github/workflows/megatron.yml")
GITLAB_FILE = Path(".gitlab/megatron.yml")
_TEMPLATES = Path(__file__).parent / "templates"
_CHECKOUT = "actions/checkout@08c6903cd8c0fde910a37f88322edcfb5dd907a8 # v5.0.0"
_PYTHON = "actions/setup-python@a26af69be951a213d495a4c3e4e4022e16d87065 # v5.6.0"
_UPLOAD = "actions/upload-artifact@ea165f8d65b6e75b540449e92b4886f43607fa02 # v4.6.2"
_DOWNLOAD = "actions/download-artifact@d3f86a106a0bac45b974a628896c90dbdf5c8093 # v4.3.0"
_CACHE = "actions/cache@5a3ec84eff668545956fd18022155c47e93e2684 # v4.2.3"
_HISTORY = ".pytest_megatron/history.jsonl"
_DURATIONS = ".pytest_megatron/durations.xml"
_JUNIT = "summary/junit.xml"
_TRUSTED = (
    "(github.event_name != 'pull_request' || "
    "github.event.pull_request.head.repo.full_name == github.repository)"
)
_COMMENT = """\
- name: Comment on the pull request
  if: always() && github.event_name == 'pull_request'
  env:
    GITHUB_TOKEN: ${{ github.token }}
  run: pytest-megatron ci comment summary/comment.md"""
_WITHOUT_LAYOUTS = {
    "workload_needs": "plan",
    "workload_if": "needs.plan.outputs.has_workloads == 'true'",
    "workload_matrix": "needs.plan.outputs.workload_jobs",
    "verdict_needs": "",
    "layout_results": "",
}
_AFTER_LAYOUTS = {
    "workload_needs": "[plan, rows]",
    "workload_if": "needs.plan.outputs.has_workloads == 'true' && !cancelled() && "
    "(needs.rows.result == 'success' || needs.plan.outputs.has_layouts == 'false') && "
    "needs.rows.outputs.workload_jobs != '[]'",
    "workload_matrix": "needs.rows.outputs.workload_jobs || needs.plan.outputs.workload_jobs",
    "verdict_needs": "layouts, rows, ",
    "layout_results": '"layouts": "${{ needs.layouts.result }}", ',
}
_MOST_ENTRIES = 50_000  # of the history, sorted by time: some 16 MB
_SHARED_MEMORY = "--ipc=host --ulimit memlock=-1"
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
    words += ["--megatron-history", _HISTORY] if workflow.keeps_history else []
    return "".join(f" {shlex.quote(word)}" for word in words)


def github_workflow(workflow: Workflow, labels: Sequence[str]) -> str:
    """Return the text of a workflow for GitHub Actions.

    Args:
        workflow: Settings of the project.
        labels: Those that the decision reads; any other label starts and cancels nothing.
    """
    blocks = {
        "checkout": f"- uses: {_CHECKOUT}\n  with:\n    persist-credentials: false",
        "python": _python_step(workflow),
        "job_python": "" if workflow.images else _python_step(workflow),
        "plan_setup": _step("Set up", workflow.light_setup),
        "setup": _step("Set up", workflow.setup),
        "container": _container(workflow),
        "image_check": _image_check(workflow),
        "secrets": "".join(f"{name}: ${{{{ secrets.{name} }}}}\n" for name in workflow.secrets),
        "redact_env": _redact_env(workflow),
        "cache": _cache_step(workflow),
        "fetch_history": _history_step(workflow, "restore"),
        "keep_history": _keep_history(workflow),
        "comment": _COMMENT if workflow.comments else "",
        "comment_permission": "pull-requests: write" if workflow.comments else "",
    }
    words = {
        "branches": json.dumps(list(workflow.branches)),
        "nightly": _quoted(workflow.nightly),
        "weekly": _quoted(workflow.weekly),
        "hosted": HOSTED,
        "runner": _runner(workflow),
        "upload": _UPLOAD,
        "download": _DOWNLOAD,
        "trusted": _TRUSTED,
        "plan_arguments": "".join(f" {shlex.quote(word)}" for word in workflow.plan),
        "retention_days": str(workflow.retention_days),
        "is_other_label": _is_other_label(labels),
        "durations": f'"{_DURATIONS}"',
    }
    jobs = {
        f"{kind}_job": _fill(
            _read("github_job.yml"), blocks, {**words, "arguments": _arguments(workflow, kind)}
        )
        for kind in ("unit", "workload", "layout")
    }
    layouts = _fill(_read("github_layouts.yml"), {**blocks, **jobs}, words)
    blocks |= {**jobs, "layouts": layouts if workflow.layouts else ""}
    words |= _AFTER_LAYOUTS if workflow.layouts else _WITHOUT_LAYOUTS
    return _fill(_read("github.yml"), blocks, words)


def _is_other_label(labels: Sequence[str]) -> str:
    """Return the expression that a label came or went which the decision does not read."""
    known = _json(list(labels))
    return (
        "(github.event.action == 'labeled' || github.event.action == 'unlabeled') && "
        f"!contains(fromJSON('{known}'), github.event.label.name)"
    )


def _redact_env(workflow: Workflow) -> str:
    """Return the variables whose values are secrets in the files of a job."""
    lines = [f"  {name}: ${{{{ secrets.{name} }}}}" for name in workflow.secrets]
    return "\n".join(["env:", *lines]) if lines else ""


def _cache_step(workflow: Workflow) -> str:
    """Return the YAML of the step that restores the cache."""
    if not workflow.cache:
        return ""
    lines = ["- name: Cache", f"  uses: {_CACHE}", "  with:", "    path: |"]
    lines += [f"      {path}" for path in workflow.cache]
    lines.append("    key: megatron-${{ runner.os }}-${{ hashFiles('pyproject.toml', 'uv.lock') }}")
    return "\n".join(lines)


def _history_step(workflow: Workflow, verb: str) -> str:
    """Return a step that restores or saves the history; the newest one of the branch is taken."""
    if not workflow.keeps_history:
        return ""
    action = _CACHE.replace("actions/cache@", f"actions/cache/{verb}@")
    lines = [f"- name: {verb.capitalize()} the history", f"  uses: {action}", "  with:"]
    lines += ["    path: |", f"      {_HISTORY}", f"      {_DURATIONS}"]
    lines.append("    key: megatron-history-${{ github.run_id }}-${{ github.run_attempt }}")
    lines += ["    restore-keys: megatron-history-"] if verb == "restore" else []
    return "\n".join(lines)


def _keep_history(workflow: Workflow) -> str:
    """Return the YAML of the steps that keep the history."""
    if not workflow.keeps_history:
        return ""
    is_new = '  echo "is_new=true" >> "$GITHUB_OUTPUT"'
    merge = (
        "mkdir -p .pytest_megatron",
        'if [ -n "$(find artifacts -name history.jsonl -size +0)" ]; then',
        # awk ends a line that a killed job left open
        "  find artifacts .pytest_megatron -name history.jsonl -exec awk 1 {} + |",
        f"    sort -u | tail -n {_MOST_ENTRIES} > history.jsonl",
        f"  mv history.jsonl {_HISTORY}",
        is_new,
        "fi",
        # a job that left nothing has a test case of its own: the durations are not of all tests
        f"if grep -qs '<testcase' {_JUNIT} && ! grep -q 'classname=\"job\"' {_JUNIT}; then",
        f"  cp {_JUNIT} {_DURATIONS}",
        is_new,
        "fi",
    )
    restore = _conditional(_history_step(workflow, "restore"), "always()")
    step = _conditional(_step("Merge the history", merge), "always()")
    step = step.replace("\n", "\n  id: history\n", 1)
    save = _conditional(
        _history_step(workflow, "save"), "always() && steps.history.outputs.is_new == 'true'"
    )
    return f"{restore}\n{step}\n{save}"


def _conditional(step: str, condition: str) -> str:
    return step.replace("\n", f"\n  if: {condition}\n", 1)


def _python_step(workflow: Workflow) -> str:
    return f"- uses: {_PYTHON}\n  with:\n    python-version: {_quoted(workflow.python)}"


def _step(name: str, lines: Sequence[str]) -> str:
    shown = "\n".join(f"    {line}" for line in lines)
    return f"- name: {name}\n  run: |\n{shown}"


def _runner(workflow: Workflow) -> str:
    """Return labels by platform; one that is not listed waits for a runner that is named so."""
    labels = _json({name: list(labels) for name, labels in workflow.all_runners.items()})
    other = 'fromJSON(format(\'["self-hosted","{0}"]\', matrix.platform))'
    return f"${{{{ fromJSON('{labels}')[matrix.platform || 'cpu'] || {other} }}}}"


def _container(workflow: Workflow) -> str:
    """Return the YAML of the container that jobs run in, empty without images."""
    if not workflow.images:
        return ""
    images = _json(dict(workflow.images))
    image = f"${{{{ fromJSON('{images}')[needs.plan.outputs.image] }}}}"
    gpus = f"${{{{ matrix.gpus > 0 && '--gpus all {_SHARED_MEMORY}' || '{_SHARED_MEMORY}' }}}}"
    credentials = ""
    if workflow.registry_secrets:
        user, password = (f"${{{{ secrets.{name} }}}}" for name in workflow.registry_secrets)
        credentials = f"  credentials:\n    username: {user}\n    password: {password}\n"
    variable = f"env:\n  PYTEST_MEGATRON_IMAGE: {image}"
    return f"container:\n  image: {image}\n  options: {gpus}\n{credentials}{variable}"


def _json(value: JsonValue) -> str:
    """Return JSON for a string of an expression; without spaces it is a plain scalar of YAML."""
    return json.dumps(value, separators=(",", ":")).replace("'", "''")


def _image_check(workflow: Workflow) -> str:
    """Return a step that refuses an image that nobody filled in: it would be left out silently."""
    if not workflow.images:
        return ""
    names = "|".join(shlex.quote(name) for name in workflow.images)
    where = "[tool.pytest-megatron.ci.workflow] images"
    problem = f"::error::the plan wants the image '$IMAGE', which {where} does not have"
    refuse = f'  *) echo "{problem}"; exit 1 ;;'
    lines = ('case "$IMAGE" in', f"  {names}) ;;", refuse, "esac")
    step = _step("Check the image", lines)
    return f"{step}\n  env:\n    IMAGE: ${{{{ steps.plan.outputs.image }}}}"


def gitlab_pipeline(workflow: Workflow) -> str:
    """Return the text of the parent pipeline for GitLab, which plans and starts the child."""
    blocks = {"plan_setup": _lines(workflow.light_setup)}
    words = {
        "file": GITLAB_FILE.as_posix(),
        "hosted_image": f"python:{workflow.python}",
        "push_branches": _branch_pattern(workflow.branches),
        "plan_arguments": "".join(f" {shlex.quote(word)}" for word in workflow.plan),
        "retention_days": str(workflow.retention_days),
    }
    return _fill(_read("gitlab.yml"), blocks, words)


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


def _lines(lines: Sequence[str]) -> str:
    return "\n".join(f"- {_quoted(line)}" for line in lines)


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
    jobs: dict[str, JsonValue] = {"stages": ["plan", "layouts", "jobs", "verdict"]}
    jobs["plan"] = _fetch_plan(workflow)
    layouts = {job.name: f"test {job.id}" for job in plan.jobs if job.kind == "layout"}
    for job in plan.jobs:
        if not job.command:
            raise CiError(where, f"job {job.id!r} has no command; expected what 'plan' prints")
        if f"test {job.id}" in jobs:
            raise CiError(where, f"has two jobs with the id {job.id!r}, expected each once")
        jobs[f"test {job.id}"] = {
            **_child_job(job, workflow, image),
            **({"stage": "layouts"} if job.kind == "layout" else {}),
            **_child_needs(job, layouts),
            "interruptible": plan.event == "pull_request",
            "retry": {"max": 1, "when": ["runner_system_failure", "scheduler_failure"]},
        }
    if len(jobs) == 2:  # noqa: PLR2004 - stages and the plan's own
        raise CiError(where, "has no jobs, expected what 'plan --format json' prints")
    verdict: dict[str, JsonValue] = {
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
            "reports": {
                "junit": "summary/junit.xml",
                "codequality": "summary/gl-code-quality-report.json",
            },
            "expire_in": f"{workflow.retention_days} days",
        },
    }
    if workflow.comments:  # a script ends where the verdict is bad
        verdict["after_script"] = ["pytest-megatron ci comment summary/comment.md"]
    jobs["verdict"] = verdict
    return yaml.safe_dump(jobs, sort_keys=False, width=1000)


def _child_needs(job: CiJob, layouts: Mapping[str, str]) -> dict[str, JsonValue]:
    """Return what a job waits for; without `needs` that is all of the earlier stages.

    Args:
        job: A job of the plan.
        layouts: Node id of a workload -> the job that tries its layout.
    """
    if not layouts or job.kind == "layout":
        return {}
    return {"needs": [layouts.get(job.node_id or "", "plan")]}


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


def _read(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _quoted(text: str) -> str:
    """Return a scalar of YAML, and of GitHub's expressions, for any text."""
    quoted = text.replace("'", "''")
    return f"'{quoted}'"


def _fill(template: str, blocks: Mapping[str, str], words: Mapping[str, str]) -> str:
    """Put blocks where a line is `@name@`, with that line's indent, and words anywhere."""
    lines: list[str] = []
    for line in template.splitlines():
        name = line.strip().strip("@")
        if line.strip() == f"@{name}@" and name in blocks:
            indent = line[: len(line) - len(line.lstrip())]
            lines += [indent + part if part else "" for part in blocks[name].splitlines()]
        else:
            lines.append(line)
    text = "\n".join(lines) + "\n"
    for name, word in words.items():
        text = text.replace(f"@{name}@", word)
    return text


_TABLE = "[tool.pytest-megatron.ci.workflow]"


def project_workflow(root: Path) -> Workflow:
    """Return the settings of a project for its workflow.

    Raises:
        ConfigError: A key of `[tool.pytest-megatron.ci]` is unknown, or its value is wrong.
    """
    return _read_table(root)[0].workflow


def _read_table(root: Path) -> tuple[CiTable, Vocabulary]:
    words = project_words(root)
    return load_table(load_config(root), words), words


def write_files(root: Path, kind: str, *, is_forced: bool) -> list[str]:
    """Write the file for `github` or `gitlab`; return lines for the user.

    Raises:
        ConfigError: The project's table is wrong.
        CiError: The file is there and is not to be replaced, or cannot be written.
    """
    table, _ = _read_table(root)
    workflow, labels = table.workflow, table.known_labels
    if not workflow.setup:
        raise ConfigError(
            f"pyproject.toml: {_TABLE} setup",
            "is missing, expected the shell lines that install the project and pytest-megatron on "
            "a runner, such as setup = [\"python -m pip install -e '.[test]'\"]; add it",
        )
    is_github = kind == "github"
    path = GITHUB_FILE if is_github else GITLAB_FILE
    text = github_workflow(workflow, labels) if is_github else gitlab_pipeline(workflow)
    file = root / path
    if (file.exists() or file.is_symlink()) and not is_forced:
        raise CiError(path.as_posix(), "is there already; --force replaces it")
    try:
        write_texts_together({file: text})
    except OSError as error:
        raise CiError(path.as_posix(), f"cannot be written: {error.strerror}") from error
    return [f"wrote {path.as_posix()}", *_advice(workflow, root, is_github=is_github)]


def _advice(workflow: Workflow, root: Path, *, is_github: bool) -> Iterator[str]:
    """Yield the settings that the project must fill in."""
    if not is_github:
        yield f"include it in .gitlab-ci.yml: include: [{{local: {GITLAB_FILE.as_posix()}}}]"
    yield f"fill in, in {_TABLE} of pyproject.toml, and write it again with --force:"
    for platform in _platforms(root) or [CPU_PLATFORM]:
        labels = workflow.all_runners.get(platform)
        other = ["self-hosted", platform] if is_github else [platform]
        shown = other if labels is None else list(labels)
        state = "set" if platform in workflow.runners else "by default"
        yield f"  runners.{platform}: {', '.join(shown)} ({state})"
    yield f"  setup: {'; '.join(workflow.setup)} (set)"
    names = ", ".join(f"{name} = {image}" for name, image in workflow.images.items())
    yield f"  images: {names or 'none, jobs run on the runner itself'}"
    if not _platforms(root) and "--shards" not in workflow.plan:
        yield '  plan: there are no recipes; for test files alone set plan = ["--shards", "4"]'
    if is_github:
        yield "then require the check 'megatron verdict' on the branch"


def _platforms(root: Path) -> list[str]:
    """Return the platforms of the project's recipes; none where there are no recipes."""
    table, words = _read_table(root)
    folders = [root / name for name in table.recipes if (root / name).exists()]
    profile = Profile(table.recipe_profile)
    try:
        read = [read_recipe(file, profile, words) for file in find_recipes(folders)]
    except RecipeError:
        return [CPU_PLATFORM]  # `pytest-megatron lint` reports why
    return sorted({row.platform for one in read for row in one.workloads})
