"""The pytest side: the only package here that knows pytest."""

from __future__ import annotations
