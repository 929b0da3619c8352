"""`guests/tiny_agent.py` does what torch's agent does, as far as a workload is judged by it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny_project import AGENT, GUEST, wait_until

from pytest_megatron.runs.layout import PhaseDirs
from pytest_megatron.triage.api import triage
from pytest_megatron.workloads.training.run.runner import settle_logs

AGENTS = {"torch": ("-m", "torch.distributed.run"), "tiny": (str(AGENT),)}
OPTIONS = (
    *("--standalone", "--local-addr", "127.0.0.1", "--max-restarts", "0", "--nproc-per-node", "2"),
    *("--redirects", "3", "--tee", "1:3"),
)
TRAIN = (str(GUEST), "--train-iters", "4")
PRINT_ENV = "import json, os, sys; print(json.dumps(dict(os.environ))); print('e', file=sys.stderr)"
# Of one launch.
OF_A_LAUNCH = re.compile(
    r"MASTER_PORT|TORCHELASTIC_(RUN_ID|ERROR_FILE)|OUTPUT_PATH|PYTEST_MEGATRON_METRICS|TINY_TRAIN_STATE"
)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A launch that ended: what is compared of it, and what its ranks printed to stdout."""

    returncode: int
    teed: list[str]
    failures: list[tuple[str, int | None, dict[str, str]]]
    logs: list[str]
    stdout: list[str]


def launch(agent: str, root: Path, *program: str, ends_by: signal.Signals | None = None) -> Ended:
    dirs = PhaseDirs(root=root / agent)
    dirs.logs.mkdir(parents=True)
    given = {"TINY_TRAIN_STATE": str(dirs.root / "state"), "OUTPUT_PATH": str(dirs.root)}
    given["PYTEST_MEGATRON_METRICS"] = str(dirs.metrics_lines)
    with dirs.launcher_log.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *AGENTS[agent], *OPTIONS, "--log-dir", str(dirs.logs), *program],
            env=os.environ | given,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        if ends_by is not None:
            wait_until((dirs.root / "state.up").exists, "the hang")
            # torch's agent copies nothing if it is ended while it still starts its copiers.
            wait_until(lambda: "[default1]" in dirs.launcher_log.read_text(), "a copied line")
            process.send_signal(ends_by)
        process.wait(timeout=120)
    settle_logs(dirs)
    failures = [group.first for group in triage([dirs.root]).groups]
    lines = dirs.launcher_log.read_text().splitlines()
    return Ended(
        returncode=process.returncode,
        teed=sorted(line for line in lines if line.startswith("[default")),
        failures=[  # torch's agent raises an exception of its own where it is ended itself
            (f.headline.partition(", ")[0], f.root_rank, f.exits)
            for f in failures
            if f.root_rank is not None
        ],
        logs=sorted(str(path.relative_to(dirs.logs)) for path in dirs.logs.rglob("*")),
        stdout=[(dirs.logs / str(rank) / "stdout.log").read_text() for rank in (0, 1)],
    )


@pytest.mark.parametrize(
    ("fault", "ends_by", "returncode"),
    [
        pytest.param("none@1", None, 0, id="sound"),
        pytest.param("crash@2:1", None, 1, id="exception"),
        pytest.param("kill@3:0", None, 1, id="SIGKILL"),
        pytest.param("hang@2:1", signal.SIGTERM, 1, id="ended from outside"),
    ],
)
def test_it_ends_and_leaves_what_torch_leaves(
    tmp_path: Path, fault: str, ends_by: signal.Signals | None, returncode: int
) -> None:
    torchs, tinys = (
        launch(agent, tmp_path, *TRAIN, "--fault", fault, ends_by=ends_by) for agent in AGENTS
    )
    assert tinys == torchs
    assert tinys.returncode == returncode


def test_a_rank_sees_the_variables_that_torch_sets(tmp_path: Path) -> None:
    program = tmp_path / "print_env.py"
    program.write_text(PRINT_ENV)

    def envs(agent: str) -> list[Mapping[str, str]]:
        found = [json.loads(text) for text in launch(agent, tmp_path, str(program)).stdout]
        return [{k: v for k, v in e.items() if not OF_A_LAUNCH.fullmatch(k)} for e in found]

    assert envs("tiny") == envs("torch")
