"""The table of features, and what they add to one another.

A feature is a folder with a module `feature.py`, which says what it adds: commands, and answers to
the extension points of others. Each but `gangs`, `workloads` and `triage` can be deleted with its
name here, its tests and its pages. Imports the standard library alone: every start of pytest
reads it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

FEATURES = (
    *("gangs", "workloads", "triage"),
    *("ci", "demo", "doctor", "engines", "flaky", "layouts"),
    *("leaks", "pages", "repro", "trace", "watch"),
)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Feature:
    """What one feature adds.

    Attributes:
        commands: Subcommand of `pytest-megatron` to `module:function` and a line of help.
        provides: Name of an extension point to `module:attribute`, a module of the feature.
    """

    commands: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    provides: Mapping[str, str] = field(default_factory=dict)


def features() -> Iterator[tuple[str, Feature]]:
    """Yield the name of each feature and what it adds, in the order of the table."""
    for name in FEATURES:
        feature: Feature = importlib.import_module(f"{__package__}.{name}.feature").FEATURE
        yield name, feature


def load(target: str) -> object:
    """Return what there is at `feature.module:attribute`, below the package."""
    module, _, attribute = target.partition(":")
    return cast("object", getattr(importlib.import_module(f"{__package__}.{module}"), attribute))


@dataclass(frozen=True, slots=True)
class ExtensionPoint(Generic[T]):
    """A place where features add something; the module that asks declares it, with its type.

    Attributes:
        name: The key in `Feature.provides`.
    """

    name: str

    def all(self) -> list[T]:
        """Return what features add here, in the order of the table."""
        found = ((name, feature.provides.get(self.name)) for name, feature in features())
        return [cast("T", load(f"{name}.{target}")) for name, target in found if target is not None]

    def first(self) -> T | None:
        """Return the only addition, or None where its feature is not there."""
        return next(iter(self.all()), None)
