"""Places that a training's metrics are read from, as a row names them in `metrics`. Pure."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, NotRequired

from typing_extensions import TypedDict

from pytest_megatron.base.schema import About, Text, closed
from pytest_megatron.base.text import without_colours

NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+|(?:inf(?:inity)?|nan)\b)(?:e[-+]?\d+)?"
_SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_BARRED = rf"\|\s*(?P<name>[^|:]+?):\s*(?P<value>{NUMBER}[KMBGT]?)\s*(?=\||$)"


class MetricFormat(Enum):
    """What holds the metrics."""

    TENSORBOARD = "tensorboard"
    JSONL = "jsonl"
    CSV = "csv"
    TRAINER_STATE = "trainer_state"
    PRINTED = "printed"


# Which files of the project they are in, where the row does not say.
PATHS: Mapping[MetricFormat, str] = {
    MetricFormat.TENSORBOARD: "**/*tfevents*",
    MetricFormat.JSONL: "**/*.jsonl",
    MetricFormat.CSV: "**/metrics.csv",
    MetricFormat.TRAINER_STATE: "**/trainer_state.json",
}


@closed
class MetricsFrom(TypedDict):
    """Where a program writes its metrics."""

    source: MetricFormat
    path: NotRequired[Annotated[Text, About("Glob of the files, from the project's root.")]]
    step: NotRequired[Annotated[Text, About("Column of the step; of lines a pattern.")]]
    pattern: NotRequired[Annotated[Text, About("Name of a ready pattern, or a pattern.")]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinePattern:
    """How to read metrics from printed lines.

    Attributes:
        values: Pattern of a value: groups `name` and `value`, or a group for each metric. A group
            `mode` (`train`, `test`) is a part of the names that follow it in the line.
        step: Pattern of a line with values, whose group (`step`, or the first) is the step; with a
            group `last`, the last step. None counts the values of each metric from 1.
    """

    values: str
    step: str | None = None

    def read(self, line: str) -> tuple[int | None, dict[str, float]]:
        """Return step and values of a line; no values where it has none."""
        line = without_colours(line)
        number = None
        if self.step is not None:
            found = _compiled(self.step).search(line)
            if found is None:
                return None, {}
            groups = found.groupdict()
            number = int((groups.get("step") or found[1]).replace(",", ""))
        values: dict[str, float] = {}
        mode = ""
        for match in _compiled(self.values).finditer(line):
            groups = match.groupdict()
            if number is None and groups.get("step"):
                number = int(groups["step"])
            mode = f"{groups['mode'].lower()} " if groups.get("mode") else mode
            for name, text in _named(groups):
                if (value := to_number(text)) is not None:
                    values[_another(f"{mode}{name}", values)] = value
        return number, values


def _another(name: str, known: Mapping[str, float]) -> str:
    """Return a name that a line does not have yet, with a number if it is there again."""
    others = (f"{name} {number}" for number in itertools.count(2))
    return name if name not in known else next(other for other in others if other not in known)


def _named(groups: Mapping[str, str | None]) -> Iterator[tuple[str, str]]:
    """Yield names and values that a pattern found."""
    if groups.get("name") and groups.get("value"):
        yield str(groups["name"]).strip(), str(groups["value"])
        return
    yield from (
        (name, text) for name, text in groups.items() if text and name not in ("step", "mode")
    )


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE)


def to_number(text: str) -> float | None:
    """Return a number as programs print it (`1,024`, `7.07K`, `nan`), None for other text."""
    text = text.strip().rstrip(",;|)]").replace(",", "")
    scale = _SUFFIXES.get(text[-1:], 1.0)
    try:
        return float(text if scale == 1.0 else text[:-1]) * scale
    except ValueError:
        return None


# Lines of Megatron-LM megatron/training/training.py, torchtitan components/metrics.py, transformers
# trainer_callback.py (a dict; no step), nanoGPT train.py, DeepSpeed runtime/engine.py and
# pipe/engine.py, nanotron logging, NeMo lightning/pytorch/callbacks/progress_printer.py.
READY: Mapping[str, LinePattern] = {
    "megatron": LinePattern(
        step=r"\biteration\s+(?P<step>\d+)\s*/\s*(?P<last>\d+)\s*\|", values=_BARRED
    ),
    "nanotron": LinePattern(
        step=r"\biteration: (?P<step>[\d,]+) / (?P<last>[\d,]+) \|", values=_BARRED
    ),
    "nemo": LinePattern(step=r"\bepoch \d+, .*\bglobal_step: (?P<step>\d+)", values=_BARRED),
    "torchtitan": LinePattern(
        step=r"\bstep:\s*(?P<step>\d+)\s+loss:",
        values=rf"\b(?!step:)(?P<name>\w+):\s*(?P<value>{NUMBER})(?![\w.])",
    ),
    "nanogpt": LinePattern(
        step=r"\b(?:iter|step) (?P<step>\d+): (?:train )?loss",
        values=rf"\b(?P<name>(?:train |val )?loss) (?P<value>{NUMBER})",
    ),
    "deepspeed": LinePattern(
        step=r"\bsteps?[=:] ?(?P<step>\d+)[, ]",
        values=rf"\b(?P<name>loss|lr|skipped)[=:]\s*\[?(?P<value>{NUMBER})",
    ),
    "hf_trainer": LinePattern(
        values=rf"(?<=[{{ ])'(?P<name>[\w/ .-]+)': '?(?P<value>{NUMBER})'?(?=[,}}])"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSource:
    """Where a row's metrics are.

    Attributes:
        names: Metrics that are compared.
        form: What holds them; None is what `$PYTEST_MEGATRON_METRICS` and `$TENSORBOARD_PATH` name.
        path: Glob of the files, below the project's root where it is relative.
        step: Column or key of the step; None takes the usual names, and else counts.
        lines: How printed lines are read, where they are.
    """

    names: tuple[str, ...]
    form: MetricFormat | None = None
    path: str | None = None
    step: str | None = None
    lines: LinePattern | None = None

    @property
    def counts_on(self) -> bool:
        """True if a resumed training has its own steps alone there, counted on."""
        if self.lines is not None:
            return self.lines.step is not None or "?P<step>" in self.lines.values
        return self.form is not MetricFormat.TRAINER_STATE


def parse_source(value: Mapping[str, str], names: tuple[str, ...]) -> MetricSource:
    """Return the source that the keys of `MetricsFrom` describe.

    Raises:
        ValueError: They describe none; the text says what was expected.
    """
    texts = {key: value.get(key) for key in ("source", "path", "step", "pattern")}
    form = MetricFormat(texts["source"])
    is_printed = form is MetricFormat.PRINTED
    for key, is_taken in (("pattern", is_printed), ("path", not is_printed)):
        if texts[key] is not None and not is_taken:
            problem = f"{key} does not go with source {form.value}; remove it"
            raise ValueError(problem)
    if is_printed and texts["pattern"] is None:
        problem = f"pattern is missing, expected one of {', '.join(READY)} or a pattern"
        raise ValueError(problem)
    return MetricSource(
        names=names,
        form=form,
        path=texts["path"] or PATHS.get(form),
        step=None if is_printed else texts["step"],
        lines=_lines(str(texts["pattern"]), texts["step"]) if is_printed else None,
    )


def _lines(pattern: str, step: str | None) -> LinePattern:
    """Return a ready pattern, or the one that is given."""
    if pattern in READY:
        return READY[pattern]
    for key, text in (("pattern", pattern), ("step", step)):
        if text is None:
            continue
        try:
            compiled = re.compile(text)
        except re.error as error:
            problem = f"{key} {text!r} is no regular expression: {error}"
            raise ValueError(problem) from error
        if not compiled.groups or (key == "pattern" and not compiled.groupindex):
            problem = (
                f"{key} {text!r} has no group, expected "
                + ("(?P<loss>...), or (?P<name>...) and (?P<value>...)" * (key == "pattern"))
                + (r"one, such as step (\d+)" * (key == "step"))
                + f", or one of {', '.join(READY)}" * (key == "pattern")
            )
            raise ValueError(problem)
    return LinePattern(values=pattern, step=step)
