"""Reads the policy that `--golden-policy` names: one of the package's, or a YAML file."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from pytest_megatron.errors import GoldenError
from pytest_megatron.files import JsonValue
from pytest_megatron.golden.limits import BY_KIND, DEFAULTS, Exact, LimitKind, Worse, kind_of
from pytest_megatron.golden.policy import (
    Base,
    ComparisonPolicy,
    Override,
    Setting,
    Settings,
    keys_of,
)
from pytest_megatron.recipe.vocabulary import nearest
from pytest_megatron.yamllines import YamlDocument, YamlPath, read_yaml

_OF_ALL = frozenset({"judged", "kind"})
_OF_MEGATRON = frozenset({"approximate", "exact"})


def policy_named(
    text: str, where: str = "--golden-policy", root: Path | None = None
) -> ComparisonPolicy:
    """Return the policy that a user named.

    Args:
        text: `strict`, `megatron` or the path of a file.
        where: What the error calls the option.
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
    """Make sure that a limit is one of the metric's kind, so that none is without effect."""
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
