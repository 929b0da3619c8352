"""Looks at the machine: limits, disks, shared memory, network, container, Slurm, compilers.

What may crash or hang is asked in another process, for a line of JSON.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pytest_megatron.base.files import JsonValue, parse_json
from pytest_megatron.base.project import mend_of_owner
from pytest_megatron.base.text import describe_exit
from pytest_megatron.doctor.facts import (
    UNKNOWN,
    Clock,
    Disk,
    MachineFacts,
    Slurm,
    SystemView,
    Toolkit,
)

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
_LOOPBACK = ("::ffff:127.0.0.1", 0, 0, 0)  # as an address of both kinds, which torch tries first
_CONNECT_LIMIT_S = 3.0
_SLURM_PROGRAMS = ("sacct", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")
_OPTIONS = 3  # the field of a line of /proc/mounts
_LOADED_FROM = ("TMPDIR", "TRITON_CACHE_DIR")  # compiled code is loaded from these
_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}
_CUDA_LIBRARIES = re.compile(r"lib(?:cudart|cudnn|nccl|cublas|cublasLt|nvrtc)\.so\.\d+$")
_CONTAINERS = (("/.dockerenv", "docker"), ("/run/.containerenv", "podman"))
_CONTAINER_VARIABLES = (
    *(("APPTAINER_NAME", "apptainer"), ("SINGULARITY_NAME", "singularity")),
    *(("ENROOT_ROOTFS", "enroot"), ("KUBERNETES_SERVICE_HOST", "kubernetes")),
    ("NVIDIA_PYTORCH_VERSION", "NGC PyTorch"),
)


def look_at_machine(places: SystemView) -> MachineFacts:
    """Return what the system around the environment is."""
    return MachineFacts(
        limits=_limits(places.read("/proc/self/limits")),
        shm_bytes=_shm_bytes(places),
        disks=tuple(_disks(places)),
        interfaces=tuple(_interfaces(places)),
        links=tuple(sorted(file.name for file in places.under("/sys/class/net").glob("*"))),
        infiniband=_infiniband(places),
        container=container_of(places),
        ephemeral_ports=_port_range(places.read("/proc/sys/net/ipv4/ip_local_port_range")),
        port_problem=_port_problem(places.rendezvous_port),
        host_problem=_host_problem(),
        lookup_s=_lookup_s(),
        clock=_clock(places),
        lost_temporary=_lost_temporary(places),
        shadows=tuple(_shadows(places.env)),
    )


def _limits(text: str) -> dict[str, int | None]:
    """Return the soft limits by name: `Max open files` -> 1024."""
    found: dict[str, int | None] = {}
    for line in text.splitlines()[1:]:
        if match := re.match(r"(.+?)\s{2,}(\d+|unlimited)\s", line):
            found[match[1]] = None if match[2] == "unlimited" else int(match[2])
    return found


def _shm_bytes(places: SystemView) -> int | None:
    """Return the size of /dev/shm: as it was mounted, else as the file system reports it."""
    for line in reversed(places.read("/proc/mounts").splitlines()):
        fields = line.split()
        if len(fields) > _OPTIONS and fields[1] == "/dev/shm":  # noqa: S108 - the name of the mount
            if match := re.search(r"(?:^|,)size=(\d+)([kmg]?)", fields[_OPTIONS]):
                return int(match[1]) * _UNITS[match[2]]
            break
    try:
        return shutil.disk_usage(places.under("/dev/shm")).total  # noqa: S108
    except OSError:
        return None


def _disks(places: SystemView) -> Iterator[Disk]:
    """Yield the directories that trainings and installations write to."""
    cache = Path(places.env.get("XDG_CACHE_HOME") or places.home / ".cache")
    env = {**places.env, "TMPDIR": str(places.temporary)}
    uses = (
        ("run directories", "", places.project),
        ("temporary files", "TMPDIR", places.temporary),
        ("uv's cache", "UV_CACHE_DIR", cache / "uv"),
        ("pip's cache", "PIP_CACHE_DIR", cache / "pip"),
        ("Triton's cache", "TRITON_CACHE_DIR", places.home / ".triton"),
    )
    for use, variable, default in uses:
        path = Path(env.get(variable) or default)
        there = next(p for p in (path, *path.absolute().parents) if os.path.lexists(p))
        try:
            free = shutil.disk_usage(there).free
            is_noexec = variable in _LOADED_FROM and bool(os.statvfs(there).f_flag & os.ST_NOEXEC)
            tempfile.TemporaryFile(dir=there).close()
        except OSError as error:
            problem = error.strerror or str(error)
            yield Disk(use=use, variable=variable, path=path, problem=problem)
        else:
            disk = Disk(use=use, variable=variable, path=path)
            yield replace(disk, free_bytes=free, is_noexec=is_noexec)


def _lost_temporary(places: SystemView) -> tuple[str, str] | None:
    """Return the variable that names no directory for temporary files, and its value."""
    for variable in ("TMPDIR", "TEMP", "TMP"):  # in the order of Python's tempfile
        value = places.env.get(variable)
        if value and not (places.project / value).is_dir():
            return variable, value
    return None


def _clock(places: SystemView) -> Clock:
    """Compare the clock with times of files and with the hardware's clock."""
    try:
        with tempfile.TemporaryFile(dir=places.project) as file:
            before = time.time()
            file.write(b".")
            file.flush()
            made, after = os.fstat(file.fileno()).st_mtime, time.time()
            fresh = min(made - before, 0.0) + max(made - after, 0.0)
    except OSError:
        fresh = None
    ahead = {}
    now = time.time()
    for path in (places.project / ".git/index", places.python.parent.parent / "pyvenv.cfg"):
        with contextlib.suppress(OSError):
            ahead[path] = path.stat().st_mtime - now
    hardware = places.read("/sys/class/rtc/rtc0/since_epoch").strip()
    hardware_s = float(hardware) - now if hardware.isdigit() else None
    return Clock(now_s=now, fresh_s=fresh, ahead_s=ahead, hardware_s=hardware_s)


def _interfaces(places: SystemView) -> Iterator[str]:
    """Yield the interfaces that are up, without loopback."""
    for directory in sorted(places.under("/sys/class/net").glob("*")):
        state = places.read(f"/sys/class/net/{directory.name}/operstate").strip()
        if directory.name != "lo" and state in ("up", "unknown"):
            yield directory.name


def _infiniband(places: SystemView) -> dict[str, str]:
    """Return the state of each InfiniBand port: `mlx5_0/1` -> `ACTIVE`."""
    found = {}
    for file in sorted(places.under("/sys/class/infiniband").glob("*/ports/*/state")):
        text = places.read(f"/{file.relative_to(places.root)}")
        found[f"{file.parts[-4]}/{file.parts[-2]}"] = text.partition(":")[2].strip()
    return found


def container_of(places: SystemView) -> str | None:
    """Return what kind of container this is, None on a bare host."""
    for file, kind in _CONTAINERS:
        if places.under(file).exists():
            return kind
    for name, kind in _CONTAINER_VARIABLES:
        if name in places.env:
            return kind
    match = re.search(r"docker|kubepods|containerd|lxc|libpod", places.read("/proc/1/cgroup"))
    return match[0] if match else places.env.get("container")


def _port_range(text: str) -> tuple[int, int] | None:
    """Parse the first and the last port that the kernel gives."""
    words = text.split()
    if len(words) != 2 or not all(word.isdigit() for word in words):  # noqa: PLR2004 - first, last
        return None
    return int(words[0]), int(words[1])


def _port_problem(port: int) -> str | None:
    """Return why nobody can listen on a port."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
            listener.listen(1)
        except OSError as error:
            return f"port {port}: {error.strerror}"
    return None


def _host_problem() -> str | None:
    """Return why this host's own name does not resolve."""
    name = socket.gethostname()

    def resolve() -> str:
        """Return why the host's own name cannot be looked up, "" if it can."""
        try:
            socket.getaddrinfo(name, None)
        except OSError as error:
            return f"{name!r}: {error.strerror}"
        return ""

    said = _in_time(resolve)
    return f"{name!r}: no answer within {_PROGRAM_LIMIT_S:g} s" if said is None else said or None


def _lookup_s() -> float:
    """Return how long the lookup takes that torch does for each connection of this host."""

    def look_up() -> str:
        """Look up the name of 127.0.0.1, as torch does."""
        try:
            return socket.getnameinfo(_LOOPBACK, socket.NI_NUMERICSERV)[0]
        except OSError as error:
            return str(error)

    started = time.monotonic()
    _in_time(look_up)
    return time.monotonic() - started


def _in_time(ask: Callable[[], str]) -> str | None:
    """Return an answer, None if there was none in time: a name server may not answer at all."""
    said: list[str] = []
    thread = threading.Thread(target=lambda: said.append(ask()), daemon=True)
    thread.start()
    thread.join(_PROGRAM_LIMIT_S)
    return said[0] if said else None


def _shadows(env: Mapping[str, str]) -> Iterator[Path]:
    """Yield the libraries of CUDA that the environment's variables put first."""
    for word in re.split(r"[ :]+", env.get("LD_PRELOAD", "")):
        if _CUDA_LIBRARIES.match(Path(word).name):
            yield Path(word)
    for word in env.get("LD_LIBRARY_PATH", "").split(":"):
        if word and Path(word).is_dir():
            yield from sorted(f for f in Path(word).glob("lib*") if _CUDA_LIBRARIES.match(f.name))


def look_at_toolkit(places: SystemView, *, ask_network: bool) -> Toolkit:
    """Return what there is to compile an extension with.

    Args:
        places: Where to look.
        ask_network: Whether to try to reach the host that publishes wheels.
    """
    nvcc = program(places, "nvcc")
    variable = "CUDA_HOME" if places.env.get("CUDA_HOME") else "CUDA_PATH"
    named = places.env.get(variable)
    default = places.under("/usr/local/cuda")
    home = Path(named) if named else (nvcc.parent.parent if nvcc else default)
    compiler = home / "bin/nvcc" if (home / "bin/nvcc").is_file() else nvcc
    headers = (home / "include/nccl.h", places.under("/usr/include/nccl.h"))
    return Toolkit(
        cuda_home=home if home.is_dir() else None,
        nvcc=_nvcc_version(places, compiler) if compiler else None,
        nccl_header=next((path for path in headers if path.is_file()), None),
        ninja=program(places, "ninja") is not None,
        compiler=any(program(places, name) for name in ("g++", "c++", "clang++")),
        reaches_wheels=_reaches(places.wheel_host) if ask_network else None,
        lost_home=(variable, named) if named and not home.is_dir() else None,
    )


def program(places: SystemView, name: str) -> Path | None:
    """Return a program of PATH; the environment's own directory counts."""
    path = f"{places.python.parent}:{places.env.get('PATH', '')}"
    found = shutil.which(name, path=path)
    return Path(found) if found else None


def _nvcc_version(places: SystemView, nvcc: Path) -> str | None:
    """Return the version that nvcc prints."""
    answer = run([str(nvcc), "--version"], limit_s=_PROGRAM_LIMIT_S, env=places.env)
    match = re.search(r"release (\d+\.\d+)", answer.text)
    return match[1] if match else None


def _reaches(address: tuple[str, int]) -> bool:
    """Return whether a TCP connection can be opened."""
    try:
        socket.create_connection(address, timeout=_CONNECT_LIMIT_S).close()
    except OSError:
        return False
    return True


def look_at_checkout(places: SystemView) -> str | None:
    """Return the command that lets git read the project, None where it reads it or is not there."""
    git = program(places, "git")
    if git is None:
        return None
    command = [str(git), "-C", str(places.project), "rev-parse", "--git-dir"]
    return mend_of_owner(run(command, limit_s=_PROGRAM_LIMIT_S, env=places.env).text)


def look_at_slurm(places: SystemView) -> Slurm:
    """Return Slurm's client, and whether its controller answers."""
    programs = {name: path for name in _SLURM_PROGRAMS if (path := program(places, name))}
    config = places.env.get("SLURM_CONF")
    if programs and config and not Path(config).is_file():  # each would look for it for a minute
        return Slurm(
            programs=dict.fromkeys(programs, UNKNOWN),
            problem=f"SLURM_CONF is {config}, and there is no such file",
        )
    versions: dict[str, str] = {}
    for name, path in programs.items():
        answer = run([str(path), "--version"], limit_s=_PROGRAM_LIMIT_S, env=places.env)
        match = re.search(r"slurm\S* +(\d\S*)", answer.text)
        versions[name] = match[1] if match else UNKNOWN
    problem = None
    if "sinfo" in programs:
        command = [str(programs["sinfo"]), "--noheader", "--format=%P"]
        answer = run(command, limit_s=_PROGRAM_LIMIT_S, env=places.env)
        problem = answer.problem and answer.problem.replace("the process", "sinfo", 1)
    return Slurm(programs=versions, problem=problem)
