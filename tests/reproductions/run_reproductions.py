"""Stages failing runs, and asks `pytest-megatron repro` for each of them in a fresh clone.

    python tests/reproductions/run_reproductions.py [--only ID,...] [--jobs 2] [--keep DIR]

Every case of `reproduction_cases.py` is a project of its own with a commit. pytest fails in it, its
run directory is packed as CI would, and the project is cloned to another place. There `repro` is
given the artifact and has to end with 1: the same item failed with the same fingerprint. Where a
case has a culprit, `--bisect-order` has to find it. Prints a line for each case, and exits with 1
if one was not the same.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [
    str(HERE.parent / name)
    for name in ("labs", "unit_tests/workloads/items", "unit_tests/gangs/sessions")
]

from reproduction_cases import CASES, Case  # noqa: E402
from tiny_project import Project  # noqa: E402

_IDENTITY = ("-c", "user.name=t", "-c", "user.email=t@example.org")
_LIMIT_S = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """What became of a case.

    Attributes:
        problem: Why it is no good, or "".
    """

    case: Case
    problem: str
    duration_s: float

    @property
    def line(self) -> str:
        """One line of the report."""
        said = f"NOT the same: {self.problem}" if self.problem else "the same"
        return f"{self.case.id:<20} {self.duration_s:5.1f} s  {said}"


def main() -> int:
    """Stage, reproduce, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", type=lambda text: text.split(","), default=[])
    parser.add_argument("--jobs", type=int, default=2, help="cases at one time")
    parser.add_argument("--keep", type=Path, help="where projects, artifacts and clones stay")
    asked = parser.parse_args()
    cases = [case for case in CASES if not asked.only or case.id in asked.only]
    root = asked.keep or Path(tempfile.mkdtemp(prefix="reproductions-"))
    started = time.monotonic()
    with ThreadPoolExecutor(asked.jobs) as pool:
        results = []
        for staged in pool.map(lambda case: stage(case, root.resolve() / case.id), cases):
            print(staged.line, flush=True)
            results.append(staged)
    num_bad = sum(bool(staged.problem) for staged in results)
    print(
        f"{len(results) - num_bad} of {len(results)} failures are the same in a fresh clone; "
        f"{time.monotonic() - started:.0f} s"
    )
    if not (num_bad or asked.keep):
        shutil.rmtree(root)
    return 1 if num_bad else 0


def stage(case: Case, home: Path) -> Staged:
    """Fail, pack, clone, and fail again."""
    started = time.monotonic()
    problem = _problem(case, home)
    return Staged(case=case, problem=problem, duration_s=time.monotonic() - started)


def _problem(case: Case, home: Path) -> str:
    there, here = home / "there", home / "elsewhere/here"
    there.mkdir(parents=True)
    _make(case, there)
    ended = _call([*_pytest(case), "--run-dir", str(home / "out")], there, case.env)
    node_id, said = _failure(home / "out", case)
    if not node_id:
        return f"nothing failed there\n{ended.stdout[-3000:]}"
    if case.headline not in said:
        return f"failed otherwise there: {said}"
    artifact = shutil.make_archive(str(home / "artifact"), "zip", home / "out")
    shutil.rmtree(home / "out")
    _git(home, "clone", "-q", str(there), str(here))
    there.rename(home / "gone")  # nothing may lead back
    if case.change:
        with_patch = home / "patch"
        shutil.unpack_archive(artifact, with_patch)
        _git(here, "apply", str(with_patch / "dirty.patch"))
    again = _call([*_REPRO, artifact, case.item, *case.again], here, {})
    same = "fails in the same way: "
    last = next((x for x in again.stdout.splitlines()[::-1] if same in x), "")
    if again.returncode != 1 or case.headline not in last:
        return f"exit {again.returncode}\n{again.stdout[-3000:]}{again.stderr[-2000:]}"
    return _look_for_culprit(case, artifact, here)


def _look_for_culprit(case: Case, artifact: str, here: Path) -> str:
    if not case.culprit:
        return ""
    found = _call([*_REPRO, artifact, case.item, "--bisect-order"], here, {})
    is_found = f"fails in the same way after\n  {case.culprit}\n" in found.stdout
    return "" if is_found and found.returncode == 1 else f"no culprit\n{found.stdout}{found.stderr}"


def _make(case: Case, root: Path) -> None:
    """Make the project and commit it."""
    if case.build is not None:
        case.build(Project(root=root, has_torch=True))
    for name, text in case.tests.items():
        (root / name).write_text(text.replace("{hash}", _hash(case.env)))
    (root / ".gitignore").write_text("__pycache__/\nstate/\n*.up\n.pytest_cache/\n")
    _git(root, "init", "-q")
    _git(root, "add", "-A")
    _git(root, "commit", "-qm", "all")
    if case.change:
        with (root / "test_a.py").open("a") as file:
            file.write(case.change)


def _hash(env: Mapping[str, str]) -> str:
    """Return what a string's hash is with the seed of a case; another seed gives another one."""
    code = "print(hash('megatron'))"
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


_MAIN = "from pytest_megatron.cli import main; main()"
_REPRO = (sys.executable, "-c", _MAIN, "repro")


def _pytest(case: Case) -> Sequence[str]:
    kind = ["--ranks", "2", "-o", "megatron_rank_grace=1"] if case.tests else ["recipes"]
    return [sys.executable, "-m", "pytest", "-p", "megatron", *kind, *case.arguments]


def _failure(run_dir: Path, case: Case) -> tuple[str, str]:
    """Return the node id of what failed, and what is said of it."""
    try:
        items = json.loads((run_dir / "run.json").read_text())["items"]
    except OSError:
        return "", ""
    for node_id, record in items.items():
        if case.item in node_id and record["verdict"] in ("failed", "broken"):
            return node_id, str(record["problem"])
    return "", ""


def _call(
    words: Sequence[str], directory: Path, env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not re.match("PYTEST_|NCCL_|PYTHONHASH", k)}
    return subprocess.run(
        words,
        cwd=directory,
        env={**kept, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=_LIMIT_S,
    )


def _git(root: Path, *words: str) -> None:
    command = ["git", *_IDENTITY, *words]
    subprocess.run(command, cwd=root, check=True, capture_output=True)


if __name__ == "__main__":
    sys.exit(main())
