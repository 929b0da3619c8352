"""A project of tiny trainings on a disk, and pytest runs in it: real recipes, real processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml
from forked_sessions import fork_session, run_command
from golden_files import write_golden

from pytest_megatron.base.files import JsonValue
from pytest_megatron.workloads.golden.model import MetricMap, Provenance, Series, Value, series_of
from pytest_megatron.workloads.golden.store import read_metrics

GUEST = Path(__file__).parents[2] / "guests" / "tiny_train.py"
AGENT = GUEST.with_name("tiny_agent.py")
MARK = "TINY_PROJECT"  # in the environment of every process of a project
DEADLINE_S = 60.0
ITERS = 10


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    """Wait for a handshake."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_true():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {DEADLINE_S:g} s: {what}")
        time.sleep(0.01)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One pytest session in a project.

    Attributes:
        directory: The run directory; may not be there.
    """

    returncode: int
    stdout: str
    stderr: str
    directory: Path

    @property
    def text(self) -> str:
        return self.stdout + self.stderr

    @property
    def outcomes(self) -> dict[str, str]:
        """Pytest's word for each case, from its own short summary (`-rA`)."""
        found = re.findall(r"^(PASSED|FAILED|ERROR|XFAIL) \S+::(\w+)\[", self.stdout, re.MULTILINE)
        return {case: word for word, case in found}

    @property
    def json(self) -> dict[str, JsonValue]:
        return read_object(self.directory / "run.json")

    def record(self, case: str) -> dict[str, JsonValue]:
        """What `run.json` says of a case."""
        items = self.json["items"]
        assert isinstance(items, dict)
        (record,) = [r for node, r in items.items() if f"::{case}[" in node]
        assert isinstance(record, dict)
        return record

    def attempts(self, case: str) -> list[dict[str, JsonValue]]:
        attempts = self.record(case)["attempts"]
        assert isinstance(attempts, list)
        return [a for a in attempts if isinstance(a, dict)]

    def item_dir(self, case: str) -> Path:
        return Path(str(self.record(case)["directory"]))

    def verdict(self, case: str) -> tuple[str | None, JsonValue]:
        """Pytest's word and ours."""
        return self.outcomes.get(case), self.record(case)["verdict"]

    def problem(self, case: str) -> str:
        """Why a case did not pass, as it is printed."""
        problem = str(self.record(case)["problem"])
        assert problem.splitlines()[0] in self.stdout
        return problem


def read_object(path: Path) -> dict[str, JsonValue]:
    found: JsonValue = json.loads(path.read_text())
    assert isinstance(found, dict)
    return found


@dataclass(frozen=True, kw_only=True)
class Project:
    """A folder with a training program, cases, one recipe and goldens.

    Attributes:
        has_torch: Whether torch's agent starts the ranks, or one that starts in milliseconds.
        path: First on PYTHONPATH.
    """

    root: Path
    entries: list[JsonValue] = field(default_factory=list)
    gpus: int = 2
    has_torch: bool = False
    path: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        shutil.copy(GUEST, self.root / "train.py")
        if not self.has_torch:
            stand_in(self.root / "agent")

    def case(
        self,
        name: str,
        /,
        *,
        config: Mapping[str, JsonValue] | None = None,
        env: Mapping[str, str] | None = None,
        **arguments: JsonValue,
    ) -> str:
        """Write a `model_config.yaml`; `train_iters=7` is `--train-iters: 7`."""
        given = {f"--{key.replace('_', '-')}": value for key, value in arguments.items()}
        args: dict[str, JsonValue] = {
            "--train-iters": ITERS,
            "--tensorboard-dir": "${TENSORBOARD_PATH}",
            "--save": "${CHECKPOINT_SAVE_PATH}",
            "--load": "${CHECKPOINT_LOAD_PATH}",
            **given,
        }
        content: dict[str, JsonValue] = {
            "TEST_TYPE": "regular",
            "ENV_VARS": {"TINY_TRAIN_STATE": str(self.state(name)), **(env or {})},
            "MODEL_ARGS": {k: v for k, v in args.items() if v is not None},
            **(config or {}),
        }
        self.config_path(name).parent.mkdir(parents=True)
        self.config_path(name).write_text(yaml.safe_dump(content, sort_keys=False))
        return name

    def row(self, case: str, *, write_golden: bool = True, **product: JsonValue) -> str:
        """Add a row to the recipe, and the golden of a sound run."""
        axes: dict[str, JsonValue] = {
            "environment": ["dev"],
            "scope": ["L0"],
            "platforms": ["cpu"],
            **product,
        }
        self.entries.append({"test_case": [case], "products": [axes]})
        recipe: dict[str, JsonValue] = {
            "type": "basic",
            "format_version": 1,
            "spec": {"model": "gpt", "gpus": self.gpus, "training_script_path": "train.py"},
            "products": self.entries,
        }
        (self.root / "recipes").mkdir(exist_ok=True)
        (self.root / "recipes" / "tiny.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
        if write_golden:
            self.golden(case)
        return case

    def add(
        self,
        case: str,
        *faults: str,
        config: Mapping[str, JsonValue] | None = None,
        env: Mapping[str, str] | None = None,
        **arguments: JsonValue,
    ) -> str:
        """Add a case with faults, its row and the golden of a run without them."""
        given: dict[str, JsonValue] = {"fault": list(faults)} if faults else {}
        given |= arguments
        return self.row(self.case(case, config=config, env=env, **given))

    def golden(self, case: str, *, changes: Mapping[int, float] | None = None) -> Path:
        """Write what a run without faults measures; `changes` are added to single losses."""
        path = self.golden_path(case)
        path.parent.mkdir(parents=True, exist_ok=True)
        metrics = dict(sound_metrics(self.root))
        loss = dict(metrics["lm loss"].items())
        changed: dict[int, Value] = {
            step: value + (changes or {}).get(step, 0.0)
            for step, value in loss.items()
            if isinstance(value, float)
        }
        metrics["lm loss"] = series_of(changed, is_full_precision=True)
        write_golden(path, metrics, Provenance(deterministic=True, repeats=2))
        return path

    def golden_path(self, case: str) -> Path:
        return self.root / "golden_values" / "gpt" / case / "golden_values_dev_cpu.json"

    def config_path(self, case: str) -> Path:
        cases = self.root / "tests" / "functional_tests" / "test_cases"
        return cases / "gpt" / case / "model_config.yaml"

    def state(self, case: str) -> Path:
        """The file that outlives an attempt."""
        (self.root / "state").mkdir(exist_ok=True)
        return self.root / "state" / case

    def command(self, *arguments: str, run_dir: str) -> list[str]:
        ours = ["-p", "megatron", "--run-dir", run_dir] if run_dir else ["-p", "megatron"]
        return [sys.executable, "-m", "pytest", "-rA", *ours, *arguments]

    def env(self, **more: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
        found = {MARK: str(self.root), "COLUMNS": "400"} | more
        if not self.has_torch:
            paths = (*self.path, str(self.root / "agent"), found.get("PYTHONPATH", ""))
            found["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return kept | found

    def run(self, *arguments: str, run_dir: str = "run", **env: str) -> Run:
        """Run pytest to its end; nothing of it may be left."""
        command = self.command(*arguments, run_dir=run_dir)
        if "PYTHONPATH" in env:  # its modules may be loaded where sessions are forked
            done = run_command(command, self.root, self.env(**env))
        else:
            done = fork_session(command[3:], self.root, self.env(**env))
        assert self.processes() == []
        return Run(
            returncode=done.returncode,
            stdout=done.stdout,
            stderr=done.stderr,
            directory=self.root / run_dir,
        )

    def start(self, *arguments: str, run_dir: str = "run", **env: str) -> subprocess.Popen[str]:
        """Start pytest in a process group of its own."""
        return subprocess.Popen(
            self.command(*arguments, run_dir=run_dir),
            cwd=self.root,
            env=self.env(**env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )

    def processes(self) -> list[Sequence[str]]:
        """Command lines of what still runs of this project."""
        found: list[Sequence[str]] = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == str(self.root):
                    found.append(process.cmdline())
            except psutil.Error:
                continue
        return found


def stand_in(directory: Path) -> None:
    """Make a directory which, on PYTHONPATH, has `tiny_agent.py` in place of torch."""
    package = directory / "torch" / "distributed"
    package.mkdir(parents=True, exist_ok=True)
    for init in (package.parent / "__init__.py", package / "__init__.py"):
        init.touch()
    shutil.copy(AGENT, package / "run.py")


def sound_metrics(directory: Path) -> MetricMap:
    """What tiny_train measures without faults, by running it alone."""
    lines = directory / "sound.jsonl"
    if not lines.exists():
        subprocess.run(
            [sys.executable, str(GUEST), "--train-iters", str(ITERS)],
            env={"PYTEST_MEGATRON_METRICS": str(lines), "OUTPUT_PATH": str(directory)},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        shutil.rmtree(directory / "meeting")
    return read_metrics(lines).metrics


def loss_of(path: Path) -> Series:
    return read_metrics(path).metrics["lm loss"]


def send(process: subprocess.Popen[str], number: signal.Signals, *, to_group: bool) -> None:
    """Send a signal as a terminal does (to the group) or as `kill` does."""
    if to_group:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
