"""Recipe files: their published schema, and the way from a file to its workloads.

`docs/reference/recipe.schema.json` is made from here. A recipe stays a mapping: any further key of
its spec is a placeholder, and Megatron-LM's own reading of it needs no schema. Must not import
pydantic before a recipe is checked.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NotRequired, TypeAlias, cast

from annotated_types import MinLen
from typing_extensions import TypedDict

from pytest_megatron.base import schema
from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.findings import Finding, Severity, as_error, finding_at
from pytest_megatron.base.schema import (
    About,
    Count,
    FormatVersion,
    Positive,
    SchemaError,
    SchemaProblem,
    Text,
    Texts,
    closed,
    dotted,
    open_to_others,
)
from pytest_megatron.base.text import one_of
from pytest_megatron.base.yaml import YamlDocument, YamlError, YamlPath, read_document
from pytest_megatron.errors import RecipeError
from pytest_megatron.workloads.recipe.expand import (
    Profile,
    duplicates_of,
    expand_compat,
    expand_strict,
    variants_of,
)
from pytest_megatron.workloads.recipe.model import (
    BUILT_IN_WORDS,
    Row,
    Vocabulary,
    Workload,
    parse_row,
)
from pytest_megatron.workloads.recipe.short_rows import (
    QuarantineKeys,
    RowSettings,
    ShortRecipe,
    expand_rows,
    is_short,
)

# Where the recipes of a project lie that names no place: ours, then Megatron-LM's.
RECIPES, MEGATRON_RECIPES = Path("recipes"), Path("tests/test_utils/recipes")
Numbers: TypeAlias = Annotated[tuple[Positive | None, ...], MinLen(1)]


@open_to_others
class RecipeSpec(RowSettings):
    """Keys that all rows of the file share; any further key is a placeholder for the templates."""

    model: Annotated[Text, About("Directory of the test cases, such as gpt.")]
    gpus: Annotated[Count, About("Ranks per node, each with a GPU except on platform cpu.")]
    nodes: NotRequired[Positive]
    name: NotRequired[Annotated[Text, About("Template, filled in from the row.")]]
    build: NotRequired[Annotated[Text, About("Template of the container build.")]]
    platforms: NotRequired[Annotated[Text, About("Where rows without their own run.")]]
    environment: NotRequired[str | None]
    scope: NotRequired[str | None]
    tag: NotRequired[str | None]
    test_case: NotRequired[str | None]
    script: NotRequired[
        Annotated[
            str | None, About("Template of a bash script; a call of Megatron-LM's driver is read.")
        ]
    ]
    script_setup: NotRequired[Annotated[str | None, About("Never run by us.")]]
    artifacts: NotRequired[dict[str, str] | None]
    segment: NotRequired[int | None]
    training_script_path: NotRequired[
        Annotated[str | None, About("Program to launch where there is no script.")]
    ]
    data_path: NotRequired[str | None]
    data_cache_path: NotRequired[str | None]
    checkpoint_load_path: NotRequired[str | None]
    trace_steps: NotRequired[
        Annotated[Positive | None, About("Steps of which tensors are traced.")]
    ]


@open_to_others
class RecipeProduct(TypedDict, total=False):
    """Lists whose cartesian product makes rows; a key of `spec` here overrides it."""

    environment: Texts
    scope: Texts
    platforms: Texts
    tag: Texts
    cadence: Texts
    model: Texts
    n_repeat: Numbers
    time_limit: Numbers
    nodes: Annotated[tuple[Positive, ...], MinLen(1)]
    gpus: Annotated[tuple[Count, ...], MinLen(1)]
    allow_failure: tuple[bool, ...]
    max_attempts: Numbers
    transient: Annotated[tuple[Texts, ...], MinLen(1)]
    never_transient: Annotated[tuple[Texts, ...], MinLen(1)]
    quarantine: Annotated[tuple[QuarantineKeys, ...], MinLen(1)]
    trace_steps: Numbers


@closed
class ProductEntry(TypedDict):
    """Some test cases and where they run."""

    test_case: Texts
    products: Annotated[tuple[RecipeProduct, ...], MinLen(1)]
    cadence: NotRequired[Texts]


@closed
class BasicRecipe(TypedDict):
    """A recipe of workloads."""

    type: Literal["basic"]
    format_version: FormatVersion
    maintainers: NotRequired[tuple[str, ...]]
    loggers: NotRequired[tuple[str, ...]]
    spec: RecipeSpec
    products: Annotated[tuple[ProductEntry, ...], MinLen(1)]


@open_to_others
class BuildSource(TypedDict):
    """The source of a build's image."""

    image: str


@open_to_others
class BuildSpec(TypedDict):
    """A container build."""

    name: Text
    platforms: NotRequired[tuple[str, ...]]
    source: NotRequired[BuildSource]


@closed
class BuildRecipe(TypedDict):
    """A recipe of a container build; it gives no workloads."""

    type: Literal["build"]
    format_version: FormatVersion
    maintainers: NotRequired[tuple[str, ...]]
    loggers: NotRequired[tuple[str, ...]]
    spec: BuildSpec


_SIMILAR = 0.8
_TYPES: dict[str, type[BasicRecipe | BuildRecipe]] = {
    "basic": BasicRecipe,
    "build": BuildRecipe,
}


def _schema_problems(value: Mapping[str, JsonValue]) -> tuple[SchemaProblem, ...]:
    """Return everything in a recipe file that the schema forbids."""
    if is_short(value):
        return _problems_of(ShortRecipe, value)
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _TYPES:
        found = f"found {kind!r}" if "type" in value else "is missing"
        text = f"{found}, expected {one_of(kind, _TYPES)}"
        text += "" if "type" in value else "; or a list of rows at 'rows'"
        return (SchemaProblem(path=("type",), kind="type", text=text),)
    return _problems_of(_TYPES[kind], value)


def _problems_of(kind: type, value: Mapping[str, JsonValue]) -> tuple[SchemaProblem, ...]:
    """Return what a mapping has against its schema."""
    try:
        schema.validate(kind, dict(value))
    except SchemaError as error:
        return error.problems
    return ()


def _schema_finding(document: YamlDocument, problem: SchemaProblem) -> Finding:
    """Return a departure from the schema under its rule."""
    path, rule = problem.path, "schema"
    if problem.kind in {"missing", "too_short"} and path[:1] + path[2:] == ("products",) * 2:
        rule = "no-products"
    if problem.kind == "tuple_type" and path[0] == "products" and len(path) > 1:
        rule = "bare-string"
    return finding_at(document, path, rule, problem.message)


def _similar_keys(document: YamlDocument) -> Iterator[Finding]:
    """Yield extra keys of `spec` or of a product that look like known ones."""
    value = document.value
    spec, known = value.get("spec"), {*RecipeSpec.__annotations__, *RecipeProduct.__annotations__}
    if value.get("type") != "basic" or not isinstance(spec, dict):
        return
    mappings: dict[YamlPath, dict[str, JsonValue]] = {("spec",): spec}
    mappings |= dict(_products_of(value.get("products")))
    places = [(*path, key) for path, found in mappings.items() for key in found.keys() - known]
    for path in places:
        if close := difflib.get_close_matches(str(path[-1]), known, 1, _SIMILAR):
            text = f"{dotted(path)}: is a placeholder of its own; did you mean {close[0]!r}?"
            yield finding_at(document, path, "similar-key", text, Severity.WARNING)


def _products_of(entries: JsonValue) -> Iterator[tuple[YamlPath, dict[str, JsonValue]]]:
    """Yield the inner products with their places, whatever else is wrong."""
    for index, entry in enumerate(entries if isinstance(entries, list) else ()):
        products = entry.get("products") if isinstance(entry, dict) else None
        for number, product in enumerate(products if isinstance(products, list) else ()):
            if isinstance(product, dict):
                yield ("products", index, "products", number), product


def json_schema() -> dict[str, JsonValue]:
    """Return the JSON schema of a recipe file."""
    kinds = cast("type", BasicRecipe | BuildRecipe | ShortRecipe)
    return schema.json_schema(kinds, "pytest-megatron recipe")


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
        return tuple(finding for finding in self.findings if finding.is_error)


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


def default_recipes(root: Path) -> Path:
    """Return the directory of a project's recipes where none is named; it need not be there."""
    ours, megatrons = root / RECIPES, root / MEGATRON_RECIPES
    return megatrons if megatrons.is_dir() and not ours.exists() else ours


def profile_at(path: Path) -> Profile:
    """Return how a recipe is read where nobody says it: Megatron-LM's own as its parser does."""
    is_megatrons = MEGATRON_RECIPES.as_posix() in path.as_posix()
    return Profile.COMPAT if is_megatrons else Profile.STRICT


def read_recipes(
    paths: Iterable[Path], profile: Profile | None, vocabulary: Vocabulary
) -> list[Loaded]:
    """Read recipe files, and those in directories; without a profile each as its place says.

    Raises:
        RecipeError: A path does not exist.
    """
    return [
        read_recipe(file, profile or profile_at(file), vocabulary) for file in find_recipes(paths)
    ]


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
    is_checked = profile is Profile.STRICT or is_short(document.value)
    findings = list(_duplicate_keys(document)) if is_checked else []
    rows = tuple(_expanded(document, profile, vocabulary, findings))
    if is_checked:
        findings += (_duplicate_row(document, a, b) for a, b in duplicates_of(rows))
    workloads: list[Workload] = []
    for row, variant in zip(rows, variants_of(rows), strict=True):
        try:
            workloads.append(parse_row(row, file=document.file, variant=variant))
        except RecipeError as error:
            findings.append(
                Finding(file=document.file, line=row.line, rule="row", message=error.problem)
            )
    findings = sorted(dict.fromkeys(findings), key=lambda finding: finding.line or 0)
    return Loaded(workloads=tuple(workloads), findings=tuple(findings))


def _expanded(
    document: YamlDocument, profile: Profile, vocabulary: Vocabulary, findings: list[Finding]
) -> Iterator[Row]:
    """Return the rows of a document by a profile; what is wrong is added to the findings."""
    is_of_rows = is_short(document.value)
    if profile is Profile.COMPAT and not is_of_rows:
        return expand_compat(document, findings)
    problems = list(_schema_problems(document.value))
    findings += (_schema_finding(document, problem) for problem in problems)
    findings += _similar_keys(document)
    expand = expand_rows if is_of_rows else expand_strict
    return expand(document, vocabulary, [problem.path for problem in problems], findings)


def unreadable(path: Path, problem: YamlError) -> Finding:
    """Return the finding for a file that is no YAML mapping."""
    return Finding(file=path, line=problem.line, rule="unreadable", message=problem.problem)


def _duplicate_keys(document: YamlDocument) -> Iterator[Finding]:
    """Yield keys that a mapping has twice."""
    for twin in document.duplicates:
        yield Finding(
            file=document.file,
            line=twin.second_line,
            rule="duplicate-key",
            message=f"key {twin.key!r} is also on line {twin.first_line}, expected it once; "
            "remove one",
        )


def _duplicate_row(document: YamlDocument, first: Row, second: Row) -> Finding:
    """Return the finding that two rows are the same."""
    spec = second.spec
    return Finding(
        file=document.file,
        line=second.line,
        rule="duplicate-row",
        message=f"{spec['test_case']} in {spec.get('environment')} on {spec.get('platforms')} "
        f"for {spec.get('scope')} is also on line {first.line}, expected it once; remove one",
    )
