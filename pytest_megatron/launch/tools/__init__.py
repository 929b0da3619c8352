"""Stand-ins for tools that recipes' scripts call and a machine may lack; on their PATH only."""

from __future__ import annotations
