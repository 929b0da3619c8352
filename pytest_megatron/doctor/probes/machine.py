"""Looks at the machine: limits, disks, network, container, Slurm, compilers, GPUs, driver, torch.

What may crash or hang, such as the driver, torch and a collective, is asked in another process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from pytest_megatron.base.files import JsonValue, parse_json
from pytest_megatron.base.project import fix_of_owner
from pytest_megatron.base.schema import trusted
from pytest_megatron.base.text import describe_exit
from pytest_megatron.doctor.facts import (
    CollectiveProbe,
    Devices,
    Disk,
    MachineFacts,
    Package,
    Slurm,
    SystemView,
    Torch,
)
from pytest_megatron.gpu.health import GpuState, HealthWatch
from pytest_megatron.gpu.host import Gpu, Host
from pytest_megatron.process.host_name import host_name_problem

_MOST_SHOWN = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildAnswer:
    """Answer of a process.

    Attributes:
        values: The last line of its output that is a JSON object.
        text: Everything it printed, both streams.
        problem: Why there is no answer, None where there is one.
    """

    values: Mapping[str, JsonValue] = field(default_factory=dict)
    text: str = ""
    problem: str | None = None


def run(
    command: Sequence[str], *, limit_s: float, env: Mapping[str, str], cwd: Path | None = None
) -> ChildAnswer:
    """Run a command to its end or its time limit; nothing that it started is left."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=dict(env),
            cwd=cwd,
        )
    except OSError as error:
        return ChildAnswer(problem=f"{command[0]} cannot be started: {error.strerror}")
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return ChildAnswer(problem=f"no answer within {limit_s:g} s")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in a driver
            process.wait(timeout=1.0)
        if process.stdout is not None:
            process.stdout.close()
    text = output.decode(errors="replace")
    if process.returncode:
        said = text.strip().rpartition("\n")[2][:_MOST_SHOWN]
        ended = f"the process {describe_exit(process.returncode)}"
        return ChildAnswer(text=text, problem=f"{ended}{': ' if said else ''}{said}")
    return ChildAnswer(text=text)


def ask(
    python: Path,
    script: Path,
    *arguments: str,
    limit_s: float,
    env: Mapping[str, str],
    cwd: Path | None = None,
) -> ChildAnswer:
    """Have a Python run a script of ours, as if its text had been typed after `-c`."""
    command = [str(python), "-c", script.read_text(encoding="utf-8"), *arguments]
    answer = run(command, limit_s=limit_s, env=env, cwd=cwd)
    if answer.problem is not None:
        return answer
    for line in reversed(answer.text.splitlines()):
        with contextlib.suppress(ValueError):
            value = parse_json(line)
            if isinstance(value, dict):
                return ChildAnswer(values=value, text=answer.text)
    return ChildAnswer(
        text=answer.text, problem=f"no JSON in {answer.text.strip()[:_MOST_SHOWN]!r}"
    )


_PROGRAM_LIMIT_S = 10.0
_SLURM_PROGRAMS = ("sacct", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")
_OPTIONS = 3  # the field of a line of /proc/mounts
_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}
_CONTAINERS = (("/.dockerenv", "docker"), ("/run/.containerenv", "podman"))
_CONTAINER_VARIABLES = (
    *(("APPTAINER_NAME", "apptainer"), ("SINGULARITY_NAME", "singularity")),
    *(("ENROOT_ROOTFS", "enroot"), ("KUBERNETES_SERVICE_HOST", "kubernetes")),
    ("NVIDIA_PYTORCH_VERSION", "NGC PyTorch"),
)


def look_at_machine(system: SystemView) -> MachineFacts:
    """Return what the system around the environment is."""
    return MachineFacts(
        limits=_limits(system.read("/proc/self/limits")),
        shm_bytes=_shm_bytes(system),
        disks=tuple(_disks(system)),
        interfaces=tuple(_interfaces(system)),
        has_infiniband=any(system.under("/sys/class/infiniband").glob("*/ports/*/state")),
        container=container_of(system),
        host_problem=host_name_problem(),
    )


def _limits(text: str) -> dict[str, int | None]:
    """Return the soft limits by name: `Max open files` -> 1024."""
    found: dict[str, int | None] = {}
    for line in text.splitlines()[1:]:
        if match := re.match(r"(.+?)\s{2,}(\d+|unlimited)\s", line):
            found[match[1]] = None if match[2] == "unlimited" else int(match[2])
    return found


def _shm_bytes(system: SystemView) -> int | None:
    """Return the size of /dev/shm: as it was mounted, else as the file system reports it."""
    for line in reversed(system.read("/proc/mounts").splitlines()):
        fields = line.split()
        if len(fields) > _OPTIONS and fields[1] == "/dev/shm":  # noqa: S108 - the name of the mount
            if match := re.search(r"(?:^|,)size=(\d+)([kmg]?)", fields[_OPTIONS]):
                return int(match[1]) * _UNITS[match[2]]
            break
    try:
        return shutil.disk_usage(system.under("/dev/shm")).total  # noqa: S108
    except OSError:
        return None


def _disks(system: SystemView) -> Iterator[Disk]:
    """Yield the directories that trainings and installations write to."""
    cache = Path(system.env.get("XDG_CACHE_HOME") or system.home / ".cache")
    env = {**system.env, "TMPDIR": str(system.temporary)}
    uses = (
        ("run directories", "", system.project),
        ("temporary files", "TMPDIR", system.temporary),
        ("uv's cache", "UV_CACHE_DIR", cache / "uv"),
        ("pip's cache", "PIP_CACHE_DIR", cache / "pip"),
        ("Triton's cache", "TRITON_CACHE_DIR", system.home / ".triton"),
    )
    for use, variable, default in uses:
        path = Path(env.get(variable) or default)
        there = next(p for p in (path, *path.absolute().parents) if os.path.lexists(p))
        try:
            free = shutil.disk_usage(there).free
            tempfile.TemporaryFile(dir=there).close()
        except OSError as error:
            problem = error.strerror or str(error)
            yield Disk(use=use, variable=variable, path=path, problem=problem)
        else:
            disk = Disk(use=use, variable=variable, path=path)
            yield replace(disk, free_bytes=free)


def _interfaces(system: SystemView) -> Iterator[str]:
    """Yield the interfaces that are up, without loopback."""
    for directory in sorted(system.under("/sys/class/net").glob("*")):
        state = system.read(f"/sys/class/net/{directory.name}/operstate").strip()
        if directory.name != "lo" and state in ("up", "unknown"):
            yield directory.name


def container_of(system: SystemView) -> str | None:
    """Return what kind of container this is, None on a bare host."""
    for file, kind in _CONTAINERS:
        if system.under(file).exists():
            return kind
    for name, kind in _CONTAINER_VARIABLES:
        if name in system.env:
            return kind
    match = re.search(r"docker|kubepods|containerd|lxc|libpod", system.read("/proc/1/cgroup"))
    return match[0] if match else system.env.get("container")


def program(system: SystemView, name: str) -> Path | None:
    """Return a program of PATH; the environment's own directory counts."""
    path = f"{system.python.parent}:{system.env.get('PATH', '')}"
    found = shutil.which(name, path=path)
    return Path(found) if found else None


def look_at_checkout(system: SystemView) -> str | None:
    """Return the command that lets git read the project, None where it reads it or is not there."""
    git = program(system, "git")
    if git is None:
        return None
    command = [str(git), "-C", str(system.project), "rev-parse", "--git-dir"]
    return fix_of_owner(run(command, limit_s=_PROGRAM_LIMIT_S, env=system.env).text)


def look_at_slurm(system: SystemView) -> Slurm:
    """Return Slurm's client, and whether its controller answers."""
    programs = {name: path for name in _SLURM_PROGRAMS if (path := program(system, name))}
    config = system.env.get("SLURM_CONF")
    problem = None
    if programs and config and not Path(config).is_file():  # sinfo would look for it for a minute
        problem = f"SLURM_CONF is {config}, and there is no such file"
    elif "sinfo" in programs:
        command = [str(programs["sinfo"]), "--noheader", "--format=%P"]
        answer = run(command, limit_s=_PROGRAM_LIMIT_S, env=system.env)
        problem = answer.problem and answer.problem.replace("the process", "sinfo", 1)
    return Slurm(programs=tuple(programs), problem=problem)


SCRIPTS = Path(__file__).parents[1] / "scripts"
_NVML_LIMIT_S = 30.0
_IMPORT_SHARE = 5  # what of the time limit one module may take
# Source: /proc/driver/nvidia/version: `NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14`
_DRIVER = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)")
_RANK = re.compile(r"^\[rank\d+\]:")


def look_at_devices(system: SystemView) -> Devices:
    """Read the driver's files, and ask NVML."""
    text = system.read("/proc/driver/nvidia/version")
    match = _DRIVER.search(text)
    driver = match[1] if match else system.read("/sys/module/nvidia/version").strip() or None
    num_nodes = sum(1 for _ in system.under("/dev").glob("nvidia[0-9]*"))
    if driver is None or system.root != Path("/"):
        return Devices(driver=driver, num_nodes=num_nodes)
    answer = ask(
        Path(sys.executable), SCRIPTS / "gpus.py", limit_s=_NVML_LIMIT_S, env=dict(system.env)
    )
    if answer.problem is not None:
        return Devices(driver=driver, num_nodes=num_nodes, problem=answer.problem)
    gpus = trusted(Host, answer.values).gpus
    return Devices(driver=driver, num_nodes=num_nodes, gpus=gpus, ill=tuple(_ill(gpus)))


def _ill(gpus: Sequence[Gpu]) -> Iterator[str]:
    """Yield the problems of GPUs that NVML reports now."""
    with HealthWatch(gpus) as watch:
        for state in watch.health.before if watch.health else ():
            yield from _illness(state)


def _illness(state: GpuState) -> Iterator[str]:
    """Yield what is wrong with a GPU, or slows it down."""
    if state.ecc_volatile_uncorrected:
        yield f"{state.label} has {state.ecc_volatile_uncorrected} uncorrected ECC errors"
    if state.is_remap_pending:
        yield f"{state.label} waits for a reset to remap a row of its memory"
    if state.has_remap_failed:
        yield f"{state.label} could not remap a row of its memory"
    if state.throttles:
        yield f"{state.label} is slowed down: {', '.join(state.throttles)}"
    for process in state.processes:
        size = f"{(process.memory_bytes or 0) / 1e9:.1f} GB"
        yield f"{state.label} is in use by process {process.pid} ({size})"


def look_at_torch(
    system: SystemView, package: Package | None, modules: Sequence[str]
) -> Torch | None:
    """Return the environment's torch; None where there is none.

    Args:
        system: Where to look.
        package: The installed package; None without metadata.
        modules: Extension modules to import after it.
    """
    answer = ask(
        system.python,
        SCRIPTS / "torch_facts.py",
        str(max(1, int(system.import_limit_s / _IMPORT_SHARE))),
        *modules,
        limit_s=system.import_limit_s,
        env=system.env,
        cwd=system.project,
    )
    found = {"version": package.version if package is not None else "unknown", **answer.values}
    problem = answer.problem or cast("str | None", found.get("problem"))
    if package is None and problem is not None and "No module named 'torch'" in problem:
        return None
    return replace(trusted(Torch, found), problem=problem)


def try_collectives(system: SystemView, num_gpus: int) -> Iterator[CollectiveProbe]:
    """Yield an all_reduce of two ranks and of all GPUs; of two ranks with gloo without GPUs."""
    if num_gpus == 0:
        yield _try_all_reduce(system, "gloo", 2)
        return
    for world_size in sorted({min(2, num_gpus), num_gpus}):
        yield _try_all_reduce(system, "nccl", world_size)


def _try_all_reduce(system: SystemView, backend: str, world_size: int) -> CollectiveProbe:
    """Have new ranks run an all_reduce; every rank is gone afterwards."""
    script = (SCRIPTS / "all_reduce.py").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(dir=system.temporary) as directory:
        meeting, ranks = Path(directory) / "store", []
        try:
            for rank in range(world_size):
                log = Path(directory, f"{rank}.log").open("w")  # noqa: SIM115 - closed below
                with log:
                    words = [backend, str(rank), str(world_size), str(meeting)]
                    process = subprocess.Popen(
                        [str(system.python), "-c", script, *words],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=dict(system.env),
                        cwd=system.project,
                    )
                ranks.append(process)
            problem = _wait(ranks, Path(directory), system.collective_limit_s)
        except OSError as error:
            problem = f"{system.python} cannot be started: {error.strerror}"
        finally:
            for process in ranks:
                process.kill()
            for process in ranks:
                process.wait()
    return CollectiveProbe(backend=backend, world_size=world_size, problem=problem)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], logs: Path, limit_s: float) -> str | None:
    """Return why not all ranks ended well; the first that failed, or those that did not end."""
    give_up_at = time.monotonic() + limit_s
    while (left := [process.poll() for process in ranks]) and None in left:
        if any(left):
            break
        if time.monotonic() > give_up_at:
            late = [str(rank) for rank, code in enumerate(left) if code is None]
            return f"no end within {limit_s:g} s on ranks {', '.join(late)}"
        time.sleep(0.05)
    for rank, code in enumerate(left):
        if code:
            text = (logs / f"{rank}.log").read_text(encoding="utf-8", errors="replace")
            return f"rank {rank} {describe_exit(code)}: {last_words(text)}"
    return None


def last_words(text: str) -> str:
    """Return the last exception with NCCL's own reason, else the last line.

    Source: torch puts `[rank0]: ` before an exception, `[rank0]:[W` before a warning;
    torch/csrc/distributed/c10d/NCCLUtils.hpp, `Last error:`.
    """
    lines = [_RANK.sub("", line).strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("[W")]
    raised = [n for n, line in enumerate(lines) if re.match(r"\S*(Error|Exception)\b", line)]
    if not raised:
        return (lines or ["it printed nothing"])[-1][:_MOST_SHOWN]
    said = lines[raised[-1]][:_MOST_SHOWN]
    for line, reason in itertools.pairwise(lines[raised[-1] :]):
        if line == "Last error:":
            return f"{said}: {reason[:_MOST_SHOWN]}"
    return said
