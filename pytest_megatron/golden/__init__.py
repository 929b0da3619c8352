"""Goldens: what a workload measured when it was right, and whether a run still measures it."""

from __future__ import annotations
