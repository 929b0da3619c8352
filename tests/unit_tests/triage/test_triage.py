"""The `triage` command: formats, exit codes, own signatures; fast, and without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pytest_megatron.cli import main
from pytest_megatron.triage.command import command

TRACE = (
    "Traceback (most recent call last):\n"
    '  File "/job/train.py", line 31, in main\n'
    "    work()\n"
    "{error}\n"
)
PORT_TAKEN = (
    "OSError: [Errno 98] error while attempting to bind on address ('127.0.0.1', 45123): address "
    "already in use"
)
OWN = """
[[signature]]
id = "solver"
family = "exception"
pattern = 'no licence for \\S+'
advice = "ask the licence server's owner"
examples = ["RuntimeError: no licence for solver"]
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


def write_log(error: str = "RuntimeError: no licence for solver", name: str = "job.log") -> None:
    Path(name).write_text(TRACE.format(error=error))


def test_text() -> None:
    write_log("ValueError: bad batch")
    result = run("job.log")
    assert (result.exit_code, result.output) == (
        1,
        (
            "job.log: exception\n"
            "    The program raised ValueError: bad batch at train.py:31 in main, before the first "
            "iteration that was logged.\n"
            "    job.log:4: ValueError: bad batch\n"
            "    not transient: running it again unchanged gives the same\n"
            "    known as exception: read the traceback from its last line upwards\n"
            "    next: less +4 job.log\n"
        ),
    )


def test_json_has_what_scripts_ask_for() -> None:
    write_log(PORT_TAKEN)
    result = run("job.log", "--format", "json")
    found = json.loads(result.stdout)
    assert result.exit_code == 1
    assert {key: found[key] for key in ("family", "transient", "root_rank", "signature")} == {
        "family": "port_in_use",
        "transient": True,
        "root_rank": None,
        "signature": "port_in_use",
    }
    assert found["evidence"] == [
        {
            "file": "job.log",
            "line": 4,
            "rank": None,
            "text": PORT_TAKEN,
        }
    ]
    assert [group["units"] for group in found["failures"]] == [["job.log"]]


def test_several_failures_are_told_once_for_each_cause() -> None:
    write_log("ValueError: bad batch", "a.log")
    write_log("ValueError: bad batch", "b.log")
    write_log("KeyError: 'x'", "c.log")
    output = run(".").output
    assert output.count("raised ValueError: bad batch") == 1
    assert "    the same in b.log\n" in output
    assert "raised KeyError: 'x'" in output


@pytest.mark.parametrize("style", ["text", "json"])
def test_a_sound_run_is_exit_code_0(style: str) -> None:
    Path("job.log").write_text("=========== 12 passed, 1 skipped in 3.02s ===========\n")
    result = run("job.log", "--format", style)
    assert result.exit_code == 0
    assert "othing failed" in result.output or json.loads(result.output)["failed"] is False


def test_neither_a_failure_nor_a_good_end_is_exit_code_3_with_what_was_read() -> None:
    """A log that merely stops is no success: nobody knows what became of the program."""
    Path("job.log").write_text("loading data\nstep 1\n")
    result = run("job.log")
    assert (result.exit_code, result.output) == (
        3,
        (
            "job.log: unknown\n"
            "    Nothing in 1 log of 20 bytes shows a failure, and nothing shows that it came to a "
            "good end.\n"
            "    job.log:1: loading data\n"
            "    job.log:2: step 1\n"
        ),
    )
    found = json.loads(run("job.log", "--format", "json").output)
    keys = ("failed", "family", "signature", "transient", "failures")
    assert [found[key] for key in keys] == [None, "unknown", "unknown", False, []]
    assert found["unclear"][0]["num_bytes"] == 20


def test_terminal_escapes_of_a_log_are_written_out() -> None:
    write_log("ValueError: \x1b]0;owned\x07\x1b[2J\x9b2Jbad")
    output = run("job.log").output
    assert "\x1b" not in output
    assert "\x9b" not in output
    assert "\\x9b2Jbad" in output


def test_unusable_input_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["pytest-megatron", "triage", "nowhere"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "pytest-megatron: nowhere: no such file or directory\n"


def test_signatures_of_the_command_line_and_of_the_project() -> None:
    write_log()
    Path("own.toml").write_text(OWN)
    assert "known as exception" in run("job.log").output
    assert "known as solver" in run("job.log", "--signatures", "own.toml").output
    Path("pyproject.toml").write_text('[tool.pytest-megatron]\nsignatures = ["own.toml"]\n')
    assert "known as solver" in run("job.log").output


def test_check_rules_tries_every_example() -> None:
    result = run("check-rules")
    assert result.exit_code == 0
    assert result.output.endswith(": all fit\n")
    Path("own.toml").write_text(OWN.replace("no licence for solver", "no license"))
    result = run("check-rules", "--signatures", "own.toml")
    assert result.exit_code == 1
    assert result.output.startswith("solver: 'RuntimeError: no license': solver does not match it")


def test_neither_torch_nor_pytest_is_loaded() -> None:
    write_log()
    code = (
        "import sys\n"
        "from pytest_megatron.triage.command import command\n"
        "try:\n    command.main(['job.log'])\n"
        "except SystemExit as end:\n    assert end.code == 1\n"
        "print(sorted({'torch', 'pytest', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")


def test_a_run_directory_may_be_named_from_here_and_through_a_link() -> None:
    attempt = Path("runs/one/gpt-tiny/repeat_1/attempt_1")
    (attempt / "phase_1/logs/0").mkdir(parents=True)
    (attempt / "plan.json").write_text('{"node_id": "gpt.yaml::tiny", "world_size": 1}')
    write_log("ValueError: bad batch", str(attempt / "phase_1/logs/0/stderr.log"))
    Path("runs/latest").symlink_to("one")
    for name in ("runs/one", "runs/latest"):
        result = run(name)
        assert (result.exit_code, result.output.splitlines()[0]) == (
            1,
            f"{name}/gpt-tiny/repeat_1/attempt_1/phase_1/logs: exception",
        )
