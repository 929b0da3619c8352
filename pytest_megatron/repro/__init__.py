"""From a run directory or an artifact to the same failure here."""

from __future__ import annotations
