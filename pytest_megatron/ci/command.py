"""`pytest-megatron ci`: files for CI, and one verdict of many jobs."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pytest_megatron.base.command import EXIT_FAILED, PATH, HintingGroup, echo_json, format_option
from pytest_megatron.base.text import without_commands
from pytest_megatron.errors import CiError, MegatronError
from pytest_megatron.runs.record import WRITE_PAGES

if TYPE_CHECKING:
    from pytest_megatron.ci.summary.merge import CiSummary

_PAGES = "pages"


@click.group("ci", cls=HintingGroup, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Write files for CI, and make one verdict of many jobs."""


@command.command("init")
@click.option("--github", "kind", flag_value="github", default="github", help="The default.")
@click.option("--gitlab", "kind", flag_value="gitlab")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
def init(*, kind: str, force: bool) -> None:
    """Write a workflow for GitHub Actions, or a pipeline for GitLab, that runs the plan.

    Settings of a project are in [tool.pytest-megatron.ci.workflow].
    """
    from pytest_megatron.ci.workflow import write_files  # noqa: PLC0415 - each command its own

    for line in write_files(Path(), kind, is_forced=force):
        click.echo(line)


@command.command("child")
@click.argument("plan", metavar="PLAN", type=PATH)
def child(*, plan: Path) -> None:
    """Print GitLab's child pipeline of a plan, which has a job for each of its jobs."""
    from pytest_megatron.ci.summary.read import read_plan  # noqa: PLC0415 - each command its own
    from pytest_megatron.ci.workflow import (  # noqa: PLC0415
        child_pipeline,
        project_workflow,
    )

    click.echo(child_pipeline(read_plan(plan), project_workflow(Path()), str(plan)), nl=False)


@command.command("job")
@click.argument("job", metavar="ID")
@click.option("--test-case", metavar="NAME", help="Name the artifact after it.  [default: ID]")
@click.option(
    "--directory",
    type=PATH,
    default=Path("megatron-job"),
    show_default=True,
    help="Of the job's artifact; made here.",
)
def begin(*, job: str, test_case: str | None, directory: Path) -> None:
    """Begin a job of the plan: make the directory of its artifact, with its name in it.

    Prints the artifact's name, and hands it to later steps through GITHUB_OUTPUT.
    """
    from pytest_megatron.ci.plan_command import outputs_text  # noqa: PLC0415
    from pytest_megatron.ci.summary.model import (  # noqa: PLC0415 - each command its own
        new_job,
        write_job,
    )

    record = new_job(job, test_case or job, os.environ)
    write_job(record, directory)
    click.echo(record.artifact)
    outputs = os.environ.get("GITHUB_OUTPUT")
    if outputs:
        values = {"artifact": record.artifact, "directory": str(directory)}
        _append(Path(outputs), outputs_text(values))


@command.command("redact")
@click.argument("directory", metavar="DIR", type=PATH)
def redact(*, directory: Path) -> None:
    """Remove secrets from the files of a job, also of a killed one, before they are uploaded.

    Secrets are the values of variables of this environment with such names, and texts with the
    form of one. Exit code 1: a file could not be cleaned, so do not upload DIR.
    """
    from pytest_megatron.base.project import load_config  # noqa: PLC0415 - each command its own
    from pytest_megatron.runs.redact import (  # noqa: PLC0415
        Redactor,
        redact_tree,
    )

    if not directory.is_dir():
        raise CiError(str(directory), "is no directory, expected what `ci job` made")
    redactor = Redactor.of(os.environ, names=load_config(Path()).secret_names)
    problems = redact_tree(directory, redactor)
    for problem in problems:
        click.echo(f"secrets may be left in {problem}", err=True)
    sys.exit(EXIT_FAILED if problems else 0)


@command.command("summary")
@click.argument("paths", metavar="RUN...", nargs=-1, type=PATH)
@click.option(
    "--expect",
    "plan",
    metavar="FILE",
    type=PATH,
    help="The plan; what it has and no RUN has is a failure.",
)
@click.option(
    "--results",
    metavar="JSON",
    help="Results of the jobs in the CI system, as GitHub's toJSON(needs).",
)
@click.option(
    "--output",
    "directory",
    metavar="DIR",
    type=PATH,
    help="Write summary.json, summary.md, comment.md and pages of the runs there.",
)
@click.option("--step-summary", is_flag=True, help="Append it to GITHUB_STEP_SUMMARY.")
@format_option("text", "json", "markdown")
def summary(
    *,
    paths: tuple[Path, ...],
    plan: Path | None,
    results: str | None,
    directory: Path | None,
    step_summary: bool,
    form: str,
) -> None:
    """Make one verdict of the runs of many jobs: run directories, unpacked artifacts, folders.

    Exit code 0: all passed. 1: something failed or is missing. 2: the input is unusable.
    """
    from pytest_megatron.ci.summary.merge import merge  # noqa: PLC0415
    from pytest_megatron.ci.summary.read import (  # noqa: PLC0415
        read_jobs,
        read_plan,
        read_results,
    )
    from pytest_megatron.ci.summary.render import (  # noqa: PLC0415
        as_markdown,
        as_text,
        github_annotations,
        write_outputs,
    )

    expected = None if plan is None else read_plan(plan)
    reported = None if results is None else read_results(results)
    if not paths and expected is None:
        raise CiError("RUN", "nothing was given, expected runs, artifacts or --expect")
    runs = read_jobs(paths, is_empty_allowed=expected is not None)
    found = replace(merge(runs, expected, reported), fetch=_fetch(paths))
    if directory is not None:
        write_outputs(found, directory)
        _write_pages(found, directory)
    if step_summary:
        page = os.environ.get("GITHUB_STEP_SUMMARY")
        if not page:
            raise CiError("--step-summary", "GITHUB_STEP_SUMMARY is not set; leave it out here")
        _append(Path(page), as_markdown(found))
    match form:
        case "json":
            echo_json(found.as_json())
        case "markdown":
            click.echo(as_markdown(found), nl=False)
        case _ if os.environ.get("GITHUB_ACTIONS") == "true":
            click.echo("\n".join([without_commands(as_text(found)), *github_annotations(found)]))
        case _:
            click.echo(as_text(found))
    sys.exit(0 if found.has_passed else EXIT_FAILED)


def _fetch(paths: tuple[Path, ...]) -> str | None:
    """Return the command that downloads the artifacts of this run of GitHub Actions."""
    run_id, repository = (os.environ.get(f"GITHUB_{name}") for name in ("RUN_ID", "REPOSITORY"))
    if run_id is None or repository is None or len(paths) != 1:
        return None
    words = ("--repo", repository, "--pattern", "logs-*", "--dir", str(paths[0]))
    return shlex.join(["gh", "run", "download", run_id, *words])


def _write_pages(found: CiSummary, directory: Path) -> None:
    """Write the pages of the runs that can be read."""
    write_pages = WRITE_PAGES.first()
    if write_pages is None:
        return
    names = (job.artifact for job in found.jobs if job.artifact is not None and job.has_run_file)
    runs = tuple(map(Path, names))
    try:
        write_pages(runs, directory / _PAGES)
    except MegatronError as error:
        click.echo(f"no pages of the runs: {error}", err=True)


def _append(path: Path, text: str) -> None:
    """Append a text to a file of the CI system."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise CiError(str(path), f"cannot be written: {error.strerror}") from error
