"""Reads recipe files: the one module of this package that pytest and the commands start from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.base.project import GOLDEN_PLATFORMS_KEY, load_config
from pytest_megatron.base.text import one_of
from pytest_megatron.base.yaml import YamlDocument, YamlError, read_document
from pytest_megatron.errors import ConfigError, RecipeError
from pytest_megatron.recipe.expand import (
    Expansion,
    Profile,
    duplicates_of,
    expand_compat,
    expand_strict,
    variants_of,
)
from pytest_megatron.recipe.findings import Finding, as_error, errors_of
from pytest_megatron.recipe.model import Row, Workload, parse_row
from pytest_megatron.recipe.vocabulary import Vocabulary

BUILT_IN_WORDS = Vocabulary()


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The workloads and findings of one recipe file.

    Attributes:
        workloads: In file order; those of the sound part where there are errors.
        findings: Errors and warnings, in file order.
    """

    workloads: tuple[Workload, ...]
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings because of which the file should not be run as it is."""
        return errors_of(self.findings)


def project_words(root: Path) -> Vocabulary:
    """Return the vocabulary with the words of the project that `root` is in.

    Raises:
        ConfigError: The project's settings are wrong.
    """
    config = load_config(root)
    words = BUILT_IN_WORDS.extended(
        scopes=config.scopes, platforms=config.platforms, environments=config.environments
    )
    for name, platform in config.golden_platforms.items():
        if platform not in words.platforms:
            raise ConfigError(
                f"{config.file}: [tool.pytest-megatron] {GOLDEN_PLATFORMS_KEY}",
                f"{name!r} is {platform!r}, expected {one_of(platform, words.platforms)}",
            )
    return words


def find_recipes(paths: Iterable[Path]) -> list[Path]:
    """Return the recipe files among and below `paths`, each once, sorted.

    Raises:
        RecipeError: A path does not exist.
    """
    found: set[Path] = set()
    for path in paths:
        if path.is_dir():
            found.update(p for p in path.rglob("*.yaml") if p.is_file())
        elif path.is_file():
            found.add(path)
        else:
            raise RecipeError(str(path), "no such file or directory, expected recipes")
    return sorted(found)


def load_recipe(
    path: Path, profile: Profile = Profile.STRICT, vocabulary: Vocabulary = BUILT_IN_WORDS
) -> tuple[Workload, ...]:
    """Return the workloads of a recipe file that has no errors.

    Raises:
        RecipeError: The file cannot be read, or has an error; the first one, with their number.
    """
    loaded = read_recipe(path, profile, vocabulary)
    if loaded.errors:
        raise as_error(loaded.errors)
    return loaded.workloads


def read_recipe(
    path: Path, profile: Profile = Profile.STRICT, vocabulary: Vocabulary = BUILT_IN_WORDS
) -> Loaded:
    """Return the workloads of a recipe file and all findings on it; never raises."""
    try:
        document = read_document(path)
    except YamlError as problem:
        return Loaded(workloads=(), findings=(unreadable(path, problem),))
    return load_document(document, profile, vocabulary)


def load_document(
    document: YamlDocument, profile: Profile, vocabulary: Vocabulary = BUILT_IN_WORDS
) -> Loaded:
    """Return the workloads of a recipe that has been read, as `read_recipe`. Pure."""
    expansion = expand(document, profile, vocabulary)
    findings = list(expansion.findings)
    variants = variants_of(expansion.rows)
    workloads: list[Workload] = []
    for row, variant in zip(expansion.rows, variants, strict=True):
        try:
            workloads.append(parse_row(row, file=document.file, variant=variant))
        except RecipeError as error:
            findings.append(
                Finding(file=document.file, line=row.line, rule="row", message=error.problem)
            )
    findings = sorted(dict.fromkeys(findings), key=lambda finding: finding.line or 0)
    return Loaded(workloads=tuple(workloads), findings=tuple(findings))


def expand(
    document: YamlDocument, profile: Profile, vocabulary: Vocabulary = BUILT_IN_WORDS
) -> Expansion:
    """Expand a document by a profile, with the findings of everything up to its rows."""
    if profile is Profile.COMPAT:
        return expand_compat(document)
    from pytest_megatron.recipe import schema  # noqa: PLC0415  a strict reading alone needs it

    problems = schema.check(document.value)
    expansion = expand_strict(document, vocabulary, [problem.path for problem in problems])
    findings = [
        *_duplicate_keys(document),
        *(schema.finding_of(document, problem) for problem in problems),
        *schema.similar_keys(document),
        *expansion.findings,
        *(_duplicate_row(document, a, b) for a, b in duplicates_of(expansion.rows)),
    ]
    return Expansion(rows=expansion.rows, findings=tuple(findings))


def unreadable(path: Path, problem: YamlError) -> Finding:
    """Return the finding for a file that is no YAML mapping."""
    return Finding(file=path, line=problem.line, rule="unreadable", message=problem.problem)


def _duplicate_keys(document: YamlDocument) -> Iterator[Finding]:
    for twin in document.duplicates:
        yield Finding(
            file=document.file,
            line=twin.second_line,
            rule="duplicate-key",
            message=f"key {twin.key!r} is also on line {twin.first_line}, expected it once; "
            "remove one",
        )


def _duplicate_row(document: YamlDocument, first: Row, second: Row) -> Finding:
    spec = second.spec
    return Finding(
        file=document.file,
        line=second.line,
        rule="duplicate-row",
        message=f"{spec['test_case']} in {spec.get('environment')} on {spec.get('platforms')} "
        f"for {spec.get('scope')} is also on line {first.line}, expected it once; remove one",
    )
