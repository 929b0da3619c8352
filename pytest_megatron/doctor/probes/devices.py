"""Asks the driver, torch and a collective, in processes of their own that may crash or hang."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from pytest_megatron.base.schema import trusted
from pytest_megatron.base.text import describe_exit
from pytest_megatron.doctor.facts import CollectiveProbe, Devices, Package, SystemView, Torch
from pytest_megatron.doctor.probes.machine import ask
from pytest_megatron.doctor.probes.packages import torch_symbols, torch_version_file
from pytest_megatron.gpu.health import GpuState, HealthWatch
from pytest_megatron.gpu.host import Gpu, Host

SCRIPTS = Path(__file__).parents[1] / "scripts"
_NVML_LIMIT_S = 30.0
_IMPORT_SHARE = 5  # what of the time limit one module may take
# Source: /proc/driver/nvidia/version: `NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14`
_DRIVER = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)")
_RANK = re.compile(r"^\[rank\d+\]:")
_MOST_SHOWN = 400  # characters of a line


def look_at_devices(places: SystemView) -> Devices:
    """Read the driver's files, and ask NVML."""
    text = places.read("/proc/driver/nvidia/version")
    match = _DRIVER.search(text)
    driver = match[1] if match else places.read("/sys/module/nvidia/version").strip() or None
    num_nodes = sum(1 for _ in places.under("/dev").glob("nvidia[0-9]*"))
    if driver is None or places.root != Path("/"):
        return Devices(driver=driver, num_nodes=num_nodes)
    answer = ask(
        Path(sys.executable), SCRIPTS / "gpus.py", limit_s=_NVML_LIMIT_S, env=dict(places.env)
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
    places: SystemView, package: Package | None, modules: Sequence[str]
) -> Torch | None:
    """Return the environment's torch; None where there is none.

    Args:
        places: Where to look.
        package: The installed package; None without metadata.
        modules: Extension modules to import after it.
    """
    directory = package.location / "torch" if package is not None else Path()
    on_disk = torch_version_file(directory)
    answer = ask(
        places.python,
        SCRIPTS / "torch_facts.py",
        str(max(1, int(places.import_limit_s / _IMPORT_SHARE))),
        *modules,
        limit_s=places.import_limit_s,
        env=places.env,
        cwd=places.project,
    )
    found = {
        "version": package.version if package is not None else "unknown",
        "cuda": on_disk.get("cuda"),
        **answer.values,
    }
    problem = answer.problem or cast("str | None", found.get("problem"))
    if package is None and problem is not None and "No module named 'torch'" in problem:
        return None
    if (file := found.pop("file", None)) is not None:
        directory = Path(str(file)).parent
    return replace(trusted(Torch, found), problem=problem, defined=torch_symbols(directory))


def try_collectives(places: SystemView, num_gpus: int) -> Iterator[CollectiveProbe]:
    """Yield an all_reduce of two ranks and of all GPUs; of two ranks with gloo without GPUs."""
    if num_gpus == 0:
        yield _try_all_reduce(places, "gloo", 2)
        return
    for world_size in sorted({min(2, num_gpus), num_gpus}):
        yield _try_all_reduce(places, "nccl", world_size)


def _try_all_reduce(places: SystemView, backend: str, world_size: int) -> CollectiveProbe:
    """Have new ranks run an all_reduce; every rank is gone afterwards."""
    script = (SCRIPTS / "all_reduce.py").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(dir=places.temporary) as directory:
        meeting, ranks = Path(directory) / "store", []
        try:
            for rank in range(world_size):
                log = Path(directory, f"{rank}.log").open("w")  # noqa: SIM115 - closed below
                with log:
                    words = [backend, str(rank), str(world_size), str(meeting)]
                    process = subprocess.Popen(
                        [str(places.python), "-c", script, *words],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=dict(places.env),
                        cwd=places.project,
                    )
                ranks.append(process)
            problem = _wait(ranks, Path(directory), places.collective_limit_s)
        except OSError as error:
            problem = f"{places.python} cannot be started: {error.strerror}"
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
