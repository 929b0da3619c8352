"""The Slurm step of a session: its nodes, their addresses and ports.

Pure except for `slurm_address`, which runs `scontrol`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from pytest_megatron.errors import LaunchError

# Below the range from which the kernel takes ports for connections, above those of services.
_FIRST_PORT, _NUM_PORTS = 20_000, 12_000
_STEPS_PER_JOB = 31  # apart, so that steps of one job seldom meet
_SCONTROL_S = 10.0
_ADDRESS = "NodeAddr="


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmStep:
    """The nodes that `srun` started this process on.

    Attributes:
        name: Unique name of the step, over all clusters.
        host: Slurm's name of node 0.
        port: Port of node 0.
    """

    num_nodes: int
    node_rank: int
    name: str
    host: str
    port: int

    @property
    def endpoint(self) -> str:
        """Address of node 0; asks Slurm for it."""
        return f"{slurm_address(self.host)}:{self.port}"


def find_slurm_step(env: Mapping[str, str]) -> SlurmStep | None:
    """Return the step of this process; None outside of `srun`, and on one node.

    Raises:
        LaunchError: The step has not one task on each node.
    """
    nodes = env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_JOB_NUM_NODES", "1"))
    hosts = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", ""))
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
    job, node_rank = env.get("SLURM_JOB_ID", ""), env.get("SLURM_NODEID", "")
    is_known = all(word.isdecimal() for word in (nodes, step, job, node_rank))
    if not is_known or int(nodes) == 1 or not hosts:
        return None
    tasks = env.get("SLURM_STEP_NUM_TASKS", nodes)
    if tasks != nodes:
        raise LaunchError(
            "srun",
            f"started {tasks} tasks on {nodes} nodes, expected one on each; "
            f"give srun both of --ntasks={nodes} --ntasks-per-node=1, "
            f"and pytest --gpus or --ranks",
        )
    cluster, restart = env.get("SLURM_CLUSTER_NAME", ""), env.get("SLURM_RESTART_COUNT", "0")
    return SlurmStep(
        num_nodes=int(nodes),
        node_rank=int(node_rank),
        name=f"{cluster}:{job}.{step}:{restart}",
        host=first_host(hosts),
        port=_FIRST_PORT + (int(job) * _STEPS_PER_JOB + int(step)) % _NUM_PORTS,
    )


def first_host(hosts: str) -> str:
    """Return the first of Slurm's list of hosts, such as `rack[1-2]node[004-007,9],login`."""
    first = re.split(r",(?![^\[]*\])", hosts, maxsplit=1)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


@cache
def slurm_address(host: str) -> str:
    """Return the address by which Slurm's daemons reach a node, whose name may not resolve.

    Without Slurm's client (in a container) that is the name.
    """
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        return host
    command = [scontrol, "show", "node", host, "-o"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SCONTROL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return host
    words = [word for word in done.stdout.split() if word.startswith(_ADDRESS)]
    return words[0].removeprefix(_ADDRESS) if words else host
