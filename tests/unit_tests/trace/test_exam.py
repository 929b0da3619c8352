"""A dozen rows of the exam of traces: planted bugs are named, clean layouts left alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

EXAM = Path(__file__).resolve().parents[2] / "traces" / "run_exam.py"


@pytest.mark.timeout(600)
def test_the_exams_sample_is_passed() -> None:
    ran = subprocess.run(
        [sys.executable, EXAM, "--sample"], capture_output=True, text=True, check=False
    )
    rows = [line for line in ran.stdout.splitlines() if line.startswith("ok: ")]
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert len(rows) == 12
