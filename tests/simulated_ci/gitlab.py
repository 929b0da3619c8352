"""Runs the pipelines for GitLab on this machine: their own script lines, on clean clones.

Artifacts are copied as GitLab does: all of earlier stages into a job, those of a failed one as well
where it says `when: always`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import yaml

from pytest_megatron.base.files import JsonValue

_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV")
_LIMIT_S = 120


@dataclass(slots=True, kw_only=True)
class Pipelines:
    """One run of the parent pipeline and of its child.

    Attributes:
        origin: The repository that jobs clone.
        root: Where clones and artifacts go.
        outputs: What each job printed.
    """

    origin: Path
    root: Path
    outputs: dict[str, str] = field(default_factory=dict)

    def run(self, file: Path) -> dict[str, bool]:
        """Run both; return whether each job ended well."""
        parent = _load(self.origin / file)
        plan = self.root / "artifacts" / "plan"
        results = {"megatron:plan": self._job("megatron:plan", parent["megatron:plan"], (), plan)}
        child = _load(plan / "megatron-jobs.yml")
        stages = cast("list[str]", child.pop("stages"))
        earlier: list[Path] = []
        for stage in stages:
            left: list[Path] = []
            for name, job in child.items():
                if job["stage"] != stage:
                    continue
                target = self.root / "artifacts" / "child" / name
                needed = (plan,) if "needs" in job else tuple(earlier)
                results[name] = self._job(name, job, needed, target)
                left.append(target)
            earlier += left
        return results

    def _job(
        self, name: str, job: dict[str, JsonValue], earlier: tuple[Path, ...], target: Path
    ) -> bool:
        place = self.root / "clones" / str(len(self.outputs))
        clone = ["git", "clone", "--quiet", str(self.origin), str(place)]
        subprocess.run(clone, check=True, capture_output=True)
        for artifacts in earlier:
            shutil.copytree(artifacts, place, dirs_exist_ok=True)
        env = {key: os.environ[key] for key in _KEPT if key in os.environ}
        env |= {
            "CI_PIPELINE_SOURCE": "merge_request_event",
            "CI_MERGE_REQUEST_LABELS": "container::lts but unknown",
            "CI_COMMIT_REF_NAME": "feature",
            "CI_PIPELINE_ID": "99",
            "CI_JOB_ID": str(1000 + len(self.outputs)),
        }
        env["CI_COMMIT_SHA"] = _commit(self.origin)
        done = _run(cast("list[str]", job["script"]), place, env)
        after = _run(cast("list[str]", job.get("after_script", [])), place, env)
        assert after.returncode == 0, after.stderr
        self.outputs[name] = done.stdout + done.stderr + after.stdout + after.stderr
        artifacts_of = cast("dict[str, JsonValue]", job["artifacts"])
        if done.returncode == 0 or artifacts_of.get("when") == "always":
            _keep(cast("list[str]", artifacts_of["paths"]), env, place, target)
        return done.returncode == 0


def _run(lines: list[str], place: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/bash", "-eo", "pipefail", "-c", "\n".join(lines)],
        cwd=place,
        env=env,
        check=False,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )


def _load(path: Path) -> dict[str, dict[str, JsonValue]]:
    return cast("dict[str, dict[str, JsonValue]]", yaml.safe_load(path.read_text(encoding="utf-8")))


def _commit(origin: Path) -> str:
    command = ["git", "-C", str(origin), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _keep(paths: list[str], env: dict[str, str], place: Path, target: Path) -> None:
    """Copy what a job says that it leaves."""
    target.mkdir(parents=True)
    for path in paths:
        source = place / path.replace("$CI_JOB_ID", env["CI_JOB_ID"])
        there = target / source.relative_to(place)
        there.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, there)
        elif source.exists():
            shutil.copy2(source, there)
