"""Metrics that an unknown program wrote or printed: found, ranked and described."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from pytest_megatron.base.text import counted
from pytest_megatron.errors import MegatronError
from pytest_megatron.runs.layout import PhaseDirs
from pytest_megatron.workloads.golden.collect import WatchedFiles, read_files, read_logs
from pytest_megatron.workloads.golden.formats.curves import Curves
from pytest_megatron.workloads.golden.model import MetricMap, Series, is_loss
from pytest_megatron.workloads.recipe.metrics import (
    NUMBER,
    PATHS,
    READY,
    LinePattern,
    MetricFormat,
)

# What a training is judged by: its loss and the like, and whatever an evaluation measures.
_COMPARED = re.compile(
    r"loss|ppl|perplexity|acc(uracy)?\b|reward|return|grad[-_ /]?norm"
    r"|(?<![a-z])(val(id(ation)?)?|eval(uation)?|test)(?![a-z])",
    re.IGNORECASE,
)
_NOT_COMPARED = re.compile(
    r"time|per[-_ ]?sec|seconds|scale|/s\b|[sf]ps\b|speed|mem|samples", re.IGNORECASE
)
# Lines of programs without a ready pattern: a name and a number, maybe behind `Train` or `Test`.
_LOSS = (
    r"\b(?:[a-z][\w.-]* )?[\w/.-]*"
    r"(?:loss|ppl|perplexity|acc(?:uracy)?|reward|return|grad(?:ient)?[-_ ]norm)"
)
_MODE = r"\b(?P<mode>train(?:ing)?|val(?:id(?:ation)?)?|test|eval(?:uation)?)\b"
_LOSSES = rf"(?P<name>{_LOSS})\s*[:=]?\s*(?P<value>{NUMBER})"
# Any name of up to three words before a number: on any line, and where a step or a loss is also.
_FUSED = r"(?<=[^\W\d_])(?=\d*\.\d)"  # as in `loss2.5`
_WORD = (
    rf"""(?!(?:nan|inf(?:inity)?)\b)[^\W\d]"""
    rf"""(?:(?!{_FUSED})[^\s|,;:=~≈→<>\[\]{{}}()'"]|\(\w*\))*"""
)
_NAME = rf"\b(?!(?:step|iter|epoch)\d){_WORD}(?: (?:{_WORD}|\([\w ]+\))){{0,2}}"
_MARKED = r"""['"]?\s*(?:[:=~≈→]|[-=]>)+\s*['"]?"""
_ONLY_MARKED = rf"(?P<name>{_NAME}){_MARKED}(?P<value>{NUMBER})(?![\w/]|[.:-]\d)"
_BESIDE = (
    rf"(?P<name>{_NAME})"
    rf"(?:{_MARKED}[\[(]?|\s+[\[(]?|[\[(]|{_FUSED}|\s*[|│](?=\s*{NUMBER}\s*(?:[|│]|$))\s*)"
    rf"(?P<value>{NUMBER})(?![.:-]?\d)"
)
_STEP = r"\b(?:global[_ ]?step|step|iteration|iter|update)\w*\s*[:=#\[]?\s*(?P<step>\d+)"
_STEP_OF_RANK_0 = rf"\brank\W*0\b.*?{_STEP}"
# A line with a loss, such as `loss (mean): 2.5`; any digit of it will do.
_WITH_LOSS = rf"^(?=.*?{_LOSS}(?![a-z])[^|,;\d]{{0,20}}?{NUMBER})\D*(?P<step>\d)"
_NO_METRIC = re.compile(
    r"(?:(?!.*per ).* )?(?:(?:global_?)?step|iter(?:ation)?|epoch|update)s?|batch|rank|.*\.py",
    re.IGNORECASE,
).fullmatch
_NUMBER_OF_RUN = re.compile(r"(?<!\d)(?<!rank)(?<!rank[_.-])\d+", re.IGNORECASE)
_GLOBS: Mapping[MetricFormat, str] = {
    **PATHS,
    MetricFormat.JSONL: "**/*json*",
    MetricFormat.CSV: "**/*.csv",
    MetricFormat.TRAINER_STATE: "**/*.json",
}
_ENOUGH, _FEW = 0.5, 3  # of the steps of the source that has most; steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One place where a program leaves metrics.

    Attributes:
        keys: `metrics` of a row that names it, without the names.
        where: For a person.
        metrics: What was read there.
        wanted: Metrics to compare; none leaves that to their names.
        has_steps: Whether it names the steps; else they are counted.
        unread: Further metrics there, with several values at a step.
    """

    keys: Mapping[str, str]
    where: str
    metrics: MetricMap
    wanted: tuple[str, ...] = ()
    has_steps: bool = True
    unread: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Metrics to compare: those wanted, else losses and their like (curves if there are)."""
        if self.wanted:
            return self.wanted
        chosen = list(filter(_is_compared, self.metrics))
        lasting = [name for name in chosen if len(self.metrics[name]) > 1]
        return tuple(sorted(lasting or chosen, key=_rank_of))

    @property
    def num_steps(self) -> int:
        """The most steps that a metric to compare has."""
        return max((len(self.metrics[name]) for name in self.names), default=0)

    @property
    def last_step(self) -> int:
        """The last step of the metrics to compare."""
        return max(self.metrics[name].steps[-1] for name in self.names)

    @property
    def has_all_digits(self) -> bool:
        """Whether most values of the metrics to compare have more digits than a person reads."""
        values = [v for name in self.names for v in self.metrics[name].finite().values()]
        return 2 * sum(float(f"{v:.6g}") != v for v in values) > len(values)

    def shortcomings(self, most: int) -> tuple[bool, ...]:
        """Return what speaks against it, the worst first: steps and digits count before length.

        Args:
            most: Steps of the place that has most.
        """
        is_short = self.num_steps < most * _ENOUGH
        is_tiny = is_short and self.num_steps < _FEW
        return is_tiny, not self.has_steps, not self.has_all_digits, is_short


def _rank_of(name: str) -> tuple[bool, bool, str]:
    """Return the order of names: losses of the training first."""
    return not is_loss(name), bool(re.search(r"eval|test|val", name)), name


@dataclass(slots=True)
class MetricSearch:
    """Looks for metrics of a program; create it, and mark, before the program starts.

    Attributes:
        root: Working directory of the program.
        outside: Directories outside of it that its arguments name.
        places: Where metrics to compare were found, the best place first.
        others: Where other metrics alone were found, or are read only when they are asked for.
        passed_over: Places whose metrics cannot be read, and why, a line each.
    """

    root: Path
    outside: tuple[Path, ...] = ()
    places: list[Found] = field(default_factory=list)
    others: list[Found] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)
    _watched: list[tuple[MetricFormat, WatchedFiles]] = field(default_factory=list)

    def mark(self) -> None:
        """Remember the files that are there already."""
        for form, glob in _GLOBS.items():
            for root in (self.root, *self.outside):
                self._watched.append((form, WatchedFiles(root, glob)))
                self._watched[-1][1].mark()

    def look(self, dirs: PhaseDirs, *, is_joint: bool) -> None:
        """Find the places that have metrics to compare.

        Args:
            dirs: The program's logs.
            is_joint: Whether several ranks print into one log.
        """
        found = [*self._files(), *self._printed(dirs, is_joint=is_joint)]
        places = [one for one in found if one.names]
        most = max((one.num_steps for one in places), default=0)
        self.places = sorted(places, key=lambda one: one.shortcomings(most))
        curves = [one for one in found if any(len(s) > 1 for s in one.metrics.values())]
        self.others = [one for one in curves if not one.names]
        self.others += self._numbers(dirs, is_joint=is_joint)

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
                yield _found(keys, f"{form.value}, {glob}", curves)

    def _printed(self, dirs: PhaseDirs, *, is_joint: bool) -> Iterator[Found]:
        """Yield what printed lines have: by a ready pattern, by step, or counted."""
        ready: Found | None = None
        for name, pattern in READY.items():
            keys = {"source": "printed", "pattern": name}
            found = _found(keys, f"printed, as {name} prints", read_logs(dirs, pattern))
            if found.names:
                ready = found
                break
        values, curves = self._by_step(dirs, _STEP)
        by_step = _found(_printed_keys(values, _STEP), "printed, by step", curves)
        if ready is not None and len(ready.names) >= len(by_step.names):
            yield ready
            return
        self.passed_over += _oddities(curves)
        if curves.disagreements:
            values, curves = self._by_step(dirs, _STEP_OF_RANK_0)
            keys = _printed_keys(values, _STEP_OF_RANK_0)
            of_rank_0 = _found(keys, "printed, lines of rank 0 by step", curves)
            by_step = of_rank_0 if len(of_rank_0.names) > len(by_step.names) else by_step
        yield by_step
        if not by_step.names and not is_joint:
            values, curves = self._by_step(dirs, None)
            yield _found(_printed_keys(values, None), "printed, counted from 1", curves)

    def _by_step(self, dirs: PhaseDirs, step: str | None) -> tuple[str, Curves]:
        """Return a pattern of losses and what it reads; by mode where they are others then."""
        by_mode = f"{_LOSSES}|{_MODE}"
        plain = read_logs(dirs, LinePattern(values=_LOSSES, step=step))
        other = read_logs(dirs, LinePattern(values=by_mode, step=step))
        if len(other) > len(plain) or len(other.disagreements) < len(plain.disagreements):
            return by_mode, other
        return _LOSSES, plain

    def _numbers(self, dirs: PhaseDirs, *, is_joint: bool) -> Iterator[Found]:
        """Yield all numbers that are printed behind a name.

        They are read by step where a line has one; beside a loss, too, a name is enough. On other
        lines a metric has a mark (`bpb: 1.2`) and comes again, or one of both and a name that says
        so: else it is a setting, or a part of a sentence.
        """
        beside_loss = read_logs(dirs, LinePattern(values=_BESIDE, step=_WITH_LOSS)).metrics
        for values, step in ((_BESIDE, _STEP), (_ONLY_MARKED, None), (_BESIDE, None)):
            curves = read_logs(dirs, LinePattern(values=values, step=step))
            where = f"printed, any number{', counted from 1' * (step is None)}"
            found = _found(_printed_keys(values, step), where, curves)
            kept = {
                name: series
                for name, series in found.metrics.items()
                if not _NO_METRIC(name)
                and (
                    step is not None
                    or name in beside_loss
                    or (values is _ONLY_MARKED) + (len(series) > 1) + _is_compared(name) > 1
                )
            }
            unread = tuple(n for n in curves.disagreements if not _NO_METRIC(n))
            if step is None and is_joint:
                kept, unread = {}, tuple(kept)
            if kept or unread:
                yield replace(found, metrics=kept, unread=unread)


def _printed_keys(values: str, step: str | None) -> dict[str, str]:
    """Return the keys of a row that reads printed lines."""
    keys = {"source": "printed", "pattern": values}
    return keys if step is None else {**keys, "step": step}


def _found(keys: Mapping[str, str], where: str, curves: Curves) -> Found:
    """Return a place with the metrics that have one value a step."""
    odd = curves.disagreements
    metrics = {name: s for name, s in curves.metrics.items() if name not in odd}
    return Found(keys=keys, where=where, metrics=metrics, has_steps=not curves.is_counted)


def _is_compared(name: str) -> bool:
    """Return whether a metric is one to compare, by its name."""
    return _COMPARED.search(name) is not None and _NOT_COMPARED.search(name) is None


def _oddities(curves: Curves) -> list[str]:
    """Return a line for metrics that have two values at a step: of one its values, of all names."""
    odd = sorted(curves.disagreements.items(), key=lambda one: not _is_compared(one[0]))
    rest = [name for name, _ in odd[1:]]
    more = f", and two values of {', '.join(rest)}" if rest else ""
    return [f"{where}: {text.partition(';')[0]}{more}" for _, (where, text) in odd[:1]]


def _glob_of(path: Path, root: Path) -> str:
    """Return a glob for a file of each run: numbers and ids in its place differ from run to run.

    The number of a rank does not.
    """
    below = path.relative_to(root) if path.is_relative_to(root) else path
    *parts, name = below.parts
    fixed: list[str] = []
    for part in parts:
        if _NUMBER_OF_RUN.search(part):
            break
        fixed.append(part)
    if "tfevents" in name:
        name = "*tfevents*"
    is_deeper = len(fixed) < len(parts) or name.startswith("*")
    return "/".join([*fixed, *(["**"] if is_deeper else []), _NUMBER_OF_RUN.sub("*", name)])


def description(name: str, series: Series) -> str:
    """Return the steps of a metric, its first and last value."""
    gaps = {b - a for a, b in pairwise(series.steps)}
    by = f" by {min(gaps)}" if len(gaps) == 1 else ""
    steps = f"{counted(len(series), 'step')}, {series.steps[0]} to {series.steps[-1]}{by}"
    first, last = series.values[0], series.values[-1]
    return f"{name}: {steps}, {first:.6g} -> {last:.6g}"


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
