"""Starts the launchers of several nodes on one machine, and ends as the worst of them.

Started as a file: `node_agents.py NODES RANKS_PER_NODE TEE COMMAND...`. Each launcher gets the
command with `{node}` filled in and, behind `--nnodes N`, its node rank, its copied ranks and one
common address to meet at. A node whose launcher fails fails the whole; the others may take
`GRACE_S` more and are then stopped. What the launchers print is copied to stdout, with the rank
over all nodes in front of a rank's line, `[default5]:`, and the node in front of any other,
`[node1]: `. SIGTERM and SIGINT go on to every launcher. Standard library only.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType

GRACE_S = 10.0
_POLL_S = 0.05
_RANK_LINE = re.compile(rb"\[default(\d+)\]:")
# What torch's agent says of a rank that died; it has no other number of it there.
_FAILED = re.compile(rb"(failed \(exitcode: -?\d+\) local_rank: )(\d+)")
_PRINTING = threading.Lock()


def main(arguments: Sequence[str]) -> int:
    """Start, watch and end the launchers."""
    num_nodes, per_node, tee = int(arguments[0]), int(arguments[1]), arguments[2]
    port = free_port()
    agents = [
        subprocess.Popen(
            node_command(arguments[3:], node, per_node, tee, ("127.0.0.1", port)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **devices_of(node, num_nodes, per_node)},
        )
        for node in range(num_nodes)
    ]

    def stop(number: int, _frame: FrameType | None) -> None:
        for agent in agents:
            agent.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    copiers = [
        threading.Thread(target=copy_lines, args=(agent, node, per_node), daemon=True)
        for node, agent in enumerate(agents)
    ]
    for copier in copiers:
        copier.start()
    code = watch(agents)
    for copier in copiers:
        copier.join(timeout=GRACE_S)
    return code


def node_command(
    command: Sequence[str], node: int, per_node: int, tee: str, endpoint: tuple[str, int]
) -> list[str]:
    """Return the launcher's command for one node; all of them meet at the endpoint of node 0."""
    filled = [word.replace("{node}", str(node)) for word in command]
    at = filled.index("--nnodes") + 2
    ranks = range(node * per_node, (node + 1) * per_node)
    chosen = ranks if tee == "all" else [int(r) for r in tee.split(",") if r and int(r) in ranks]
    copied = ",".join(f"{rank - node * per_node}:3" for rank in chosen)
    host, port = endpoint
    meeting = ["--node-rank", str(node), "--master-addr", host, "--master-port", str(port)]
    return [*filled[:at], *meeting, *(["--tee", copied] if copied else []), *filled[at:]]


def devices_of(node: int, num_nodes: int, per_node: int) -> dict[str, str]:
    """Return which of the GPUs that all nodes may see is for the ranks of this one."""
    devices = [d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
    if len(devices) < num_nodes * per_node:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[node * per_node : (node + 1) * per_node])}


def free_port() -> int:
    """Return a port that no program listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def copy_lines(agent: subprocess.Popen[bytes], node: int, per_node: int) -> None:
    """Copy what a launcher prints, line by line, with ranks as they are over all nodes."""
    assert agent.stdout is not None
    for line in agent.stdout:
        text = over_all_nodes(line, node, per_node)
        with _PRINTING:
            sys.stdout.buffer.write(text)
            sys.stdout.buffer.flush()


def over_all_nodes(line: bytes, node: int, per_node: int) -> bytes:
    """Return a line of the launcher of one node as it is printed for all of them."""
    first = node * per_node
    found = _RANK_LINE.match(line)
    if found is not None:
        return b"[default%d]:" % (int(found[1]) + first) + line[found.end() :]
    text = _FAILED.sub(lambda match: match[1] + b"%d" % (int(match[2]) + first), line)
    return b"[node%d]: " % node + text


def watch(agents: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for every launcher; return the first exit code that was not 0, or 0."""
    deadline, first = float("inf"), 0
    ended: set[int] = set()
    while len(ended) < len(agents):
        for node, agent in enumerate(agents):
            code = agent.poll()
            if code is None or node in ended:
                continue
            ended.add(node)
            if code and not first:
                first = code
                deadline = time.monotonic() + GRACE_S
                say(f"node {node} ended with exit code {code}")
        if time.monotonic() > deadline:
            say(f"nodes that did not end within {GRACE_S:g} s are stopped")
            for agent in agents:
                if agent.poll() is None:
                    agent.terminate()
            deadline = float("inf")
        time.sleep(_POLL_S)
    return max(first, 0) or int(first != 0)  # a launcher that was killed has a negative one


def say(text: str) -> None:
    """Print one line of our own."""
    with _PRINTING:
        sys.stdout.write(f"[nodes]: {text}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
