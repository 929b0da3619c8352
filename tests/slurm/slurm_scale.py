"""A run of many tiny jobs on a real Slurm, what happens to it, and whether anything was lost.

Each execution of a training leaves a line: which attempt it is and which job. That is compared with
the engine's journal and with what the run says of itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import yaml
from labs import SlurmLab, wait_until

TRANSIENT = "RuntimeError: The server socket has failed to listen: EADDRINUSE"
KINDS = {"passed": "exit 0", "failed": "exit 3", "flaky": f"echo '{TRANSIENT}' >&2; exit 1"}
_LIMIT_S = 3600.0
_CONFIG = {
    "slurm": {
        "interval": 1,
        "cpus_per_task": 8,
        "account": "nobody",
        "max_jobs": 64,
    },
}


@dataclass(kw_only=True)
class ScaleRun:
    """One run: a project of scripts, and the pytest that has it.

    Attributes:
        kinds: By test case, what comes of it where no machine fails.
    """

    root: Path
    lab: SlurmLab
    kinds: dict[str, str]
    _process: subprocess.Popen[str] | None = None

    @property
    def marks_dir(self) -> Path:
        return self.root / "marks"

    def write(self) -> None:
        """Write the project."""
        (self.root / "project" / "recipes").mkdir(parents=True)
        self.marks_dir.mkdir()
        pause = f"until [ -e {self.root}/go ]; do sleep 0.1; done"
        products = []
        for name, kind in self.kinds.items():
            mark = self.marks_dir / name
            last = KINDS[kind]
            if kind == "flaky":
                last = f"[ $(wc -l < {mark}) = 1 ] || exit 0; {last}"
            script = f'echo "{{assets_dir}} $SLURM_JOB_ID" >> {mark}; {pause}; {last}'
            axes: dict[str, object] = {"environment": ["dev"], "scope": ["L0"]}
            axes |= {"script": [script], "time_limit": [120]}
            products.append({"test_case": [name], "products": [axes]})
        spec = {"model": "gpt", "gpus": 1, "platforms": "cpu"}
        recipe = {"type": "basic", "format_version": 1, "spec": spec, "products": products}
        project = self.root / "project"
        (project / "recipes" / "tiny.yaml").write_text(yaml.safe_dump(recipe))
        (project / "slurm.yaml").write_text(yaml.safe_dump({"format_version": 1, **_CONFIG}))

    def start(self) -> None:
        """Start pytest."""
        words = (
            *("recipes", "--executor", "slurm", "--executor-config", "slurm.yaml"),
            *("--run-dir", str(self.root / "run"), "-o", "megatron_max_retries_per_run=10000"),
        )
        self._process = self._open(self.root / "pytest.log", *words)

    def _open(self, path: Path, *words: str) -> subprocess.Popen[str]:
        kept = {k: v for k, v in self.lab.env.items() if not k.startswith(("PYTEST_", "COV_"))}
        with path.open("a") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "pytest", "-p", "megatron", "-rA", *words],
                cwd=self.root / "project",
                env={**kept, "COLUMNS": "200"},
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                process_group=0,
            )

    def go(self) -> None:
        """Let trainings end."""
        (self.root / "go").touch()

    def end(self) -> None:
        """Leave no pytest behind."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def wait(self) -> int:
        """Wait for pytest; return its exit code."""
        assert self._process is not None
        return self._process.wait(_LIMIT_S)

    def wait_until_begun(self, num_marks: int) -> None:
        """Wait until so many trainings have begun."""
        process = self._process
        assert process is not None

        def is_time() -> bool:
            assert process.poll() is None, (self.root / "pytest.log").read_text()[-5000:]
            return self.num_marks >= num_marks

        wait_until(is_time, f"{num_marks} executions", _LIMIT_S)

    @property
    def marks(self) -> Counter[tuple[str, str]]:
        """How often each attempt was executed, by its key and its job's id."""
        found: Counter[tuple[str, str]] = Counter()
        for path in self.marks_dir.iterdir():
            for line in path.read_text().splitlines():
                assets, _, job = line.rpartition(" ")
                found[str(Path(assets).parent.relative_to(self.root / "run")), job] += 1
        return found

    @property
    def num_marks(self) -> int:
        return self.marks.total()

    def problems(self) -> list[str]:
        """Return what was lost, executed twice or judged wrongly."""
        journal = _journal(self.root / "run" / "engine" / "journal.jsonl")
        run = json.loads((self.root / "run" / "run.json").read_text())
        items = {name.split("::")[1].partition("[")[0]: i for name, i in run["items"].items()}
        lost = sorted(self.kinds.keys() - items.keys())
        found = [f"{name}: is not in run.json" for name in lost]
        known = {
            str(Path(attempt["directory"]).relative_to(self.root / "run"))
            for item in items.values()
            for attempt in item["attempts"]
        }
        for (key, job), number in self.marks.items():
            if number > 1:
                found.append(f"{key}: was executed {number} times by job {job}")
            if journal.get(key) != job:
                found.append(
                    f"{key}: was executed by job {job}, the journal has {journal.get(key)}"
                )
            if key not in known:
                found.append(f"{key}: was executed, and run.json does not know of it")
        keys = Counter(key for key, _ in self.marks)
        found += [f"{key}: was executed by {n} jobs" for key, n in keys.items() if n > 1]
        for name, item in items.items():
            good = {self.kinds[name], "flaky" if self.kinds[name] == "passed" else ""}
            if item["verdict"] not in good:
                found.append(f"{name}: is {item['verdict']}: {item['problem']}")
        return found


def kinds_of(number: int) -> dict[str, str]:
    """Return so many workloads: of ten, one fails and one has a transient failure."""
    kinds = {3: "failed", 7: "flaky"}
    return {f"case_{index}": kinds.get(index % 10, "passed") for index in range(number)}


def _journal(path: Path) -> dict[str, str]:
    """Return the job of each order that was submitted."""
    keys: dict[int, str] = {}
    found: dict[str, str] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row["event"] == "intent":
            keys[row["batch"]] = row["key"]
        elif row["event"] == "job":
            found[keys[row["batch"]]] = str(row["job_id"])
    return found
