"""Writes the files for CI into a project, and says what is left to fill in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pytest_megatron.ci.table import CiTable, load_table
from pytest_megatron.ci.workflow import (
    GITHUB_FILE,
    GITLAB_FILE,
    Workflow,
    github_workflow,
    gitlab_pipeline,
    workflow_of,
)
from pytest_megatron.config import load_config
from pytest_megatron.errors import CiError, ConfigError, RecipeError
from pytest_megatron.files import write_texts_together
from pytest_megatron.recipe.expand import Profile
from pytest_megatron.recipe.load import BUILT_IN_WORDS, find_recipes, read_recipe
from pytest_megatron.recipe.vocabulary import Vocabulary

_TABLE = "[tool.pytest-megatron.ci.workflow]"


def project_workflow(root: Path) -> Workflow:
    """Return what is particular to a project.

    Raises:
        ConfigError: A key of `[tool.pytest-megatron.ci]` is unknown, or its value is wrong.
    """
    _read_table(root)
    return workflow_of(load_config(root))


def _read_table(root: Path) -> tuple[CiTable, Vocabulary]:
    config = load_config(root)
    words = BUILT_IN_WORDS.extended(
        scopes=config.scopes, platforms=config.platforms, environments=config.environments
    )
    return load_table(config, words), words


def write_files(root: Path, kind: str, *, is_forced: bool) -> list[str]:
    """Write the file for `github` or `gitlab`; return what to tell the user.

    Raises:
        ConfigError: The project's table is wrong.
        CiError: The file is there and is not to be replaced, or cannot be written.
    """
    workflow = project_workflow(root)
    if not workflow.setup:
        raise ConfigError(
            f"pyproject.toml: {_TABLE} setup",
            "is missing, expected the shell lines that install the project and pytest-megatron on "
            "a runner, such as setup = [\"python -m pip install -e '.[test]'\"]; add it",
        )
    is_github = kind == "github"
    path = GITHUB_FILE if is_github else GITLAB_FILE
    labels = _read_table(root)[0].known_labels
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
    """Yield what only the project's people know."""
    built_in = Workflow()
    if not is_github:
        yield f"include it in .gitlab-ci.yml: include: [{{local: {GITLAB_FILE.as_posix()}}}]"
    yield f"fill in, in {_TABLE} of pyproject.toml, and write it again with --force:"
    for platform in _platforms(root):
        labels = workflow.runners.get(platform)
        other = ["self-hosted", platform] if is_github else [platform]
        shown = other if labels is None else list(labels)
        state = (
            "by default" if labels is None or labels == built_in.runners.get(platform) else "set"
        )
        yield f"  runners.{platform}: {', '.join(shown)} ({state})"
    yield f"  setup: {'; '.join(workflow.setup)} (set)"
    names = ", ".join(f"{name} = {image}" for name, image in workflow.images.items())
    yield f"  images: {names or 'none, jobs run on the runner itself'}"
    if is_github:
        yield "then require the check 'megatron verdict' on the branch"


def _platforms(root: Path) -> list[str]:
    """Return the platforms of the project's recipes; `cpu` where they cannot be read."""
    table, words = _read_table(root)
    folders = [root / name for name in table.recipes if (root / name).exists()]
    profile = Profile(table.recipe_profile)
    try:
        read = [read_recipe(file, profile, words) for file in find_recipes(folders)]
    except RecipeError:
        read = []  # `pytest-megatron lint` says why
    return sorted({row.platform for one in read for row in one.workloads}) or ["cpu"]
