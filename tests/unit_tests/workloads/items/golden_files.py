"""Goldens of trainings on a disk."""

from __future__ import annotations

from pathlib import Path

from pytest_megatron.workloads.golden.model import Golden, MetricMap, Provenance
from pytest_megatron.workloads.golden.store import golden_text


def write_golden(path: Path, metrics: MetricMap, provenance: Provenance) -> None:
    golden = Golden(path=str(path), metrics=metrics, provenance=provenance)
    path.write_text(golden_text(golden))
