"""The files of a run: what the last release wrote is read, what none wrote is one error.

`samples/` holds runs of a small project, of distributed tests and of two recipes of this
repository, as version 0.1.0.dev0 wrote them; only paths and the processor are other ones.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_megatron.base.files import JsonValue
from pytest_megatron.base.schema import validate
from pytest_megatron.errors import RunError
from pytest_megatron.runs.history import read as read_history
from pytest_megatron.runs.record import (
    FORMAT_VERSION,
    RecordedComparison,
    RecordedPlan,
    RecordedTest,
    RecordedTriage,
    RecordedWorkload,
    Result,
    item_to_json,
    read_if_whole,
    read_record,
    read_run,
    to_json,
)
from pytest_megatron.workloads.commands.recipes import schema_path

SAMPLES = Path(__file__).parent / "samples"


def content_of(path: Path) -> dict[str, JsonValue]:
    found: JsonValue = json.loads(path.read_text())
    assert isinstance(found, dict)
    return found


def holds(found: JsonValue, kept: JsonValue) -> bool:
    """Whether everything that a file has is in what was read of it."""
    match found, kept:
        case dict(), dict():
            return all(key in kept and holds(value, kept[key]) for key, value in found.items())
        case list(), list():
            return len(found) == len(kept) and all(map(holds, found, kept))
        case _:
            return found == kept


@pytest.mark.parametrize("sample", ["workloads", "gangs", "recipes"])
def test_nothing_of_a_run_of_the_last_release_is_lost(sample: str) -> None:
    path = SAMPLES / sample / "run/run.json"
    found = content_of(path)
    del found["positional"]  # for --attach, which was removed
    assert holds(found, to_json(read_run(path.parent)))


def test_the_items_of_the_last_release_are_what_they_were() -> None:
    items = read_run(SAMPLES / "workloads/run").items
    found = {name.partition("::")[2]: item for name, item in items.items()}
    verdicts = {name: item.verdict for name, item in found.items()}
    assert verdicts == {
        "sound[dev-cpu]": "passed",
        "differs[dev-cpu]": "failed",
        "crash[dev-cpu]": "failed",
        "nan[dev-cpu]": "failed",
        "drift[dev-cpu]": "failed",
        "no_golden[dev-cpu]": "broken",
        "flaky[dev-cpu]": "flaky",
    }
    assert found["flaky[dev-cpu]"].causes == ("port_in_use",)
    assert found["nan[dev-cpu]"].is_held
    tests = read_run(SAMPLES / "gangs/run").items
    assert all(isinstance(item, RecordedTest) for item in tests.values())
    assert tests["test_it.py::test_dies_twice"].causes == ("gpu_lost", "gpu_lost")


@pytest.mark.parametrize("path", sorted(SAMPLES.rglob("plan.json")), ids=str)
def test_nothing_of_a_plan_of_the_last_release_is_lost(path: Path) -> None:
    assert holds(content_of(path), to_json(read_record(path, RecordedPlan)))


def test_nothing_of_the_other_records_of_the_last_release_is_lost() -> None:
    for path in SAMPLES.rglob("comparison.json"):
        found = read_record(path, RecordedComparison)
        assert holds(content_of(path), to_json(found))
        assert found.passed == all(m.passed for r in found.repeats for m in r.comparisons)
    for path in SAMPLES.rglob("triage.json"):
        triage = read_record(path, RecordedTriage)
        content = content_of(path)
        attempts = content["attempts"]
        assert isinstance(attempts, list)
        for diagnosis in (content, *attempts):
            assert isinstance(diagnosis, dict)
            for key in ("phase", "facts", "again"):  # which were removed
                diagnosis.pop(key, None)
        assert holds(content, to_json(triage))
        last = triage.attempts[-1]
        assert last.attempt.startswith("repeat_1/attempt_")
        assert last.text or "nan" in str(path)


@pytest.mark.parametrize("sample", ["workloads", "gangs", "recipes"])
def test_a_history_of_the_last_release_is_read(sample: str) -> None:
    path = SAMPLES / sample / "history.jsonl"
    found = read_history(path)
    assert (len(found.entries), found.problems) == (len(path.read_text().splitlines()), ())
    lines = [json.loads(entry.as_line()) for entry in found.entries]
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert holds(kept, lines)


def test_runs_of_the_last_release_are_what_the_schema_allows() -> None:
    program = Path(sys.executable).with_name("check-jsonschema")
    files = sorted(map(str, SAMPLES.glob("*/run/run.json")))
    done = subprocess.run(
        [program, "--schemafile", str(schema_path("run")), *files],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, len(files)) == (0, 3), done.stdout


def write(directory: Path, **keys: JsonValue) -> Path:
    (directory / "run.json").write_text(json.dumps({"items": {}, **keys}))
    return directory


def test_a_file_of_a_later_format_is_one_clear_error(tmp_path: Path) -> None:
    later = FORMAT_VERSION + 1
    with pytest.raises(RunError, match=f"run.json: has format_version {later}, expected") as raised:
        read_run(write(tmp_path, format_version=later, items=[]))
    assert "read it with the release of pytest-megatron that wrote it" in str(raised.value)


def test_keys_of_a_later_release_are_ignored(tmp_path: Path) -> None:
    item: JsonValue = {"verdict": "passed", "new": 1}
    found = read_run(write(tmp_path, new={"a": 1}, items={"a.py::b": item}))
    assert to_json(found)["format_version"] == FORMAT_VERSION
    assert found.items == {"a.py::b": RecordedWorkload(verdict="passed")}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"items": {', "is no JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"items": {}, "exit_code": ' + "9" * 400 + "}", "more than 300 digits"),
        ("[]", "holds a list, expected an object"),
        ("{}", "items: is missing; give the file as the run"),
        ('{"items": {"a::b": {}}}', "items.a::b.verdict: is missing, expected one of broken, "),
        (
            '{"items": {"a::b": {"verdict": "good"}}}',
            "b.verdict: found 'good', expected one of ",
        ),
        ('{"items": {"a::b": {"world_size": 2}}}', "items.a::b.verdict: is missing"),
        (
            '{"items": {"a::b": {"world_size": 2, "verdict": "passed", "device": "x"}}}',
            "items.a::b.device: found 'x', expected",
        ),
        (
            '{"items": {}, "options": {"rank_grace": -5}}',
            "options.rank_grace: found -5, expected true or false or an integer >= 0",
        ),
        ('{"items": {"a::b": 3}}', "items.a::b: found 3, expected a mapping; give the"),
        ('{"items": {}, "commit": "new"}', "commit: found 'new', expected a match of ^[0-9a-f]"),
        ('{"items": {}, "env": {"A B": "1"}}', "env.A B: found 'A B', expected a match of ^[A-Z"),
        ('{"items": {}, "exit_code": "1"}', "exit_code: found '1', expected an integer; give"),
        ('{"items": {}, "exit_code": true}', "exit_code: found True, expected an integer"),
        ('{"items": {}, "is_redacted": 1}', "is_redacted: found 1, expected true or false"),
    ],
)
def test_a_file_that_no_run_wrote_is_one_error(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RunError) as raised:
        read_run(tmp_path)
    assert raised.value.where == str(tmp_path / "run.json")
    assert problem in raised.value.problem
    assert "\n" not in str(raised.value)
    assert read_if_whole(tmp_path / "run.json", Result) is None


def test_a_key_that_is_there_twice_has_its_last_value(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"items": {}, "exit_code": 1, "exit_code": 0}')
    assert read_run(tmp_path).exit_code == 0


def test_an_item_crosses_from_a_worker_with_any_text(tmp_path: Path) -> None:
    item = RecordedTest(verdict="failed", world_size=2, problem="a \udc80 b", ranks={"0": "\ud800"})
    found = validate(RecordedTest, item_to_json(item))
    assert (found.problem, found.verdict) == ("a \ufffd b", "failed")
    (tmp_path / "run.json").write_text(json.dumps(to_json(Result(items={"a::b": found}))))
    assert read_run(tmp_path).items == {"a::b": found}


def test_an_item_has_no_key_without_something_to_say() -> None:
    found = item_to_json(RecordedWorkload(verdict="broken", problem="not enough GPUs"))
    assert {"directory", "duration_s", "golden", "quarantine"}.isdisjoint(found)
    assert found["attempts"] == []
