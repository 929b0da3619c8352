"""Trains rows of recipes with a trace of their tensors, each in a session of pytest of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.runs.headline import PHASE
from pytest_megatron.workloads.training.plan.trace_settings import BEGIN_VARIABLE, TraceValues

_MOST_LINES = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTraining:
    """A training of a row: the first steps of its first phase.

    Attributes:
        row: What pytest takes: a node id.
        directory: Gets the run, and beside it what pytest printed; not there yet.
        values: See `TraceSettings`.
        begin: Keys of `TraceSettings` for how the training begins.
        env: Variables over those of this process; None unsets one.
        words: Further arguments of pytest.
    """

    row: str
    directory: Path
    values: TraceValues
    begin: Mapping[str, object]
    env: Mapping[str, str | None]
    words: Sequence[str]

    @property
    def log(self) -> Path:
        """What pytest printed."""
        return self.directory.with_name(f"{self.directory.name}.log")

    def run(self) -> int:
        """Train the row; return the exit code of pytest, whose judgement does not count here."""
        words = [sys.executable, "-m", "pytest", "-p", "megatron", self.row]
        words += ["--megatron-run-dir", str(self.directory), "--megatron-golden", "off"]
        words += ["--megatron-tensor-trace", self.values, "--megatron-lightweight", *self.words]
        begin = json.dumps(self.begin, default=str)
        own = {PHASE: "1", BEGIN_VARIABLE: begin, **self.env}
        env = {**os.environ, **own}
        given = {name: text for name, text in env.items() if text is not None}
        with self.log.open("w") as said:
            done = subprocess.run(words, env=given, stdout=said, stderr=said, check=False)
        return done.returncode

    def last_words(self) -> str:
        """Return the end of what pytest printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_MOST_LINES:])
