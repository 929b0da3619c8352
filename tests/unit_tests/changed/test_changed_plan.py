from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from click.testing import CliRunner

from pytest_megatron.changed.record import (
    ProjectState,
    TestEntry,
    TestRecord,
    read_record,
    write_record,
)
from pytest_megatron.ci.jobs import UNCHANGED, CiJob, UnitChoice, shard_jobs
from pytest_megatron.ci.table import built_in_table
from pytest_megatron.cli import group


def test_shards_are_of_the_files_for_which_something_changed(tmp_path: Path) -> None:
    table = built_in_table()
    folder = tmp_path / table.unit_tests[0]
    folder.mkdir(parents=True)
    for name in ("test_a.py", "test_b.py"):
        (folder / name).touch()
    row = CiJob(id="shard", environment="dev", platform="")
    same = f"{table.unit_tests[0]}/test_a.py"
    choice = UnitChoice(environment="dev", platforms=(), tag="", unaffected=frozenset((same,)))
    some = shard_jobs(tmp_path, 2, {}, row, choice, table)
    assert [job.num_files for job in some.jobs] == [1]
    assert "test_b.py" in some.jobs[0].command
    assert [(one.name, one.reasons) for one in some.left_out] == [(same, (UNCHANGED,))]
    both = replace(choice, unaffected=frozenset((same, same.replace("_a", "_b"))))
    assert shard_jobs(tmp_path, 2, {}, row, both, table).jobs == ()


def test_records_of_jobs_are_merged_to_one(tmp_path: Path) -> None:
    state = ProjectState(environment={}, files={})
    for name in ("a", "b"):
        entry = TestEntry(state=0, mode="plain", time=1.0, duration_s=1.0)
        write_record(tmp_path / name, TestRecord(states=(state,), tests={f"{name}::t": entry}))
    output = tmp_path / "all/changed.z"
    words = ["changed", "merge", str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(output)]
    done = CliRunner().invoke(group, words)
    assert (done.exit_code, done.output) == (0, f"{output}: 2 tests of 2 records\n")
    assert read_record(output).tests.keys() == {"a::t", "b::t"}
