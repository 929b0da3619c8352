"""Programs that know nothing of Megatron-LM, as rows in the short form: real processes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tiny_project import Project, Run

from pytest_megatron.base.files import JsonValue

# Trains a number; saves all of it in a file of its own, and takes no argument of Megatron-LM.
PROGRAM = """
import argparse, json, os, sys
from pathlib import Path
parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--max_steps", type=int)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--log_every", type=int, default=1)
parser.add_argument("--out", type=Path)
parser.add_argument("--save_at", type=int)
parser.add_argument("--resume", type=Path)
parser.add_argument("--forgets", action="store_true")
args = parser.parse_args()
assert "RANK" not in os.environ, "started by a launcher"
weight, first = 1.0, 0
if args.resume:
    saved = json.loads(args.resume.read_text())
    weight, first = saved["weight"], 0 if args.forgets else saved["step"]
with open(os.environ["PYTEST_MEGATRON_METRICS"], "w") as log:
    for step in range(first + 1, args.max_steps + 1):
        weight -= args.lr * 2 * (weight - 0.1)
        if step % args.log_every == 0:
            print(json.dumps({"step": step, "train/loss": (weight - 0.1) ** 2}), file=log)
        if args.out and step == args.save_at:
            (args.out / f"at-{step}.json").write_text(json.dumps({"weight": weight, "step": step}))
"""
# Prints what DeepSpeed 0.19 did, whose second rank raised or was killed; or accelerate 1.15.
RANKS = """
import sys
how = sys.argv[1]
trace = "Traceback (most recent call last):\\n  File {0}/{1}.py{0}, line 5, in {1}\\n    x()\\n{2}"
lost = "RuntimeError: [x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:75"
ranks = {} if how == "lone" else {0: trace.format(chr(34), "reduce", lost)}
if how == "raises":
    ranks = {1: trace.format(chr(34), "step", "IndexError: index out of range in self"), **ranks}
for rank, text in ranks.items():
    sys.stderr.writelines(f"[rank{rank}]: {line}\\n" for line in text.split("\\n"))
if how == "lone":
    at = "accelerate/commands/launch.py"
    print("Traceback (most recent call last):", file=sys.stderr)
    print(f'  File "{at}", line 999, in simple_launcher\\n    raise x', file=sys.stderr)
    sys.exit("subprocess.CalledProcessError: Command '[9]' died with <Signals.SIGKILL: 9>.")
for rank in (0, 1):
    print(f"[INFO] [launch.py:245:main] process 422{rank} spawned with command: ['/x/python', "
          f"'-u', 'train.py', '--local_rank={rank}', '--lr', '1']")
print("[2026-11-26 21:50:05,717] [INFO] [launch.py:253:sigkill_handler] Killing subprocess 4223")
print(f"[2026-11-26 21:50:05,788] [ERROR] [launch.py:259:sigkill_handler] ['/x/python', '-u', "
      f"'train.py', '--local_rank=1', '--lr', '1'] exits with return code = {sys.argv[2]}")
sys.exit(1)
"""
ROWS = """
model: gpt
rows:
  - &sound
    name: sound
    command: python train.py --max_steps 12
    last_step: 12
    stop: --max_steps {steps}
    metrics: [train/loss]
  - {<<: *sound, name: sparse, command: python train.py --max_steps 12 --log_every 6}
  - {<<: *sound, name: early, command: python train.py --max_steps 9}
  - &resumes
    <<: *sound
    name: resumes
    resume: {save: "--out {dir} --save_at {at}", load: "--resume {dir}/at-{at}.json", at: 5}
  - {<<: *resumes, name: forgets, command: python train.py --max_steps 12 --forgets}
  - <<: *sound
    name: saves_nothing
    resume: {save: "--out {dir} --save_at 99", load: "--resume {dir}", at: 5}
  - {<<: *sound, name: raises, command: python ranks.py raises 1}
  - {<<: *sound, name: killed, command: python ranks.py killed -9}
  - {<<: *sound, name: lone, command: python ranks.py lone}
  - {<<: *sound, name: syntax, command: python broken.py}
  - {<<: *sound, name: takes_less, command: python train.py --max_steps 12 --exit-interval 12}
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = Project(root=tmp_path_factory.mktemp("own") / "project")
    (project.root / "train.py").write_text(PROGRAM)
    (project.root / "ranks.py").write_text(RANKS)
    (project.root / "broken.py").write_text("import os\nprint(os.name\n")
    (project.root / "recipes").mkdir()
    (project.root / "recipes" / "own.yaml").write_text(ROWS)
    return project


@pytest.fixture(scope="module")
def run(project: Project) -> Run:
    return project.run("recipes", "--golden", "off")


def plan_of(run: Run, case: str) -> list[list[str]]:
    plan: JsonValue = json.loads(next(run.item_dir(case).glob("*/*/plan.json")).read_text())
    assert isinstance(plan, dict)
    phases = plan["phases"]
    assert isinstance(phases, list)
    words = [phase["argv"] for phase in phases if isinstance(phase, dict)]
    return [[str(word) for word in one] for one in words if isinstance(one, list)]


def test_a_program_is_started_as_it_is_and_gets_no_argument(run: Run) -> None:
    assert run.verdict("sound") == ("PASSED", "passed")
    ((*_, program, flag, steps),) = plan_of(run, "sound")
    assert (program, flag, steps) == ("train.py", "--max_steps", "12")


def test_a_program_resumes_in_its_own_way(run: Run) -> None:
    assert run.verdict("resumes") == ("PASSED", "passed")
    first, second = plan_of(run, "resumes")
    saved = str(run.item_dir("resumes") / "repeat_1" / "attempt_1" / "checkpoints")
    own = ["--out", saved, "--save_at", "5"]
    assert first[-6:] == ["--max_steps", "12", *own]
    assert second[-8:] == ["--max_steps", "12", *own, "--resume", f"{saved}{os.sep}at-5.json"]


def test_a_count_of_steps_that_begins_anew_is_told(run: Run) -> None:
    assert run.verdict("forgets") == ("FAILED", "failed")
    assert (
        "it did not load its checkpoint: its first step is 1, expected it to go on after 5; see "
        "`load` of resume, and whether the program restores its count of steps, and logs to a "
        "place that holds none of before"
    ) in run.problem("forgets")


def test_a_start_that_saves_nothing_is_told(run: Run) -> None:
    assert run.verdict("saves_nothing") == ("FAILED", "failed")
    assert "is empty, expected what `save` of resume has it save there" in run.problem(
        "saves_nothing"
    )


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        ("raises", "rank 1 of 2 raised IndexError: index out of range in self at step.py:5 in st"),
        ("killed", "rank 1 of 2 was killed by SIGKILL, before the first iteration"),
        ("lone", "rank 0 was killed by SIGKILL, before the first iteration"),
    ],
)
def test_of_ranks_that_a_program_starts_the_one_that_failed_is_named(
    run: Run, case: str, problem: str
) -> None:
    assert run.problem(case).startswith(problem)


def test_the_place_of_a_syntax_error_is_told(run: Run) -> None:
    problem = run.problem("syntax")
    assert problem.startswith("rank 0 raised SyntaxError: '(' was never closed at broken.py:2, ")


def test_a_lightweight_run_gives_the_program_fewer_steps(project: Project) -> None:
    light = project.run(
        "recipes", "--lightweight", "-k", "sound or sparse or resumes", run_dir="light"
    )
    assert light.verdict("sound") == ("PASSED", "passed")
    assert plan_of(light, "sound")[0][-2:] == ["--max_steps", "4"]
    assert light.verdict("sparse") == ("PASSED", "passed")  # it logs none of four steps
    assert light.verdict("resumes") == ("PASSED", "passed")


@pytest.mark.nightly
def test_pytest_testmon_leaves_out_no_row(tmp_path: Path) -> None:
    """It sees nothing of a training, whose code may have been edited."""
    project = Project(root=tmp_path)
    project.add("sound")
    for number in range(2):
        run = project.run("recipes", "--testmon", run_dir=f"run-{number}")
        assert run.verdict("sound") == ("PASSED", "passed")
