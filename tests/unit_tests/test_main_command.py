"""The command as a process: what it says where it cannot say anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from pytest_megatron.cli import group
from pytest_megatron.errors import REMOVED

COMMAND = [sys.executable, "-c", "from pytest_megatron.cli import main; main()", "--help"]


def test_a_full_standard_output_is_one_error() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            COMMAND, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )
    told = "pytest-megatron: standard output: No space left on device; make room\n"
    assert (done.returncode, done.stderr) == (2, told)


@pytest.mark.parametrize(
    "command", [name for name in REMOVED if not name.startswith(("-", "megatron_"))]
)
def test_a_removed_command_says_what_to_do_instead(command: str) -> None:
    done = subprocess.run(
        [*COMMAND[:3], *command.split(), "--dry-run"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    told = f"pytest-megatron: {command}: {REMOVED[command]}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        pytest.param(["docter"], "'docter'; did you mean 'doctor'?", id="a command"),
        pytest.param(["golden", "acept"], "'acept'; did you mean 'accept'?", id="of golden"),
        pytest.param(["ci", "sumary"], "'sumary'; did you mean 'summary'?", id="of a plain group"),
        pytest.param(["xyz"], "'xyz'.", id="like none"),
    ],
)
def test_an_unknown_command_names_the_nearest(words: list[str], hint: str) -> None:
    result = CliRunner().invoke(group, words)
    assert (result.exit_code, result.output.splitlines()[-1]) == (
        2,
        f"Error: No such command {hint}",
    )


def test_a_reader_that_goes_away_is_no_error() -> None:
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""


def completed(shell: str, *words: str, code: str = "") -> str:
    """Return what the command answers to a shell that completes the last word."""
    env = {"_PYTEST_MEGATRON_COMPLETE": shell, "COMP_WORDS": " ".join(words)}
    env["COMP_CWORD"] = str(len(words) - 1) if "bash" in shell else words[-1]
    argv = [*COMMAND[:2], f"{code}; {COMMAND[2]}"] if code else COMMAND[:3]
    done = subprocess.run(
        argv, env={**os.environ, **env}, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param(["re"], ["record", "repro"], id="a command"),
        pytest.param(["golden", "li"], ["lint"], id="a command of a group"),
        pytest.param(["lint", "--schema", "re"], ["recipe"], id="a choice of an option"),
        pytest.param(["doctor", "--no"], ["--no-collective"], id="an option"),
        pytest.param(["plan", "--format", "g"], ["github"], id="a word of an option"),
    ],
)
def test_bash_completes_words(words: list[str], expected: list[str]) -> None:
    found = completed("bash_complete", "pytest-megatron", *words)
    assert found.split() == [f"plain,{word}" for word in expected]


def test_a_command_is_completed_without_importing_any() -> None:
    report = "import atexit, sys; atexit.register(lambda: print(*sys.modules))"
    *names, modules = completed("bash_complete", "pytest-megatron", "", code=report).splitlines()
    assert "plain,triage" in names
    loaded = {name for name in modules.split() if name.startswith("pytest_megatron.")}
    assert {name for name in loaded if name.endswith("command")} == {"pytest_megatron.base.command"}
