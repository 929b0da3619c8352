"""Why a run failed: signatures, logs, flight recorders, and the rank that everything began with."""

from __future__ import annotations
