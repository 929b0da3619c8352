"""Golden values in memory: series of metrics, their provenance, and drift of the platform. Pure.

The same training gives the same bits on the same image, versions and class of host; after a change
of one of them other kernels round otherwise, which is drift of the platform and no regression.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby, pairwise
from typing import Annotated, TypeAlias, TypeVar

from annotated_types import Ge, Gt, Lt

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.schema import FINITE, SchemaError, validate
from pytest_megatron.errors import GoldenError, MetricsError

TOKENS = "generated_tokens"
TEXT = "generated_text"
ROUTING = "routing_indices"
THROUGHPUT = "throughput"
MEMORY = "mem-max-allocated-bytes"
# Log-probabilities: of prompt and answer, or of one of them.
LOGPROBS = ("logprobs", "prompt_logprobs", "generated_logprobs")
# Numbers of the whole run that must be the same each time.
COUNTS = (
    "lifetime_prefill_token_count",
    "async_sched_step_count",
    "async_sched_compaction_step_count",
)
REQUEST_METRICS = (TOKENS, *LOGPROBS, TEXT, ROUTING)
GENERATION_METRICS = (*REQUEST_METRICS, THROUGHPUT, MEMORY, *COUNTS)

_REQUEST_KEYS = frozenset((*REQUEST_METRICS, "input_prompt", "latency"))
_INDICES = f"{ROUTING}_token_indices"
_MOST = 1 << 53  # whole numbers that a float has
_Whole: TypeAlias = Annotated[int, Gt(-_MOST), Lt(_MOST)]
_Of = TypeVar("_Of")

# Position in the request to the experts of each layer there.
Routing: TypeAlias = Mapping[int, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptAnswer:
    """The answer to one prompt; None for a field that the program did not write.

    Attributes:
        tokens: (num_generated,) token ids.
        logprobs: Name out of `LOGPROBS` to (num_positions,) natural logarithms; nan and inf stay.
        routing: Experts of each layer, sorted, by position.
        content: All of it as JSON.
    """

    tokens: tuple[int, ...] | None
    logprobs: Mapping[str, tuple[float, ...]]
    text: str | None
    routing: Routing | None
    content: Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The output of one inference run.

    Attributes:
        requests: By id.
        throughput: (num_batches,) tokens per second, the first one warming up; empty if absent.
        memory_bytes: (num_samples,) peak of allocated memory; empty if absent.
        counts: Name out of `COUNTS` to its number.
        content: All keys beside the requests, as JSON.
    """

    requests: Mapping[str, PromptAnswer]
    throughput: tuple[float, ...] = ()
    memory_bytes: tuple[float, ...] = ()
    counts: Mapping[str, float] = field(default_factory=dict)
    content: Mapping[str, JsonValue] = field(default_factory=dict)

    def has(self, metric: str) -> bool:
        """Return True if every request, or the run as a whole, has a value of `metric`."""
        if metric == THROUGHPUT:
            return bool(self.throughput)
        if metric == MEMORY:
            return bool(self.memory_bytes)
        if metric in COUNTS:
            return metric in self.counts
        return bool(self.requests) and all(has_metric(r, metric) for r in self.requests.values())


def has_metric(answer: PromptAnswer, metric: str) -> bool:
    """Return True if a request has a value of `metric`, one of `REQUEST_METRICS`."""
    others = {TOKENS: answer.tokens, TEXT: answer.text, ROUTING: answer.routing}
    return others.get(metric, answer.logprobs.get(metric)) is not None


def is_generation(value: Mapping[str, JsonValue]) -> bool:
    """Return True if a JSON object is the output of an inference program."""
    if value.keys() & _REQUEST_KEYS or THROUGHPUT in value:
        return True
    return any(isinstance(v, dict) and v.keys() & _REQUEST_KEYS for v in value.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """The keys of an answer that are read."""

    generated_tokens: tuple[_Whole, ...] | None = None
    generated_text: str | None = None
    logprobs: tuple[float, ...] | None = None
    prompt_logprobs: tuple[float, ...] | None = None
    generated_logprobs: tuple[float, ...] | None = None
    routing_indices: list[list[_Whole] | list[list[_Whole]]] | None = None
    routing_indices_token_indices: list[_Whole] | None = None


def parse_generation(value: Mapping[str, JsonValue], where: str) -> Generation:
    """Return the parsed output of an inference program.

    A file of one request without an id, as older programs write it, is request `0`.

    Raises:
        GoldenError: There is no request, or one of the values that are compared has another type
            than it must have; `where` names the file.
    """
    if value.keys() & (_REQUEST_KEYS - {THROUGHPUT}):
        value = {"0": dict(value)}
    requests = {name: item for name, item in value.items() if isinstance(item, dict)}
    if not requests:
        raise GoldenError(where, "holds no request, expected one object a request, by its id")
    rest = {name: item for name, item in value.items() if name not in requests}
    of_run: JsonValue = {
        name: item if isinstance(item := rest.get(name, []), list) else [item]
        for name in (THROUGHPUT, MEMORY, *COUNTS)
    }
    try:
        answers = validate(dict[str, _Answer], {**requests})
        numbers = validate(dict[str, list[float]], of_run)
    except SchemaError as error:
        raise GoldenError(where, str(error)) from error
    return Generation(
        requests={
            name: PromptAnswer(
                tokens=answer.generated_tokens,
                logprobs={
                    metric: values
                    for metric in LOGPROBS
                    if (values := getattr(answer, metric)) is not None
                },
                text=answer.generated_text,
                routing=_routing_of(answer, f"{where}: {name}"),
                content=requests[name],
            )
            for name, answer in answers.items()
        },
        throughput=tuple(numbers[THROUGHPUT]),
        memory_bytes=tuple(numbers[MEMORY]),
        counts={name: numbers[name][0] for name in COUNTS if numbers[name]},
        content=rest,
    )


def _routing_of(answer: _Answer, where: str) -> Routing | None:
    """Return experts by position: of every position, or of those that the request names."""
    rows, named = answer.routing_indices, answer.routing_indices_token_indices
    if rows is None:
        return None
    indices = range(len(rows)) if named is None else named
    if len(indices) != len(rows):  # all rows are there, and some of them are meant
        for index in indices:
            if not 0 <= index < len(rows):
                raise GoldenError(where, f"{_INDICES!r} names row {index} of {len(rows)}")
        rows = [rows[index] for index in indices]
    return {i: _experts_of(row) for i, row in zip(indices, rows, strict=True)}


def _experts_of(row: list[int] | list[list[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the experts of a position, by layer; of one layer they may stand by themselves."""
    layers = [part for part in row if isinstance(part, list)]
    alone = [part for part in row if isinstance(part, int)]
    return tuple(tuple(sorted(layer)) for layer in layers or [alone])


def generation_to_json(generation: Generation) -> dict[str, JsonValue]:
    """Return the JSON form: requests in order of their ids, then the other keys."""
    names = sorted(generation.requests, key=lambda name: (len(name), name))
    requests: dict[str, JsonValue] = {n: dict(generation.requests[n].content) for n in names}
    return requests | dict(sorted(generation.content.items()))


def find_not_finite(generation: Generation) -> str | None:
    """Return the place of a number that is not finite, None without one."""
    for name, request in generation.requests.items():
        for metric, values in request.logprobs.items():
            for position, value in enumerate(values):
                if not math.isfinite(value):
                    return f"{metric} of request {name!r} is {value} at position {position}"
    for metric, values in (
        (THROUGHPUT, generation.throughput),
        (MEMORY, generation.memory_bytes),
    ):
        if not all(map(math.isfinite, values)):
            return f"{metric} is not a finite number"
    return None


def kind_of(value: JsonValue) -> str:
    """Return a JSON value for a message: its type and how it begins."""
    return "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


# A number, nan and inf included, or text that stands where a number belongs (Megatron-LM's
# goldens hold the string "nan" for a step without a value). Telling them apart is the point:
# text, a real nan, inf and a missing step are four different things.
Value: TypeAlias = float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One metric of one run.

    Attributes:
        steps: (num_values,) training iterations, strictly ascending, counted from 1.
        values: (num_values,) the value at each of them.
        is_full_precision: True if the values have all their digits. Megatron-LM's extraction
            rounds to five decimals, and its goldens hold such values.
    """

    steps: tuple[int, ...]
    values: tuple[Value, ...]
    is_full_precision: bool = False

    def __post_init__(self) -> None:
        assert len(self.steps) == len(self.values)
        # `map` and a set of types: a long training has 100,000 values a metric.
        assert all(map(operator.lt, self.steps, self.steps[1:]))
        types = set(map(type, self.values))
        assert all(issubclass(t, float | str) for t in types), f"values are {types}"

    def __len__(self) -> int:
        return len(self.steps)

    def items(self) -> Iterator[tuple[int, Value]]:
        """Yield (step, value) in ascending order of step."""
        return zip(self.steps, self.values, strict=True)

    def finite(self) -> dict[int, float]:
        """Return step to value where the value is a finite number."""
        return {s: v for s, v in self.items() if isinstance(v, float) and math.isfinite(v)}

    def at(self, step: int) -> Value | None:
        """Return the value at `step`, or None where the run has none."""
        return dict(self.items()).get(step)

    def after(self, step: int) -> Series:
        """Return the part with steps greater than `step`."""
        return self.where(lambda s, _: s > step)

    def where(self, is_kept: Callable[[int, Value], bool]) -> Series:
        """Return the part for which `is_kept` holds, of step and value."""
        kept = [(s, v) for s, v in self.items() if is_kept(s, v)]
        return replace(self, steps=tuple(s for s, _ in kept), values=tuple(v for _, v in kept))


def series_of(values: Mapping[int, Value], *, is_full_precision: bool = False) -> Series:
    """Return the series of step to value, in any order of steps."""
    pairs = sorted(values.items())
    return Series(
        steps=tuple(step for step, _ in pairs),
        values=tuple(value for _, value in pairs),
        is_full_precision=is_full_precision,
    )


# Metric name, as TensorBoard has it (`lm loss`, `iteration-time`), to its series.
MetricMap: TypeAlias = Mapping[str, Series]
# The loss of reinforcement learning, and its name in some programs.
LOSS, _LOSS_SPELT_OTHERWISE = "lm loss", "lm-loss"
# Metric to place and text of its first step with two values.
Disagreements: TypeAlias = dict[str, tuple[str, str]]


def is_loss(name: str) -> bool:
    """Return True if a metric is a loss, by its name."""
    return "loss" in name.lower()


def rl_metrics(metrics: Sequence[str] | None) -> tuple[str, ...]:
    """Return the metrics that a case compares: the loss, then its METRICS."""
    names = (LOSS, *(LOSS if m == _LOSS_SPELT_OTHERWISE else m for m in metrics or ()))
    return tuple(dict.fromkeys(names))


def with_one_loss_name(found: Mapping[str, _Of]) -> Mapping[str, _Of]:
    """Return what is kept by metric, the loss as `lm loss` also where it is called `lm-loss`."""
    if LOSS in found or _LOSS_SPELT_OTHERWISE not in found:
        return found
    return {LOSS if k == _LOSS_SPELT_OTHERWISE else k: v for k, v in found.items()}


def is_finite(value: Value | None) -> bool:
    """Return True for a finite number: not missing, not text, not nan, not inf."""
    return isinstance(value, float) and math.isfinite(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredValues:
    """The metrics of a run or a golden.

    Attributes:
        generation: Of an inference program, which has no series.
    """

    metrics: MetricMap
    generation: Generation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed(MeasuredValues):
    """The values of one attempt.

    Attributes:
        disagreements: Metrics that have two values at a step, of which the first is here.
    """

    disagreements: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def refuse_disagreements(found: Mapping[str, tuple[str, str]], names: Iterable[str]) -> None:
    """Raise what was found about the first of some metrics that has two values at a step.

    Raises:
        MetricsError: One of them has.
    """
    for name in names:
        if name in found:
            raise MetricsError(*found[name])


def is_same(a: Value | None, b: Value | None) -> bool:
    """Return whether two values are equal, nan included."""
    return a == b or (isinstance(a, float) and isinstance(b, float) and a != a and b != b)  # noqa: PLR0124 - nan


def without_unmeasured_end(series: Series) -> Series:
    """Return a series up to its last number, where only text follows; whole if there is no number.

    Megatron-LM writes "nan" for every step up to the end of the schedule that a training did not
    get to, as in the goldens of its releases, which a time limit ends.
    """
    end = len(series)
    while end and isinstance(series.values[end - 1], str):
        end -= 1
    if end in (0, len(series)):
        return series
    return replace(series, steps=series.steps[:end], values=series.values[:end])


def find_frozen(
    golden: Series | None, observed: Series, *, least_steps: int
) -> tuple[int, int] | None:
    """Return first and last step of a constant stretch of the run where the golden moves.

    A stretch counts from `least_steps` golden steps on, and only if the golden's longest constant
    stretch within it is less than half as long. Without a golden every such stretch counts.
    """
    at = dict(observed.items())
    expected = at if golden is None else dict(golden.items())
    steps = [step for step in expected if step in at]
    for _, group in groupby(steps, key=at.__getitem__):
        stretch = list(group)
        if len(stretch) < least_steps:
            continue
        if golden is None or 2 * _longest_constant([expected[s] for s in stretch]) < len(stretch):
            return stretch[0], stretch[-1]
    return None


def _longest_constant(values: list[Value]) -> int:
    return max(len(list(group)) for _, group in groupby(values))


def step_interval(steps: Sequence[int]) -> int:
    """Return the distance of ascending steps, that from step 1 left out, as Megatron-LM counts."""
    spaced = [step for step in steps if step != 1]
    return math.gcd(*(b - a for a, b in pairwise(spaced))) or 1


def to_float32(value: float) -> float:
    """Return the float32 nearest to a finite `value`, as a float; inf where it is too large."""
    try:
        (number,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        return math.copysign(math.inf, value)
    assert isinstance(number, float)
    return number


# The relative standard deviation of one metric over the repeats, |golden| = 1: one number for all
# steps, or a series of its own.
Spread: TypeAlias = float | Series

# Megatron-LM's reader takes every top-level key of a metric map for a metric and refuses a file
# where one lacks these; with them, empty, it takes a file of ours and never looks at the values.
# Source: Megatron-LM tests/functional_tests/python_test_utils/common.py, d98e8a64dd.
AS_BLOCK: Mapping[str, JsonValue] = {
    "start_step": 0,
    "end_step": 0,
    "step_interval": 1,
    "values": {},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The origin of a golden's values.

    Attributes:
        command: (num_arguments,) the command line.
        commit: Commit of the repository that holds the golden.
        config_hash: The `fingerprint` of case and recipe row.
        is_dirty: True if there were uncommitted changes.
        image: The container image with its digest.
        gpu: Model and count, as in `8x NVIDIA H100 80GB HBM3`.
        host_class: Machines of one class are as fast as one another; time and memory are judged
            only within one class.
        precision: The number format of the model: fp32, bf16 or fp16.
        versions: Package or tool to its version.
        date: ISO 8601, UTC.
        repeats: Number of runs that the spread was learned from.
        deterministic: True if the repeats agreed bit for bit.
        spread: Metric to its spread over the repeats.
        reason: The typed reason for replacing the golden although a figure got worse.
        run: The directory of the run, or the page of a CI system that shows it.
        world_size: Ranks of the training.
    """

    command: tuple[str, ...] | None = None
    commit: str | None = None
    config_hash: str | None = None
    is_dirty: bool | None = None
    image: str | None = None
    gpu: str | None = None
    driver: str | None = None
    host_class: str | None = None
    precision: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    date: str | None = None
    repeats: int | None = None
    deterministic: bool | None = None
    spread: Mapping[str, Spread] = field(default_factory=dict)
    reason: str | None = None
    run: str | None = None
    world_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden(MeasuredValues):
    """The committed series of one workload.

    Attributes:
        path: The file, as messages name it.
        provenance: None in a golden that Megatron-LM wrote.
    """

    path: str
    provenance: Provenance | None = None


_Deviation: TypeAlias = Annotated[float, Ge(0), FINITE]
_Spreads: TypeAlias = dict[str, _Deviation | dict[int, _Deviation]]


def parse_provenance(value: JsonValue, where: str) -> Provenance:
    """Return the provenance that the JSON value of `_provenance` describes; other keys are ignored.

    Raises:
        GoldenError: The value or one of the known fields has another type than it must have.
    """
    if not isinstance(value, dict):
        raise GoldenError(where, f"_provenance is {kind_of(value)}, expected an object")
    names = {f.name for f in fields(Provenance)}
    known: JsonValue = {n: v for n, v in value.items() if n in names - {"spread"} and v is not None}
    spreads: JsonValue = {"spread": value.get("spread") or {}}
    try:
        spread = validate(dict[str, _Spreads], spreads)["spread"]
        made = validate(Provenance, known)
    except SchemaError as error:
        raise GoldenError(where, f"_provenance.{error}") from error
    return replace(
        made,
        spread={
            metric: one if isinstance(one, float) else series_of({**one}, is_full_precision=True)
            for metric, one in spread.items()
        },
    )


def provenance_to_json(provenance: Provenance) -> dict[str, JsonValue]:
    """Return the JSON form, keys sorted; unknown fields are left out."""
    values: dict[str, JsonValue] = {
        f.name: value
        for f in fields(provenance)
        if (value := getattr(provenance, f.name)) is not None
    }
    if provenance.command is not None:
        values["command"] = list(provenance.command)
    values["versions"] = dict(sorted(provenance.versions.items()))
    values["spread"] = {
        metric: {str(step): value for step, value in spread.items()}
        if isinstance(spread, Series)
        else spread
        for metric, spread in sorted(provenance.spread.items())
    }
    return {name: value for name, value in sorted(values.items()) if value != {}}


# Of no influence on what a training computes.
_IDLE_PACKAGES = frozenset({"pytest", "pytest-megatron", "python"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnvironment:
    """The environment of a run, as far as it is known.

    Attributes:
        host_class: Machines of one class are as fast as one another.
        image: The container image with its digest.
        versions: Package to its version.
        is_traced: Whether tensors were recorded, which costs time and memory.
    """

    host_class: str | None = None
    image: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    is_traced: bool = False


NOWHERE = RunEnvironment()


def environment_of(provenance: Provenance | None) -> RunEnvironment:
    """Return the environment that a golden was measured in."""
    made = provenance or Provenance()
    return RunEnvironment(host_class=made.host_class, image=made.image, versions=made.versions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """The difference between the platforms of a run and of its golden.

    Attributes:
        changes: Known differences, as in `torch 2.12.0 -> 2.13.0`.
        is_same_platform: Nothing differs, and all that matters is known.
    """

    changes: tuple[str, ...]
    is_same_platform: bool

    @property
    def text(self) -> str:
        """The changes for a note."""
        return f"platform drift: {', '.join(self.changes)}"


def drift_between(provenance: Provenance | None, run: RunEnvironment) -> Drift:
    """Return how the platform changed from a golden to a run."""
    if provenance is None:
        return Drift(changes=(), is_same_platform=False)
    pairs = [
        ("host", provenance.host_class, run.host_class),
        ("image", provenance.image, run.image),
        *(
            (name, provenance.versions.get(name), run.versions.get(name))
            for name in sorted({*provenance.versions, *run.versions} - _IDLE_PACKAGES)
        ),
    ]
    changes = [f"{name} {old} -> {new}" for name, old, new in pairs if old and new and old != new]
    # What only one side names is nothing to rely on.
    is_known = provenance.host_class is not None and all(old == new for _, old, new in pairs)
    has_versions = bool(provenance.versions.keys() - _IDLE_PACKAGES)
    return Drift(changes=tuple(changes), is_same_platform=is_known and has_versions)


def why_not_timed(golden: Golden, host_class: str | None) -> str | None:
    """Return why time and memory of a run are not judged; None where they are."""
    theirs = None if golden.provenance is None else golden.provenance.host_class
    if theirs is None:
        return "the golden does not say on which class of host it was measured"
    if host_class is None:
        return f"the golden is from {theirs!r}, the class of this host is not known"
    if theirs != host_class:
        return f"the golden is from {theirs!r}, this host is {host_class!r}"
    return None
