"""`pytest-megatron record` on small programs, in projects of their own."""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pretended_gpus import pretend_gpus

from pytest_megatron.errors import MegatronError
from pytest_megatron.workloads.commands.record import command as record_command

LOOP = """
import json, os, random, sys
last = int(dict(word.split("=") for word in sys.argv[1:] if "=" in word).get("--max_steps", 12))
mode = sys.argv[1]
noise = random.SystemRandom().random() if mode == "noisy" else 0.0
for step in range(last if mode != "early" else 5):
    loss = 3.0 / (1 + 0.111 * step) + noise
    if mode == "rising":
        loss = 3.0 + step
    if mode == "rising" or mode == "print" or mode == "noisy" or mode == "early":
        print(f"step {step} | loss {loss:.5f} | 3 ms", flush=True)
    if mode == "jsonl":
        os.makedirs("out/run_1", exist_ok=True)
        with open("out/run_1/log.jsonl", "w" if step == 0 else "a") as log:
            print(json.dumps({"step": step, "train/loss": loss, "lr": 0.1}), file=log)
if mode == "joint":
    for step in range(last):
        for rank in (0, 1):
            print(f"step {step} loss {(2.0 + rank) / (1 + step):.5f}")
if mode == "epochs":
    for step in range(last):
        print(f"Train [{step}] Loss: {3.0 / (1 + 0.111 * step):.5f}")
        if step % 6 == 5:
            print(f"Test Average loss: {2.0 / step:.5f}, asked by {os.environ['ASKED']}")
    print("Final accuracy: 0.97"); print("Validation bpb: 1.5"); print("Validation bpb: 1.25")
if mode == "gpus":
    seen = os.environ["CUDA_VISIBLE_DEVICES"].count("GPU-")
    for step in range(last):
        print(f"step {step} loss {3.0 / seen / (1 + 0.111 * step):.5f}, on {seen} GPUs")
if mode == "hang" or mode == "second" and os.path.exists("ran"):
    import time; open("hangs", "w").write(str(os.getpid())); time.sleep(600)
if mode == "second":
    open("ran", "w"), [print(f"step {step} loss {3 - step}", flush=True) for step in range(3)]
if mode == "background":
    import time; print("step 0 loss 2.5", flush=True); open("began", "w"); time.sleep(600)
if mode == "crash":
    print("step 0 loss 2.0"); last += int("no number")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    root.mkdir()
    (root / "loop.py").write_text(LOOP)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)  # noqa: S607 - the user's
    return root


def record(project: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return command(project, "record", *words, **env)


def command(project: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    main = "from pytest_megatron.cli import main; main()"
    if "PRETEND_NVML" in more:
        main = f"import conftest; {main}"
    return subprocess.run(
        [sys.executable, "-c", main, *words],
        cwd=project,
        env=own_env() | more,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def own_env() -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    return env


def start(project: Path, *words: str) -> subprocess.Popen[str]:
    """Start `record` with signals as a shell's foreground command has them."""
    main = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from pytest_megatron.cli import main; main()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", main, "record", *words],
        cwd=project,
        env=own_env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def record_here(project: Path, *words: str) -> str:
    """Return the error of a command line that is refused, without a process for it."""
    with pytest.raises(MegatronError) as caught:
        record_command.main(["--root", str(project), *words], standalone_mode=False)
    return str(caught.value)


def test_a_command_becomes_a_row_and_a_golden(project: Path) -> None:
    done = record(project, "--", "python", "loop.py", "jsonl", "--max_steps=12")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (project / "recipes" / "loop.yaml").read_text() == (
        "rows:\n"
        "- name: loop\n"
        "  command: python loop.py jsonl --max_steps=12\n"
        "  last_step: 11\n"
        "  stop: --max_steps={steps}\n"
        "  metrics:\n"
        "    source: jsonl\n"
        "    path: out/**/log.jsonl\n"
        "    names: [train/loss]\n"
        "  platforms: cpu\n"
        "  time_limit: 120\n"
    )
    golden = project / "golden_values/loop/loop/golden_values_dev_cpu.json"
    written = json.loads(golden.read_text())
    assert len(written["train/loss"]["values"]) == 12
    assert (written["_provenance"]["repeats"], written["_provenance"]["deterministic"]) == (2, True)
    assert "train/loss: 12 steps, 0 to 11 by 1, 3 -> 1.35074\n" in done.stdout
    assert "train/loss repeats: 12 steps equal in 2 runs" in done.stdout


def test_a_metric_that_ends_early_is_left_out_and_variables_are_kept(project: Path) -> None:
    done = record(project, "--", "ASKED=me", "python", "loop.py", "epochs", "--max_steps=12")
    assert done.returncode == 0, done.stdout + done.stderr
    told = "left out: Average loss, Final accuracy of printed, counted from 1; --metric"
    assert told in done.stdout
    assert "Validation bpb of printed, any number, counted from 1; --" in done.stdout
    row = (project / "recipes" / "loop.yaml").read_text()
    assert "command: ASKED=me python loop.py epochs --max_steps=12" in row
    assert "names: [Loss]\n" in row


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("visible", "seen", "said", "kept"),
    [
        (None, 1, "it sees 1 of 2 GPUs, as its row will; set CUDA_VISIBLE_DEVICES to", ""),
        ("0,1", 2, "", "  gpus: 2\n"),
    ],
)
def test_by_hand_a_command_has_the_gpus_of_its_row(
    project: Path, visible: str | None, seen: int, said: str, kept: str
) -> None:
    env = pretend_gpus(project, 2)
    if visible is not None:
        env["CUDA_VISIBLE_DEVICES"] = visible
    done = record(project, "--", "python", "loop.py", "gpus", "--max_steps=12", **env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"step 11 loss {3.0 / seen / 2.221:.5f}, on {seen} GPUs") == 2
    assert said in done.stdout
    row = (project / "recipes" / "loop.yaml").read_text()
    assert f"command: python loop.py gpus --max_steps=12\n{kept}  last_step: 11\n" in row
    assert "  platforms: dgx_h100\n" in row


def test_ranks_that_print_into_one_log_are_not_counted_as_one(project: Path) -> None:
    launch = project / "accelerate"
    launch.write_text('#!/bin/sh\nshift 3\nexec python "$@"\n')
    launch.chmod(0o755)
    words = [str(launch), "launch", "--num_processes", "2", "loop.py", "joint", "--max_steps=12"]
    done = record(project, "--", *words)
    assert done.returncode == 2
    assert "log:2: step 0 has two values of 'loss', 2.0 and then 3.0; have" in done.stderr


def test_a_dry_run_shows_row_and_golden_and_writes_nothing(project: Path) -> None:
    done = record(project, "--dry-run", "--name", "mine", "--", "python", "loop.py", "print")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "recipes/mine.yaml would be:" in done.stdout
    assert '"start_step": 0, "end_step": 11' in done.stdout
    assert sorted(path.name for path in project.iterdir()) == [".git", "loop.py"]


def test_a_metric_that_is_no_loss_by_name_is_read_where_it_is_asked_for(project: Path) -> None:
    words = ["python", "loop.py", "epochs", "--max_steps=2"]
    done = record(project, "--dry-run", "--metric", "Validation bpb", "--", *words, ASKED="me")
    assert done.returncode == 0, done.stdout + done.stderr
    told = "\nmetrics:\n  printed, any number, counted from 1\n    Validation bpb: 2 steps, 1 to 2"
    assert told in done.stdout
    assert "    names: [Validation bpb]\n" in done.stdout
    assert "Validation bpb repeats: 2 steps equal in 2 runs\n" in done.stdout


def test_runs_that_differ_are_told_and_give_no_golden(project: Path) -> None:
    done = record(project, "--", "python", "loop.py", "noisy")
    assert done.returncode == 1
    assert "loss differs in 12 of 12 steps, first at step 0: " in done.stdout
    assert "give the command its seed" in done.stdout
    assert "deterministic" not in (project / "recipes" / "loop.yaml").read_text()
    assert not (project / "golden_values").exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["python", "loop.py", "nothing"], "wrote no metric, expected a loss in files of"),
        (
            ["python", "loop.py", "crash"],
            (
                "ended with exit code 1, after step 0 (loss): "
                'print("step 0 loss 2.0"); last += int("no number"); ValueError: inv'
            ),
        ),
        (
            ["python", "loop.py", "early", "--max_steps=12"],
            "ended with exit code 0 at step 4 of its loss, and --max_steps is 12; nothing was",
        ),
        (["no-such-program"], "no-such-program: is no command that can be found"),
        (
            ["sh", "-c", "python loop.py background & until [ -e began ]; do sleep 0.05; done"],
            (
                "ended with exit code 0, and 1 process that it left in the background was ended "
                "at the first step; start it in the foreground; nothing was written"
            ),
        ),
    ],
)
def test_a_command_that_cannot_be_recorded_is_one_clear_line(
    project: Path, words: list[str], problem: str
) -> None:
    done = record(project, "--", *words)
    assert done.returncode == 2
    assert problem in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (project / "recipes").exists()


def test_a_command_that_does_not_end_is_ended(project: Path) -> None:
    done = record(project, "--time-limit", "2", "--", "python", "loop.py", "hang")
    assert done.returncode == 2
    assert "did not end within 2 s, before it wrote any metric; give it an end" in done.stderr


def test_a_name_that_has_a_row_is_refused_before_anything_runs(project: Path) -> None:
    (project / "recipes").mkdir()
    (project / "recipes" / "loop.yaml").write_text("rows: []\n")
    done = record(project, "--", "python", "loop.py", "print")
    assert (done.returncode, "is there already; give another --name" in done.stderr) == (2, True)
    assert "running" not in done.stdout


@pytest.mark.parametrize("name", ["", " ", "a/b", "..", "../x", "a[b]", "x" * 300, "a\nb", "-x"])
def test_a_name_that_no_row_can_have_is_refused_before_anything_runs(
    project: Path, name: str
) -> None:
    done = record_here(project, "--name", name, "--", "python", "loop.py", "print")
    assert "is no name of a row, expected at most 100 letters, digits and any of . _ + -" in done
    assert len(done.splitlines()) == 1


def test_a_project_that_takes_no_files_is_refused_before_anything_runs(project: Path) -> None:
    (project / ".pytest_megatron").write_text("a file\n")
    done = record_here(project, "--", "python", "loop.py", "print")
    assert "cannot be written to: " in done
    assert done.endswith("; nothing was run")


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("python loop.py | tee log", "give -- sh -c 'python loop.py | tee log'; nothing"),
        ("python loop.py print", "give -- python loop.py print; nothing"),
    ],
)
def test_a_line_that_quotes_make_one_word_is_told(project: Path, line: str, fix: str) -> None:
    done = record_here(project, "--", line)
    assert f"'{line}': is one word because of its quotes, and no shell runs it; {fix}" in done


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["python", "a b.py", "--bf16", "|", "tee", "log"], "python 'a b.py' --bf16 | tee log"),
        (["python", "loop.py", "2>&1", ">", "log"], "python loop.py 2>&1 > log"),
        (["python", "loop.py", "&&", "echo", "done"], "python loop.py && echo done"),
    ],
)
def test_a_word_that_only_a_shell_understands_is_refused(
    project: Path, words: list[str], fix: str
) -> None:
    done = record_here(project, "--", *words)
    assert "is a word of the command because of its quotes, and no shell runs it" in done
    assert f"give -- sh -c {shlex.quote(fix)}" in done


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_everything_and_leaves_no_row_or_golden(
    project: Path, number: signal.Signals
) -> None:
    running = start(project, "--", "python", "loop.py", "second")
    hangs = project / "hangs"
    while not (hangs.exists() and hangs.read_text()) and running.poll() is None:
        select.select([], [], [], 0.05)
    assert list((project / "recipes").iterdir()) == [project / "recipes" / "loop.yaml"]
    running.send_signal(number)
    out, _ = running.communicate(timeout=60)
    assert running.returncode == 128 + number, out
    assert f"{number.name}: what it had started was ended; nothing was written" in out
    assert not (project / "recipes").exists()
    assert not (project / "golden_values").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(hangs.read_text()), 0)


def test_variables_of_the_shell_are_kept_where_asked(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASKED", "me")
    words = ["python", "loop.py", "epochs", "--max_steps=12"]
    done = record(project, "--dry-run", "--env", "ASKED", "--", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "  env: {ASKED: me}\n" in done.stdout


@pytest.mark.parametrize(("name", "problem"), [("NO_SUCH", "is not set"), ("HF_TOKEN", "a secret")])
def test_a_variable_that_no_row_can_hold_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch, name: str, problem: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdef")
    done = record(project, "--env", name, "--", "python", "loop.py", "print")
    assert (done.returncode, problem in done.stderr, "running" in done.stdout) == (2, True, False)


@pytest.mark.nightly
def test_a_refused_golden_is_accepted_by_its_reason_alone(project: Path) -> None:
    commit = ["git", "-c", "user.name=u", "-c", "user.email=u@u", "commit", "-qm", "base"]
    subprocess.run(["git", "add", "-A"], cwd=project, check=True)  # noqa: S607 - the user's
    subprocess.run(commit, cwd=project, check=True)
    (project / "new.txt").write_text("not committed\n")
    (project / "loop.py").write_text(LOOP + "# edited\n")
    done = record(project, "--", "python", "loop.py", "rising")
    assert (done.returncode, "with --golden-reason TEXT" in done.stdout) == (1, True)
    run = next((project / ".pytest_megatron" / "runs").iterdir())
    taken = ("golden", "accept", str(run), "--reason", "it rises", "--allow-dirty")
    accepted = command(project, *taken)
    assert accepted.returncode == 0, accepted.stdout + accepted.stderr
    (golden,) = (project / "golden_values").rglob("*.json")
    assert '"is_dirty": true' in golden.read_text()
