"""Metrics that an unknown program wrote or printed: found, ranked and described."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from pytest_megatron.errors import MegatronError
from pytest_megatron.runs.layout import PhaseDirs
from pytest_megatron.workloads.golden.collect import WatchedFiles, read_files, read_logs
from pytest_megatron.workloads.golden.formats.curves import Curves
from pytest_megatron.workloads.golden.model import MetricMap, Series, Value, is_loss
from pytest_megatron.workloads.recipe.metrics import (
    NUMBER,
    PATHS,
    READY,
    LinePattern,
    MetricFormat,
)

_COMPARED = re.compile(r"loss|ppl|perplexity|acc(uracy)?\b|reward|grad[-_ /]?norm", re.IGNORECASE)
_NOT_COMPARED = re.compile(r"time|per[-_ ]sec|scale|runtime|/s\b", re.IGNORECASE)
# Lines of programs without a ready pattern: those with a step, and those that have to be counted.
_LOSSES = (
    rf"(?P<name>\b(?:(?:train|training|val|valid|validation|test|eval) )?[\w/.-]*"
    rf"(?:loss|ppl|perplexity|accuracy|reward|grad(?:ient)?[-_ ]norm))"
    rf"\s*[:=]?\s*(?P<value>{NUMBER})"
)
_STEP = r"\b(?:global[_ ]?step|step|iteration|iter|update)\w*\s*[:=#\[]?\s*(?P<step>\d+)"
_OTHERS = (LinePattern(values=_LOSSES, step=_STEP), LinePattern(values=_LOSSES))
_GLOBS: Mapping[MetricFormat, str] = {**PATHS, MetricFormat.CSV: "**/*.csv"}
_CURVE_WIDTH = 32
_SPARKS = "▁▂▃▄▅▆▇█"
_GAP = "·"
_ENOUGH = 0.5  # of the steps of the source that has most


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One place where a program leaves metrics.

    Attributes:
        keys: `metrics` of a row that names it, without the names.
        where: For a person.
        metrics: What was read there.
        wanted: Metrics to compare; none leaves that to their names.
    """

    keys: Mapping[str, str]
    where: str
    metrics: MetricMap
    wanted: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Metrics to compare: those wanted, else losses and their like (curves if there are)."""
        if self.wanted:
            return self.wanted
        chosen = self._like_losses
        lasting = [name for name in chosen if len(self.metrics[name]) > 1]
        return tuple(sorted(lasting or chosen, key=_rank_of))

    @property
    def single(self) -> tuple[str, ...]:
        """Losses and their like that have one value."""
        return tuple(name for name in self._like_losses if len(self.metrics[name]) == 1)

    @property
    def _like_losses(self) -> list[str]:
        return [n for n in self.metrics if _COMPARED.search(n) and not _NOT_COMPARED.search(n)]

    @property
    def num_steps(self) -> int:
        """The most steps that a metric to compare has."""
        return max((len(self.metrics[name]) for name in self.names), default=0)

    @property
    def last_step(self) -> int:
        """The last step of the metrics to compare."""
        return max(self.metrics[name].steps[-1] for name in self.names)


def _rank_of(name: str) -> tuple[bool, bool, str]:
    """Return the order of names: losses of the training first."""
    return not is_loss(name), bool(re.search(r"eval|test|val", name)), name


@dataclass(slots=True)
class MetricSearch:
    """Looks for metrics of a program; create it, and mark, before the program starts.

    Attributes:
        root: Working directory of the program.
        others: Directories outside of it that its arguments name.
        places: Where metrics were found, the best place first.
        passed_over: Places whose metrics have two values at a step, a line each.
    """

    root: Path
    others: tuple[Path, ...] = ()
    places: list[Found] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)
    _watched: list[tuple[MetricFormat, WatchedFiles]] = field(default_factory=list)

    def mark(self) -> None:
        """Remember the files that are there already."""
        for form, glob in _GLOBS.items():
            for root in (self.root, *self.others):
                self._watched.append((form, WatchedFiles(root, glob)))
                self._watched[-1][1].mark()

    def look(self, dirs: PhaseDirs, *, is_joint: bool) -> None:
        """Find the places that have metrics to compare.

        Args:
            dirs: The program's logs.
            is_joint: Whether several ranks print into one log.
        """
        found = [
            one for one in (*self._files(), *self._printed(dirs, is_joint=is_joint)) if one.names
        ]
        most = max((one.num_steps for one in found), default=0)
        self.places = sorted(found, key=lambda one: one.num_steps < most * _ENOUGH)

    def _files(self) -> Iterator[Found]:
        """Yield metrics that were found in files, by format and place."""
        for form, watched in self._watched:
            globs = dict.fromkeys(_glob_of(path, self.root) for path in watched.changed())
            covered = {glob.replace("**/", "") for glob in globs if "**/" in glob}
            for glob in (glob for glob in globs if glob not in covered):
                part = watched.narrowed(self.root, glob)
                try:
                    curves = read_files(part, form, None)
                except MegatronError:  # no metrics in there: data, or a table of another kind
                    continue
                self.passed_over += _oddities(curves)
                keys = {"source": form.value, "path": glob}
                yield Found(keys=keys, where=f"{form.value}, {glob}", metrics=_sound(curves))

    def _printed(self, dirs: PhaseDirs, *, is_joint: bool) -> Iterator[Found]:
        """Yield metrics that were found in printed lines."""
        for name, pattern in READY.items():
            metrics = _sound(read_logs(dirs, pattern))
            if any(map(_COMPARED.search, metrics)):
                keys = {"source": "printed", "pattern": name}
                yield Found(keys=keys, where=f"printed, as {name} prints", metrics=metrics)
                return
        by_step, counted = _OTHERS
        curves, keys = read_logs(dirs, by_step), {"source": "printed", "pattern": by_step.values}
        if len(curves) and not curves.disagreements:
            keys["step"] = str(by_step.step)
            yield Found(keys=keys, where="printed, by step", metrics=curves.metrics)
            return
        self.passed_over += _oddities(curves)
        if not is_joint and (metrics := _sound(read_logs(dirs, counted))):
            yield Found(keys=keys, where="printed, counted from 1", metrics=metrics)


def _oddities(curves: Curves) -> list[str]:
    """Return a line where metrics to compare have two values at a step."""
    odd = [place for name, place in curves.disagreements.items() if _COMPARED.search(name)]
    return [f"{where}: {text.partition(';')[0]}" for where, text in odd[:1]]


def _sound(curves: Curves) -> MetricMap:
    """Return the metrics that have one value a step."""
    return {n: s for n, s in curves.metrics.items() if n not in curves.disagreements}


def _glob_of(path: Path, root: Path) -> str:
    """Return a glob for a file of each run: numbers and ids in its place differ from run to run."""
    below = path.relative_to(root) if path.is_relative_to(root) else path
    *parts, name = below.parts
    fixed: list[str] = []
    for part in parts:
        if re.search(r"\d", part):
            break
        fixed.append(part)
    if "tfevents" in name:
        name = "*tfevents*"
    elif name.endswith(".wandb"):
        name = "*.wandb"
    is_deeper = len(fixed) < len(parts) or name.startswith("*")
    return "/".join([*fixed, *(["**"] if is_deeper else []), re.sub(r"\d+", "*", name)])


def disagreement(best: Found, places: Sequence[Found]) -> str | None:
    """Say where another place has another value of a metric than the best one has."""
    for other in places:
        for name in best.names if other is not best else ():
            theirs = other.metrics[name].finite() if name in other.metrics else {}
            for step, here in best.metrics[name].finite().items():
                there = theirs.get(step, here)
                if not math.isclose(here, there, rel_tol=1e-3):  # one may be printed shorter
                    values = f"{here:g} ({best.where}) and {there:g} ({other.where})"
                    return f"{name} at step {step} is {values}"
    return None


def description(name: str, series: Series) -> str:
    """Return the steps of a metric, its first and last value, and its curve."""
    gaps = {b - a for a, b in pairwise(series.steps)}
    by = f" by {min(gaps)}" if len(gaps) == 1 else ""
    steps = f"{len(series)} steps, {series.steps[0]} to {series.steps[-1]}{by}"
    first, last = series.values[0], series.values[-1]
    curve = _sparkline(series.values, width=_CURVE_WIDTH)
    return f"{name}: {steps}, {first:.6g} -> {last:.6g}  {curve}"


def _sparkline(values: Sequence[Value], *, width: int) -> str:
    """Return a curve of block characters; each stands for the mean of as many values.

    A part without any finite number is a dot; where all are equal, the line is low.
    """
    num_parts = min(width, len(values))
    bounds = [len(values) * i // max(num_parts, 1) for i in range(num_parts + 1)]
    parts = [_mean(values[a:b]) for a, b in pairwise(bounds)]
    finite = [mean for mean in parts if mean is not None]
    least = min(finite, default=0.0)
    height = max(finite, default=0.0) - least
    return "".join(
        _GAP if mean is None else _SPARKS[_level((mean - least) / height if height > 0 else 0.0)]
        for mean in parts
    )


def _level(share: float) -> int:
    return min(int(share * len(_SPARKS)), len(_SPARKS) - 1)


def _mean(values: Sequence[Value]) -> float | None:
    finite = [v for v in values if isinstance(v, float) and math.isfinite(v)]
    return sum(v / len(finite) for v in finite) if finite else None


_LENGTH = re.compile(
    r"[-+]*(?:\w+\.)*(?:(?:max|num|train|total)[-_](?:train[-_])?|train(?:ing)?\.)"
    r"(?:steps?|iters?|iterations)"
)


def length_of(words: Sequence[str]) -> tuple[str, int] | None:
    """Return the argument that says how many steps a command trains, and the number."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, has_value, value = word.partition("=")
        value = value if has_value else after
        if _LENGTH.fullmatch(name) and value.isdecimal():
            return name, int(value)
    return None
