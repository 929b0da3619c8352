"""Conversion of a golden's text to another form, with a list of losses. Pure.

Works on the JSON as it stands: numbers keep their digits and unknown keys stay. Content that the
new text cannot hold is listed, never dropped silently.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.text import counted
from pytest_megatron.errors import GoldenError
from pytest_megatron.workloads.golden.model import (
    AS_BLOCK,
    Generation,
    Series,
    Value,
    find_not_finite,
    generation_to_json,
    step_interval,
)
from pytest_megatron.workloads.golden.store import (
    PROVENANCE_KEY,
    Form,
    GoldenDocument,
    document_of,
    is_block,
    lay_out,
    load_object,
    parse_document,
)

_DECIMALS = 5
_BLOCK_KEYS = ("end_step", "non_finite", "start_step", "step_interval", "value_precision", "values")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """Options of a conversion.

    Attributes:
        form: The layout.
        is_plain: Leave out everything that Megatron-LM does not write.
        is_rounded: Round to five decimals, which Megatron-LM compares exactly.
        drops_text: Leave out steps that have a text for a value.
    """

    form: Form
    is_plain: bool = False
    is_rounded: bool = False
    drops_text: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """A converted text.

    Attributes:
        losses: Content of the old text that the new one lacks.
        notes: Unusual things about the old text and how they were read.
    """

    text: str
    losses: tuple[str, ...]
    notes: tuple[str, ...]


def convert(text: str, where: str, options: ConvertOptions) -> Converted:
    """Return a golden in another form.

    Raises:
        GoldenError: The text is no golden, or has a number that JSON does not have in a place
            where there is no other way to write it; `where` names the file.
    """
    value, notes = load_object(text, where)
    document = document_of(value, where, notes)
    losses: list[str] = []
    if document.generation is None:
        new = _metrics(value, document, options, losses)
    else:
        new = _generation(document.generation, where)
    provenance = value.get(PROVENANCE_KEY)
    if options.is_plain and provenance is not None:
        names = provenance.keys() - AS_BLOCK.keys() if isinstance(provenance, dict) else ()
        losses.append(f"its provenance ({', '.join(sorted(names))})")
    elif provenance is not None:
        new[PROVENANCE_KEY] = _provenance(provenance, is_block=document.generation is None)
    try:
        result = lay_out(new, options.form)
    except ValueError as error:
        raise GoldenError(
            where, f"a number in it is not finite, which JSON cannot say: {error}; record it again"
        ) from error
    if not losses:
        _require_same(document, parse_document(result, where))
    return Converted(text=result, losses=tuple(losses), notes=document.notes)


def _metrics(
    value: Mapping[str, JsonValue],
    document: GoldenDocument,
    options: ConvertOptions,
    losses: list[str],
) -> dict[str, JsonValue]:
    """Return the metrics in another form, and note what is lost."""
    new: dict[str, JsonValue] = {}
    for name, series in sorted(document.metrics.items()):
        block = value[name]
        assert isinstance(block, dict)
        new[name] = _Block(name, block, series, options).convert(losses)
    for name, other in value.items():
        if name == PROVENANCE_KEY or is_block(other):
            continue
        if options.is_plain:
            losses.append(f"{name!r}, a number beside the metrics")
        else:
            new[name] = other
    return new


@dataclass(slots=True)
class _Block:
    """One metric on its way."""

    name: str
    block: Mapping[str, JsonValue]
    series: Series
    wish: ConvertOptions
    _values: dict[int, JsonValue] = field(default_factory=dict)
    _non_finite: dict[int, str] = field(default_factory=dict)

    def convert(self, losses: list[str]) -> JsonValue:
        """Return the metric's block in its new form."""
        originals = self._originals()
        for step, value in self.series.items():
            if isinstance(value, float) and not math.isfinite(value):
                self._non_finite[step] = str(value)
            else:
                self._values[step] = originals[step]
        if self.wish.drops_text:
            self._drop_text(losses)
        if self.wish.is_rounded:
            self._round(losses)
        if self.wish.is_plain and self._non_finite:
            losses.append(f"{self.name}: {counted(len(self._non_finite), 'value')} of nan or inf")
            self._non_finite = {}
        steps = sorted({*self._values, *self._non_finite})
        precision = None if self.wish.is_rounded else self.block.get("value_precision")
        new: dict[str, JsonValue] = {
            "start_step": steps[0] if steps else 0,
            "end_step": steps[-1] if steps else 0,
            "step_interval": step_interval(steps),
        }
        if precision is not None:
            new["value_precision"] = precision
        new["values"] = {str(step): self._values[step] for step in sorted(self._values)}
        if self._non_finite:
            new["non_finite"] = {str(s): v for s, v in sorted(self._non_finite.items())}
        return new | {k: v for k, v in self.block.items() if k not in _BLOCK_KEYS}

    def _originals(self) -> dict[int, JsonValue]:
        """Return step to value as they stand in the file: 5 is not 5.0."""
        raw = self.block["values"]
        if isinstance(raw, dict):
            return {int(step): value for step, value in raw.items()}
        assert isinstance(raw, list)
        start, interval = self.block["start_step"], self.block["step_interval"]
        assert isinstance(start, int)
        assert isinstance(interval, int)
        return {start + i * interval: value for i, value in enumerate(raw)}

    def _drop_text(self, losses: list[str]) -> None:
        """Remove values that are text, and note how many."""
        texts = {step: text for step, text in self._values.items() if isinstance(text, str)}
        if texts:
            some = ", ".join(sorted({repr(text) for text in texts.values()})[:3])
            losses.append(
                f"{self.name}: {counted(len(texts), 'step')} with a text for a value ({some})"
            )
        for step in texts:
            del self._values[step]

    def _round(self, losses: list[str]) -> None:
        """Round values to five decimals, and note how much is lost."""
        largest, num_rounded = 0.0, 0
        for step, value in self._values.items():
            if isinstance(value, float) and round(value, _DECIMALS) != value:
                rounded = round(value, _DECIMALS)
                largest, num_rounded = max(largest, abs(rounded - value)), num_rounded + 1
                self._values[step] = rounded
        if num_rounded:
            count = counted(num_rounded, "value")
            losses.append(f"{self.name}: digits of {count}, rounded by {largest:.1e} at most")
        elif "value_precision" in self.block:
            losses.append(f"{self.name}: that its values have all their digits")


def _generation(generation: Generation, where: str) -> dict[str, JsonValue]:
    """Return the output of an inference program as JSON."""
    if problem := find_not_finite(generation):
        raise GoldenError(where, f"{problem}, which JSON cannot say; record it again")
    return generation_to_json(generation)


def _provenance(value: JsonValue, *, is_block: bool) -> JsonValue:
    """Return the provenance, with or without the keys of a metric's block."""
    if not isinstance(value, dict):
        return value
    own = {key: kept for key, kept in sorted(value.items()) if key not in AS_BLOCK}
    return dict(AS_BLOCK) | own if is_block else own


def _require_same(old: GoldenDocument, new: GoldenDocument) -> None:
    """Assert that nothing was lost without being listed."""
    assert _comparable(old) == _comparable(new)


def _comparable(document: GoldenDocument) -> str:
    """Return the content of a document as text, so that nan equals nan."""
    parts: list[tuple[str, tuple[int, ...], tuple[Value, ...], bool]] = [
        (name, s.steps, s.values, s.is_full_precision)
        for name, s in sorted(document.metrics.items())
    ]
    generation = document.generation
    provenance = document.provenance
    if isinstance(provenance, dict):
        provenance = {k: v for k, v in sorted(provenance.items()) if k not in AS_BLOCK}
    requests = None if generation is None else sorted(generation.requests.items())
    rest = None if generation is None else sorted(replace(generation, requests={}).content.items())
    return repr((parts, requests, rest, json.dumps(provenance)))
