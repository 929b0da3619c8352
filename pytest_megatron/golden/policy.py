"""Policies: the rules of a comparison, and the changes that a project makes to them.

`ComparisonPolicy.STRICT` and `ComparisonPolicy.MEGATRON` come with the package; a policy file
inherits from one of them and changes limits by metric, case, platform and environment.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import ClassVar, TypeAlias, cast

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.yaml import YamlDocument, YamlPath, read_yaml
from pytest_megatron.errors import GoldenError
from pytest_megatron.golden.compare.limits import (
    BY_KIND,
    DEFAULTS,
    Exact,
    LimitKind,
    Limits,
    Worse,
    kind_of,
    limits_of,
)
from pytest_megatron.recipe.vocabulary import nearest

# One number or word of a policy file, already parsed: as the field of the limits has it.
Setting: TypeAlias = float | int | bool | LimitKind | Worse | Exact
Settings: TypeAlias = Mapping[str, Setting]


class Base(Enum):
    """The policies of the package; the value is what `--golden-policy` takes."""

    STRICT = "strict"
    MEGATRON = "megatron"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedWorkload:
    """The workload that is compared.

    Attributes:
        case: `<model>/<test_case>`.
    """

    case: str
    platform: str | None = None
    environment: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """Settings for some workloads; each of the three is a list of patterns, empty for all.

    Attributes:
        metrics: Metric, or a pattern of metrics, to its changes.
    """

    cases: tuple[str, ...] = ()
    platforms: tuple[str, ...] = ()
    environments: tuple[str, ...] = ()
    metrics: Mapping[str, Settings] = field(default_factory=dict)

    def is_at(self, place: ComparedWorkload | None) -> bool:
        """Return True if it applies to a workload; None stands for any workload."""
        wanted = (self.cases, self.platforms, self.environments)
        here = (None,) * 3 if place is None else (place.case, place.platform, place.environment)
        return all(
            not patterns or (name is not None and any(fnmatch.fnmatch(name, p) for p in patterns))
            for patterns, name in zip(wanted, here, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonPolicy:
    """The rules of a comparison.

    Attributes:
        base: The policy that it inherits from.
        name: Its name in verdicts: the base's, or its file's.
        metrics: Metric, or a pattern of metrics, to its changes; a later one wins.
        overrides: The same for some workloads; a later one wins.
    """

    STRICT: ClassVar[ComparisonPolicy]
    MEGATRON: ClassVar[ComparisonPolicy]

    base: Base
    name: str
    metrics: Mapping[str, Settings] = field(default_factory=dict)
    overrides: tuple[Override, ...] = ()

    @property
    def value(self) -> str:
        """Its name in verdicts."""
        return self.name

    @property
    def is_strict(self) -> bool:
        """True if it is `strict`, or inherits from it."""
        return self.base is Base.STRICT

    def at(self, place: ComparedWorkload | None) -> ComparisonPolicy:
        """Return the policy as it is for one workload."""
        return replace(
            self,
            overrides=tuple(
                replace(o, cases=(), platforms=(), environments=())
                for o in self.overrides
                if o.is_at(place)
            ),
        )

    def settings(self, metric: str) -> Settings:
        """Return the changes for a metric; use `at` first for those of a workload."""
        found: dict[str, Setting] = {}
        everywhere = (o.metrics for o in self.overrides if o.is_at(None))
        for metrics in (self.metrics, *everywhere):
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
            metric: Its name.
            is_long: Whether its golden is long, and has no band of its own.
        """
        settings = dict(self.settings(metric))
        if "floor" in settings:  # who names one means it wherever the repeats were
            settings.setdefault("learned_floor", settings["floor"])
        kind = settings.pop("kind", None)
        if kind is None or kind is kind_of(metric):
            limits = limits_of(metric, is_long=is_long)
        else:
            assert isinstance(kind, LimitKind)
            limits = BY_KIND[kind]
        known = keys_of(limits)
        changes: dict[str, object] = {k: v for k, v in settings.items() if k in known}
        return replace(limits, **changes)  # type: ignore[arg-type] # typed as the fields are


ComparisonPolicy.STRICT = ComparisonPolicy(base=Base.STRICT, name=Base.STRICT.value)
ComparisonPolicy.MEGATRON = ComparisonPolicy(base=Base.MEGATRON, name=Base.MEGATRON.value)


def keys_of(limits: Limits) -> frozenset[str]:
    """Return the names of the numbers of one kind."""
    return frozenset(f.name for f in fields(limits))


_OF_ALL = frozenset({"judged", "kind"})
_OF_MEGATRON = frozenset({"approximate", "exact"})


def policy_named(
    text: str, where: str = "--golden-policy", root: Path | None = None
) -> ComparisonPolicy:
    """Return the policy that a user named.

    Args:
        text: `strict`, `megatron` or the path of a file.
        where: Name of the option in the error.
        root: Where a relative path is looked for after the current directory.

    Raises:
        GoldenError: It is none of them, or the file is wrong; with file and line.
    """
    for policy in (ComparisonPolicy.STRICT, ComparisonPolicy.MEGATRON):
        if policy.name == text:
            return policy
    candidates = [Path(text)] if root is None else [Path(text), root / text]
    for path in candidates:
        if path.is_file():
            return read_policy(path)
    names = sorted(base.value for base in Base)
    if Path(text).suffix in (".yaml", ".yml") or "/" in text:
        raise GoldenError(where, f"no policy file {text!r}; give its path, or {' or '.join(names)}")
    raise GoldenError(
        where,
        f"unknown policy {text!r}, expected {', '.join(names)} or a YAML file"
        f"{nearest(text, names)}",
    )


def read_policy(path: Path) -> ComparisonPolicy:
    """Read a policy file.

    Raises:
        GoldenError: With file and line: it is not YAML, has a key twice, departs from the schema,
            or gives a metric a limit that metrics of its kind do not have.
    """
    from pytest_megatron.golden import policy_schema  # noqa: PLC0415  pydantic is slow to import

    document = read_yaml(path, error=GoldenError)
    for twice in document.duplicates:
        raise GoldenError(
            f"{path}:{twice.second_line}", f"the key {twice.key!r} is there twice; keep one"
        )
    problem = policy_schema.check(document.value)
    if problem is not None:
        place, message = problem
        raise GoldenError(document.where(place), message)
    base = Base(document.value["inherit"])
    overrides = cast("list[dict[str, JsonValue]]", document.value.get("overrides", []))
    return ComparisonPolicy(
        base=base,
        name=str(path),
        metrics=_metrics(document, ("metrics",), document.value.get("metrics"), base),
        overrides=tuple(
            Override(
                cases=_patterns(one.get("cases")),
                platforms=_patterns(one.get("platforms")),
                environments=_patterns(one.get("environments")),
                metrics=_metrics(document, ("overrides", i, "metrics"), one["metrics"], base),
            )
            for i, one in enumerate(overrides)
        ),
    )


def _patterns(value: JsonValue) -> tuple[str, ...]:
    return tuple(cast("list[str]", value or []))


def _metrics(
    document: YamlDocument, path: YamlPath, value: JsonValue, base: Base
) -> dict[str, Settings]:
    metrics = cast("Mapping[str, Mapping[str, JsonValue]]", value or {})
    return {
        name: {
            key: _setting(key, one, base)
            for key, one in settings.items()
            if _check_key(document, (*path, name, key), settings, base)
        }
        for name, settings in metrics.items()
    }


def _check_key(
    document: YamlDocument, path: YamlPath, settings: Mapping[str, JsonValue], base: Base
) -> bool:
    """Require that a limit is one of the metric's kind, so that none is without effect."""
    metric, key = str(path[-2]), str(path[-1])
    written = settings.get("kind")
    kinds = _kinds_of(metric) if written is None else (LimitKind(written),)
    known = _OF_ALL.union(*(keys_of(BY_KIND[kind]) for kind in kinds))
    whose = f"a metric of kind {' or '.join(kind.value for kind in kinds)}"
    if base is Base.MEGATRON:
        known, whose = _OF_MEGATRON, "a metric under megatron"
    if key not in known:
        raise GoldenError(
            document.where(path),
            f"{metric}: {key!r} is no limit of {whose}, expected one of "
            f"{', '.join(sorted(known))}{nearest(key, known)}",
        )
    value = settings[key]
    if key == "exact" and isinstance(value, bool) != (base is Base.MEGATRON):
        expected = "true, false" if base is Base.MEGATRON else "auto, always, never"
        raise GoldenError(
            document.where(path), f"{metric}: exact is {value!r}, expected one of {expected}"
        )
    return True


def _kinds_of(pattern: str) -> tuple[LimitKind, ...]:
    """Return the kinds of the metrics that a name, or a pattern of names, means."""
    meant = [metric for metric in DEFAULTS if fnmatch.fnmatchcase(metric, pattern)]
    return tuple(dict.fromkeys(kind_of(metric) for metric in meant or [pattern]))


def _setting(key: str, value: JsonValue, base: Base) -> Setting:
    """Return a value of a file that the schema passed as the type of its limit."""
    if key == "kind":
        return LimitKind(value)
    if key == "worse":
        return Worse(value)
    if key == "exact" and base is Base.STRICT:
        return Exact(value)
    assert isinstance(value, bool | int | float)
    return value
