"""A pytest plugin for guest suites of the fault program: what tests of a gang do, and do wrong.

Loaded by `-p fault_guest` in the session under test. Ranks tell in `$FAULT_DIR/events.jsonl` when
they strike; the controller tells when it reported a test.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fault_cases import STOPPED
from fault_ways import (
    REPORT_CHARS,
    WAYS,
    Gang,
    fail,
    flood,
    is_dead,
    kill,
    leave_child,
    segv,
    sleep,
    tell,
    test_name,
    wait_while,
)

UNTOLD_S = 3.0  # longer than a connection may be closed by a rank that lives


@pytest.fixture
def gang(
    rank: int, world_size: int, device: torch.device, process_group: dist.ProcessGroup
) -> Gang:
    del process_group
    found = Gang(rank=rank, world_size=world_size, device=device)
    found.reduce()
    return found


def before(way: Callable[[], object]) -> Callable[[Gang], None]:
    """Strike where the others are in a collective that this rank never joins."""

    def body(gang: Gang) -> None:
        if gang.is_last:
            gang.sign()
            way()
        gang.reduce()

    return body


def after(way: Callable[[], object]) -> Callable[[Gang], None]:
    """Strike where the others need this rank no longer."""

    def body(gang: Gang) -> None:
        gang.reduce()
        if gang.is_last:
            gang.sign()
            way()

    return body


BODIES: dict[str, Callable[[Gang], None]] = {
    f"{name}_{when.__name__}": when(way) for name, way in WAYS.items() for when in (before, after)
}


def body(function: Callable[[Gang], None]) -> Callable[[Gang], None]:
    BODIES[function.__name__] = function
    return function


@body
def sound(gang: Gang) -> None:
    gang.reduce()


@body
def skips(gang: Gang) -> None:
    gang.reduce()
    pytest.skip("every rank does")


@body
def fails(gang: Gang) -> None:
    gang.reduce()
    assert gang.world_size == 0, "every rank does"


@body
def fail_in(gang: Gang) -> None:
    gang.start(is_async=True)
    if gang.is_last:
        gang.sign()
        fail()


@body
def sigkill_in(gang: Gang) -> None:
    if gang.is_last:
        gang.start(is_async=True)
        gang.sign()
        kill()
    for _ in range(1000):
        gang.start()


@body
def missed(gang: Gang) -> None:
    if gang.is_last:
        gang.sign()
    else:
        gang.reduce()


@body
def extra(gang: Gang) -> None:
    gang.reduce()
    if gang.is_last:
        gang.sign()
        gang.reduce()


@body
def extra_async(gang: Gang) -> None:
    gang.reduce()
    if gang.is_last:
        gang.sign()
        gang.start(is_async=True)


@body
def first_rank_dies(gang: Gang) -> None:
    if gang.is_first:
        gang.sign()
        kill()
    gang.reduce()


@body
def two_die(gang: Gang) -> None:
    gang.reduce()
    if gang.is_first:
        gang.sign()
        os._exit(1)
    if gang.is_last:
        gang.sign()
        segv()
    gang.reduce()


@body
def all_die(gang: Gang) -> None:
    gang.reduce()
    gang.sign()
    os._exit(1)


@body
def flood_passes(gang: Gang) -> None:
    if gang.is_last:
        gang.sign()
        flood()
    gang.reduce()


@body
def flood_fails(gang: Gang) -> None:
    gang.reduce()
    if gang.is_last:
        flood()
        gang.sign()
        fail()


@body
def flood_dies(gang: Gang) -> None:
    gang.reduce()
    if gang.is_last:
        flood()
        gang.sign()
        kill()


def leaving(*, in_own_session: bool, dies: bool) -> Callable[[Gang], None]:
    def body(gang: Gang) -> None:
        gang.reduce()
        if gang.is_last:
            leave_child(in_own_session=in_own_session)
            gang.sign()
            if dies:
                kill()

    return body


BODIES["child_passes"] = leaving(in_own_session=False, dies=False)
BODIES["child_dies"] = leaving(in_own_session=False, dies=True)
BODIES["daemon_passes"] = leaving(in_own_session=True, dies=False)
BODIES["daemon_dies"] = leaving(in_own_session=True, dies=True)


@body
def closes_descriptors(gang: Gang) -> None:
    if gang.is_last:
        gang.sign()
        os.closerange(3, 4096)
        sleep()
    gang.reduce()


@body
def closes_all_descriptors(gang: Gang) -> None:
    gang.reduce()
    if gang.is_last:
        gang.sign()
        os.closerange(0, 4096)


@body
def reports_to_nobody(gang: Gang) -> None:
    """Write much, and fail on each rank with more than a socket holds while nobody reads it."""
    flood()
    gang.reduce()
    gang.sign()
    stopped = os.path.join(os.environ["FAULT_DIR"], STOPPED)  # noqa: PTH118 - cheap
    wait_while(lambda: not os.path.exists(stopped))  # noqa: PTH110 - cheap
    pytest.fail("x" * REPORT_CHARS)


@body
def ignores_interrupt(gang: Gang) -> None:
    signal.signal(signal.SIGINT, lambda *_: tell("interrupt"))
    gang.sign()
    sleep()


def last_pid(gang: Gang) -> int:
    """Return the process of the last rank, in all ranks."""
    pid = torch.tensor([os.getpid() if gang.is_last else 0])
    pids = pid.to(gang.device)
    dist.all_reduce(pids)
    gang.reduce()
    return int(pids.item())


@body
def dies_when_done(gang: Gang) -> None:
    """Pass, and die while the others are still busy."""
    pid = last_pid(gang)
    if gang.is_last:
        gang.sign()
        threading.Timer(0.5, kill).start()
    else:
        wait_while(lambda: os.path.exists(f"/proc/{pid}"))  # noqa: PTH110 - cheap


@body
def dies_untold(gang: Gang) -> None:
    """Die likewise, but have the others pass before anybody can say so."""
    pid, template = last_pid(gang), os.getppid()

    def die() -> None:
        os.kill(template, signal.SIGSTOP)
        kill()

    if gang.is_last:
        gang.sign()
        threading.Timer(0.5, die).start()
    else:
        wait_while(lambda: not is_dead(pid))
    if gang.is_first and os.fork() == 0:  # this rank may be gone before that
        time.sleep(UNTOLD_S)
        os.kill(template, signal.SIGCONT)
        os._exit(0)


@body
def kills_keeper(gang: Gang) -> None:
    """Kill the process that holds the gangs' stores, and the gang, so that it needs a new one."""
    gang.reduce()
    if gang.is_last:
        template = os.getppid()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and entry.name != str(template):
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                except OSError:  # a process of somebody else ended just now
                    continue
                if (int(fields[1]), int(fields[3])) == (template, os.getsid(template)):
                    os.kill(int(entry.name), signal.SIGKILL)
                    gang.sign()
                    kill()
        raise AssertionError("found no process that holds stores")


@body
def sleeps_everywhere(gang: Gang) -> None:
    gang.sign()
    sleep()


@body
def stuck_in_collective(gang: Gang) -> None:
    if gang.is_last:
        gang.sign()
        sleep()
    gang.reduce()


@body
def floods_full_disk(gang: Gang) -> None:
    if gang.is_last:
        gang.sign()
        for _ in range(1000):
            print("x" * 1023)
    gang.reduce()


# Faults in fixtures


def way_of(request: pytest.FixtureRequest) -> Callable[[], object]:
    mark = request.node.get_closest_marker("way")
    assert mark is not None
    return WAYS[mark.args[0]]


def strike(gang: Gang, way: Callable[[], object]) -> None:
    if gang.is_last:
        gang.sign()
        way()
    gang.reduce()


@pytest.fixture
def at_setup(request: pytest.FixtureRequest, gang: Gang) -> None:
    strike(gang, way_of(request))


@pytest.fixture
def at_first_setup(request: pytest.FixtureRequest, rank: int, world_size: int) -> None:
    """Strike before the process group: the others wait for this rank where they meet."""
    if rank == world_size - 1:
        tell("sign", test=test_name(), rank=rank)
        way_of(request)()


@pytest.fixture
def at_late_setup(gang: Gang) -> None:
    """End on the last rank alone, as a collective may on the rank that ends it."""
    if not gang.is_last:
        sleep()


@pytest.fixture
def at_teardown(request: pytest.FixtureRequest, gang: Gang) -> Iterator[None]:
    way = way_of(request)
    yield
    strike(gang, way)


@pytest.fixture(scope="session")
def at_end(
    request: pytest.FixtureRequest, rank: int, world_size: int, device: torch.device
) -> Iterator[None]:
    del request
    yield
    way = WAYS[os.environ["FAULT_AT_END"]]
    strike(Gang(rank=rank, world_size=world_size, device=device), way)


# What the sessions tell


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "way(name): how a fixture strikes")
    config.addinivalue_line("markers", "timeout(seconds): limit of a phase")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "RANK" not in os.environ:
        name = report.nodeid.rpartition("::")[2]
        tell("report", test=name, when=report.when, outcome=report.outcome)


def run(name: str, gang: Gang) -> None:
    """Do what a test of that name does."""
    BODIES[name](gang)
