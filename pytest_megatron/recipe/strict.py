"""The strict reading of a recipe: nothing is dropped or mangled without a finding. Pure.

What the schema forbids is found by `schema.py` and handed in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.text import one_of
from pytest_megatron.base.yaml import YamlDocument, YamlPath
from pytest_megatron.recipe.expand import ExpandedProduct, Expansion, expand_product
from pytest_megatron.recipe.findings import Finding, Severity, finding_at
from pytest_megatron.recipe.model import Row, RowError
from pytest_megatron.recipe.vocabulary import CADENCES, Vocabulary

_WORD_KEYS = ("scope", "platforms", "environment", "cadence")


def expand_strict(
    document: YamlDocument, vocabulary: Vocabulary, forbidden: Sequence[YamlPath]
) -> Expansion:
    """Expand every element of every entry that is sound.

    Args:
        document: The recipe.
        vocabulary: The words that it may use.
        forbidden: Places where the file departs from the schema; an entry or product that holds
            one gives no rows, and outside of `products` it leaves the file without any.
    """
    value = document.value
    spec, entries = value.get("spec"), value.get("products")
    if value.get("type") != "basic" or not isinstance(spec, dict) or not isinstance(entries, list):
        return Expansion(rows=(), findings=())
    if any(path[:1] != ("products",) or len(path) == 1 for path in forbidden):
        return Expansion(rows=(), findings=())
    findings = list(_unknown_words(document, vocabulary, spec, ("spec",)))
    rows: list[Row] = []
    # ("products", 3) and ("products", 3, "products", 0): an entry and a product of it.
    broken = {
        path[:4] if path[2:3] == ("products",) and path[3:] else path[:2] for path in forbidden
    }
    for index, entry in enumerate(entries):
        path: YamlPath = ("products", index)
        if path in broken or not isinstance(entry, dict):
            continue
        findings += _entry_findings(document, vocabulary, entry, path)
        for inner, product in _products_of(document, spec, entry, path):
            findings += _unknown_words(document, vocabulary, product.axes, inner)
            if inner in broken or not _has_known_cadence(product):
                continue
            try:
                _check_axes(product)
                rows += expand_product(product)
            except RowError as problem:
                findings.append(finding_at(document, inner, "row", str(problem)))
    return Expansion(rows=tuple(rows), findings=tuple(dict.fromkeys(findings)))


def _products_of(
    document: YamlDocument,
    spec: Mapping[str, JsonValue],
    entry: Mapping[str, JsonValue],
    path: YamlPath,
) -> Iterator[tuple[YamlPath, ExpandedProduct]]:
    """Yield the inner products of an entry, once for each of its test cases."""
    cases, products = entry.get("test_case"), entry.get("products")
    assert isinstance(cases, list)
    assert isinstance(products, list)
    for case in cases:
        for number, axes in enumerate(products):
            inner = (*path, "products", number)
            if not isinstance(axes, dict):
                continue
            yield (
                inner,
                ExpandedProduct(
                    spec=spec,
                    test_case=case,
                    axes=axes,
                    outer_cadence=entry.get("cadence"),
                    line=document.line_of(inner),
                ),
            )


def _has_known_cadence(product: ExpandedProduct) -> bool:
    """Whether the cadence that counts has known words only; others are reported as words."""
    cadence = product.axes.get("cadence", product.outer_cadence)
    return not isinstance(cadence, list) or all(word in CADENCES for word in cadence)


def _check_axes(product: ExpandedProduct) -> None:
    """Refuse an axis that would lose or mangle rows; the schema knows only some keys."""
    for key, axis in product.axes.items():
        if not isinstance(axis, list):
            raise RowError(f"{key}: found {axis!r}, expected a list; write [{axis}]")
        if not axis:
            raise RowError(f"{key}: found [], expected a list with at least one element")


def _entry_findings(
    document: YamlDocument, vocabulary: Vocabulary, entry: Mapping[str, JsonValue], path: YamlPath
) -> Iterator[Finding]:
    """Yield what is wrong beside the inner products of an entry."""
    yield from _unknown_words(document, vocabulary, entry, path)
    cases = entry.get("test_case")
    if isinstance(cases, list) and len(cases) > 1:
        dropped = ", ".join(str(case) for case in cases[1:])
        message = f"test_case: Megatron-LM runs only {cases[0]!r} and drops {dropped}; "
        message += "give each an entry of its own"
        place = (*path, "test_case")
        yield finding_at(document, place, "one-test-case", message, Severity.WARNING)


def _unknown_words(
    document: YamlDocument, vocabulary: Vocabulary, mapping: Mapping[str, JsonValue], path: YamlPath
) -> Iterator[Finding]:
    """Yield every word of a mapping that the vocabulary lacks."""
    for key in _WORD_KEYS:
        value = mapping.get(key)
        words = enumerate(value) if isinstance(value, list) else [(None, value)]
        for index, word in words:
            if not isinstance(word, str) or vocabulary.knows(key, word):
                continue
            known = vocabulary.known(key) or ()
            place = (*path, key) if index is None else (*path, key, index)
            message = f"{key}: unknown word {word!r}, expected {one_of(word, known)}"
            yield finding_at(document, place, "unknown-word", message)
