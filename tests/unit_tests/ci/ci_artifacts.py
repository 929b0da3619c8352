"""Artifacts of jobs as runs leave them, for tests of what is made of many."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from click.testing import CliRunner, Result

from pytest_megatron.base.files import JsonValue
from pytest_megatron.ci.command import command

COMMIT = "c" * 40
ROW = "recipes/tiny.yaml::line[dev-cpu]"
TEST = "tests/unit/test_a.py::test_one"
JUNIT = (
    '<?xml version="1.0"?><testsuites><testsuite><testcase classname="tests.unit.test_a" '
    'name="{name}" time="0.1">{child}</testcase></testsuite></testsuites>'
)
FAILURE = '<failure message="assert 1 == 2">\ntests/unit/test_a.py:3: AssertionError</failure>'


def workload(verdict: str = "passed", **keys: JsonValue) -> dict[str, JsonValue]:
    """Return the record of a workload in `run.json`."""
    attempt: dict[str, JsonValue] = {"cause": None, "root_rank": None, "signature": None}
    return {
        "verdict": verdict,
        "problem": None,
        "duration_s": 4.0,
        "directory": "/ci/run/tiny-line",
        "attempts": [attempt],
        **keys,
    }


def distributed(verdict: str = "passed", **keys: JsonValue) -> dict[str, JsonValue]:
    """Return the record of a distributed test in `run.json`."""
    return {
        "verdict": verdict,
        "outcome": verdict,
        "problem": None,
        "duration_s": 0.5,
        "world_size": 2,
        "attempts": [{"directory": "/ci/run/ranks/attempt_1", "is_transient": False}],
        **keys,
    }


def write_run(directory: Path, items: dict[str, JsonValue], **keys: JsonValue) -> Path:
    """Write the `run.json` of a run that ended as its items say."""
    has_failed = any(
        isinstance(item, dict) and item["verdict"] in ("failed", "broken")
        for item in items.values()
    )
    run: dict[str, JsonValue] = {
        "schema": 1,
        "updated": "2026-11-21T12:00:00Z",
        "ended": "2026-11-21T12:00:01Z",
        "exit_code": int(has_failed),
        "commit": COMMIT,
        "items": items,
        **keys,
    }
    write_json(directory / "run.json", run)
    return directory


def write_job(
    folder: Path,
    job: str,
    items: dict[str, JsonValue] | None = None,
    *,
    run_attempt: int = 1,
    commit: str = COMMIT,
    **keys: JsonValue,
) -> Path:
    """Write the artifact of a job, as a directory; without items it left nothing but its name."""
    root = folder / f"logs-{job}-7-{run_attempt}{len(list(folder.glob('*')))}"
    record: dict[str, JsonValue] = {"job": job, "run_id": "7", "run_attempt": run_attempt}
    record["commit"] = commit
    write_json(root / "job.json", record)
    if items is not None:
        write_run(root / "run", items, **{"commit": commit, **keys})
    return root


def write_plan(path: Path, keys: dict[str, JsonValue] | None = None, **jobs: str | None) -> Path:
    """Write a plan of jobs; the value is a workload's node id, None a bucket of unit tests.

    Args:
        path: The file.
        keys: Of every job besides.
        jobs: By id.
    """
    rows: list[JsonValue] = [
        {
            "id": job,
            "kind": "unit" if node_id is None else "workload",
            "name": node_id or job,
            **(keys or {}),
        }
        for job, node_id in jobs.items()
    ]
    plan: dict[str, JsonValue] = {"event": "pull_request", "scope": "L0", "labels": []}
    write_json(path, {**plan, "run_id": "7", "jobs": rows})
    return path


def write_json(path: Path, value: JsonValue) -> None:
    """Write a file, and the directories that it needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def summary(*arguments: str) -> Result:
    """Run `ci summary`."""
    return CliRunner().invoke(command, ["summary", *arguments])


def head(*arguments: str) -> tuple[int, list[str]]:
    """Return exit code and the first block of the text, without indents."""
    result = summary(*arguments)
    return result.exit_code, [line.strip() for line in result.output.split("\n\n")[0].splitlines()]


@dataclass(frozen=True)
class Command:
    """A line that GitHub's runner executes."""

    name: str
    properties: dict[str, str]
    message: str


def commands(log: str) -> list[Command]:
    """Read a log as the runner does: ActionCommand.cs, TryParseV2 and TryParse."""
    found = []
    for line in re.split(r"\r\n|\r|\n", log):
        match = re.match(r"::([\w-]+) ?(.*?)::(.*)", line.lstrip())
        if match is not None:
            pairs = (pair.partition("=") for pair in match[2].split(",") if pair)
            properties = {key: unquote(value) for key, _, value in pairs}
            found.append(Command(match[1], properties, unquote(match[3])))
        elif old := re.search(r"##\[(\w+)[^\]]*\](.*)", line):
            found.append(Command(old[1], {}, old[2]))
    return found
