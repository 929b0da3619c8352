"""The platform of a run and of its golden: the same one, another, or unknown. Pure.

The same training gives the same bits on the same image, versions and class of host; after a change
of one of them other kernels round otherwise, which is drift of the platform and no regression.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_megatron.golden.provenance import Golden, Provenance

# Of no influence on what a training computes.
_IDLE_PACKAGES = frozenset({"pytest", "pytest-megatron", "python"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnvironment:
    """The environment of a run, as far as it is known.

    Attributes:
        host_class: Machines of one class are as fast as one another.
        image: The container image with its digest.
        versions: Package to its version.
    """

    host_class: str | None = None
    image: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)


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
