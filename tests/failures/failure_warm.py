"""Starts the process whose forks are ranks, and gives it steps to run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from slurm_step import Step


class WarmTasks:
    """The client's side: one such process, for many steps."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("warm_tasks.py"))],
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def run(self, step: Step) -> int:
        """Run a step to its end."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(step)) + "\n")
        self._process.stdin.flush()
        return int(self._answer())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"warm tasks ended with {self._process.wait()}")
        return line.strip()
