"""Tries the wheel with several releases of Python and torch, and prints a table.

    python tests/compatibility/run_versions.py --wheel FILE 3.12:2.8.0 3.13:2.13.0
    python tests/compatibility/run_versions.py --pytest 7.3.2,7.4.4,8.0.2

For each pair uv makes an environment with the wheel, that torch and the newest of everything else,
and small projects run in it: tests on two ranks of which some pass, others fail, are skipped or
kill their rank, alone and under pytest-xdist; a rank that never comes to a collective; a workload
that records a golden and then equals it. The rows are those of the table of
`docs/reference/compatibility.md`. A torch from the package index brings the CUDA packages, 6 GB for
each pair, which are removed after it. `--pytest` tries the same in this environment, with other
releases of pytest in front of its own. Needs uv and the Pythons, and nothing but the standard
library. Exits with 1 if anything was not as expected.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 600
_BESIDE = Path(sys.executable).with_name("uv")
UV = str(_BESIDE) if _BESIDE.exists() else "uv"
_TESTS = """
    import os
    import signal

    import pytest
    import torch
    import torch.distributed as dist


    def test_sum(process_group, device, rank, world_size):
        value = torch.tensor([float(rank)], device=device)
        dist.all_reduce(value)
        assert (value.item(), world_size) == (1.0, 2)


    def test_fails_on_one(process_group, rank):
        dist.barrier()
        assert rank != 1


    def test_gathers(process_group, device, rank):
        found = [torch.zeros(2, device=device) for _ in range(2)]
        dist.all_gather(found, torch.full((2,), float(rank), device=device))
        assert torch.stack(found).tolist() == [[0.0, 0.0], [1.0, 1.0]]


    def test_is_skipped(rank):
        pytest.skip("not here")


    def test_dies(rank):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)


    @pytest.mark.controller
    def test_plain():
        pass
    """
_HANG = """
    import torch
    import torch.distributed as dist


    def test_misses(process_group, rank):
        if rank == 1:
            return
        dist.all_reduce(torch.ones(1))
    """
_TRAIN = """
    import argparse
    import json
    import os

    import torch
    import torch.distributed as dist

    parser = argparse.ArgumentParser()
    parser.add_argument("--train-iters", type=int)
    parser.add_argument("--exit-interval", type=int)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    x = torch.linspace(-1, 1, 32).reshape(8, 4)
    with open(os.environ["PYTEST_MEGATRON_METRICS"], "a") as metrics:
        for step in range(1, (args.exit_interval or args.train_iters) + 1):
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for weights in model.parameters():
                    dist.all_reduce(weights.grad)
                    weights -= 0.05 * weights.grad / 2
            if dist.get_rank() == 0:
                print(json.dumps({"step": step, "lm loss": loss.item()}), file=metrics, flush=True)
    dist.destroy_process_group()
    """
_RECIPE = """
    type: basic
    format_version: 1
    spec:
      model: tiny
      gpus: 2
      platforms: cpu
      training_script_path: train.py
    products:
      - test_case: [line]
        products:
          - {environment: [dev], scope: [L0]}
    """
_CASE = """
    TEST_TYPE: regular
    METRICS: [lm loss]
    MODEL_ARGS:
      --train-iters: 10
    """
_VERSIONS = """
import json, platform, importlib.metadata as m
names = ("torch", "numpy", "pytest")
print(json.dumps([platform.python_version(), *map(m.version, names)]))
"""


@dataclass(frozen=True)
class Environment:
    """Where sessions run.

    Attributes:
        python: Its Python.
        front: Folder with packages that go before those of the environment.
    """

    python: Path
    front: Path | None = None

    def variables(self) -> dict[str, str]:
        """Return the variables of its processes: none of pytest's, the environment as activated."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        path = f"{self.python.parent}{os.pathsep}{os.environ['PATH']}"
        front = {} if self.front is None else {"PYTHONPATH": str(self.front)}
        return {**kept, "PATH": path, "COLUMNS": "160", **front}


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What came of one environment.

    Attributes:
        versions: Of Python, torch, numpy and pytest.
        problems: What was not as expected, by the column of the table.
    """

    versions: tuple[str, ...]
    problems: dict[str, str]

    @property
    def row(self) -> str:
        """The row of the table."""
        marks = [
            "no" if self.problems.get(name) else "yes" for name in ("tests", "hang", "workload")
        ]
        today = dt.datetime.now(dt.UTC).strftime("%Y-%m-%d")
        return f"| {' | '.join((*self.versions, *marks, today))} |"


def main() -> int:
    """Try everything; return the exit code."""
    parser = argparse.ArgumentParser(prog="run_versions.py")
    parser.add_argument("pairs", nargs="*", metavar="PYTHON:TORCH")
    parser.add_argument("--wheel", type=Path, help="needed for pairs")
    parser.add_argument("--pytest", default="", metavar="LIST", help="releases to try here")
    parser.add_argument("--uv", default=UV, help="uv's program")
    found = parser.parse_args()
    releases = found.pytest.split(",") if found.pytest else []
    if not (found.pairs or releases) or (found.pairs and found.wheel is None):
        parser.error("expected pairs and --wheel, or --pytest")
    has_failed = False
    for pair in (*found.pairs, *releases):
        with tempfile.TemporaryDirectory(prefix="versions-") as directory:
            work = Path(directory)
            if pair in releases:
                environment = with_pytest(work / "front", pair, found.uv)
            else:
                environment = make_environment(work, found.uv, found.wheel.resolve(), pair)
            tried = try_environment(environment, work)
        print(tried.row, flush=True)
        for name, problem in tried.problems.items():
            has_failed = True
            print(f"{name}:\n{problem}", file=sys.stderr, flush=True)
    return 1 if has_failed else 0


def make_environment(work: Path, uv: str, wheel: Path, pair: str) -> Environment:
    """Make an environment with a wheel, for a Python and with a torch."""
    python, _, torch = pair.partition(":")
    venv = work / "venv"
    subprocess.run([uv, "venv", "--quiet", "--python", python, venv], check=True)
    environment = Environment(venv / "bin" / "python")
    _install(uv, environment, f"torch=={torch}", str(wheel))
    return environment


def with_pytest(front: Path, release: str, uv: str = UV) -> Environment:
    """Return this environment with another pytest, such as `7.3.*`, in front of its own."""
    _install(uv, Environment(Path(sys.executable)), "--target", str(front), f"pytest=={release}")
    return Environment(Path(sys.executable), front)


def _install(uv: str, environment: Environment, *words: str) -> None:
    command: list[str | Path] = [
        uv,
        "pip",
        "install",
        "--no-config",
        "--quiet",
        "--python",
        environment.python,
    ]
    subprocess.run([*command, *words], check=True)


def try_environment(environment: Environment, work: Path) -> Tried:
    """Run everything in an environment."""
    asked = [str(environment.python), "-c", _VERSIONS]
    done = subprocess.run(asked, capture_output=True, check=True, env=environment.variables())
    problems = {name: check(environment, work / name) for name, check in CHECKS.items()}
    return Tried(
        versions=tuple(json.loads(done.stdout)), problems={k: v for k, v in problems.items() if v}
    )


def try_tests(environment: Environment, project: Path) -> str:
    """Return what was wrong with tests of all outcomes, alone and under pytest-xdist."""
    write(project, {"test_ranks.py": _TESTS})
    words = ("--ranks", "2", "--device", "cpu")
    expected = (
        r"rank 1: failed: assert 1 != 1",
        r"rank 1: .*SIGSEGV",
        r"=+ 2 failed, 3 passed, 1 skipped in ",
    )
    alone = missing(run_pytest(environment, project, *words), *expected)
    return alone or missing(run_pytest(environment, project, *words, "-n", "2"), *expected)


def try_hang(environment: Environment, project: Path) -> str:
    """Return what was wrong with the report of a rank that never comes."""
    write(project, {"test_hang.py": _HANG})
    words = (
        "--ranks",
        "2",
        "--device",
        "cpu",
        "--rank-timeout",
        "8",
        "-o",
        "megatron_rank_grace=2",
    )
    text = run_pytest(environment, project, *words)
    return missing(text, r"rank 0: .*test_hang.py:9", r"all_reduce", r"rank 1: passed")


def try_workload(environment: Environment, project: Path) -> str:
    """Return what was wrong with a workload that records its golden, and runs again."""
    case = "tests/functional_tests/test_cases/tiny/line/model_config.yaml"
    write(project, {"train.py": _TRAIN, "recipes/tiny.yaml": _RECIPE, case: _CASE})
    git = ("git", "-c", "user.name=n", "-c", "user.email=e")
    for words in (("init", "--quiet"), ("add", "."), ("commit", "--quiet", "-m", "x")):
        subprocess.run([*git, *words], cwd=project, check=True)
    text = run_pytest(environment, project, "recipes", "--golden", "record")
    if problem := missing(text, r"=+ 1 passed in "):
        return problem
    return missing(run_pytest(environment, project, "recipes"), r"=+ 1 passed in ")


CHECKS = {"tests": try_tests, "hang": try_hang, "workload": try_workload}


def write(project: Path, files: dict[str, str]) -> None:
    """Write the files of a project."""
    for name, text in files.items():
        path = project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


def run_pytest(environment: Environment, project: Path, *words: str) -> str:
    """Return what a session prints; warnings are errors in it."""
    done = subprocess.run(
        [environment.python, "-m", "pytest", "-p", "megatron", "-W", "error", *words],
        cwd=project,
        env=environment.variables(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    return done.stdout


def missing(text: str, *patterns: str) -> str:
    """Return the text and the patterns that it lacks; empty if it lacks none."""
    lacking = [pattern for pattern in patterns if not re.search(pattern, text)]
    return f"{text}\nexpected {lacking}\n" if lacking else ""


if __name__ == "__main__":
    sys.exit(main())
