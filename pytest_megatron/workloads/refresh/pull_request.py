"""Changed goldens for a reviewer: Markdown, sentences, a commit message. Pure.

A comment of GitHub ends at 64 kB, so the page stays below 60 however many goldens there are: the
rows that matter most come first, and the rest is counted.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Sequence

from pytest_megatron.base.templates import render
from pytest_megatron.base.text import counted, listed, plain
from pytest_megatron.workloads.golden.model import is_loss
from pytest_megatron.workloads.refresh.difference import (
    BUCKETS,
    NOISE,
    Divergence,
    FileChange,
    FileDifference,
    MetricDifference,
    Trend,
)
from pytest_megatron.workloads.refresh.gate import Refusal

MOST_BYTES = 60_000
_ATTENTION, _SMALL = 1e-3, 1e-6
_CANCELS = 10  # the largest deviation over the signed mean
_SUBJECT_LENGTH = 60
_MOST_NAMES = 5


def markdown(differences: Sequence[FileDifference], *, reason: str | None = None) -> str:
    """Return the page for a pull request, without a final newline.

    Args:
        differences: One for each golden.
        reason: Why they were replaced, if given.
    """
    causes = Counter(cause for d in differences if d.metrics for cause in d.causes)
    page = render(
        "goldens.md",
        headline=_headline(differences),
        num_outside=sum(d.is_outside for d in differences),
        reason=reason,
        sentences=interpret(differences),
        causes=[(cause, counted(n, "golden")) for cause, n in causes.most_common()],
        rows=_rows(differences),
        buckets=BUCKETS,
        histogram=_histogram(differences),
        noise=f"{NOISE:.0e}",
        directions=_directions(differences),
        files=_files(differences),
    )
    return page.rstrip()


def interpret(differences: Sequence[FileDifference]) -> list[str]:
    """Return the meaning of the figures in sentences, the weightiest first."""
    losses = [m for d in differences for m in d.metrics if is_loss(m.metric) and m.deviations]
    found = []
    if holes := sum(m.num_not_finite[1] > 0 for d in differences for m in d.metrics):
        found.append(f"{counted(holes, 'metric')} with values that are no numbers.")
    if lost := sum(m.num_new > 0 and m.num_lost > 0 for d in differences for m in d.metrics):
        found.append(f"{counted(lost, 'metric')} with fewer steps: less is compared than before.")
    if outside := sum(d.is_outside for d in differences):
        found.append(f"{counted(outside, 'golden')} outside the band: {_what_is(differences)}")
    found += _loss_lines(losses)
    changed = [d for d in differences if d.state is FileChange.CHANGED]
    if not changed and not found:
        kinds = "Nothing that was there changes." if differences else "There is nothing to compare."
        found.append(kinds)
    elif not losses and changed:
        found.append("No loss changes, only other metrics.")
    return found


def _what_is(differences: Sequence[FileDifference]) -> str:
    """Explain metrics that are outside: a loss is the curve, all others are around it."""
    names = sorted({m.metric for d in differences for m in d.metrics if m.is_outside})
    if any(map(is_loss, names)) or not names:
        return "a run as it now is would have failed, so what is measured is another curve."
    shown = listed(names, _MOST_NAMES)
    return f"only in {shown}; a run as it now is fails where a case compares that."


def _loss_lines(losses: Sequence[MetricDifference]) -> Iterable[str]:
    """Yield sentences on how losses change."""
    if not losses:
        return
    if starts := sum(
        m.start is Divergence.STEP_1 and abs(m.deviations[1]) > _ATTENTION for m in losses
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
    """Rate the size of the deviations."""
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
    if worst is not None and worst.largest and worst.state is FileChange.CHANGED:
        metric = max(worst.metrics, key=lambda m: m.largest)
        lines.append(
            f"Largest relative change: {metric.largest:.1e}, {metric.metric} at step "
            f"{metric.worst_step} of {worst.path}"
        )
    return plain("\n".join(lines)) + "\n"


def refusals_text(refusals: Sequence[tuple[str, Refusal]]) -> list[str]:
    """Return a line for each golden that is not written: its name, the rule, the remedy."""
    return [plain(f"{name}: {refusal.line}") for name, refusal in refusals]


def _origins(written: Sequence[FileDifference]) -> Iterable[tuple[str, str]]:
    """Yield the origins of all goldens, each value once."""
    origins = [d.new.provenance for d in written if d.new is not None and d.new.provenance]
    for title, values in (
        ("Command", [shlex.join(o.command) for o in origins if o.command]),
        ("Measured at commit", [o.commit for o in origins if o.commit]),
        ("Image", [o.image for o in origins if o.image]),
        ("GPU", [o.gpu for o in origins if o.gpu]),
        ("Driver", [o.driver for o in origins if o.driver]),
    ):
        for value in dict.fromkeys(values):
            yield title, value


def _headline(differences: Sequence[FileDifference]) -> str:
    """Describe how many goldens are new, changed or gone."""
    counts = Counter(d.state for d in differences)
    parts = [f"{counts[state]} {state.value}" for state in FileChange if counts[state]]
    return f"{counted(len(differences), 'golden')}: {', '.join(parts) or 'none'}"


def _rows(differences: Sequence[FileDifference]) -> list[tuple[str, MetricDifference]]:
    """Return each metric that changes with its golden, those outside the band first."""
    rows = [(d.path, m) for d in differences if d.state is FileChange.CHANGED for m in d.metrics]
    return sorted(rows, key=lambda r: (not r[1].is_outside, -r[1].largest, r[0], r[1].metric))


def _histogram(
    differences: Sequence[FileDifference],
) -> list[tuple[str, list[tuple[int, int, int]]]]:
    """Return how many steps of each metric deviate by how much: (smaller, same, larger)."""
    total: Counter[tuple[str, int, int]] = Counter()
    for difference in differences:
        for metric in difference.metrics:
            for (bucket, sign), count in metric.histogram().items():
                total[metric.metric.partition(" of ")[0], bucket, sign] += count
    return [
        (
            name,
            [
                (total[name, b, -1], total[name, b, 0], total[name, b, 1])
                for b in range(len(BUCKETS))
            ],
        )
        for name in sorted({name for name, _, _ in total})
    ]


def _directions(differences: Sequence[FileDifference]) -> list[tuple[str, int, int, int]]:
    """Return how many goldens grow, shrink and stay, metric by metric."""
    total: Counter[tuple[str, Trend]] = Counter()
    for difference in differences:
        for metric in difference.metrics:
            if metric.deviations and " of " not in metric.metric:
                total[metric.metric, metric.trend] += 1
    return [
        (name, total[name, Trend.WORSE], total[name, Trend.BETTER], total[name, Trend.SAME])
        for name in sorted({name for name, _ in total})
    ]


def _files(differences: Sequence[FileDifference]) -> list[tuple[str, list[str]]]:
    """Return the paths that are new, gone or unchanged."""
    states = (FileChange.NEW, FileChange.UNREADABLE, FileChange.GONE, FileChange.UNCHANGED)
    found = [(s, sorted(d.path for d in differences if d.state is s)) for s in states]
    return [(state.value.capitalize(), paths) for state, paths in found if paths]
