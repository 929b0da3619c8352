from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from labs import NUM_NODES, DockerLab, SlurmLab, wait_until

pytestmark = pytest.mark.nightly

HOLDER = """
import os, signal, sys
from labs import {lab}
with {lab}() as lab:
    {work}
    print(lab.directory, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
SLURM_WORK = """
    job = lab.submit("--nodes=2", "--output=/dev/null", "--wrap", "srun -N2 setsid sleep 1000")
    lab.wait_for(job, "RUNNING")
"""
DOCKER_WORK = """
    lab.docker("run", "--detach", "--volume=/usr:/usr:ro", "hostusr:1", "sleep", "1000")
"""


def test_a_job_runs_on_nodes_with_pretend_gpus(slurm_lab: SlurmLab) -> None:
    words = ["srun", "-N2", "--ntasks-per-node=1", "--gpus-per-node=8", "--label", "printenv"]
    said = slurm_lab.ask(*words, "SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES").splitlines()
    gpus = "0,1,2,3,4,5,6,7"
    assert sorted(said) == [f"0: {gpus}", "0: node1", f"1: {gpus}", "1: node2"]


def test_a_killed_node_fails_its_job_and_can_come_back(slurm_lab: SlurmLab, tmp_path: Path) -> None:
    job = slurm_lab.submit("-wnode2", "--no-requeue", "--wrap", "sleep 1000", cwd=tmp_path)
    slurm_lab.wait_for(job, "RUNNING")
    slurm_lab.kill_node(2)
    slurm_lab.ask("scontrol", "update", "nodename=node2", "state=down", "reason=power")
    assert slurm_lab.wait_for(job) == "NODE_FAIL"
    slurm_lab.fix()
    idle = slurm_lab.ask("sinfo", "-h", "-p", "debug", "-t", "idle", "-o", "%D")
    assert int(idle) == NUM_NODES


def test_a_container_runs_with_the_hosts_programs(docker_lab: DockerLab) -> None:
    said = docker_lab.docker("run", "--rm", "--volume=/usr:/usr:ro", "hostusr:1", "id", "-u")
    assert (said, docker_lab.containers()) == ("0\n", [])


@pytest.mark.parametrize(
    ("lab", "work"),
    [
        pytest.param("slurm", SLURM_WORK, id="slurm"),
        pytest.param("dockerd", DOCKER_WORK, id="docker"),
    ],
)
def test_nothing_is_left_of_a_lab_whose_holder_was_killed(
    request: pytest.FixtureRequest, lab: str, work: str
) -> None:
    request.getfixturevalue({"slurm": "slurm_lab", "dockerd": "docker_lab"}[lab])  # or skip
    program = HOLDER.format(lab=lab, work=work.strip())
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(Path(__file__).parents[2] / "labs"), "PATH": "/usr/bin:/usr/sbin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -9, done.stderr
    directory = done.stdout.strip()
    wait_until(lambda: not Path(directory).exists(), "its files are gone")
    assert processes_of(directory) == []


def processes_of(directory: str) -> list[list[str]]:
    found = []
    for process in psutil.process_iter():
        try:
            command, env = process.cmdline(), process.environ()
        except psutil.Error:
            continue
        if directory in json.dumps([command, env]):
            found.append(command)
    return found
