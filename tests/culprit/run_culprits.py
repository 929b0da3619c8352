"""Exam of `pytest-megatron culprit`: 20 planted commits in histories of 64, five of them flaky.

    python tests/culprit/run_culprits.py [--seed N] [--only NAME]

Makes a git repository for each culprit, runs the real command on it, which runs pytest in
worktrees, and prints a table. Ends with exit code 1 if fewer than 19 answers are right. The
flaky ones draw from a generator with a seed, so that the exam is the same each time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_megatron.runs.history import HistoryEntry, append

NUM_COMMITS = 64
PASS_MARK = 19
NODE_ID = "test_item.py::test_item"
FAILS = "assert not is_bad"
# Draws the next number of a generator; `COUNT` has how many were drawn.
DRAW = """
import os, pathlib, random
def draw():
    file = pathlib.Path(os.environ["EXAM_COUNT"])
    number = int(file.read_text() or 0) + 1
    file.write_text(str(number))
    return random.Random(f"{os.environ['EXAM_SEED']} {number}").random()
"""


@dataclass(frozen=True)
class Planted:
    """A culprit.

    Attributes:
        fixture: Of the test: `rank` runs it on a gang.
        body: Of the test, with `is_bad`.
        options: Of the command.
        share: Of the commits, which cannot be collected.
        history: Outcomes at a commit before, of the file that runs append to.
    """

    name: str
    body: str = FAILS
    fixture: str = ""
    options: tuple[str, ...] = ()
    share: float = 0.0
    history: tuple[str, ...] = ()
    is_flaky: bool = False


GANG = Planted("", fixture="rank", options=("--pytest-args", "--ranks 2 --device cpu"))
HANG = "import time\n    while is_bad: time.sleep(0.1)"
BUG = "assert not (is_bad and draw() < 0.3)"  # the culprit fails in 30 % of its runs
NOISE = "assert not is_bad and draw() >= 0.3"  # good commits fail in 30 % of their runs
BOTH = "assert is_bad == (draw() < 0.3)"  # 30 % of all runs mislead
RATE = ("--flake-rate", "0.3")
PLANTED = (
    *(Planted(f"assertion {number}") for number in range(1, 5)),
    Planted("assertion, rate 0", options=("--flake-rate", "0")),
    *(Planted(f"broken imports {number}", share=0.25) for number in (1, 2)),
    Planted("skipped commits", body=f"import pytest\n    if is_odd: pytest.skip()\n    {FAILS}"),
    Planted("segmentation fault", body="import os\n    if is_bad: os.kill(os.getpid(), 11)"),
    Planted("hang", body=HANG, options=("--time-limit", "20")),
    *(
        replace(GANG, name=f"rank {number} fails", body=f"assert not (is_bad and rank == {number})")
        for number in (0, 1)
    ),
    replace(GANG, name="rank dies", body="import os\n    if is_bad and rank: os._exit(3)"),
    replace(
        GANG,
        name="rank hangs",
        body=f"{HANG} if rank else None",
        options=("--pytest-args", "--ranks 2 --device cpu --rank-timeout 5"),
    ),
    Planted("last commit"),
    Planted("flaky bug", body=BUG, options=RATE, is_flaky=True),
    Planted("flaky bug, unknown rate", body=BUG, is_flaky=True),
    Planted("noise", body=NOISE, options=RATE, is_flaky=True),
    Planted(
        "noise, rate of history",
        body=NOISE,
        history=("passed",) * 7 + ("failed",) * 3,
        is_flaky=True,
    ),
    Planted("both", body=BOTH, options=RATE, is_flaky=True),
)


def make_history(root: Path, planted: Planted, culprit: int, chance: random.Random) -> list[str]:
    """Make a repository; return its commits, the good end first."""
    stream = []
    for number in range(NUM_COMMITS + 1):
        is_bad, is_odd = number >= culprit, 0 < number < NUM_COMMITS and number % 2 == 1
        is_broken = 0 < number < NUM_COMMITS and chance.random() < planted.share
        test = f"{DRAW}\nimport library\ndef test_item({planted.fixture}):\n"
        test += f"    is_bad, is_odd = library.IS_BAD, {is_odd}\n    {planted.body}\n"
        files = {
            "pytest.ini": "[pytest]\n",
            "library.py": f"IS_BAD = {is_bad}\nVERSION = {number}\n{'!' * is_broken}\n",
            "test_item.py": test,
        }
        message = f"Change {number}"
        stream += [
            "commit refs/heads/main",
            f"committer exam <exam@localhost> {10**9 + number} +0000",
        ]
        stream += [f"data {len(message)}", message]
        for name, text in files.items():
            stream += [f"M 644 inline {name}", f"data {len(text.encode())}", text]
    git(root, "init", "-q", "-b", "main")
    git(root, "fast-import", "--quiet", given="\n".join(stream) + "\n")
    git(root, "checkout", "-q", "-f", "main")
    return git(root, "rev-list", "--reverse", "main").split()


def git(root: Path, *words: str, given: str = "") -> str:
    """Run git and return its output."""
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, input=given, text=True, capture_output=True, check=True).stdout


def examine(root: Path, planted: Planted, seed: int) -> tuple[bool, int, int, float, str]:
    """Return whether the answer is right, the culprit, the number of runs, seconds, the answer.

    An answer is right if it names the culprit, and no other commit that could be run.
    """
    chance = random.Random(f"{seed} {planted.name}")
    culprit = chance.randrange(1, NUM_COMMITS + 1)
    if planted.name == "last commit":
        culprit = NUM_COMMITS
    if planted.share:
        culprit = 20  # a commit that can be collected, behind one that can
    commits = make_history(root, planted, culprit, chance)
    (root.parent / "count").write_text("")
    history = root.parent / "history.jsonl"
    history.touch()
    append(history, [entry(commits[0], verdict) for verdict in planted.history])
    words = ["pytest-megatron", "culprit", NODE_ID, "--good", commits[0], "--bad", "main"]
    env = {**os.environ, "EXAM_SEED": f"{seed} {planted.name}"}
    env["EXAM_COUNT"] = str(root.parent / "count")
    begun = time.monotonic()
    done = subprocess.run(
        [*words, "--history", str(history), *planted.options],
        cwd=root, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    took_s = time.monotonic() - begun
    if (
        git(root, "status", "--porcelain").strip()
        or len(git(root, "worktree", "list").split("\n")) != 2
    ):
        return False, culprit, 0, took_s, "the user's tree was changed"
    found = next((root / ".pytest_megatron" / "culprit").glob("*/culprit.json"), None)
    if found is None:
        return False, culprit, 0, took_s, (done.stderr or done.stdout).strip()[-120:]
    report = json.loads(found.read_text())
    untestable = {row["commit"] for row in report["commits"] if row["untestable"] is not None}
    named = set(report["candidates"])
    right = commits[culprit] in named and len(named - untestable) <= 1
    answer = report["subject"] or f"one of {len(report['candidates'])}"
    return right, culprit, report["num_runs"], took_s, f"{answer}, {report['probability']:.3f}"


def entry(commit: str, verdict: str) -> HistoryEntry:
    """Return a run of the item in the past."""
    return HistoryEntry(
        time="2026-11-20T10:00:00Z", run="r", node_id=NODE_ID, kind="test", verdict=verdict,
        num_attempts=1, causes=(), duration_s=1.0, commit=commit, is_dirty=False, platform="cpu x1",
    )  # fmt: skip


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    chosen = [planted for planted in PLANTED if arguments.only in planted.name]
    num_right = 0
    print(f"{'culprit':26} {'flaky':5} {'commit':>6} {'runs':>5} {'s':>6}  answer", flush=True)
    for planted in chosen:
        with tempfile.TemporaryDirectory(prefix="culprit-exam-") as scratch:
            root = Path(scratch) / "project"
            root.mkdir()
            right, culprit, runs, took_s, answer = examine(root, planted, arguments.seed)
        num_right += right
        mark = "right" if right else "WRONG"
        flaky = "30 %" if planted.is_flaky else ""
        row = f"{planted.name:26} {flaky:5} {culprit:6} {runs:5} {took_s:6.0f}  {mark}: {answer}"
        print(row, flush=True)
    print(f"{num_right} of {len(chosen)} right")
    return 0 if num_right >= min(PASS_MARK, len(chosen)) else 1


if __name__ == "__main__":
    sys.exit(main())
