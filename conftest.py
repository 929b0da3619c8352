from __future__ import annotations

import gc
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController  # type: ignore[import-untyped]

pytest_plugins = ["pytester", "labs"]
for number in (
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGHUP,
):  # of `pytest &`, and of sessions below
    if signal.getsignal(number) is signal.SIG_IGN:
        is_ctrl_c = number is signal.SIGINT
        signal.signal(number, signal.default_int_handler if is_ctrl_c else signal.SIG_DFL)
for name in ("CI", "GITHUB_ACTIONS", "GITLAB_CI"):  # sessions of tests write for a terminal
    os.environ.pop(name, None)

# How long each tier takes where nobody has run it yet.
TIERS = {"everyday": "6 min on two cores", "all": "11 min on two cores"}
MARKS = (
    "nightly: not part of the everyday tier, `python3 dev.py test`",
    "everyday(*ids): in the everyday tier, of a matrix these ids, whatever its file is",
)
# Files that take long, from the longest on. They begin first, so that no worker of pytest-xdist
# is left with one at the end; those that wait stand between those that compute.
LONG = (
    *("test_doc_commands", "test_docker", "test_gang_faults", "test_slurm_limits"),
    *("test_gang_hosts", "test_gang_collection", "test_failing_workloads", "test_slurm_lab"),
    *("test_gang_xdist", "test_golden_writing"),
)
WAITING = pytest.StashKey[int]()
STARTED = time.monotonic()

gc.disable()  # collecting 5,000 tests makes no garbage to speak of


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=TIERS,
        help="run these tests, in parallel, unless some are named: `python3 dev.py test [--all]`",
    )


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist, which reads the number of workers
def pytest_cmdline_main(config: pytest.Config) -> None:
    option = config.option
    if hasattr(config, "workerinput") or option.tier is None:
        return
    named = ("keyword", "markexpr", "lf", "failedfirst", "stepwise")
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS or any(
        getattr(option, name) for name in named
    ):
        option.tier = None
    elif option.numprocesses is None and not option.usepdb:
        # More workers than cores, since many tests wait.
        option.numprocesses, option.dist = len(os.sched_getaffinity(0)) + 1, "loadfile"
        option.loadscopereorder = False


def pytest_configure(config: pytest.Config) -> None:
    for mark in MARKS:
        config.addinivalue_line("markers", mark)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Give a worker a file at a time, and of the typed pages a page."""
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import (  # type: ignore[import-untyped] # noqa: PLC0415
        LoadFileScheduling,
    )

    scheduler = LoadFileScheduling(config, log)
    file_of = scheduler._split_scope  # noqa: SLF001 - what each of its own schedulers overrides
    scheduler._split_scope = lambda nodeid: (  # noqa: SLF001
        nodeid if "::test_a_page_runs_" in nodeid else file_of(nodeid)
    )
    return scheduler


def is_nightly(item: pytest.Item) -> bool:
    everyday = item.get_closest_marker("everyday")
    if everyday is None:
        return item.get_closest_marker("nightly") is not None
    return bool(everyday.args) and id_of(item) not in everyday.args


def id_of(item: pytest.Item) -> str:
    return item.name.partition("[")[2].removesuffix("]")


def select_everyday(items: list[pytest.Item]) -> list[pytest.Item]:
    """Take out the nightly tests, and return them.

    Raises:
        pytest.UsageError: A mark names an id that its matrix does not have.
    """
    found = {(item.path, item.name.partition("[")[0], id_of(item)) for item in items}
    for item in items:
        for name in (args for mark in item.iter_markers("everyday") for args in mark.args):
            if (item.path, item.name.partition("[")[0], name) not in found:
                raise pytest.UsageError(f"{item.nodeid}: its mark everyday names {name!r}, no id")
    nightly = [item for item in items if is_nightly(item)]
    items[:] = [item for item in items if not is_nightly(item)]
    return nightly


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.tier == "everyday":
        nightly = select_everyday(items)
        config.hook.pytest_deselected(items=nightly)
        config.stash[WAITING] = len(nightly)
        if hasattr(config, "workeroutput"):
            config.workeroutput["waiting"] = len(nightly)
    ranks = {name: rank for rank, name in enumerate(LONG)}
    items.sort(key=lambda item: ranks.get(item.path.stem, len(LONG)))


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()  # nor do the tests search all of it, and torch, again and again


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: WorkerController) -> None:
    node.config.stash[WAITING] = getattr(node, "workeroutput", {}).get("waiting", 0)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Keep how long the whole of a tier takes on this machine."""
    config = session.config
    ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    whole = ended and not (session.shouldstop or session.shouldfail)
    if whole and config.option.tier and not hasattr(config, "workerinput"):
        config.cache.set(f"tiers/{config.option.tier}", time.monotonic() - STARTED)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if config.option.tier is None or config.option.collectonly:
        return
    times = []
    for tier, usually in TIERS.items():
        seconds = config.cache.get(f"tiers/{tier}", None)
        took = f"took {seconds / 60:.1f} min here" if seconds else f"takes {usually}"
        times.append(f"{tier} {took}")
    waiting = config.stash.get(WAITING, 0)
    line = f"{waiting} tests wait for `python3 dev.py test --all`; {', '.join(times)}"
    terminalreporter.write_line(line)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("may not mount a file system")
    yield disk
    umount = ["umount", "--lazy", str(disk)]  # a test that failed may have files open
    subprocess.run(umount, check=True)
