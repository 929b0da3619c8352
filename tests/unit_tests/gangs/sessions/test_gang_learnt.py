"""Ranks that begin to collect beside the controller, as the last session learnt that they need."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest
from gang_suite import Suite, wait_until

from pytest_megatron.gangs.spec import GangSpec
from pytest_megatron.gangs.start.environment import EnvWatch, learn, recall

CACHE = ".pytest_cache/v/megatron/ranks_that_collect"
# A rank notes that it has collected. The controller collects until the ranks have.
CONFTEST = """
    import os
    import time
    from pathlib import Path

    import pytest

    RANK = int(os.environ["RANK"])
    NOTES = Path(os.environ.get("NOTES", "."))


    def pytest_collection_modifyitems(session, config, items):
        if hasattr(config, "workerinput"):
            (NOTES / str(os.getpid())).touch()
            return
        deadline = time.monotonic() + 120
        while "NOTES" in os.environ and len(list(NOTES.iterdir())) < 2:
            assert time.monotonic() < deadline
            config.hook.pytest_make_collect_report(collector=items[0].parent)
            time.sleep(0.01)
"""
TESTS = """
    import pytest

    @pytest.mark.parametrize("number", [1, 2])
    def test_passes(number, world_size):
        assert world_size == 2

    def test_fails(rank):
        assert rank == 0

    @pytest.mark.skip
    def test_is_skipped():
        pass
"""
OUTCOMES = {"test_passes[1]": "PASSED", "test_passes[2]": "PASSED", "test_fails": "FAILED"}
OUTCOMES |= {"test_is_skipped": "SKIPPED"}


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    suite = Suite(tmp_path, has_torch=False).write(conftest=CONFTEST, test_some=TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return suite


def teach(root: Path) -> None:
    """Have the next session expect two ranks that collect for themselves."""
    (root / CACHE).parent.mkdir(parents=True)
    entry = {"conftest": ".", "gang": [2, "cpu"], "modules": ["psutil"]}
    (root / CACHE).write_text(json.dumps({"2x1:": entry}))


def test_ranks_collect_while_the_controller_does_so(suite: Suite, tmp_path: Path) -> None:
    first = suite.run("-v", "--ranks=2")
    assert first.words == OUTCOMES, first.stdout
    entry = json.loads((tmp_path / CACHE).read_text())["2x1:"]
    assert (entry["gang"], entry["conftest"]) == ([2, "cpu"], ".")
    notes = tmp_path / "notes"
    notes.mkdir()
    second = suite.run("-v", "--ranks=2", env={"NOTES": str(notes)})
    assert (second.words, second.returncode) == (OUTCOMES, 1), second.stdout
    assert "every rank collects for itself: RANK in " in second.stdout
    failed = suite.run("-v", "--ranks=2", "--lf", "-k", "fails or skipped", "test_some.py")
    assert failed.words == {"test_fails": "FAILED"}, failed.stdout


def test_ranks_that_collected_for_nothing_leave_nothing(suite: Suite, tmp_path: Path) -> None:
    teach(tmp_path)
    suite.write(conftest=CONFTEST.replace('os.environ["RANK"]', '"0"'))
    notes = tmp_path / "notes"
    notes.mkdir()
    run = suite.run("-v", "--ranks=2", "--run-dir=run", env={"NOTES": str(notes)})
    assert (run.words, run.returncode) == (OUTCOMES, 1), run.stdout
    assert "collects for itself" not in run.stdout + run.stderr
    assert [path.name for path in (tmp_path / "run/ranks").iterdir()] == ["attempt_1"]
    assert json.loads((tmp_path / CACHE).read_text()) == {}


def test_a_controller_that_cannot_collect_ends_ranks_that_have_begun(
    suite: Suite, tmp_path: Path
) -> None:
    teach(tmp_path)
    suite.write(test_wrong="raise ValueError('not here')", test_zero="from test_wrong import x")
    run = suite.run("--ranks=2")
    assert (run.returncode, run.summary) == (2, "2 errors"), run.stdout
    assert run.stdout.count("ValueError: not here") == 4, run.stdout
    assert not (tmp_path / ".pytest_megatron").exists()


# A rank notes that it loads this file. The controller does so until a number of notes is there.
LOADS = """
    import os
    import time
    from pathlib import Path

    NOTES = Path(os.environ["NOTES"])
    RANK = int(os.environ["RANK"])
    NUM_THREADS, os.environ["OMP_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"], "3"
    if "MASTER_PORT" in os.environ:
        (NOTES / f"{RANK}-{os.getpid()}").touch()
    else:
        deadline = time.monotonic() + 120
        while len(list(NOTES.iterdir())) < int(os.environ["NUM_NOTES"]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
"""
THREADS = """
    import conftest

    def test_threads(rank):
        assert conftest.NUM_THREADS == "3"
"""


@pytest.mark.parametrize("num_threads", ["3", "1"], ids=["as predicted", "otherwise"])
def test_ranks_load_conftest_files_while_the_controller_does_so(
    suite: Suite, tmp_path: Path, num_threads: str
) -> None:
    teach(tmp_path)
    suite.write(conftest=LOADS, test_some=THREADS)
    notes = tmp_path / "notes"
    notes.mkdir()
    env = {"NOTES": str(notes), "NUM_NOTES": "2", "OMP_NUM_THREADS": num_threads}
    run = suite.run("-v", "--ranks=2", env=env)
    assert (run.words, run.returncode) == ({"test_threads": "PASSED"}, 0), run.stdout
    begun = [*"01"] if num_threads == "3" else [*"0011"]
    assert sorted(note.name[0] for note in notes.iterdir()) == begun


def test_ranks_that_load_conftest_files_end_with_a_killed_controller(
    suite: Suite, tmp_path: Path
) -> None:
    teach(tmp_path)
    suite.write(conftest=LOADS, test_some=THREADS)
    notes = tmp_path / "notes"
    notes.mkdir()
    env = {"NOTES": str(notes), "NUM_NOTES": "3", "OMP_NUM_THREADS": "3"}
    with suite.start("--ranks=2", **env) as process:
        try:
            wait_until(lambda: len(list(notes.iterdir())) == 2, "ranks load conftest.py")
        finally:
            process.kill()
    wait_until(lambda: not suite.processes(), "no process is left")


class _Config:
    """The part of pytest's configuration that names files and has a cache."""

    def __init__(self, root: Path, *files: str, cacheclear: bool = False) -> None:
        self.rootpath = root
        self.known_args_namespace = SimpleNamespace(file_or_dir=list(files), cacheclear=cacheclear)
        self.invocation_params = SimpleNamespace(dir=root)
        self.pluginmanager = pytest.PytestPluginManager()
        self.cache = pytest.Cache(root / ".pytest_cache", self.config, _ispytest=True)

    @property
    def config(self) -> pytest.Config:
        return cast("pytest.Config", self)

    def getini(self, name: str) -> str:
        return {"cache_dir": ".pytest_cache"}[name]


SIZE = (4, 1)
SPECS = [GangSpec(world_size=size, device="cpu") for size in (2, 4, 8)]


def watch(*readers: str) -> EnvWatch:
    found = EnvWatch({}, lambda: None)
    found.rank_readers += readers
    return found


@pytest.mark.parametrize(
    ("files", "folders"),
    [
        (["tests"], ["tests"]),
        (["tests/moe/test_a.py::test_x[1]"], ["tests"]),
        (["tests/moe", "other"], []),
        ([], []),
    ],
    ids=["same", "below-the-conftest", "outside", "everything"],
)
def test_a_suite_is_known_by_its_files(
    files: list[str], folders: list[str], tmp_path: Path
) -> None:
    reader = f"LOCAL_RANK in {tmp_path}/tests/conftest.py:3"
    learn(_Config(tmp_path, "tests").config, SIZE, SPECS, watch(reader), is_forkable=True)
    found = recall(_Config(tmp_path, *files).config, SIZE)
    assert [f.conftest for f in [found] if f is not None] == folders
    assert found is None or found.gang == (4, "cpu")
    assert recall(_Config(tmp_path, *files).config, (2, 1)) is None
    assert recall(_Config(tmp_path, *files, cacheclear=True).config, SIZE) is None


def test_a_suite_that_reads_no_rank_is_forgotten(tmp_path: Path) -> None:
    config = _Config(tmp_path, "tests").config
    learn(config, SIZE, SPECS, watch(f"RANK in {tmp_path}/tests/utils.py:3"), is_forkable=True)
    known = recall(config, SIZE)
    assert known is not None
    assert known.conftest is None
    learn(config, SIZE, SPECS, watch(), is_forkable=True)
    assert recall(config, SIZE) is None


@pytest.mark.parametrize("text", ["[]", "{", '{"4x1: tests": {"gang": 3}}', '{"4x1: tests": []}'])
def test_a_damaged_cache_teaches_nothing(text: str, tmp_path: Path) -> None:
    file = tmp_path / CACHE
    file.parent.mkdir(parents=True)
    file.write_text(text)
    config = _Config(tmp_path, "tests").config
    assert recall(config, SIZE) is None
    learn(config, SIZE, SPECS, watch(f"RANK in {tmp_path}/tests/conftest.py:1"), is_forkable=True)
    assert recall(config, SIZE) is not None


def test_only_libraries_that_no_code_of_the_user_can_have_changed_are_imported_early(
    tmp_path: Path,
) -> None:
    config = _Config(tmp_path, "tests").config
    reader = f"RANK in {tmp_path}/tests/conftest.py:1"

    def modules(seen: EnvWatch) -> set[str]:
        learn(config, SIZE, SPECS, seen, is_forkable=True)
        found = recall(config, SIZE)
        assert found is not None
        return set(found.modules)

    plain = modules(watch(reader))
    assert {"psutil", "psutil._common"} <= plain
    assert not plain & {"os", "pytest_megatron.session.options", "gang_suite", "__main__"}
    changed = watch(reader)
    changed.loaded = frozenset(("psutil", "os"))
    assert modules(changed) == {"psutil"}
    assert modules(watch(reader, f"RANK in {psutil.__file__}:7")) == set()


def test_a_change_of_a_variable_by_code_of_the_user_is_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = watch()
    seen.start()
    try:
        code = compile("os.environ['SOME_CACHE'] = 'x'", psutil.__file__, "exec")
        exec(code, {"os": os})  # noqa: S102 - as a library
        assert {*(seen.loaded or ())} == set()
        code = compile("os.environ.update(SOME_CACHE='y')", f"{tmp_path}/conftest.py", "exec")
        exec(code, {"os": os})  # noqa: S102 - as the user's file
        assert "os" in (seen.loaded or ())
    finally:
        seen.stop()
        monkeypatch.delenv("SOME_CACHE")
