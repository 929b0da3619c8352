"""What is wrong inside one golden file, alone and beside its test case. Pure.

Which rows read the file and where it lies is `lint.py`'s.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.errors import GoldenError
from pytest_megatron.files import JsonValue
from pytest_megatron.golden.document import GoldenDocument, step_interval
from pytest_megatron.golden.generation import find_not_finite
from pytest_megatron.golden.model import Series
from pytest_megatron.golden.presence import without_unmeasured_end
from pytest_megatron.golden.provenance import Provenance, parse_provenance
from pytest_megatron.recipe.cases import compared_metrics, last_step
from pytest_megatron.recipe.findings import RecipeFinding, RecipeSeverity
from pytest_megatron.yamllines import YamlDocument as CaseDocument

# Megatron-LM writes the text "nan" there for a step that was not measured.
_MAY_BE_UNMEASURED = ("iteration-time", "num-zeros")
_ENDED_BY_TIME = "release"  # text after its last number is not the golden's fault
_MIN_REPEATS = 2
_MIN_VALUES = 8  # fewer may have few decimals by chance
_COARSE = 8.0  # from here on a float32 has hardly more than five decimals
_DECIMALS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenFile:
    """One golden file that could be read.

    Attributes:
        value: Its JSON object.
        text: The text of that, for the lines of findings.
        is_ours: Whether it lies in `golden_values/`.
        is_read: Whether a row of the recipes reads it; what nobody reads is no error.
    """

    path: Path
    text: str
    value: Mapping[str, JsonValue]
    document: GoldenDocument
    is_ours: bool
    is_read: bool

    def line_of(self, name: str, step: int | None = None) -> int | None:
        """Return the line of a top-level key, or of a step below it."""
        at = self.text.find(f"{json.dumps(name)}:")
        if at >= 0 and step is not None:
            at = max(at, self.text.find(f'"{step}":', self.text.find('"values"', at)))
        return None if at < 0 else self.text.count("\n", 0, at) + 1

    def finding(
        self, rule: str, message: str, *, line: int | None = None, is_error: bool = False
    ) -> RecipeFinding:
        """Return a finding of this file."""
        severity = RecipeSeverity.ERROR if is_error and self.is_read else RecipeSeverity.WARNING
        return RecipeFinding(
            file=self.path, line=line, rule=rule, message=message, severity=severity
        )


class FindingGroup:
    """Says once what is wrong with several metrics of a file."""

    def __init__(self, sheet: GoldenFile) -> None:
        """Begin with none."""
        self.sheet = sheet
        self._names: dict[tuple[str, str], list[str]] = {}

    def add(self, rule: str, name: str, message: str) -> None:
        """Note what is wrong with a metric."""
        self._names.setdefault((rule, message), []).append(name)

    def findings(self) -> Iterator[RecipeFinding]:
        """Yield what was noted."""
        for (rule, message), names in self._names.items():
            yield self.sheet.finding(
                rule,
                f"{', '.join(names)}: {message}",
                line=self.sheet.line_of(names[0]),
                is_error=rule in ("golden-empty", "golden-truncated"),
            )


def check_content(sheet: GoldenFile) -> Iterator[RecipeFinding]:
    """Yield what is wrong in the file itself."""
    yield from _check_provenance(sheet)
    generation = sheet.document.generation
    if generation is not None and (problem := find_not_finite(generation)):
        message = f"{problem}; record it again"
        yield sheet.finding("golden-not-finite", message, is_error=True)
    together = FindingGroup(sheet)
    for name, series in sheet.document.metrics.items():
        if not len(series):
            together.add("golden-empty", name, "no value; record it again")
            continue
        yield from _check_finite(sheet, name, series)
        _check_steps(together, name, series)
        _check_precision(together, name, series)
    yield from together.findings()


def check_against_case(sheet: GoldenFile, case: CaseDocument) -> Iterator[RecipeFinding]:
    """Yield where the file does not fit the test case that it belongs to."""
    is_generation = sheet.document.generation is not None
    mode = case.value.get("MODE", "pretraining")
    if is_generation != (mode == "inference"):
        kind = "the output of an inference program" if is_generation else "series of a training"
        message = f"holds {kind}, MODE of {case.file} is {mode!r}; record it again"
        yield sheet.finding("golden-kind", message, is_error=True)
        return
    for name in compared_metrics(case):
        if not _has_metric(sheet.document, name):
            message = f"{case.file} compares {name!r}, which is not here; record it again"
            yield sheet.finding("golden-metric", message, is_error=True)
    last = last_step(case)
    if last is None:
        return
    together = FindingGroup(sheet)
    for name, series in sheet.document.metrics.items():
        is_open = name in _MAY_BE_UNMEASURED or case.value.get("TEST_TYPE") == _ENDED_BY_TIME
        steps = (series if is_open else without_unmeasured_end(series)).steps
        if steps and steps[-1] + step_interval(series.steps) <= last:
            message = f"ends at step {steps[-1]}, the training of {case.file} at {last}; "
            together.add("golden-truncated", name, f"{message}record it again")
    yield from together.findings()


def _has_metric(document: GoldenDocument, name: str) -> bool:
    if document.generation is not None:
        return document.generation.has(name)
    return name in document.metrics or name.replace("-", " ") in document.metrics


def _check_provenance(sheet: GoldenFile) -> Iterator[RecipeFinding]:
    value = sheet.document.provenance
    if value is None:
        if sheet.is_ours:
            message = "has no _provenance, so nobody knows what it was measured with; record it"
            yield sheet.finding("golden-provenance", f"{message} again")
        return
    line = sheet.line_of("_provenance")
    try:
        provenance = parse_provenance(value, str(sheet.path))
    except GoldenError as error:
        yield sheet.finding("golden-provenance", error.problem, line=line, is_error=True)
        return
    for message in _doubts(provenance):
        yield sheet.finding("golden-provenance", f"{message}; record it again", line=line)


def _doubts(provenance: Provenance) -> Iterator[str]:
    if provenance.commit is None:
        yield "names no commit"
    if provenance.is_dirty:
        yield "was made with changes that no commit has"
    if provenance.repeats is not None and provenance.repeats < _MIN_REPEATS:
        yield f"was made from {provenance.repeats} run, so nobody knows how far runs differ"


def _check_finite(sheet: GoldenFile, name: str, series: Series) -> Iterator[RecipeFinding]:
    numbers = [value for value in series.values if not isinstance(value, str)]
    if len(numbers) == len(series) and all(map(math.isfinite, numbers)):
        return
    bad = [(s, v) for s, v in series.items() if isinstance(v, str) or not math.isfinite(v)]
    step, value = bad[0]
    what = f"the text {value!r}" if isinstance(value, str) else f"{value}"
    message = f"{name}: {len(bad)} of {len(series)} values are no finite number, the first {what}"
    is_ended = not any(isinstance(v, str) for v in without_unmeasured_end(series).values)
    is_known = (name in _MAY_BE_UNMEASURED or is_ended) and all(isinstance(v, str) for _, v in bad)
    ending = "not compared there" if is_known and numbers else "record it again"
    yield sheet.finding(
        "golden-not-finite",
        f"{message} at step {step}; {ending}",
        line=sheet.line_of(name, step),
        is_error=not is_known,
    )


def _check_steps(together: FindingGroup, name: str, series: Series) -> None:
    first, last = series.steps[0], series.steps[-1]
    interval = step_interval(series.steps)
    spaced = [step for step in series.steps if step != 1] or [first]
    missing = sorted({*range(spaced[0], last + 1, interval)} - {*spaced})
    if missing:
        message = f"{len(missing)} of the steps {first} to {last} are missing, the first is "
        together.add("golden-steps", name, f"{message}{missing[0]}; record it again")
        return
    block = together.sheet.value[name]
    assert isinstance(block, dict)
    said = (block.get("start_step"), block.get("end_step"), block.get("step_interval"))
    is_single = len(spaced) < 2  # noqa: PLR2004 - then no distance is wrong
    if said[:2] != (first, last) or not (is_single or said[2] == interval):
        message = f"start_step, end_step and step_interval are {said[0]}, {said[1]} and {said[2]}, "
        message += f"those of the values {first}, {last} and {interval}; `golden convert` mends it"
        together.add("golden-steps", name, message)


def _check_precision(together: FindingGroup, name: str, series: Series) -> None:
    if not series.is_full_precision:
        if together.sheet.document.provenance is not None:
            together.add("golden-precision", name, "five decimals; record it again for all of them")
        return
    broken = [v for v in series.values if isinstance(v, float) and 0 < abs(v % 1) < 1]
    small = [v for v in broken if abs(v) < _COARSE]
    if len(small) >= _MIN_VALUES and all(round(v, _DECIMALS) == v for v in small):
        message = "says full precision, and no value has more than five decimals; record it again"
        together.add("golden-precision", name, message)
