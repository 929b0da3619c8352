"""The policy of a comparison, and the limits by kind of metric that it changes.

`ComparisonPolicy.STRICT` and `ComparisonPolicy.MEGATRON` come with the package; a policy file
inherits from the first and changes limits by metric, case, platform and environment.

A limit that is a fraction is relative to the golden unless the name says otherwise. The values for
a loss, a count and memory come from the movement of Megatron-LM's own goldens over 238 changes of
container: 95 % of loss curves stay within 2e-3 at every step and within 3e-4 in the mean. Those of
a learned band and of the first steps come from `benchmarks/compare_curves.py`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeAlias, cast

from annotated_types import Ge, Lt, MinLen
from typing_extensions import TypedDict

from pytest_megatron.base.files import JsonValue, digest_of
from pytest_megatron.base.schema import (
    FINITE,
    About,
    Count,
    FormatVersion,
    SchemaError,
    Texts,
    closed,
    dotted,
    json_schema,
    read,
    refuse_duplicates,
    validate,
)
from pytest_megatron.base.text import nearest, one_of
from pytest_megatron.base.yaml import YamlDocument, YamlPath, read_yaml
from pytest_megatron.errors import GoldenError, RecipeError
from pytest_megatron.workloads.recipe.model import Workload

# What a training logs of its model beside the loss; judged without being asked for.
NORMS = ("grad-norm", "params-norm")
TAIL_FRACTION = 0.25
FULL_PRECISION = "fp32"
_FLOORS: Mapping[str, float] = {FULL_PRECISION: 2e-5, "bf16": 2e-4, "fp16": 1e-4}
_FLOOR = 1e-4  # of a precision that is not known


class Worse(Enum):
    """The side of the golden on which a run is worse; it fails only there."""

    HIGHER = "higher"
    LOWER = "lower"
    EITHER = "either"


class Exact(Enum):
    """Conditions under which every value must equal the golden bit for bit."""

    AUTO = "auto"  # the golden is deterministic, and the run has its image, versions and host
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossLimits:
    """Limits of a loss, and of every metric of no other kind.

    Attributes:
        exact: When every bit counts.
        step_1: Limit of the first step, which has seen no update.
        early_steps: How many steps are the early window, where no step may be outside.
        early_band: There, of a golden without a band of its own.
        band: Limit of every step of a golden without a band of its own.
        floor: The narrowest band that is learned; by precision where it is None.
        learned_floor: The same where the repeats were on the run's own platform, whose noise they
            know.
        absolute: Added to every band, in the metric's own unit.
        outside_fraction: Part of the steps that may be outside the band.
        outside_factor: How many bands such a step may be off.
        mean: Limit of the mean of all steps.
        tail_mean: Limit of the mean of the last quarter.
        window_mean: Limit of each of the windows that the steps are cut into; None for no windows.
        frozen_steps: From how many steps without a change on a curve is frozen.
        frozen_fraction: The same as a part of all steps; the larger counts.
    """

    exact: Exact = Exact.AUTO
    step_1: float = 1e-3
    early_steps: int = 10
    early_band: float = 1e-3
    band: float = 2e-3
    floor: float | None = None
    learned_floor: float = 2e-5
    absolute: float = 0.0
    outside_fraction: float = 0.02
    outside_factor: float = 5.0
    mean: float = 3e-4
    tail_mean: float = 5e-4
    window_mean: float | None = None
    frozen_steps: int = 5
    frozen_fraction: float = 0.1

    def fixed_at(self, step: int) -> float:
        """Return the band of a step of a golden without a band of its own."""
        return min(self.early_band, self.band) if step <= self.early_steps else self.band

    def floor_in(self, precision: str | None, *, is_at_home: bool = False) -> float:
        """Return the narrowest band of a model that computes in `precision`.

        Args:
            precision: That of the golden, or None.
            is_at_home: Whether repeats on the platform of the run taught the band.
        """
        if is_at_home:
            return self.learned_floor
        return _FLOORS.get(precision or "", _FLOOR) if self.floor is None else self.floor


@dataclass(frozen=True, slots=True, kw_only=True)
class CountLimits:
    """Limits of a count, such as num-zeros; single steps are not compared.

    Attributes:
        exact: When every bit counts.
        mean: Limit of the mean without the steps that differ most, either way (`TRIMMED_FRACTION`).
        tail_mean: The same of the last quarter.
        absolute: In counts; less than this is no difference.
    """

    exact: Exact = Exact.AUTO
    mean: float = 0.085
    tail_mean: float = 0.12
    median: float = 0.15
    absolute: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostLimits:
    """Limits of a time or a rate, compared on the golden's class of host only.

    Attributes:
        median: Limit of the median of the steps after the warm-up.
        quartile: Limit of the border of the slowest quarter, so that slow steps do not hide.
        warm_up: Part of the steps that is left out at the start.
        worse: The side that fails.
    """

    median: float = 0.10
    quartile: float = 0.25
    warm_up: float = 0.1
    worse: Worse = Worse.HIGHER


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimits:
    """Limits of memory, compared on the golden's class of host only."""

    peak: float = 0.01
    median: float = 0.01
    worse: Worse = Worse.HIGHER


Limits: TypeAlias = LossLimits | CountLimits | CostLimits | MemoryLimits

# A metric that is computed from the schedule alone, and one that varies more than a loss does.
_SCHEDULE = LossLimits(
    step_1=1e-6,
    early_band=1e-6,
    band=1e-6,
    floor=1e-6,
    learned_floor=1e-6,
    mean=1e-6,
    tail_mean=1e-6,
)
_NORM = LossLimits(
    step_1=5e-3,
    early_band=1e-2,
    band=2e-2,
    floor=1e-3,
    outside_factor=10.0,
    mean=5e-3,
    tail_mean=5e-3,
)
# The parameters add up what the steps did, so that their norm drifts and is off in the mean by as
# much as at single steps (`benchmarks/compare_norms.py`).
_PARAMETERS = LossLimits(mean=1e-3, tail_mean=2e-3)
DEFAULTS: Mapping[str, Limits] = {
    "grad-norm": _NORM,
    "params-norm": _PARAMETERS,
    "learning-rate": _SCHEDULE,
    "num-zeros": CountLimits(),
    "iteration-time": CostLimits(),
    "throughput": CostLimits(worse=Worse.LOWER),
    "mem-allocated-bytes": MemoryLimits(),
    "mem-max-allocated-bytes": MemoryLimits(),
}
# A long training is chaotic: its single steps part by percents while its windows stay together.
_LONG = LossLimits(band=3e-2, mean=1e-3, tail_mean=2.5e-3, window_mean=5e-3)
_SAME_IF_LONG = DEFAULTS.keys() - {"params-norm"}


def limits_of(metric: str, *, is_long: bool = False) -> Limits:
    """Return the limits of a metric; `is_long` for a long golden without a band of its own."""
    if is_long and metric not in _SAME_IF_LONG:
        return _LONG
    return DEFAULTS.get(metric, LossLimits())


def tail_length(num_steps: int) -> int:
    """Return how many of the last steps the tail has."""
    return max(1, int(num_steps * TAIL_FRACTION))


_Part: TypeAlias = Annotated[float, Ge(0), FINITE]
_Fraction: TypeAlias = Annotated[float, Ge(0), Lt(1)]


@closed
class MetricSettings(TypedDict, total=False):
    """Limits that are changed of one metric; which keys it takes depends on its kind."""

    judged: Annotated[bool, About("False leaves the metric out.")]
    exact: Annotated[Exact, About("When every bit counts.")]
    step_1: Annotated[_Part, About("Of the first step.")]
    early_steps: Annotated[Count, About("Length of the early window.")]
    early_band: Annotated[_Part, About("Of each step in it.")]
    band: Annotated[_Part, About("Of each step, where none is learned.")]
    floor: Annotated[_Part, About("The narrowest band that is learned.")]
    learned_floor: Annotated[_Part, About("The same on the platform of the repeats.")]
    absolute: Annotated[_Part, About("In the metric's own unit, beside every band.")]
    outside_fraction: Annotated[_Fraction, About("Of the steps, those that may be outside.")]
    outside_factor: Annotated[float, Ge(1), About("By how many bands each of them.")]
    mean: Annotated[_Part, About("Of the mean of all steps.")]
    tail_mean: Annotated[_Part, About("Of that of the last quarter.")]
    window_mean: Annotated[_Part, About("Of that of each twentieth of the steps.")]
    median: Annotated[_Part, About("Of the median.")]
    quartile: Annotated[_Part, About("Of the border of the worst quarter.")]
    peak: Annotated[_Part, About("Of the largest value.")]
    frozen_steps: Annotated[Count, About("From how many is frozen.")]
    frozen_fraction: Annotated[_Fraction, About("As a part of all.")]
    warm_up: Annotated[_Fraction, About("Part that is left out first.")]
    worse: Annotated[Worse, About("The side that fails; either judges both.")]


# One number or word of a policy file, as the field of the limits has it.
Setting: TypeAlias = float | int | bool | Worse | Exact
Settings: TypeAlias = Mapping[str, Setting]
_Metrics: TypeAlias = Annotated[
    dict[str, MetricSettings],
    About("Name of a metric, or a pattern with * and ?, to its limits."),
]


class Base(Enum):
    """The policies of the package; the value is its name in `--golden-policy`."""

    STRICT = "strict"
    MEGATRON = "megatron"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedWorkload:
    """The workload that is compared.

    Attributes:
        case: `<model>/<test_case>`.
        own: Limits of its row, which win over those of a policy, or None.
    """

    case: str
    platform: str | None = None
    environment: str | None = None
    own: Override | None = None

    @staticmethod
    def of(workload: Workload) -> ComparedWorkload:
        """Return the properties by which a policy may select a workload, and its own limits.

        Raises:
            RecipeError: A limit of the row is none, or has another value.
        """
        return ComparedWorkload(
            case=f"{workload.model}/{workload.test_case}",
            platform=workload.platform,
            environment=workload.environment,
            own=_own_limits(workload),
        )


@closed
@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """Limits for some workloads; without a list for all."""

    cases: Annotated[Texts, About("<model>/<test_case>, with * and ?.")] = ()
    platforms: Annotated[Texts, About("Such as dgx_h100.")] = ()
    environments: Annotated[Texts, About("Such as dev.")] = ()
    metrics: _Metrics

    def is_at(self, workload: ComparedWorkload | None) -> bool:
        """Return True if the override applies to a workload; None stands for any workload."""
        wanted = (self.cases, self.platforms, self.environments)
        here = (
            (None,) * 3
            if workload is None
            else (workload.case, workload.platform, workload.environment)
        )
        return all(
            not patterns or (name is not None and any(fnmatch.fnmatch(name, p) for p in patterns))
            for patterns, name in zip(wanted, here, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonPolicy:
    """The rules of a comparison.

    Attributes:
        base: The policy that it inherits from.
        name: Name of the policy in verdicts: the base's, or its file's.
        metrics: Metric, or a pattern of metrics, to its changes; a later one wins.
        overrides: The same for some workloads; a later one wins.
        digest: SHA-256 of its file; None for a policy of the package.
    """

    STRICT: ClassVar[ComparisonPolicy]
    MEGATRON: ClassVar[ComparisonPolicy]

    base: Base
    name: str
    metrics: Mapping[str, Settings] = field(default_factory=dict)
    overrides: tuple[Override, ...] = ()
    digest: str | None = None

    @property
    def is_strict(self) -> bool:
        """True if it is `strict`, or inherits from it."""
        return self.base is Base.STRICT

    def at(self, workload: ComparedWorkload | None) -> ComparisonPolicy:
        """Return the policy as it is for one workload."""
        return replace(
            self,
            overrides=tuple(
                replace(o, cases=(), platforms=(), environments=())
                for o in (*self.overrides, *([workload.own] if workload and workload.own else ()))
                if o.is_at(workload)
            ),
        )

    def as_json(self) -> dict[str, JsonValue]:
        """Return the policy of a plan or a record; by `at` for which workload.

        `metrics` is a list of changes, of which a later one wins.
        """
        return {
            "name": self.name,
            "inherit": self.base.value,
            "sha256": self.digest,
            "metrics": [
                {
                    pattern: {
                        key: value.value if isinstance(value, Enum) else value
                        for key, value in settings.items()
                    }
                    for pattern, settings in metrics.items()
                }
                for metrics in self._changes()
                if metrics
            ],
        }

    def _changes(self) -> list[Mapping[str, Settings]]:
        """Return the changes for any workload; a later one wins."""
        everywhere = [o.metrics for o in self.overrides if o.is_at(None)]
        return [self.metrics, *cast("list[Mapping[str, Settings]]", everywhere)]

    def settings(self, metric: str) -> Settings:
        """Return the changes for a metric; use `at` first for those of a workload."""
        found: dict[str, Setting] = {}
        for metrics in self._changes():
            for pattern, settings in metrics.items():
                if fnmatch.fnmatchcase(metric, pattern):
                    found |= settings
        return found

    def is_judged(self, metric: str) -> bool:
        """Return True if a metric is judged at all."""
        return self.settings(metric).get("judged") is not False

    def limit(self, metric: str, key: str, default: float) -> float:
        """Return one number of the settings of a metric, `default` where it is not set."""
        value = self.settings(metric).get(key)
        return float(value) if isinstance(value, int | float) else default

    def worse(self, metric: str, default: Worse) -> Worse:
        """Return the side of the golden that fails, `default` where it is not set."""
        value = self.settings(metric).get("worse")
        return value if isinstance(value, Worse) else default

    def require_judged(self, metrics: Sequence[str]) -> None:
        """Require that one of several metrics is judged, so that nothing passes unseen.

        Raises:
            GoldenError: The policy leaves out every one.
        """
        if metrics and not any(map(self.is_judged, metrics)):
            raise GoldenError(
                self.name,
                f"judged is false for {', '.join(metrics)}, so nothing would be compared; judge "
                "one of them, or run without comparing with `--golden off`",
            )

    def limits(self, metric: str, *, is_long: bool = False) -> Limits:
        """Return the limits of a metric under `strict`, after the policy's changes.

        Args:
            metric: Name of the metric.
            is_long: Whether its golden is long, and has no band of its own.
        """
        settings = dict(self.settings(metric))
        if "floor" in settings:  # who names one means it wherever the repeats were
            settings.setdefault("learned_floor", settings["floor"])
        limits = limits_of(metric, is_long=is_long)
        known = keys_of(limits)
        changes: dict[str, object] = {k: v for k, v in settings.items() if k in known}
        return replace(limits, **changes)  # type: ignore[arg-type] # typed as the fields are


ComparisonPolicy.STRICT = ComparisonPolicy(base=Base.STRICT, name=Base.STRICT.value)
ComparisonPolicy.MEGATRON = ComparisonPolicy(base=Base.MEGATRON, name=Base.MEGATRON.value)


def keys_of(limits: Limits) -> frozenset[str]:
    """Return the names of the numbers of one kind."""
    return frozenset(f.name for f in fields(limits))


def policy_named(
    text: str, where: str = "--golden-policy", root: Path | None = None
) -> ComparisonPolicy:
    """Return the policy that a user named.

    Args:
        text: `strict`, `megatron` or the path of a file.
        where: Name of the option in the error.
        root: Where a relative path is looked for after the current directory.

    Raises:
        GoldenError: The text names no policy, or the file is wrong; with file and line.
    """
    for policy in (ComparisonPolicy.STRICT, ComparisonPolicy.MEGATRON):
        if policy.name == text:
            return policy
    candidates = [Path(text)] if root is None else [Path(text), root / text]
    for path in candidates:
        if path.is_file():
            return read_policy(path)
    names = sorted(base.value for base in Base)
    expected = f"expected {', '.join(names)} or the path of a YAML file{nearest(text, names)}"
    raise GoldenError(where, f"unknown policy {text!r}, {expected}")


@closed
@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFile:
    """A policy of one's own."""

    format_version: FormatVersion
    inherit: Literal["strict"]
    metrics: _Metrics = field(default_factory=dict)
    overrides: Annotated[tuple[Override, ...], MinLen(1)] = ()


def policy_json_schema() -> dict[str, JsonValue]:
    """Return the JSON schema of a policy file."""
    return json_schema(PolicyFile, "pytest-megatron golden policy")


def read_policy(path: Path) -> ComparisonPolicy:
    """Read a policy file.

    Raises:
        GoldenError: With file and line: it is not YAML, has a key twice, departs from the schema,
            or gives a metric a limit that metrics of its kind do not have.
    """
    document = read_yaml(path, error=GoldenError)
    refuse_duplicates(document, GoldenError)
    found = read(PolicyFile, document, GoldenError)
    _check_keys(document, ("metrics",), found.metrics)
    for i, override in enumerate(found.overrides):
        _check_keys(document, ("overrides", i, "metrics"), override.metrics)
    return ComparisonPolicy(
        base=Base.STRICT,
        name=str(path),
        digest=digest_of(path),
        metrics=cast("Mapping[str, Settings]", found.metrics),
        overrides=found.overrides,
    )


def _own_limits(workload: Workload) -> Override | None:
    """Return the limits of a row in the short form, for the strict policy; None without any."""
    if not workload.limits:
        return None
    try:
        found = validate(Override, {"metrics": dict(workload.limits)})
    except SchemaError as error:
        problem = error.problems[0]
        text = f"compare.{dotted(problem.path[1:])}: {problem.text}"
        raise RecipeError(workload.where, text) from error
    for _, text in _wrong_keys(found.metrics):
        raise RecipeError(workload.where, f"compare.{text}")
    return found


def _check_keys(
    document: YamlDocument, path: YamlPath, metrics: Mapping[str, MetricSettings]
) -> None:
    """Require that each limit is one of its metric's kind, so that none is without effect."""
    for keys, problem in _wrong_keys(metrics):
        raise GoldenError(document.where((*path, *keys)), problem)


def _wrong_keys(metrics: Mapping[str, MetricSettings]) -> Iterator[tuple[YamlPath, str]]:
    """Yield the limits that their metrics do not have, with the problem."""
    for metric, settings in metrics.items():
        meant = [name for name in DEFAULTS if fnmatch.fnmatchcase(name, metric)]
        known = frozenset({"judged"}).union(
            *(keys_of(limits_of(name)) for name in meant or [metric])
        )
        for key in (key for key in settings if key not in known):
            text = f"{metric}: {key!r} is no limit of it, expected {one_of(key, known)}"
            yield (metric, key), text
