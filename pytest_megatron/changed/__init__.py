"""Code and files that tests use: recorded as they run, compared to select them."""

from __future__ import annotations
