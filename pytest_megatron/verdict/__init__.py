"""Verdicts: from attempts to passed, failed, flaky or broken."""

from __future__ import annotations
