"""The command as a process: what it says where it cannot say anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

COMMAND = [sys.executable, "-c", "from pytest_megatron.cli.main import main; main()", "--help"]


def test_a_full_standard_output_is_one_error() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            COMMAND, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )
    told = "pytest-megatron: standard output: No space left on device; make room\n"
    assert (done.returncode, done.stderr) == (2, told)


def test_a_reader_that_goes_away_is_no_error() -> None:
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
