"""Gangs of ranks: who runs one test together, how they are started, watched and ended."""

from __future__ import annotations
