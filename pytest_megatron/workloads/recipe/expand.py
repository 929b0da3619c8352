"""From a recipe file to its rows. Pure.

`expand_compat` keeps every quirk of Megatron-LM's parser, so that its recipes give the very rows
its CI runs. `expand_strict` reports each row that a quirk would drop or mangle; violations of the
schema are found by `load.py` and handed in.
Source: Megatron-LM tests/test_utils/python_scripts/recipe_parser.py, d98e8a64dd
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.findings import Finding, Severity, finding_at
from pytest_megatron.base.text import one_of
from pytest_megatron.base.yaml import YamlDocument, YamlPath
from pytest_megatron.workloads.recipe.model import (
    CADENCES,
    DEFAULT_CADENCE,
    IMPLIED_CADENCE,
    SCOPE_ALIASES,
    Row,
    RowError,
    Vocabulary,
    fill_in,
    item_name,
)


class Profile(Enum):
    """The way to read a recipe: as Megatron-LM does, or with its quirks reported."""

    COMPAT = "compat"
    STRICT = "strict"


@dataclass(frozen=True, slots=True)
class Product:
    """One inner product with the keys that it takes from its file and entry.

    Attributes:
        spec: The file's `spec`.
        test_case: The one to run.
        axes: The product's own keys.
        outer_cadence: The entry's, None where it has none.
    """

    spec: Mapping[str, JsonValue]
    test_case: JsonValue
    axes: Mapping[str, JsonValue]
    outer_cadence: JsonValue
    line: int

    def rows(self) -> list[Row]:
        """Return the rows, one for each combination of elements.

        Raises:
            RowError: An axis is no list, a cadence is wrong, or `build` cannot be filled in.
        """
        axes = dict(self.axes)
        inner = axes.pop("cadence", None)
        explicit = check_cadence(self.outer_cadence if inner is None else inner)
        if "test_case" in axes:
            raise RowError("test_case: stands inside a product, expected it beside 'products'")
        own = {*axes, "test_case", "cadence"}
        base = {key: value for key, value in self.spec.items() if key not in own}
        names = tuple(axes)
        return [
            _row(self, names, {**base, **dict(zip(names, values, strict=True))}, explicit)
            for values in itertools.product(*(_elements(key, axes[key]) for key in names))
        ]


def expand_compat(document: YamlDocument, findings: list[Finding]) -> Iterator[Row]:
    """Expand as Megatron-LM does, quirks included.

    An entry without `products` gives nothing; of `test_case` only element 0 counts, the first
    character of a string; a bare string on an axis gives one row per character. Errors
    of that parser are added to the findings, and all of them are collected.
    """
    spec, entries = document.value.get("spec"), document.value.get("products")
    if document.value.get("type") == "build":
        return
    if not isinstance(spec, dict) or not isinstance(entries, list):
        key = "products" if isinstance(spec, dict) else "spec"
        problem = f"{key}: found {document.value.get(key)!r}, expected it filled in"
        findings.append(finding_at(document, (key,), "row", problem))
        return
    for index, entry in enumerate(entries):
        try:
            for path, product in _products_of(document, spec, entry, index, is_strict=False):
                yield from _rows_of(document, product, path, findings, is_strict=False)
        except RowError as problem:  # the entry's own
            findings.append(finding_at(document, ("products", index), "row", str(problem)))


def _products_of(
    document: YamlDocument,
    spec: Mapping[str, JsonValue],
    entry: JsonValue,
    index: int,
    *,
    is_strict: bool,
) -> Iterator[tuple[YamlPath, Product]]:
    """Yield the inner products of an entry with their paths, strictly for each of its cases.

    Raises:
        RowError: Megatron-LM's parser fails; of a strict entry the schema is known to hold.
    """
    if not isinstance(entry, dict):
        raise RowError(f"found {entry!r}, expected a mapping")
    if "products" not in entry:
        return
    cases, products = entry.get("test_case"), entry["products"]
    if not isinstance(cases, list | str) or not cases:
        raise RowError(f"test_case: found {cases!r}, expected a list with one test case")
    if not isinstance(products, list):
        raise RowError(f"products: found {products!r}, expected a list")
    for case in cases if is_strict else cases[:1]:
        for number, axes in enumerate(products):
            path = ("products", index, "products", number)
            if isinstance(axes, dict):
                yield path, Product(spec, case, axes, entry.get("cadence"), document.line_of(path))
            elif not is_strict:
                raise RowError(f"products[{number}]: found {axes!r}, expected a mapping")


def _rows_of(
    document: YamlDocument,
    product: Product,
    path: YamlPath,
    findings: list[Finding],
    *,
    is_strict: bool,
) -> list[Row]:
    """Return the rows of a product; none of one with an error, which is added to the findings."""
    try:
        if is_strict:
            _check_axes(product)
        return product.rows()
    except RowError as problem:
        findings.append(finding_at(document, path, "row", str(problem)))
        return []


def _row(
    product: Product,
    names: tuple[str, ...],
    spec: dict[str, JsonValue],
    explicit: list[str] | None,
) -> Row:
    """Finish the spec of one row: alias, cadence, build."""
    spec["test_case"] = product.test_case
    implied = DEFAULT_CADENCE
    scope = spec.get("scope") if "scope" in names else None
    if isinstance(scope, str):
        spec["scope"] = SCOPE_ALIASES.get(scope, scope)
        implied = IMPLIED_CADENCE.get(scope, DEFAULT_CADENCE)
    spec["cadence"] = list(implied if explicit is None else explicit)
    build = spec.get("build")
    if isinstance(build, str):
        try:
            spec["build"] = fill_in(build, spec)
        except RowError as problem:
            raise RowError(f"build: {problem}") from problem
    return Row(line=product.line, spec=spec, axes=names)


def check_cadence(value: JsonValue) -> list[str] | None:
    """Return an explicit cadence, None where there is none.

    Raises:
        RowError: It is no list, or one of its words is not a cadence.
    """
    if value is None:
        return None
    expected = f"expected a list of {', '.join(CADENCES)}"
    if not isinstance(value, list):
        raise RowError(f"cadence: found {value!r}, {expected}")
    for word in value:
        if word not in CADENCES:
            raise RowError(f"cadence: unknown word {word!r}, {expected}")
    return [str(word) for word in value]


def _elements(key: str, axis: JsonValue) -> list[JsonValue]:
    """Return the elements of an axis: a string's characters, a mapping's keys."""
    if isinstance(axis, list | str | dict):
        return list(axis)
    raise RowError(f"{key}: found {axis!r}, expected a list")


_IN_EVERY_NAME = ("environment", "platforms", "test_case")


def variants_of(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return for each row the values that make its name unique in the file.

    Rows with the same test case, environment and platform get the values of those product keys
    that differ among them, in the order of the file; rows that are alike even so are numbered.
    """
    variants: list[tuple[str, ...]] = [()] * len(rows)
    for members in _groups(rows):
        keys = _differing_keys([rows[member] for member in members])
        for member in members:
            variants[member] = tuple(_word(rows[member].spec.get(key)) for key in keys)
    taken: set[str] = set()
    for index, row in enumerate(rows):
        parts = [str(row.spec.get(key)) for key in ("environment", "platforms")]
        test_case, variant, number = str(row.spec["test_case"]), variants[index], 1
        while (name := item_name(test_case, (*parts, *variants[index]))) in taken:
            number += 1
            variants[index] = (*variant, str(number))
        taken.add(name)
    return variants


def duplicates_of(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Return pairs of equal rows: the first of its kind and the later one."""
    pairs: list[tuple[Row, Row]] = []
    for members in _groups(rows):
        first: dict[str, Row] = {}
        keys = {key for member in members for key in rows[member].axes} | {"cadence"}
        for member in members:
            row = rows[member]
            same = first.setdefault(repr([row.spec.get(key) for key in keys]), row)
            if same is not row:
                pairs.append((same, row))
    return pairs


def _groups(rows: Sequence[Row]) -> list[list[int]]:
    """Return the indices of rows that share all that is in every name, groups of two or more."""
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        spec = row.spec
        named = str(spec.get("environment")), str(spec.get("platforms")), str(spec.get("test_case"))
        groups[named].append(index)
    return [members for members in groups.values() if len(members) > 1]


def _differing_keys(rows: Sequence[Row]) -> list[str]:
    """Return the product keys, and the cadence if nothing else, whose values differ."""
    keys = dict.fromkeys(key for row in rows for key in row.axes if key not in _IN_EVERY_NAME)
    words = {key: [_word(row.spec.get(key)) for row in rows] for key in (*keys, "cadence")}
    differing = [key for key in keys if len(set(words[key])) > 1]
    columns = [words[key] for key in differing]
    num_values = len(set(zip(*columns, strict=True))) if columns else 1
    if num_values < len(set(zip(*columns, words["cadence"], strict=True))):
        return [*differing, "cadence"]
    return differing


def _word(value: JsonValue) -> str:
    """Return a value as a part of a name."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "+".join(f"{key.lstrip('-')}={_word(one)}" for key, one in value.items())
    return "+".join(map(str, value)) if isinstance(value, list) else str(value)


_WORD_KEYS = ("scope", "platforms", "environment", "cadence")


def expand_strict(
    document: YamlDocument,
    vocabulary: Vocabulary,
    forbidden: Sequence[YamlPath],
    findings: list[Finding],
) -> Iterator[Row]:
    """Expand every element of every entry that is sound.

    Args:
        document: The recipe.
        vocabulary: The words that it may use.
        forbidden: Places where the file departs from the schema; an entry or product that holds
            one gives no rows, and outside of `products` it leaves the file without any.
        findings: Gets further errors.
    """
    value = document.value
    spec, entries = value.get("spec"), value.get("products")
    if value.get("type") != "basic" or not isinstance(spec, dict) or not isinstance(entries, list):
        return
    if any(path[:1] != ("products",) or len(path) == 1 for path in forbidden):
        return
    findings += unknown_words(document, vocabulary, spec, ("spec",))
    # ("products", 3) and ("products", 3, "products", 0): an entry and a product of it.
    broken = {
        path[:4] if path[2:3] == ("products",) and path[3:] else path[:2] for path in forbidden
    }
    for index, entry in enumerate(entries):
        path: YamlPath = ("products", index)
        if path in broken or not isinstance(entry, dict):
            continue
        findings += _entry_findings(document, vocabulary, entry, path)
        for inner, product in _products_of(document, spec, entry, index, is_strict=True):
            findings += unknown_words(document, vocabulary, product.axes, inner)
            if inner not in broken and _has_known_cadence(product):
                yield from _rows_of(document, product, inner, findings, is_strict=True)


def _check_axes(product: Product) -> None:
    """Refuse an axis that would lose or mangle rows; the schema knows only some keys."""
    for key, axis in product.axes.items():
        if not isinstance(axis, list):
            raise RowError(f"{key}: found {axis!r}, expected a list; write [{axis}]")
        if not axis:
            raise RowError(f"{key}: found [], expected a list with at least one element")


def _has_known_cadence(product: Product) -> bool:
    """Return whether the cadence that counts has known words only; others are reported as words."""
    cadence = product.axes.get("cadence", product.outer_cadence)
    return not isinstance(cadence, list) or all(word in CADENCES for word in cadence)


def _entry_findings(
    document: YamlDocument, vocabulary: Vocabulary, entry: Mapping[str, JsonValue], path: YamlPath
) -> Iterator[Finding]:
    """Yield the errors of an entry outside of its inner products."""
    yield from unknown_words(document, vocabulary, entry, path)
    cases = entry.get("test_case")
    if isinstance(cases, list) and len(cases) > 1:
        dropped = ", ".join(str(case) for case in cases[1:])
        message = f"test_case: Megatron-LM runs only {cases[0]!r} and drops {dropped}; "
        message += "give each an entry of its own"
        place = (*path, "test_case")
        yield finding_at(document, place, "one-test-case", message, Severity.WARNING)


def unknown_words(
    document: YamlDocument, vocabulary: Vocabulary, mapping: Mapping[str, JsonValue], path: YamlPath
) -> Iterator[Finding]:
    """Yield every word of a mapping that the vocabulary lacks."""
    for key in _WORD_KEYS:
        if (value := mapping.get(key)) is None:
            continue
        words = enumerate(value) if isinstance(value, list) else [(None, value)]
        for index, word in words:
            if not isinstance(word, str) or vocabulary.knows(key, word):
                continue
            known = vocabulary.known(key) or ()
            place = (*path, key) if index is None else (*path, key, index)
            message = f"{key}: unknown word {word!r}, expected {one_of(word, known)}"
            yield finding_at(document, place, "unknown-word", message)
