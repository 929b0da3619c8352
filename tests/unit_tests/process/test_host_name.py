"""Hosts whose own name leads nowhere, or elsewhere; each in a UTS namespace of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

# Names that are addresses need no hosts file: 192.0.2.0/24 and .invalid are nobody's.
NAMES = ("localhost", "127.0.0.1", "192.0.2.9", "12345", "no-such-host.invalid")
LOOKS = """
import json, os, socket, subprocess, sys
from pathlib import Path
from pytest_megatron.process.guarded import GuardedProcess
from pytest_megatron.process.host_name import host_name_problem
from pytest_megatron.workloads.recipe.case import Launcher
from pytest_megatron.workloads.training.plan.plan import Ranks, start_words, started

problems = {}
for name in json.loads(sys.argv[1]):
    socket.sethostname(name)
    host_name_problem.cache_clear()
    problems[name] = host_name_problem()
print(json.dumps(problems))
here = Path.cwd()
own = Ranks(
    starter=Launcher.TORCHRUN, num_nodes=1, per_node=1, tee_ranks=None, logs=here / "planned"
)
env = {name: value for name, value in os.environ.items() if name != "PET_LOCAL_ADDR"}
planned = start_words(started(sys.executable, own, "rank.py", []))
with Path("planned.log").open("w") as log:  # it needs no variable
    subprocess.run(planned, env=env, stdout=log, stderr=log, check=True, timeout=60)
script = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "rank.py")
for name, words, more in (("script", script, {}), ("given", ("env",), {"PET_LOCAL_ADDR": "::1"})):
    log = here / f"{name}.log"
    with GuardedProcess(words, env=env | more, cwd=here, output=log, grace_s=1) as process:
        ended = process.poll(60)
    assert ended is not None and ended.returncode == 0, log.read_text()
"""


def test_one_node_meets_on_loopback_whatever_its_name(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text("import os; print('at', os.environ['MASTER_ADDR'])\n")
    command = ["unshare", "--uts", sys.executable, "-c", LOOKS, json.dumps(NAMES)]
    try:
        done = subprocess.run(
            command,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        pytest.skip("there is no unshare")
    if "unshare failed" in done.stderr:
        pytest.skip(f"no such namespace: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    problems = json.loads(done.stdout)
    assert [problems[name] for name in NAMES[:-1]] == [
        *(None, None),
        "'192.0.2.9' is 192.0.2.9, an address that no interface has",
        "'12345' is 0.0.48.57, an address that no interface has",
    ]
    assert problems[NAMES[-1]].startswith(f"{NAMES[-1]!r}: ")
    assert "at 127.0.0.1" in (tmp_path / "planned.log").read_text()  # by its argument
    assert "at 127.0.0.1" in (tmp_path / "script.log").read_text()  # by a variable
    assert "PET_LOCAL_ADDR=::1\n" in (tmp_path / "given.log").read_text()  # the user's stays
