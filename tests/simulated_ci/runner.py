"""Runs a workflow of GitHub Actions on this machine: its own `run:` lines, on clean clones.

Actions are played: a checkout is a clone, artifacts are zips in a folder. What a job's steps,
conditions and outputs say is taken from the file, so that what is tested is what is written.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import signal
import subprocess
import zipfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import yaml
from expressions import evaluate, fill, is_true, shown

from pytest_megatron.base.files import JsonValue

_OUTPUT = re.compile(r"^(\S+?)<<(\S+)\n(.*?)\n?^\2$", re.MULTILINE | re.DOTALL)
_STEP_LIMIT_S = 120
_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """How one step of one job ended."""

    job: str
    name: str
    returncode: int
    output: str


@dataclass(slots=True, kw_only=True)
class Simulation:
    """One run of a workflow.

    Attributes:
        origin: The repository that jobs clone.
        root: Where clones and artifacts go.
        file: The workflow, from the repository's root.
        github: The `github` context: event, ref and so on.
        lost: Ids of jobs whose runner goes away before it uploads anything.
        killed: Id of a job -> a file that its tests make in the clone; then all of it is killed.
        runners: Id of a job -> labels of the runner that it asks for.
        steps: What ran, in the order in which it ended.
        summary: Text of the step summaries.
    """

    origin: Path
    root: Path
    file: Path
    github: dict[str, JsonValue]
    lost: frozenset[str] = frozenset()
    killed: Mapping[str, str] = field(default_factory=dict)
    runners: dict[str, str] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    summary: str = ""

    @property
    def artifacts(self) -> Path:
        """Where zips of uploaded artifacts are."""
        return self.root / "artifacts"

    def run(self) -> dict[str, str]:
        """Run all jobs in the order of their needs; return the result of each."""
        self.artifacts.mkdir(parents=True)
        document = yaml.safe_load((self.origin / self.file).read_text(encoding="utf-8"))
        needs: dict[str, JsonValue] = {}
        for name, job in cast("dict[str, dict[str, JsonValue]]", document["jobs"]).items():
            needs[name] = self._run_job(name, job, needs)
        return {name: shown(cast("dict[str, JsonValue]", v)["result"]) for name, v in needs.items()}

    def _context(self, needs: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        return {
            "github": self.github,
            "needs": dict(needs),
            "inputs": {},
            "matrix": {},
            "steps": {},
        }

    def _run_job(
        self, name: str, job: Mapping[str, JsonValue], needs: Mapping[str, JsonValue]
    ) -> dict[str, JsonValue]:
        """Run a job, or every job of its matrix."""
        context = self._context(needs)
        results = [shown(cast("dict[str, JsonValue]", needs[n])["result"]) for n in _needs(job)]
        condition = shown(job.get("if") or "")
        is_due = is_true(evaluate(condition, context)) if condition else True
        is_asked = "always()" in condition or "cancelled()" in condition
        if not is_due or (not is_asked and set(results) - {"success"}):
            return {"result": "skipped", "outputs": {}}
        strategy = job.get("strategy")
        rows: list[JsonValue] = [{}]
        if isinstance(strategy, dict):
            found = evaluate(
                shown(cast("dict[str, JsonValue]", strategy["matrix"])["include"]), context
            )
            assert isinstance(found, list)
            rows = found
        with ThreadPoolExecutor(2) as pool:
            ended = list(
                pool.map(lambda row: self._run_row(name, job, {**context, "matrix": row}), rows)
            )
        is_good = all(one["result"] == "success" for one in ended)
        return {"result": "success" if is_good else "failure", "outputs": ended[-1]["outputs"]}

    def _run_row(
        self, name: str, job: Mapping[str, JsonValue], context: dict[str, JsonValue]
    ) -> dict[str, JsonValue]:
        """Run the steps of one job in a clone of its own."""
        matrix = cast("dict[str, JsonValue]", context["matrix"])
        identity = shown(matrix.get("id") or name)
        self.runners[identity] = fill(shown(job["runs-on"]), context)
        place = self.root / "clones" / identity
        steps: dict[str, JsonValue] = {}
        has_failed = False
        for number, step in enumerate(cast("list[dict[str, JsonValue]]", job["steps"])):
            now = {**context, "steps": steps}
            condition = shown(step.get("if") or "")
            is_due = is_true(evaluate(condition, now)) if condition else True
            if not is_due or (has_failed and "always()" not in condition):
                continue
            if identity in self.lost and has_failed:
                break
            ended, outputs = self._run_step(identity, step, place, now)
            self.steps.append(ended)
            outcome = "success" if ended.returncode == 0 else "failure"
            steps[shown(step.get("id") or str(number))] = {"outcome": outcome, "outputs": outputs}
            is_tolerated = step.get("continue-on-error") is True
            has_failed = has_failed or (ended.returncode != 0 and not is_tolerated)
            if identity in self.lost and "begin" in steps:
                has_failed = True  # the machine is gone
        outputs = {
            key: fill(shown(value), {**context, "steps": steps})
            for key, value in cast("dict[str, JsonValue]", job.get("outputs") or {}).items()
        }
        return {"result": "failure" if has_failed else "success", "outputs": dict(outputs)}

    def _run_step(
        self, job: str, step: Mapping[str, JsonValue], place: Path, context: Mapping[str, JsonValue]
    ) -> tuple[Step, dict[str, JsonValue]]:
        uses = shown(step.get("uses"))
        name = shown(step.get("name")) or uses
        if uses:
            inputs = cast("dict[str, JsonValue]", step.get("with") or {})
            problem = self._play(
                uses, {k: fill(shown(v), context) for k, v in inputs.items()}, place
            )
            return Step(job=job, name=name, returncode=1 if problem else 0, output=problem), {}
        output_file, summary_file = place.with_suffix(".output"), place.with_suffix(".summary")
        output_file.write_text("")
        summary_file.write_text("")
        event_file = self.root / "event.json"
        event_file.write_text(json.dumps(self.github["event"]))
        env = {key: os.environ[key] for key in _KEPT if key in os.environ}
        env |= {
            "CI": "true",
            "GITHUB_OUTPUT": str(output_file),
            "GITHUB_STEP_SUMMARY": str(summary_file),
            "GITHUB_RUN_ID": shown(self.github["run_id"]),
            "GITHUB_RUN_ATTEMPT": shown(self.github["run_attempt"]),
            "GITHUB_SHA": shown(self.github["sha"]),
            "GITHUB_REPOSITORY": shown(self.github["repository"]),
            "GITHUB_EVENT_PATH": str(event_file),
        }
        own = cast("dict[str, JsonValue]", step.get("env") or {})
        env |= {key: fill(shown(value), context) for key, value in own.items()}
        assert "${{" not in shown(step["run"])  # nothing of an event becomes part of a script
        ended = self._shell(job, name, shown(step["run"]), place, env)
        self.summary += summary_file.read_text(encoding="utf-8")
        found = _OUTPUT.findall(output_file.read_text(encoding="utf-8"))
        return ended, {key: value for key, _, value in found}

    def _shell(self, job: str, name: str, script: str, place: Path, env: dict[str, str]) -> Step:
        """Run a script as GitHub does; kill all of it once its job's file is there."""
        process = subprocess.Popen(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],  # noqa: S607
            cwd=place,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        mark = self.killed.get(job)
        if mark is not None and name == "Test":
            while process.poll() is None and not (place / mark).exists():
                _pause(process)
            os.killpg(process.pid, signal.SIGKILL)
        try:
            output, _ = process.communicate(timeout=_STEP_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        return Step(job=job, name=name, returncode=process.returncode, output=output)

    def _play(self, uses: str, inputs: Mapping[str, str], place: Path) -> str:
        """Play an action; return what is wrong, or nothing."""
        action, _, version = uses.partition("@")
        assert re.fullmatch(r"[0-9a-f]{40}", version.split()[0])
        actions: dict[str, Callable[[], str]] = {
            "actions/checkout": lambda: self._checkout(place),
            "actions/setup-python": lambda: "",
            "actions/upload-artifact": lambda: self._upload(inputs, place),
            "actions/download-artifact": lambda: self._download(inputs, place),
        }
        return actions[action]()

    def _checkout(self, place: Path) -> str:
        place.parent.mkdir(parents=True, exist_ok=True)
        command = ["git", "clone", "--quiet", str(self.origin), str(place)]
        subprocess.run(command, check=True, capture_output=True)
        return ""

    def _upload(self, inputs: Mapping[str, str], place: Path) -> str:
        lines = inputs["path"].split()
        root = place / lines[0]
        left_out = [line[1:] for line in lines if line.startswith("!")]
        files = [root] if root.is_file() else list(_files(root))
        files = [f for f in files if not _matches(f.relative_to(place), left_out)]
        archive = self.artifacts / f"{inputs['name']}.zip"
        if not files or re.search(r'["<>|:*?/\\\r\n]', inputs["name"]):
            return f"nothing to upload, or a forbidden name: {inputs['name']}"
        if archive.exists() and inputs.get("overwrite") != "true":
            return f"artifact {inputs['name']} is there already"
        with zipfile.ZipFile(archive, "w") as packed:
            for file in files:
                packed.write(file, file.relative_to(root if root.is_dir() else root.parent))
        return ""

    def _download(self, inputs: Mapping[str, str], place: Path) -> str:
        target = place / inputs["path"]
        if "name" in inputs:
            archive = self.artifacts / f"{inputs['name']}.zip"
            if not archive.exists():
                return f"no artifact {inputs['name']}"
            shutil.unpack_archive(archive, target)
            return ""
        for archive in sorted(self.artifacts.glob(f"{inputs['pattern']}.zip")):
            shutil.unpack_archive(archive, target / archive.stem)
        return ""


def _pause(process: subprocess.Popen[str]) -> None:
    """Wait a moment for a process to end."""
    try:
        process.wait(0.05)
    except subprocess.TimeoutExpired:
        return


def _needs(job: Mapping[str, JsonValue]) -> list[str]:
    needs = job.get("needs") or []
    return [shown(name) for name in needs] if isinstance(needs, list) else [shown(needs)]


def _files(directory: Path) -> Iterator[Path]:
    """Yield files as upload-artifact finds them: what is hidden is left out."""
    for path in sorted(directory.rglob("*")):
        is_hidden = any(part.startswith(".") for part in path.relative_to(directory).parts)
        if path.is_file() and not is_hidden:
            yield path


def _matches(path: Path, patterns: list[str]) -> bool:
    text = path.as_posix()
    return any(fnmatch.fnmatch(text, p.replace("**/", "*").replace("**", "*")) for p in patterns)
