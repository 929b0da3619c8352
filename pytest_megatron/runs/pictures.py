"""Pages and pictures of finished runs. A room draws them; without it there are none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from pytest_megatron.errors import RunError
from pytest_megatron.rooms import ExtensionPoint
from pytest_megatron.runs.record import RecordedWorkload


@dataclass(frozen=True, slots=True, kw_only=True)
class MermaidChart:
    """A small picture for Markdown of GitHub and GitLab, which render mermaid and no SVG.

    Attributes:
        legend: The lines, by their colours.
        source: No text of anybody is in it; below 1,000 characters.
    """

    legend: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A metric of a workload that disagrees with its golden.

    Attributes:
        mermaid: None where no two steps can be compared.
    """

    metric: str
    svg: str
    mermaid: MermaidChart | None


# Of a run directory, the node id and the record of a workload: the metric that is off, if one is.
DRAW_FAILED: ExtensionPoint[Callable[[Path, str, RecordedWorkload], Picture | None]] = (
    ExtensionPoint("failed_picture")
)
# Whether a file of a run is needed for that.
IS_DRAWN: ExtensionPoint[Callable[[PurePath], bool]] = ExtensionPoint("drawn_files")
# Writes pages of runs below a path; returns the index, and an error for each run that it lacks.
WRITE_PAGES: ExtensionPoint[
    Callable[[Sequence[Path], Path | None], tuple[Path, list[RunError]]]
] = ExtensionPoint("pages")
