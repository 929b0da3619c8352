"""Launching: from a workload to a command line, an environment, directories and a process."""

from __future__ import annotations
