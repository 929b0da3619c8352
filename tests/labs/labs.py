"""A real Slurm and a real dockerd for tests, each with a keeper that ends it whatever happens.

The fixtures are for every test below this directory's parent (the root's conftest.py names this
module). A lab starts with the first test that asks, once for each process of pytest, in a directory
and on ports of its own; a machine that cannot have it skips the test and says what is missing.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

DEADLINE_S = 60.0
NUM_NODES = 4
GPUS_PER_NODE = 8
IMAGE = "hostusr:1"
_HERE = Path(__file__).parent
_SCRIPTS = Path(sys.executable).parent  # of this environment
_KEEPER = _HERE / "lab_keeper.py"
_POLL_S = 0.05
# Below the ports that sessions of several nodes meet at, and apart by more than a lab needs.
_PORTS = range(10_000, 20_000, 40)
_REQUIRED = "PYTEST_MEGATRON_LABS"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")


def wait_until(is_true: Callable[[], object], what: str, limit_s: float = DEADLINE_S) -> None:
    """Wait for a sign.

    Raises:
        AssertionError: It did not come.
    """
    deadline = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}"
        time.sleep(_POLL_S)


class Keeper:
    """The process that has the lab's daemons, and ends them when this one is gone."""

    def __init__(self, script: Path, env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(_KEEPER), str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            cwd="/",
            text=True,
            start_new_session=True,  # what ends pytest's group leaves it time to clean up
        )

    def do(self, *words: str) -> None:
        """Have the lab's script do something.

        Raises:
            LabError: It could not.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(words) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if answer["exit_code"]:
            raise LabError(f"{' '.join(words)}: {answer['output'].strip()}")

    def close(self) -> None:
        """End the lab; returns when nothing of it is left."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.wait(DEADLINE_S)


class LabError(Exception):
    """A lab did not do what it was told."""


class SlurmLab:
    """Slurm with four nodes of 16 CPUs and 8 pretend GPUs each, all on this machine.

    Attributes:
        env: What programs need in their environment: this one's, without an outer Slurm's.
    """

    def __init__(self, directory: Path, port: int) -> None:
        self.directory = directory
        self._config = directory / "etc" / "slurm.conf"
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "PYTEST_"))}
        self.env: dict[str, str] = {
            **kept,
            "SLURM_CONF": str(self._config),
            "PATH": f"{directory}/bin:{_SCRIPTS}:{kept.get('PATH', os.defpath)}",
        }
        own = {
            "SLURM_LAB_DIR": str(directory),
            "SLURM_LAB_PORT": str(port + 1),
            "SLURM_LAB_NODES": str(NUM_NODES),
            "SLURM_LAB_GPUS": str(GPUS_PER_NODE),
            "SLURM_LAB_FIRST_JOB": str(random.randrange(1, 50_000)),
        }
        self._keeper = Keeper(_HERE / "slurm_lab.sh", kept | own)

    def start(self) -> None:
        """Start what is not running, and wait until every node can be used."""
        self._keeper.do("start")

    def close(self) -> None:
        """End it with all jobs, and remove its files."""
        self._keeper.close()

    def run(
        self, *words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end."""
        return subprocess.run(
            words,
            env={**self.env, **(env or {})},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=DEADLINE_S,
        )

    def ask(self, *words: str) -> str:
        """Return what a program that must not fail prints."""
        done = self.run(*words)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        return done.stdout

    def submit(self, *words: str, cwd: Path | None = None) -> int:
        """Submit with these words of `sbatch`; return the number of the job."""
        done = self.run("sbatch", "--parsable", *words, cwd=cwd)
        assert done.returncode == 0, done.stderr
        return int(done.stdout.partition(";")[0])

    def job(self, job: int | str) -> dict[str, str]:
        """Return what `scontrol` says of a job."""
        words = self.ask("scontrol", "show", "job", "-o", str(job)).splitlines()[0].split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def state(self, job: int | str) -> str:
        """Return the state of a job: `RUNNING`."""
        return self.job(job)["JobState"]

    def wait_for(self, job: int | str, *states: str, limit_s: float = DEADLINE_S) -> str:
        """Wait until a job is in one of these states, by default at its end; return which."""
        wanted, deadline = states or ENDED, time.monotonic() + limit_s
        while (state := self.state(job)) not in wanted:
            assert time.monotonic() < deadline, f"job {job} is {state}, not {' or '.join(wanted)}"
            time.sleep(_POLL_S)
        return state

    def cancel_all(self) -> None:
        """Cancel what is queued or runs, and wait until nothing does."""
        numbers = self.ask("squeue", "-h", "-o", "%A").split()
        if numbers:
            self.run("scancel", *numbers)
            wait_until(lambda: not self.ask("squeue", "-h", "-o", "%A").split(), "no job is left")

    def kill_node(self, number: int) -> None:
        """Kill a node's daemon and everything that runs on it, as a power cut does."""
        self._keeper.do("kill-node", str(number))

    def start_node(self, number: int) -> None:
        """Start a killed node again."""
        self._keeper.do("start-node", str(number))

    def kill_controller(self) -> None:
        """Kill slurmctld once it has saved what it knows (it does so every few seconds).

        Jobs go on without it. One that was not saved yet would be forgotten for good.
        """
        saved, word = self.directory / "state" / "job_state", str(time.time_ns())

        def is_saved() -> bool:
            return saved.exists() and self.run("grep", "-qF", word, str(saved)).returncode == 0

        def is_told() -> bool:
            """Whether one job has the word, or none is left: the first may end meanwhile."""
            jobs = self.ask("squeue", "-h", "-r", "-o", "%i").split()
            words = ("scontrol", "update", f"job={jobs[0]}", f"comment={word}") if jobs else ()
            return not jobs or self.run(*words).returncode == 0

        if self.ask("squeue", "-h", "-o", "%i").split():
            wait_until(is_told, "a job is marked")
            wait_until(
                lambda: is_saved() or not self.ask("squeue", "-h", "-o", "%i").split(),
                "jobs are saved",
            )
        self._keeper.do("kill-controller")

    def start_controller(self) -> None:
        """Start slurmctld, and wait until it answers."""
        self._keeper.do("start-controller")

    def fix(self) -> None:
        """Bring back what was killed and end all jobs: as after the start, but for old jobs."""
        self.start_controller()
        for number in range(1, NUM_NODES + 1):  # or jobs on dead nodes end only when it is noticed
            self.start_node(number)
        self.cancel_all()
        self.start()


class DockerLab:
    """A dockerd of its own.

    Its image `hostusr:1` is empty: mount the host's `/usr`, and whatever else a program needs.

    Attributes:
        env: What programs need in their environment to talk to it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.host = f"unix://{directory}/docker.sock"
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("DOCKER_", "PYTEST_"))}
        self.env: dict[str, str] = {**kept, "DOCKER_HOST": self.host}
        script = _HERE / "dockerd_lab.sh"
        self._keeper = Keeper(script, kept | {"DOCKERD_LAB_DIR": str(directory)})

    def start(self) -> None:
        """Start it unless it runs."""
        self._keeper.do("start")

    def stop(self) -> None:
        """Remove all containers and end the daemon, which `start` brings back."""
        self._keeper.do("stop")

    def close(self) -> None:
        """End it with all containers, and remove its files."""
        self._keeper.close()

    def docker(self, *words: str) -> str:
        """Return what `docker` prints, which must not fail."""
        done = subprocess.run(
            ["docker", *words],  # noqa: S607 - the one that the lab found
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, f"docker {' '.join(words)}: {done.stderr}"
        return done.stdout

    def containers(self) -> list[str]:
        """Return the names of all containers, ended ones too."""
        return self.docker("ps", "--all", "--format", "{{.Names}}").split()


@contextmanager
def slurm() -> Iterator[SlurmLab]:
    """Start a Slurm.

    Raises:
        LabError: It did not come up.
    """
    with _directory("slurm-lab-") as directory, _claimed_ports() as port:
        lab = SlurmLab(directory, port)
        try:
            lab.start()
            yield lab
        finally:
            lab.close()


@contextmanager
def dockerd() -> Iterator[DockerLab]:
    """Start a dockerd.

    Raises:
        LabError: It did not come up.
    """
    with _directory("dockerd-lab-") as directory:
        lab = DockerLab(directory)
        try:
            lab.start()
            yield lab
        finally:
            lab.close()


@pytest.fixture(scope="session")
def slurm_lab() -> Iterator[SlurmLab]:
    """A Slurm that all tests of this process share; who kills nodes calls `fix` afterwards."""
    missing = _missing("slurm_lab.sh")
    if missing:
        skip(f"needs Slurm: {missing} not installed; as root: tests/labs/slurm_lab.sh install")
    with slurm() as lab:
        yield lab


@pytest.fixture(scope="session")
def docker_lab() -> Iterator[DockerLab]:
    """A dockerd that all tests of this process share."""
    missing = _missing("dockerd_lab.sh")
    if missing:
        skip(f"needs Docker: {missing} not installed; as root: tests/labs/dockerd_lab.sh install")
    if os.geteuid() != 0:
        skip("needs Docker: dockerd runs as root only, this is another user; run pytest as root")
    try:
        with dockerd() as lab:
            yield lab
    except LabError as error:
        skip(f"needs Docker: this machine cannot run it; {error}")


def _missing(script: str) -> str:
    """Return the Debian packages that a lab lacks."""
    done = subprocess.run(
        [_HERE / script, "missing"], capture_output=True, text=True, check=True, timeout=DEADLINE_S
    )
    return ", ".join(done.stdout.split())


def skip(reason: str) -> NoReturn:
    """Skip a test that this machine cannot run, or fail it where labs are required."""
    if os.environ.get(_REQUIRED) == "required":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@contextmanager
def _directory(prefix: str) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _claimed_ports() -> Iterator[int]:
    """Return a port that stays taken; the 39 above it are this lab's, as every lab claims so."""
    while True:
        port = random.choice(_PORTS)
        try:
            claim = socket.create_server(("127.0.0.1", port))
        except OSError:
            continue
        with claim:
            yield port
            return
