from __future__ import annotations

import os
import pty
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from junit import junit_results
from labs import DEADLINE_S, SlurmLab, wait_until

pytestmark = pytest.mark.nightly

SUITE = """
import faulthandler, os
import pytest

def test_every_rank_meets_all_others(rank, world_size, shared_tmp_path):
    assert os.environ["SLURMD_NODENAME"] != os.environ["HEAD"] or rank < world_size // 2
    (shared_tmp_path / str(rank)).touch()

def test_dies_on_node_1(rank, world_size):
    if rank == world_size // 2:
        faulthandler._sigsegv()

def test_fails_on_the_last_rank(rank, world_size):
    assert rank != world_size - 1, "no head on the last stage"

@pytest.mark.world_size(1)
def test_fits_on_node_0():
    assert os.environ["SLURMD_NODENAME"] == os.environ["HEAD"]
"""
CRASHED_AT = " at test_suite.py:11 in test_dies_on_node_1"
HANGING = """
import time
from pathlib import Path
import pytest

def test_passes(rank): pass

def test_hangs(rank):
    Path(f"up{rank}").touch()
    while True:
        time.sleep(3600)

def test_needs_both_nodes(): pass

@pytest.mark.world_size(1)
def test_needs_one_node(): pass
"""
SCRIPT = """#!/bin/bash
#SBATCH --array=1-2 --nodes=3 --ntasks-per-node=2 --output=batch-%a.out
export HEAD=$SLURMD_NODENAME
step() {
    srun --overlap --nodes=$1 --ntasks=$1 --ntasks-per-node=1 --output=$2-%t.out \\
        pytest -p megatron -p no:cacheprovider --ranks 1 --run-dir run-$2 \\
        -o megatron_rank_grace=1 --junitxml $2.xml test_suite.py &
}
step 2 pair-$SLURM_ARRAY_TASK_ID
first=$!
step 3 three-$SLURM_ARRAY_TASK_ID
wait $first; echo $? > pair-$SLURM_ARRAY_TASK_ID.code
wait $!; echo $? > three-$SLURM_ARRAY_TASK_ID.code
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "test_hanging.py").write_text(HANGING)
    before = Path.cwd()
    os.chdir(tmp_path)
    yield tmp_path
    os.chdir(before)


def start(lab: SlurmLab, *srun: str, **more: str) -> subprocess.Popen[bytes]:
    """Start a session of two nodes whose second test hangs on both; return once it does.

    And once the first one is told, since ranks go on before that.
    """
    program = [*srun, "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--output=%t.out"]
    pytest_words = ["pytest", "-p", "megatron", "-p", "no:cacheprovider", "--ranks=1"]
    rest = ["-v", "-omegatron_rank_grace=1", "--junitxml=out.xml", "test_hanging.py"]
    session = subprocess.Popen([*program, *pytest_words, *rest], env=lab.env | more)
    output = Path("0.out")

    def is_running() -> bool:
        return hangs() and "PASSED" in output.read_text()

    wait_until(lambda: is_running() or session.poll() is not None, "the test runs")
    assert is_running(), output.read_text()
    return session


def hangs() -> bool:
    return all(Path(f"up{rank}").exists() for rank in (0, 1))


def test_steps_of_an_array_run_side_by_side_and_each_test_has_one_outcome(
    slurm_lab: SlurmLab, project: Path
) -> None:
    (project / "job.sh").write_text(SCRIPT)
    job = slurm_lab.submit("job.sh", cwd=project)
    for element in (1, 2):
        assert slurm_lab.wait_for(f"{job}_{element}") == "COMPLETED"
    for name, world_size in {"pair": 2, "three": 3}.items():
        for element in (1, 2):
            where = project / f"{name}-{element}"
            dead, last = world_size // 2, world_size - 1
            assert junit_results(where.with_suffix(".xml")) == {
                "test_every_rank_meets_all_others": ("passed", ""),
                "test_dies_on_node_1": (
                    "failure",
                    f"rank {dead} of {world_size} was killed by SIGSEGV{CRASHED_AT}",
                ),
                "test_fails_on_the_last_rank": (
                    "failure",
                    f"[rank {last}] AssertionError: no head on the last stage at test_suite.py:14",
                ),
                "test_fits_on_node_0": ("passed", ""),
            }
            assert where.with_suffix(".code").read_text() == "1\n"
            for node in range(world_size):
                output = Path(f"{where}-{node}.out").read_text()
                shown = "has the outcomes, and ended with code 1" if node else "2 failed, 2 passed"
                assert output.count(shown) == 1, output


def test_a_cancelled_job_writes_what_it_has(slurm_lab: SlurmLab, project: Path) -> None:
    session = start(slurm_lab, "srun")
    (job,) = slurm_lab.ask("squeue", "-h", "-o", "%A").split()
    slurm_lab.ask("scancel", job)
    assert session.wait(DEADLINE_S) == 2
    why = f"SIGTERM: Slurm cancelled job {job}, or its time was up"
    for node in (0, 1):
        output = (project / f"{node}.out").read_text()
        assert (output.count(why) > 0, output.count("1 passed")) == (True, 1 - node), output
    assert junit_results(project / "out.xml") == {"test_passes": ("passed", "")}


def test_a_killed_node_fails_the_running_test_and_those_that_need_it(
    slurm_lab: SlurmLab, project: Path
) -> None:
    session = start(slurm_lab, "srun", "--no-kill", "--nodelist=node2,node4")
    try:
        slurm_lab.kill_node(4)
        out = project / "out.xml"
        wait_until(lambda: out.exists() and "</testsuites>" in out.read_text(), "node 0 has ended")
    finally:
        session.kill()  # srun waits until Slurm misses the node
        session.wait()
        slurm_lab.fix()
    gone = "node 1 (rank 1) is gone"
    assert junit_results(project / "out.xml") == {
        "test_passes": ("passed", ""),
        "test_hangs": ("failure", f"rank 1 of 2 is lost: {gone}"),
        "test_needs_both_nodes": ("failure", f"rank 1 of 2 did not start: {gone}"),
        "test_needs_one_node": ("passed", ""),
    }


def test_ctrl_c_in_the_terminal_of_an_allocation_ends_the_session(
    slurm_lab: SlurmLab,
) -> None:
    pytest_words = ["pytest", "-v", "-p", "megatron", "--ranks=1", "test_hanging.py"]
    allocation = ["setsid", "--ctty", "--wait", "salloc", "--nodes=2"]
    step = ["srun", "--pty", "--ntasks-per-node=1"]
    own, theirs = pty.openpty()
    session = subprocess.Popen(
        [*allocation, *step, *pytest_words],
        env=slurm_lab.env,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    said: list[bytes] = []

    def is_over() -> bool:
        said.append(read(own, 0.05))
        return session.poll() is not None

    try:
        wait_until(lambda: is_over() or (hangs() and b"PASSED" in b"".join(said)), "the test runs")
        os.write(own, b"\x03")
        wait_until(is_over, "the session ends")
    finally:
        session.kill()
        said.append(read(own, 0))
        os.close(own)
    text = b"".join(said).decode()
    assert (session.wait(), "1 passed" in text) == (2, True), text


def read(terminal: int, wait_s: float) -> bytes:
    """Return what comes next, if anything does; a terminal without users has nothing."""
    try:
        return os.read(terminal, 4096) if select.select([terminal], [], [], wait_s)[0] else b""
    except OSError:
        return b""
