"""Reports: the texts and files that tell a person what happened."""

from __future__ import annotations
