"""Runs one case with real processes and leaves what a person would have: logs, in many forms.

The way of starting is a form of the case: as our local executor starts a training, as plain
`torch.distributed.run` does, into one mixed file, under a step of Slurm, or through this project's
own pytest session. Knows nothing of what the logs should be judged to mean.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from failure_cases import Case
from failure_warm import WarmTasks
from slurm_step import Step, run_step
from ways_system import FULL_DISK

from pytest_megatron.base.files import JsonValue
from pytest_megatron.runs.layout import PhaseDirs
from pytest_megatron.workloads.training.run.runner import settle_logs

HERE = Path(__file__).parent
TAG = "FAILURES_CASE"  # in the environment of every process of a case
STAGE_S = 120.0  # for one case; nothing that is meant to end takes so long
SMALL_DISK_BYTES = 128 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where and how cases run.

    Attributes:
        device: `cpu` (gloo) or `cuda` (NCCL).
        full_disk: A directory on a file system with no room, or None where none can be made.
        warm: Runs the steps of Slurm, where they shall start in no time.
    """

    root: Path
    device: str
    num_ranks: int
    full_disk: Path | None
    warm: WarmTasks | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """What a case left.

    Attributes:
        evidence: What is given to triage: a directory, or a zip file.
        returncode: Of whatever started the ranks; None where it had to be killed.
        num_left: Processes of the case that outlived it, and were killed.
    """

    evidence: Path
    returncode: int | None
    num_left: int
    duration_s: float


def run_stage(case: Case, stage: Stage) -> Staged:
    """Run one case to its end."""
    home = stage.root / case.id
    shutil.rmtree(home, ignore_errors=True)
    evidence, work = home / "logs", home / "work"
    for directory in (evidence, work):
        directory.mkdir(parents=True)
    work.chmod(0o777)
    tag = uuid.uuid4().hex
    started = time.monotonic()
    returncode = _FORMS[case.form](case, stage, _Place(evidence=evidence, work=work, tag=tag))
    num_left = _sweep(tag)
    left = _finish(case, evidence)
    return Staged(
        evidence=left,
        returncode=returncode,
        num_left=num_left,
        duration_s=time.monotonic() - started,
    )


@contextmanager
def full_disk() -> Iterator[Path | None]:
    """Mount a small disk that is full, where this user may mount one."""
    directory = Path(tempfile.mkdtemp(prefix="failures-disk-"))
    options = ("-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES}", "tmpfs", str(directory))
    is_mounted = (
        subprocess.run(["mount", *options], check=False, capture_output=True).returncode == 0
    )
    try:
        yield directory if is_mounted else None
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(directory)], check=False, capture_output=True)
        with suppress(OSError):
            directory.rmdir()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    evidence: Path
    work: Path
    tag: str


def _training(case: Case, stage: Stage, place: _Place) -> list[str]:
    program = str(HERE / ("training.py" if case.program is None else case.program))
    words = ["--fault", case.fault, "--guilty", case.guilty_text, "--device", stage.device]
    return [program, *words, "--work", str(place.work), *case.arguments]


def _env(case: Case, stage: Stage, place: _Place) -> dict[str, str]:
    own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", TAG)
    env = {k: v for k, v in os.environ.items() if k not in own}
    if stage.device == "cuda":
        env |= {"NCCL_NVLS_ENABLE": "0", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "20"}
        env |= {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "3000"}
    if stage.full_disk is not None:
        env[FULL_DISK] = str(stage.full_disk)
    return env | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", TAG: place.tag} | dict(case.env)


def _run(words: Sequence[str], env: Mapping[str, str], place: _Place, output: str) -> int | None:
    """Run a command to its end, everything that it prints in one file."""
    with (place.evidence / output).open("wb") as file:
        process = subprocess.Popen(
            words,
            env=dict(env),
            cwd=place.work,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(STAGE_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            return None


def _elastic(stage: Stage, case: Case, *more: str) -> list[str]:
    words = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "0"]
    rendezvous = case.rendezvous or ("--standalone",)
    return [*words, *rendezvous, "--nproc-per-node", str(stage.num_ranks), *more]


def _torch(case: Case, stage: Stage, place: _Place, **env: str) -> int | None:
    """Per-rank logs in torch's own tree, the last rank also in the launcher's log."""
    tee = ("--redirects", "3", "--tee", f"{stage.num_ranks - 1}:3")
    words = _elastic(stage, case, "--log-dir", str(place.evidence / "logs"), *tee)
    with _occupied(case) as port:
        words = [word.replace("{port}", str(port)) for word in words]
        command = [*words, *_training(case, stage, place)]
        return _run(command, _env(case, stage, place) | env, place, "launcher.log")


def _ours(case: Case, stage: Stage, place: _Place) -> int | None:
    """As our local executor leaves it: `logs/<rank>/`, `launcher.log`; and `error.json`."""
    returncode = _torch(case, stage, place, FAILURES_RECORD="1")
    settle_logs(PhaseDirs(root=place.evidence))
    return returncode


def _mixed(case: Case, stage: Stage, place: _Place) -> int | None:
    """One file, each line with `[default3]:` in front."""
    logs = place.work / "elastic"
    words = _elastic(stage, case, "--log-dir", str(logs), "--tee", "3")
    command = [*words, *_training(case, stage, place)]
    return _run(command, _env(case, stage, place), place, "output.log")


def _single(case: Case, stage: Stage, place: _Place) -> int | None:
    """One file in which the ranks are told apart by what they say themselves."""
    command = [*_elastic(stage, case), *_training(case, stage, place)]
    return _run(command, _env(case, stage, place), place, "train.log")


def _slurm(case: Case, stage: Stage, place: _Place) -> int | None:
    """A step of Slurm: ranks without an agent, labelled lines or a file a task."""
    env = _env(case, stage, place)
    with _held_port() as port:
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        step = Step(
            words=(sys.executable, *_training(case, stage, place)),
            env=env,
            directory=str(place.evidence),
            num_tasks=stage.num_ranks,
            is_labelled=case.form == "srun",
            limit_s=case.limit_s or STAGE_S,
            reason=case.limit_reason,
        )
        return run_step(step) if stage.warm is None else stage.warm.run(step)


def _session(case: Case, stage: Stage, place: _Place) -> int | None:
    """A pytest session of this project, over a workload that needs no torch in its ranks."""
    sys.path[:0] = [
        str(HERE.parent / name)
        for name in ("labs", "unit_tests/workloads/items", "unit_tests/gangs/sessions")
    ]
    from tiny_project import Project

    project = Project(root=place.work, gpus=stage.num_ranks, has_torch=True)
    faults: list[JsonValue] = [case.fault]
    name = project.case("workload", fault=faults if case.fault else None)
    project.row(name, time_limit=[int(case.limit_s or 300)])
    if case.is_golden_other:
        project.golden(name, changes={7: 0.5})
    words = [sys.executable, "-m", "pytest", "-p", "pytest_megatron.plugin", "recipes"]
    env = _env(case, stage, place) | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), env.get("PYTHONPATH", "")])
    run_dir = place.evidence / "run"
    return _run([*words, "--run-dir", str(run_dir)], env, place, "pytest.log")


_FORMS = {
    "torch": _torch,
    "zip": _torch,
    "ours": _ours,
    "mixed": _mixed,
    "single": _single,
    "srun": _slurm,
    "tasks": _slurm,
    "session": _session,
}


def _finish(case: Case, evidence: Path) -> Path:
    """Pack the logs where that is the form; returns what is given to triage."""
    if case.form != "zip":
        return evidence
    packed = evidence.with_suffix(".zip")
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(evidence.rglob("*")):
            if path.is_file():
                archive.write(path, path.relative_to(evidence.parent))
    return packed


@contextmanager
def _occupied(case: Case) -> Iterator[int]:
    """Hold a port that the case wants to be taken; else name a free one."""
    if not case.is_port_taken:
        with _held_port() as port:
            yield port
        return
    with socket.create_server(("0.0.0.0", 0)) as server:  # noqa: S104 - as a real one would
        yield server.getsockname()[1]


@contextmanager
def _held_port() -> Iterator[int]:
    """Keep a port from other processes; torch's store can listen there."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def _sweep(tag: str) -> int:
    """Kill what is left of a case; return how many there were, helpers of Python left out."""
    left = [process for process in psutil.process_iter() if _has_tag(process, tag)]
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=10)
    return sum(not re.search(r"resource_tracker", " ".join(_words(p))) for p in left)


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _has_tag(process: psutil.Process, tag: str) -> bool:
    try:
        return process.environ().get(TAG) == tag
    except psutil.Error:
        return False
