"""Recipes: the YAML files that say which workloads exist, and their expansion into rows."""

from __future__ import annotations
