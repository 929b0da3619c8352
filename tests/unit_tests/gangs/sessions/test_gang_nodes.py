from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from forked_sessions import Session, start_session
from gang_suite import processes_with
from junit import junit_results
from labs import wait_until

pytestmark = pytest.mark.nightly

DEADLINE_S = 60.0
MARK = "GANG_NODES_TEST"  # in the environment of every process of a cluster

MEETING = """
import os

NAMES = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE"

def test_every_rank_meets_all_others(rank, process_group, shared_tmp_path):
    import torch
    total = torch.tensor([10.0 ** rank])
    torch.distributed.all_reduce(total)
    assert total.item() == 1111
    found = [os.environ[name] for name in NAMES.split()]
    assert found == [str(rank), str(rank % 2), "4", "2", str(rank // 2), "2"]
    (shared_tmp_path / str(rank)).touch()
    torch.distributed.barrier()
    assert len(list(shared_tmp_path.iterdir())) == 4
"""
SUITE = """
import os, sys, warnings
import pytest

def test_fails_on_a_remote_rank(rank):
    print("printed on", rank // 2)
    assert rank != 2, "two"

@pytest.mark.world_size(2)
def test_fits_on_one_node(rank, tmp_path):
    assert os.environ["GROUP_RANK"] == "0"
    assert os.environ["GROUP_WORLD_SIZE"] == "1"

@pytest.mark.world_size(3)
def test_fills_nodes_in_order(rank, local_rank):
    assert (local_rank, os.environ["GROUP_RANK"]) == [(0, "0"), (1, "0"), (0, "1")][rank]
    assert os.environ["LOCAL_WORLD_SIZE"] == ("2" if rank < 2 else "1")

def test_dies_on_a_remote_rank(rank):
    if rank == 3:
        os._exit(5)

def test_goes_on(tmp_path):
    warnings.warn("on every rank")

@pytest.mark.skip(reason="not here")
def test_is_skipped():
    pass

@pytest.mark.controller
def test_runs_in_the_controller():
    assert "--node-rank=0" in sys.argv
"""
HANGING = """
import os, time
import pytest

def test_hangs(rank):
    if rank >= 2:
        open(os.environ["UP"] + str(rank), "w").close()
    while True:
        time.sleep(3600)

def test_needs_both_nodes():
    pass

@pytest.mark.world_size(2)
def test_needs_one_node():
    pass
"""

LATE = """
import os, sys
import pytest

read_end, write_end = os.pipe()
is_held = "--node-rank=0" in sys.argv

def wait_in_the_template_of_node_0():
    global is_held
    if is_held:
        is_held = False
        os.close(write_end)
        os.read(read_end, 1)

os.register_at_fork(after_in_child=wait_in_the_template_of_node_0)

@pytest.mark.controller
def test_runs_once_node_1_is_there():
    global is_held
    assert is_held
    is_held = False
    os.close(write_end)

def test_torch_was_loaded_before_ranks_were_forked(rank):
    assert "torch" in sys.modules

def test_every_rank_meets_all_others(rank, process_group):
    import torch
    total = torch.tensor([10.0 ** rank])
    torch.distributed.all_reduce(total)
    assert total.item() == 1111
"""

UNBUFFERED = {"PYTHONUNBUFFERED": "1"}  # what a session prints is waited for


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Two nodes on this machine: sessions of one suite, each with output and results.

    Attributes:
        address: Of node 0.
        held: Has its port until it listens there, so that no other process gets it.
    """

    root: Path
    address: str
    held: socket.socket
    sessions: list[Session] = field(default_factory=list)

    def start(self, node_rank: int, *arguments: str, is_fresh: bool = False, **env: str) -> Session:
        """Start the session of a node, in a fork or in a new process."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
        given = [
            *("-p", "megatron", "-p", "no:cacheprovider", "-rA", "--ranks=2", "--nnodes=2"),
            f"--node-rank={node_rank}",
            f"--rdzv-endpoint={self.address}",
            "-omegatron_rank_grace=1",
            f"--run-dir={self.root}/run",
            f"--junitxml={self.root}/{node_rank}.xml",
            *arguments,
        ]
        own = {"PYTEST_MEGATRON_KEY": "k", "COLUMNS": "300", "UP": f"{self.root}/up"} | UNBUFFERED
        given_env = kept | own | {MARK: str(self.root)} | env
        with (self.root / f"{node_rank}.out").open("wb") as output:
            session = start_session(given, self.root, given_env, output, is_fresh=is_fresh)
        self.sessions.append(session)
        return session

    def output(self, node_rank: int) -> str:
        return (self.root / f"{node_rank}.out").read_text()

    def results(self, node_rank: int) -> dict[str, tuple[str, str]]:
        """Outcome and message of each test, from JUnit XML."""
        return junit_results(self.root / f"{node_rank}.xml")

    def wait(self) -> list[int]:
        """Return the exit codes in the order of the starts; nothing may be left."""
        codes = [session.wait(DEADLINE_S) for session in self.sessions]
        self.held.close()
        # What has ended and is not waited for has no command line.
        wait_until(lambda: not any(processes_with(MARK, str(self.root))), "every process is gone")
        return codes


def cluster_of(root: Path, suite: str) -> Cluster:
    (root / "test_suite.py").write_text(suite)
    (root / "pytest.ini").write_text("[pytest]\n")
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return Cluster(root=root, address=f"127.0.0.1:{held.getsockname()[1]}", held=held)


@pytest.mark.everyday
def test_node_0_shows_what_ran_on_all_of_them_and_the_others_end_like_it(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, MEETING + SUITE)
    cluster.start(1)
    wait_until(lambda: "collected 8 items" in cluster.output(1), "node 1 is up, alone")
    cluster.start(0)
    assert cluster.wait() == [1, 1]
    assert cluster.results(0) == {
        "test_every_rank_meets_all_others": ("passed", ""),
        "test_fails_on_a_remote_rank": (
            "failure",
            "[rank 2] AssertionError: two at test_suite.py:22",
        ),
        "test_fits_on_one_node": ("passed", ""),
        "test_fills_nodes_in_order": ("passed", ""),
        "test_dies_on_a_remote_rank": ("failure", "rank 3 of 4 exited with code 5"),
        "test_goes_on": ("passed", ""),
        "test_is_skipped": ("skipped", "not here"),
        "test_runs_in_the_controller": ("passed", ""),
    }
    shown = cluster.output(0)
    assert ("on every rank" in shown, "printed on 1" in shown) == (True, True), shown
    told = cluster.output(1)
    assert "megatron: node 1 of 2, follows node 0 at 127.0.0.1" in told
    line = f"node 0 at {cluster.address} has the outcomes, and ended with code 1\n"
    assert (told.count(line), "passed" in told) == (1, False), told
    assert not (tmp_path / "1.xml").exists()


def test_nodes_meet_where_each_loads_torch_beforehand_and_node_0_calls_last(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, LATE)
    cluster.start(0, "--rank-timeout=30", is_fresh=True)
    cluster.start(1, is_fresh=True)
    assert cluster.wait() == [0, 0], cluster.output(0)
    assert cluster.results(0) == {
        "test_runs_once_node_1_is_there": ("passed", ""),
        "test_torch_was_loaded_before_ranks_were_forked": ("passed", ""),
        "test_every_rank_meets_all_others": ("passed", ""),
    }


def test_a_session_that_ends_early_ends_on_every_node(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, SUITE)
    cluster.start(0, "-x")
    wait_until(lambda: "waits at" in cluster.output(0), "node 0 waits")
    assert cluster.start(2, "--nnodes=3").wait(DEADLINE_S) == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: --node-rank: 2 is taken or too large" in cluster.output(2)
    cluster.start(1, "-x")
    assert cluster.wait() == [1, 4, 1]
    assert list(cluster.results(0).values())[-1][0] == "failure"
    assert "ended with code 1: stopping after 1 failures" in cluster.output(1)


@pytest.mark.everyday
def test_a_lost_node_fails_the_running_test_and_those_that_need_it(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, HANGING)
    cluster.start(0)
    follower = cluster.start(1)
    wait_until(lambda: all((tmp_path / f"up{n}").exists() for n in (2, 3)), "the test runs")
    follower.send_signal(signal.SIGKILL)
    assert cluster.wait() == [1, -9]
    gone = "node 1 (ranks 2-3) is gone"
    assert cluster.results(0) == {
        "test_hangs": ("failure", f"rank 2 of 4 is lost: {gone}"),
        "test_needs_both_nodes": ("failure", f"rank 2 of 4 did not start: {gone}"),
        "test_needs_one_node": ("passed", ""),
    }


@pytest.mark.everyday
def test_a_killed_controller_ends_every_node(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, HANGING)
    controller = cluster.start(0)
    cluster.start(1)
    wait_until(lambda: all((tmp_path / f"up{n}").exists() for n in (2, 3)), "the test runs")
    controller.send_signal(signal.SIGKILL)
    assert cluster.wait() == [-9, 3]
    gone = f"node 0 at {cluster.address} is gone before the session ended"
    assert cluster.output(1).count(gone) == 1
    assert "Traceback" not in cluster.output(1)
    assert "INTERNALERROR" not in cluster.output(1)


def test_nodes_that_collect_different_tests_say_so(tmp_path: Path) -> None:
    cluster = cluster_of(
        tmp_path,
        "import os\n"
        "if os.environ['NODE'] == '0':\n    def test_a(): pass\n"
        "def test_b(rank): assert os.environ['NODE'] == str(rank // 2)\n"
        "if os.environ['NODE'] == '1':\n    def test_c(): pass\n",
    )
    cluster.start(0, NODE="0")
    cluster.start(1, NODE="1")
    assert cluster.wait() == [3, 4]
    problem = "2 tests of one node only: test_suite.py::test_a is collected by node 0; give"
    assert f"node 1: {problem}" in cluster.output(0)
    assert f"ERROR: {problem}" in cluster.output(1)


def test_ranks_of_every_node_collect_for_themselves_where_modules_ask_for_ranks(
    tmp_path: Path,
) -> None:
    suite = (
        "import os\n"
        "import pytest\n"
        "RANK = int(os.environ['RANK'])\n"
        "def test_knows_its_rank(rank, tmp_path): assert RANK == rank\n"
        "@pytest.mark.parametrize('n', [RANK // 2])\n"
        "def test_of_one_node(n): pass\n"
        "def test_fails_on_the_last(rank): assert RANK != 3\n"
    )
    cluster = cluster_of(tmp_path, suite)
    cluster.start(0, "--continue-on-collection-errors")
    cluster.start(1)
    assert cluster.wait() == [1, 1]
    assert cluster.results(0) == {
        "test_knows_its_rank": ("passed", ""),
        "test_of_one_node[0]": ("failure", "rank 2 of 4 collected no such test"),
        "test_fails_on_the_last": ("failure", "[rank 3] assert 3 != 3 at test_suite.py:7"),
        "test_of_one_node[1]": ("error", "collection failure"),
    }


def test_nodes_that_were_started_differently_say_so(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, HANGING)
    cluster.start(0)
    cluster.start(1, "--ranks=3")
    assert cluster.wait() == [3, 4]
    problem = "--nnodes 2 with 3 ranks each, node 0 has --nnodes 2 with 2; give both the same"
    assert f"node 1: {problem}" in cluster.output(0)
    assert f"ERROR: {problem}" in cluster.output(1)


def test_a_node_that_cannot_collect_stops_all(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, "import os\nassert os.environ['NODE'] == '0'\ndef test(): 0\n")
    cluster.start(0, NODE="0")
    cluster.start(1, NODE="1")
    assert cluster.wait() == [3, 2]
    assert "node 1: 1 error while it collected; see its output" in cluster.output(0)
    assert not (tmp_path / "1.xml").exists()
