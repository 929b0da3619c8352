from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_megatron.base.project import run_git
from pytest_megatron.changed.record import (
    ProjectState,
    TestEntry,
    TestRecord,
    merge_records,
    read_record,
    write_record,
)
from pytest_megatron.changed.select import Changes, blocks_at, find_unaffected
from pytest_megatron.changed.sources import Sources, files_of
from pytest_megatron.errors import ConfigError, SelectionError

FILES = {
    "pkg/a.py": "def f():\n    return 1\ndef g():\n    return 2\n",
    "pkg/alone.py": "X = 1\n",
    "data/d.txt": "d\n",
    "tests/conftest.py": "",
    "tests/test_a.py": "def test_f(): ...\ndef test_g(): ...\n",
    "uv.lock": "1\n",
    "kernel.cu": "k\n",
    "README.md": "r\n",
}
ENVIRONMENT = {"python": "3.12.1", "torch": "2.8"}
F, G = "tests/test_a.py::test_f", "tests/test_a.py::test_g"


def commit_all(root: Path) -> None:
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        assert run_git(root, "-c", "user.name=a", "-c", "user.email=a@b", *words).returncode == 0


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    commit_all(tmp_path)
    return tmp_path


@pytest.fixture
def record(project: Path) -> TestRecord:
    """Of two tests: one runs `f` and reads the data, the other runs `g` and lists its folder."""
    sources = Sources(project)
    names = [
        *(("pkg/a.py", name) for name in ("", "f", "g")),
        *(("data/d.txt", "*"), ("data", "/"), ("tests/conftest.py", "*")),
    ]
    blocks = tuple((path, name, sources.blocks(path)[name]) for path, name in names)
    entry = TestEntry(state=0, mode="cpu x2", time=1.0, duration_s=1.0)
    return TestRecord(
        states=(ProjectState(environment=ENVIRONMENT, files=files_of(project)),),
        blocks=blocks,
        tests={F: replace(entry, blocks=(0, 1, 3, 5)), G: replace(entry, blocks=(0, 2, 4, 5))},
        collected={"tests/test_a.py": 2},
    )


def selected(project: Path, record: TestRecord, base: str = "") -> set[str]:
    now = ProjectState(environment=ENVIRONMENT, files=files_of(project))
    base_blocks = blocks_at(project, base) if base else {}
    changes = Changes(record, Sources(project), now, base_blocks)
    return {name for name in (F, G) if changes.reason(name, "cpu x2") is not None}


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        pytest.param("pkg/a.py", FILES["pkg/a.py"].replace("1", "3"), {F}, id="function"),
        pytest.param("pkg/a.py", "Y = 2\n" + FILES["pkg/a.py"], {F, G}, id="module"),
        pytest.param("pkg/a.py", "# Y\n" + FILES["pkg/a.py"], set(), id="comment"),
        pytest.param("pkg/a.py", None, {F, G}, id="deleted"),
        pytest.param("pkg/a.py", "def (", {F, G}, id="syntax-error"),
        pytest.param("pkg/alone.py", "X = 2\n", set(), id="unused-python"),
        pytest.param("pkg/new.py", "X = 2\n", set(), id="new-python"),
        pytest.param("data/d.txt", "e\n", {F}, id="read-data"),
        pytest.param("data/e.txt", "e\n", {G}, id="new-in-listed-folder"),
        pytest.param("kernel.cu", "l\n", {F, G}, id="of-unknown-use"),
        pytest.param("other.cu", "l\n", {F, G}, id="new-of-unknown-use"),
        pytest.param("uv.lock", "2\n", {F, G}, id="lock-file"),
        pytest.param("tests/conftest.py", "x = 1\n", {F, G}, id="conftest"),
        pytest.param("conftest.py", "", {F, G}, id="new-conftest"),
        pytest.param("pkg/conftest.py", "", set(), id="conftest-elsewhere"),
        pytest.param("README.md", "s\n", set(), id="docs"),
    ],
)
def test_tests_run_that_used_what_changed(
    project: Path, record: TestRecord, path: str, text: str | None, expected: set[str]
) -> None:
    if text is None:
        (project / path).unlink()
    else:
        (project / path).write_text(text)
    assert selected(project, record) == expected


def test_a_link_to_other_content_is_a_change(project: Path) -> None:
    (project / "one.txt").write_text("1")
    (project / "two.txt").write_text("2")
    (project / "link.txt").symlink_to("one.txt")
    sources = Sources(project)
    record = TestRecord(
        states=(ProjectState(environment=ENVIRONMENT, files=files_of(project)),),
        blocks=(("link.txt", "*", sources.blocks("link.txt")["*"]),),
        tests={F: TestEntry(state=0, mode="cpu x2", time=1.0, duration_s=1.0, blocks=(0,))},
    )
    assert F not in selected(project, record)
    (project / "link.txt").unlink()
    (project / "link.txt").symlink_to("two.txt")
    assert F in selected(project, record)


def test_a_new_file_that_an_old_one_tried_to_import_is_a_change(
    project: Path, record: TestRecord
) -> None:
    (project / "pkg/a.py").write_text("try:\n    import pkg.fast\nexcept ImportError: ...\n")
    sources = Sources(project)
    block = ("pkg/a.py", "", sources.blocks("pkg/a.py")[""])
    state = ProjectState(environment=ENVIRONMENT, files=files_of(project))
    entry = replace(record.tests[F], blocks=(0,))
    record = TestRecord(states=(state,), blocks=(block,), tests={F: entry})
    assert F not in selected(project, record)
    (project / "pkg/fast.py").write_text("")
    assert F in selected(project, record)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"problem": "it failed last time"}, "it failed last time"),
        ({"mode": "cpu x4"}, "it was recorded as cpu x4, and would run as cpu x2"),
        ({}, None),
    ],
)
def test_an_entry_that_proves_nothing_runs(
    project: Path, record: TestRecord, changes: dict[str, str], reason: str | None
) -> None:
    entry = replace(record.tests[F], **changes)  # type: ignore[arg-type]
    record = replace(record, tests={F: entry})
    state = ProjectState(environment=ENVIRONMENT, files=files_of(project))
    compared = Changes(record, Sources(project), state)
    assert compared.reason(F, "cpu x2") == reason
    assert compared.reason(G, "cpu x2") == "it is not in the record"


def test_another_environment_runs_all(project: Path, record: TestRecord) -> None:
    environment = ENVIRONMENT | {"torch": "2.9"}
    now = ProjectState(environment=environment, files=files_of(project))
    reason = Changes(record, Sources(project), now).reason(F, "cpu x2")
    assert reason == "the environment changed: torch 2.9, was 2.8"


def test_what_differs_from_the_base_counts_besides(project: Path, record: TestRecord) -> None:
    (project / "pkg/a.py").write_text(FILES["pkg/a.py"].replace("2", "4"))
    commit_all(project)
    (project / "pkg/a.py").write_text(FILES["pkg/a.py"])  # as it was recorded
    assert selected(project, record) == set()
    assert selected(project, record, "HEAD") == {G}


@pytest.mark.parametrize("base", ["nowhere", "--output=x", "a b"])
def test_a_base_that_is_none_is_one_error(project: Path, base: str) -> None:
    with pytest.raises(SelectionError, match="expected a branch, a tag or a commit"):
        blocks_at(project, base)


def test_without_git_there_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(SelectionError, match="git cannot list the files"):
        files_of(tmp_path)


def test_a_file_is_unaffected_if_all_of_its_tests_are_recorded(
    project: Path, record: TestRecord
) -> None:
    now = ProjectState(environment={}, files=files_of(project))
    found = find_unaffected(record, Changes(record, Sources(project), now))
    assert found == {F, G, "tests/test_a.py"}
    partly = replace(record, collected={"tests/test_a.py": 3})
    assert find_unaffected(partly, Changes(partly, Sources(project), now)) == {F, G}


def test_of_two_shards_the_later_entry_counts(record: TestRecord) -> None:
    later = replace(record.tests[F], time=2.0, blocks=(4,))
    shard = replace(record, tests={F: later})
    for records in ((record, shard), (shard, record)):
        merged = merge_records(records)
        assert [merged.blocks[number] for number in merged.tests[F].blocks] == [record.blocks[4]]
        assert merged.tests.keys() == {F, G}
        assert len(merged.states) == 1


def test_a_record_is_read_as_it_was_written(tmp_path: Path, record: TestRecord) -> None:
    file = tmp_path / "sub/changed.z"
    assert read_record(file) == TestRecord()
    write_record(file, record)
    assert read_record(file) == record
    write_record(file, replace(record, schema=1))
    assert read_record(file) == TestRecord()  # of another version: all run


def test_a_damaged_record_is_one_error(tmp_path: Path, record: TestRecord) -> None:
    file = tmp_path / "changed.z"
    write_record(file, record)
    for data in (b"", b"no", file.read_bytes()[:-9]):
        file.write_bytes(data)
        with pytest.raises(ConfigError, match="remove it, and record again"):
            read_record(file)
