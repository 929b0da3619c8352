"""Text on changed goldens for reviewers: Markdown, sentences, a commit message. Pure.

A comment of GitHub ends at 64 kB, so the page stays below 60 however many goldens there are: the
rows that matter most come first, and the rest is counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pytest_megatron.base.text import code, escaped, plain
from pytest_megatron.golden.compare.result import relative
from pytest_megatron.golden.model import Series, is_finite, is_loss
from pytest_megatron.refresh.candidate import Refusal
from pytest_megatron.refresh.difference import (
    BUCKETS,
    NOISE,
    Divergence,
    FileChange,
    FileDifference,
    MetricDifference,
    Trend,
)

MOST_BYTES = 60_000
_ROW_BYTES = 44_000
_LIST_BYTES = 5_000
_ATTENTION, _SMALL = 1e-3, 1e-6
_CANCELS = 10  # the largest deviation over the signed mean
_SUBJECT_LENGTH = 60
_MOST_NAMES = 5
_ROW_HEAD = (
    "| golden | metric | steps | not finite | changed | median | largest | mean, signed | parts |"
)
_ROW_RULE = "|---|---|---:|---:|---:|---:|---:|---:|---|"


def markdown(differences: Sequence[FileDifference], *, reason: str | None = None) -> str:
    """Return the page for a pull request, without a final newline.

    Args:
        differences: One for each golden.
        reason: The typed reason for replacing them, if any.
    """
    parts = ["## Goldens", "", _headline(differences), ""]
    if reason:
        parts += [f"Reason: {escaped(reason)}", ""]
    parts += [f"- {sentence}" for sentence in interpret(differences)] + [""]
    parts += _causes(differences)
    rows = _rows(differences)
    if rows:
        parts += [_ROW_HEAD, _ROW_RULE, *_within(rows, _ROW_BYTES, "| and {} more rows |")]
        parts.append("")
    parts += _histogram(differences)
    parts += _directions(differences)
    parts += _files(differences)
    return "\n".join(parts).rstrip()


def interpret(differences: Sequence[FileDifference]) -> list[str]:
    """Return sentences on the figures, the weightiest first."""
    losses = [m for d in differences for m in d.metrics if is_loss(m.metric) and m.deviations]
    found = []
    if holes := sum(m.num_not_finite[1] > 0 for d in differences for m in d.metrics):
        found.append(f"{counted(holes, 'metric')} with values that are no numbers.")
    if lost := sum(m.num_new > 0 and m.num_lost > 0 for d in differences for m in d.metrics):
        found.append(f"{counted(lost, 'metric')} with fewer steps: less is compared than before.")
    if outside := sum(d.is_outside for d in differences):
        found.append(f"{counted(outside, 'golden')} outside the band: {_what_is(differences)}")
    found += _of_losses(losses)
    changed = [d for d in differences if d.state is FileChange.CHANGED]
    if not changed and not found:
        kinds = "Nothing that was there changes." if differences else "There is nothing to compare."
        found.append(kinds)
    elif not losses and changed:
        found.append("No loss changes, only other metrics.")
    return found


def _what_is(differences: Sequence[FileDifference]) -> str:
    """Explain metrics outside the band: a loss is the curve, the others are around it."""
    names = sorted({m.metric for d in differences for m in d.metrics if m.is_outside})
    if any(map(is_loss, names)) or not names:
        return "a run as it now is would have failed, so what is measured is another curve."
    shown = ", ".join(escaped(name) for name in names[:_MOST_NAMES])
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"only in {shown}{more}; a run as it now is fails where a case compares that."


def _of_losses(losses: Sequence[MetricDifference]) -> Iterable[str]:
    if not losses:
        return
    if starts := sum(
        m.start is Divergence.STEP_1 and abs(m.deviations[1]) > _SMALL for m in losses
    ):
        yield (
            f"{counted(starts, 'loss', 'losses')} with another first step: data, initialisation "
            "or the forward pass changed, not only numerics."
        )
    yield _size_of(losses)
    trends = Counter(m.trend for m in losses)
    moving = trends[Trend.WORSE] + trends[Trend.BETTER]
    for trend in (Trend.WORSE, Trend.BETTER):
        if moving > 1 and trends[trend] == moving:
            yield f"All {moving} losses that move get {trend.value}."
    if cancelled := sum(m.largest > _ATTENTION > _CANCELS * abs(m.mean_signed) for m in losses):
        yield (
            f"{counted(cancelled, 'loss', 'losses')} with deviations both ways, which cancel in "
            "the signed mean: look at the largest one."
        )


def _size_of(losses: Sequence[MetricDifference]) -> str:
    """Describe the size of the deviations, relative to noise."""
    median = max(m.median for m in losses)
    largest = max(m.largest for m in losses)
    if largest < _SMALL:
        return "Losses differ in the last digits only."
    if largest < NOISE:
        return f"Losses deviate by {largest:.1e} at most, which is noise."
    if median < NOISE:
        return (
            f"The usual deviation of losses ({median:.1e} in the median) is noise, but single "
            f"steps deviate by up to {largest:.1e}."
        )
    if median < _ATTENTION:
        return f"The median deviation of losses reaches {median:.1e}: more than noise, still small."
    return f"The median deviation of losses reaches {median:.1e}, which needs attention."


def commit_message(differences: Sequence[FileDifference], *, reason: str | None = None) -> str:
    """Return the message that a commit of these goldens should have, with a final newline."""
    written = [d for d in differences if d.new is not None]
    cases = sorted({d.path.split("/")[-2] if "/" in d.path else d.path for d in written})
    verb = "Record" if all(d.old is None for d in written) else "Refresh"
    what = f"the golden of {cases[0]}" if len(cases) == 1 else f"goldens of {len(cases)} cases"
    subject = f"{verb} {what}"
    if len(subject) > _SUBJECT_LENGTH:
        subject = f"{verb} {counted(len(written), 'golden')}"
    lines = [subject, ""]
    if reason:
        lines += [reason, ""]
    lines += [f"{name}: {value}" for name, value in _origins(written)]
    worst = max(written, key=lambda d: d.largest, default=None)
    if worst is not None and worst.metrics and worst.state is FileChange.CHANGED:
        metric = max(worst.metrics, key=lambda m: m.largest)
        lines.append(
            f"Largest relative change: {metric.largest:.1e}, {metric.metric} at step "
            f"{metric.worst_step} of {worst.path}"
        )
    return plain("\n".join(lines)) + "\n"


def refusals_text(refusals: Sequence[tuple[str, Refusal]]) -> list[str]:
    """Return a line for each golden that is not written: name, rule, advice."""
    return [plain(f"{name}: {refusal.line}") for name, refusal in refusals]


def _origins(written: Sequence[FileDifference]) -> Iterable[tuple[str, str]]:
    """Yield the origins of all goldens, each value once."""
    origins = [d.new.provenance for d in written if d.new is not None and d.new.provenance]
    for title, values in (
        ("Command", [" ".join(o.command) for o in origins if o.command]),
        ("Measured at commit", [o.commit for o in origins if o.commit]),
        ("Image", [o.image for o in origins if o.image]),
        ("GPU", [o.gpu for o in origins if o.gpu]),
        ("Driver", [o.driver for o in origins if o.driver]),
    ):
        for value in dict.fromkeys(values):
            yield title, value


def _headline(differences: Sequence[FileDifference]) -> str:
    counts = Counter(d.state for d in differences)
    parts = [f"{counts[state]} {state.value}" for state in FileChange if counts[state]]
    outside = sum(d.is_outside for d in differences)
    tail = f"; **{outside} outside the band**" if outside else ""
    return f"{counted(len(differences), 'golden')}: {', '.join(parts) or 'none'}{tail}."


def _rows(differences: Sequence[FileDifference]) -> list[str]:
    """Return a row for each metric that changes, those outside the band first."""
    pairs = [(d, m) for d in differences if d.state is FileChange.CHANGED for m in d.metrics]
    pairs.sort(key=lambda p: (not p[1].is_outside, -p[1].largest, p[0].path, p[1].metric))
    return [_row(d, m) for d, m in pairs]


def _row(difference: FileDifference, metric: MetricDifference) -> str:
    steps = f"{metric.num_old} -> {metric.num_new}"
    if metric.num_added or metric.num_lost:
        steps += f" (+{metric.num_added} -{metric.num_lost})"
    holes = " -> ".join(map(str, metric.num_not_finite)) if any(metric.num_not_finite) else "0"
    name = f"**{_name(metric.metric)}**" if metric.is_outside else _name(metric.metric)
    if not metric.num_new:
        name += " (gone)"
    elif not metric.num_old:
        name += " (new)"
    first = metric.first_step
    start = metric.start.value if first is None else f"{metric.start.value} ({first})"
    if metric.start is Divergence.STEP_1:
        start = metric.start.value
    return (
        f"| {_name(difference.path)} | {name} | {steps} | {holes} | {metric.num_changed} "
        f"| {metric.median:.1e} | {metric.largest:.1e} | {metric.mean_signed:+.1e} | {start} |"
    )


def _histogram(differences: Sequence[FileDifference]) -> list[str]:
    """Return the table of steps by size and sign of their deviation."""
    total: Counter[tuple[str, int, int]] = Counter()
    for difference in differences:
        for metric in difference.metrics:
            for (bucket, sign), count in metric.histogram().items():
                total[metric.metric.partition(" of ")[0], bucket, sign] += count
    names = sorted({name for name, _, _ in total})
    if not names:
        return []
    lines = ["Steps by relative deviation, `-` where the new value is smaller, `+` where larger:"]
    lines += ["", f"| metric | {' | '.join(BUCKETS)} |", f"|---|{'---:|' * len(BUCKETS)}"]
    for name in names:
        cells = []
        for bucket in range(len(BUCKETS)):
            minus, zero, plus = (total[name, bucket, sign] for sign in (-1, 0, 1))
            both = minus + zero + plus
            cells.append(f"{both} ({minus}- {plus}+)" if minus or plus else f"{both}")
        lines.append(f"| {_name(name)} | {' | '.join(cells)} |")
    return [*_within(lines, _LIST_BYTES, "| and {} more metrics |"), ""]


def _directions(differences: Sequence[FileDifference]) -> list[str]:
    """Return the table of goldens by direction, metric by metric."""
    total: Counter[tuple[str, Trend]] = Counter()
    for difference in differences:
        for metric in difference.metrics:
            if metric.deviations and " of " not in metric.metric:
                total[metric.metric, metric.trend] += 1
    if not total:
        return []
    lines = [
        f"| metric | grows | shrinks | same within {NOISE:.0e} |",
        "|---|---:|---:|---:|",
    ]
    for name in sorted({name for name, _ in total}):
        counts = [total[name, trend] for trend in (Trend.WORSE, Trend.BETTER, Trend.SAME)]
        lines.append(f"| {_name(name)} | {' | '.join(map(str, counts))} |")
    head = "Goldens by the signed mean of their deviations:"
    return [head, "", *_within(lines, _LIST_BYTES // 2, "| and {} more |"), ""]


def _causes(differences: Sequence[FileDifference]) -> list[str]:
    """Return one line for all goldens whose surroundings changed in the same way."""
    groups = Counter(cause for d in differences if d.metrics for cause in d.causes)
    lines = [f"- {_name(cause)}: {counted(n, 'golden')}" for cause, n in groups.most_common()]
    if not lines:
        return []
    return ["What else changed:", "", *_within(lines, _LIST_BYTES // 2, "- and {} more"), ""]


def _files(differences: Sequence[FileDifference]) -> list[str]:
    """Return the lists of new, gone and unchanged files."""
    lines: list[str] = []
    for state in (FileChange.NEW, FileChange.UNREADABLE, FileChange.GONE, FileChange.UNCHANGED):
        paths = [_name(d.path) for d in differences if d.state is state]
        if paths:
            lines += [f"{state.value.capitalize()} ({len(paths)}):", ""]
            listed = [f"- {path}" for path in sorted(paths)]
            lines += [*_within(listed, _LIST_BYTES // 4, "- and {} more"), ""]
    return lines


def _within(lines: Sequence[str], most_bytes: int, rest: str) -> list[str]:
    """Return the first lines that fit, and how many are left out."""
    kept: list[str] = []
    for number, line in enumerate(lines):
        most_bytes -= len(line.encode()) + 1
        if most_bytes < 0:
            return [*kept, rest.format(len(lines) - number)]
        kept.append(line)
    return kept


def counted(count: int, one: str, many: str | None = None) -> str:
    """Return `1 golden` or `2 goldens`."""
    return f"1 {one}" if count == 1 else f"{count} {many or f'{one}s'}"


def _name(text: str) -> str:
    """Return an untrusted name as code that ends no table cell."""
    return code(text).replace("|", "\\|")


OLD, NEW, BOTH = "\N{MIDDLE DOT}", "+", "\N{BULLET}"
_BARS = (
    " \N{LOWER ONE EIGHTH BLOCK}\N{LOWER ONE QUARTER BLOCK}\N{LOWER THREE EIGHTHS BLOCK}"
    "\N{LOWER HALF BLOCK}\N{LOWER FIVE EIGHTHS BLOCK}\N{LOWER THREE QUARTERS BLOCK}"
    "\N{LOWER SEVEN EIGHTHS BLOCK}\N{FULL BLOCK}"
)
_LABEL = 11  # characters left of the plot


def plot(old: Series | None, new: Series | None, *, width: int = 60, height: int = 8) -> str:
    """Return a plot of two series over their steps; either may be missing.

    Args:
        old: Drawn as a dot.
        new: Drawn as a plus; a bullet where both are.
        width: Of the whole plot, in characters.
        height: Of the curves, in lines; two more show the deviation.
    """
    sides = (_finite(old), _finite(new))
    everything = {step: value for side in sides for step, value in side.items()}
    if not everything:
        return "(no finite value)"
    num_columns = max(10, width - _LABEL)
    first, last = min(everything), max(everything)
    values = [value for side in sides for value in side.values()]
    low, high = min(values), max(values)
    grid: list[list[str]] = [[" "] * num_columns for _ in range(height)]
    for side, mark in zip(sides, (OLD, NEW), strict=True):
        for step, value in side.items():
            column = _scaled(step, first, last, num_columns)
            row = height - 1 - _scaled(value, low, high, height)
            cell = grid[row][column]
            grid[row][column] = mark if cell in (" ", mark) else BOTH
    lines = [_labelled(_label(row, height, low, high), cells) for row, cells in enumerate(grid)]
    lines += _deviation_lines(sides, first, last, num_columns)
    axis = f"{first}".ljust(num_columns - len(f"{last}")) + f"{last}"
    return "\n".join([*lines, _labelled("step", axis)])


def _finite(series: Series | None) -> Mapping[int, float]:
    if series is None:
        return {}
    return {s: v for s, v in series.items() if isinstance(v, float) and is_finite(v)}


def _deviation_lines(
    sides: tuple[Mapping[int, float], Mapping[int, float]], first: int, last: int, num_columns: int
) -> Sequence[str]:
    """Return a line of bars for steps where the new value is larger, and one where it is not."""
    old, new = sides
    peaks = {1: [0.0] * num_columns, -1: [0.0] * num_columns}
    for step in old.keys() & new.keys():
        off = relative(new[step], old[step])
        if off:
            row = peaks[1 if off > 0 else -1]
            column = _scaled(step, first, last, num_columns)
            row[column] = max(row[column], abs(off))
    finite = [off for row in peaks.values() for off in row if math.isfinite(off)]
    largest = max(finite, default=0.0)
    if not largest:
        return ()
    return [
        _labelled(f"{sign}{largest:.1e}", [_bar(off, largest) for off in peaks[key]])
        for key, sign in ((1, "+"), (-1, "-"))
    ]


def _bar(off: float, largest: float) -> str:
    if not off:
        return " "
    share = min(1.0, off / largest)  # over an old value of 0 it is infinite
    return _BARS[max(1, math.ceil(share * (len(_BARS) - 1)))]


def _scaled(value: float, low: float, high: float, size: int) -> int:
    if high <= low:
        return size // 2
    return min(size - 1, int((value - low) / (high - low) * size))


def _label(row: int, height: int, low: float, high: float) -> str:
    if row == 0:
        return f"{high:.5g}"
    return f"{low:.5g}" if row == height - 1 else ""


def _labelled(label: str, cells: Sequence[str]) -> str:
    return f"{label:>{_LABEL - 1}} {''.join(cells)}".rstrip()
