"""Ranks of `--keep-contexts`, with a driver that logs calls in the place of NVIDIA's: no GPU."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest
from gang_suite import wait_until
from kept_project import TORCH, WARM, Project
from pretended_gpus import pretend_gpus
from typing_extensions import override

from pytest_megatron.hooks.start.contexts import _SET_BY_SOURCE

# `state` has the result of cuInit, the compute mode, and the percentage of free memory.
DRIVER = r"""
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static int state(int index) {
    int values[3] = {0, 0, 50};
    FILE *file = fopen(getenv("FAKE_CUDA_STATE"), "r");
    if (file) {
        fscanf(file, "%d %d %d", values, values + 1, values + 2);
        fclose(file);
    }
    return values[index];
}

static int note(const char *call, int number) {
    char line[400];
    const char *set = getenv("CUDA_DEVICE_MAX_CONNECTIONS"), *seen = getenv("CUDA_VISIBLE_DEVICES");
    int length = snprintf(line, sizeof line, "%d %s %d %s %s\n", getpid(), call, number,
                          set ? set : "-", seen ? seen : "-");
    int log = open(getenv("FAKE_CUDA_LOG"), O_WRONLY | O_CREAT | O_APPEND, 0600);
    write(log, line, length);
    close(log);
    return 0;
}

int cuInit(int flags) {
    static int times;
    note("cuInit", times++);
    return state(0);
}
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 20 ? state(1) : 7;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = (void *)0x123456789abcL;
    return note("retain", device);
}
int cuCtxPushCurrent_v2(void *context) { return context == (void *)0x123456789abcL ? 0 : 201; }
int cuCtxPopCurrent_v2(void **context) { return 0; }
int cuMemGetInfo_v2(size_t *free, size_t *total) {
    *total = 80000000000;
    *free = *total / 100 * state(2);
    return 0;
}
"""
# As torch uses CUDA: torch/cuda/__init__.py, _lazy_init() and _lazy_call(), 2.13.
TORCH_CUDA = """
    import ctypes
    import os

    _initialized = False
    _queued_calls = []

    def is_initialized():
        return _initialized

    def _lazy_call(call):
        _queued_calls.append(call)

    def _lazy_init():
        global _initialized
        if not _initialized:
            os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
            assert ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
            for call in _queued_calls:
                call()
            _initialized = True

    def init():
        _lazy_init()
"""
HAS_DRIVER = "from pytest_megatron.gpu import host\nhost.has_driver = lambda: True\n"
USES_CUDA = """
    import json
    import os

    import torch

    HAD = torch.cuda.is_initialized(), "CUDA_MODULE_LOADING" in os.environ

    def test_uses_cuda():
        with open(f"seen{os.environ['RANK']}", "w") as seen:
            json.dump([os.getpid(), *HAD], seen)
        torch.cuda.init()
"""


@dataclass(frozen=True)
class GpuProject(Project):
    """A project on a host with two GPUs, as NVML and the driver have them."""

    driver: Path

    @override
    def env(self, **more: str) -> dict[str, str]:
        paths = f"{self.root / 'site-packages'}:{self.root / 'pretended'}"
        own = {
            "PYTHONPATH": paths,
            "PRETEND_NVML": str(self.root / "pretended/state.json"),
            "PYTEST_MEGATRON_LEASES": str(self.root / "leases"),
            "LD_LIBRARY_PATH": str(self.driver.parent),
            "FAKE_CUDA_LOG": str(self.root / "log"),
            "FAKE_CUDA_STATE": str(self.root / "state"),
        }
        return super().env(**own, **more)

    def session(self, *args: str) -> tuple[int, str]:
        return self.run("--keep-contexts", "--device=cuda", *args)

    def ready(self) -> list[int]:
        """Wait for contexts; return the processes that have them, in the order of the GPUs."""
        wait_until(lambda: self.kept().num_contexts == 2, "two contexts")
        made = {int(n): int(pid) for pid, call, n, *_ in self.calls() if call == "retain"}
        return [made[ordinal] for ordinal in range(2)]

    def calls(self) -> list[list[str]]:
        """Return calls of the driver: process, function, number, and variables."""
        return [line.split() for line in (self.root / "log").read_text().splitlines()]

    def seen(self) -> list[list[int]]:
        return [json.loads((self.root / f"seen{rank}").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library in the place of NVIDIA's driver."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=DRIVER, text=True, check=True)
    return library


@pytest.fixture
def project(tmp_path: Path, driver: Path) -> Iterator[GpuProject]:
    """A project whose tests use CUDA."""
    made = GpuProject(tmp_path, driver)
    pretend_gpus(tmp_path, 2)
    assert (tmp_path / "conftest.py").read_text() == HAS_DRIVER
    made.write("pytest.ini", "[pytest]")
    made.write("site-packages/torch/__init__.py", f"{TORCH}\n    from torch import _C, cuda")
    made.write("site-packages/torch/_C.py", "")
    made.write("site-packages/torch/cuda.py", TORCH_CUDA)
    made.write("test_cuda.py", USES_CUDA)
    yield made
    made.end()


def test_ranks_have_a_context_before_the_session_begins(project: GpuProject) -> None:
    code, output = project.session()
    assert (code, "none was kept yet" in output) == (0, True), output
    for _ in range(2):
        spares, num_calls = project.ready(), len(project.calls())
        assert project.calls()[0][-1] == "GPU-0,GPU-1"
        assert "MiB, 2 CUDA contexts" in project.command("gangs", "list")
        code, output = project.session("-v")
        assert (code, f"{WARM}, with CUDA contexts on 2 GPUs" in output) == (0, True), output
        assert project.seen() == [[pid, False, False] for pid in spares]
        first = project.calls()[num_calls : num_calls + 2]
        assert {(int(pid), call, times) for pid, call, times, *_ in first} == {
            (pid, "cuInit", "1") for pid in spares
        }
    assert set(project.ready()).isdisjoint(spares)
    project.write("test_plain.py", "def test_plain():\n    pass")
    project.write("state", "999 0 50")
    code, output = project.session("test_plain.py")
    assert (code, "with CUDA contexts" in output) == (0, True), output
    wait_until(lambda: len(project.calls()) == num_calls + 8, "contexts that fail")
    wait_until(lambda: project.kept().num_contexts is None, "their end")
    code, output = project.session("test_plain.py")
    text = f"{WARM}, without CUDA contexts: cuInit() returned CUDA error 999"
    assert (code, text in output) == (0, True), output


def test_a_variable_that_collecting_sets_is_that_of_the_driver(project: GpuProject) -> None:
    project.session()
    spares, num_calls = project.ready(), len(project.calls())
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    project.write("conftest.py", f"{HAS_DRIVER}import os\nos.environ['{name}'] = '1'")
    code, output = project.session()
    assert (code, "with CUDA contexts on 2 GPUs" in output) == (0, True), output
    assert {pid for pid, *_ in project.seen()}.isdisjoint(spares)  # which run another program now
    calls = project.calls()[num_calls:]
    assert {tuple(words[1:4]) for words in calls} == {("cuInit", "0", "1")}, calls
    code, output = project.session()
    text = f"without CUDA contexts: {name} is changed before CUDA is used, until --cache-clear"
    assert (code, text in output) == (0, True), output
    assert project.kept().num_contexts is None


LATE = """
    import os

    import pytest
    import torch

    def test_sets_a_variable(monkeypatch):
        monkeypatch.setenv("CUDA_" + "LAUNCH_BLOCKING", "1")
        torch.cuda.init()

    def test_uses_cuda_in_a_child():
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                torch.cuda.init()
            except Exception as error:
                os.write(write_end, str(error).encode())
            os._exit(0)
        os.close(write_end)
        os.waitpid(child, 0)
        text = os.read(read_end, 1000).decode()
        if text:
            pytest.fail(text)
"""


def test_what_comes_after_the_context_is_named_and_runs_without_it(project: GpuProject) -> None:
    project.write("test_cuda.py", LATE)
    for test, reason in (
        ("sets_a_variable", "CUDA_LAUNCH_BLOCKING is changed before CUDA is used"),
        ("in_a_child", "a process is forked, and uses CUDA"),
    ):
        project.session("-k", test)
        project.ready()
        code, output = project.session("-k", test)
        text = f"{reason}, and this rank had a CUDA context before, by --keep-contexts; the next"
        assert (code, text in output) == (1, True), output
        code, output = project.session("-k", test)
        text = f"without CUDA contexts: {reason}, until --cache-clear"
        assert (code, text in output) == (0, True), output
        shutil.rmtree(project.root / ".pytest_cache")


def has_processes(project: GpuProject, number: int) -> bool:
    return len(project.others()) == number


def test_nothing_is_left_of_one_that_is_killed(project: GpuProject) -> None:
    project.session()
    for who in ("spare", "idle", "guard", "kept"):
        spare = psutil.Process(project.ready()[0])
        idle = spare.parent()
        assert idle is not None
        guard = idle.parent()
        assert guard is not None
        kept = project.kept().pid
        pids = {"spare": spare.pid, "idle": idle.pid, "guard": guard.pid, "kept": kept}
        os.kill(pids[who], signal.SIGKILL)
        known = "none was kept yet"
        if who != "kept":
            known = f"{WARM}, without CUDA contexts: a process that had one was killed"
            wait_until(lambda: project.kept().num_contexts is None, "that it is known")
        wait_until(partial(has_processes, project, int(who != "kept")), "the end of the others")
        code, output = project.session()
        assert (code, known in output) == (0, True), output
    project.ready()


GIVES_UP = """
    import os
    import sys
    from pathlib import Path

    from pytest_megatron.hooks.start.contexts import CudaContext

    context = CudaContext(1)
    for state in ("0 0 50", "0 0 5"):
        Path(os.environ["FAKE_CUDA_STATE"]).write_text(state)
        print(context.find_problem())
    Path(os.environ["FAKE_CUDA_STATE"]).write_text("0 3 50")
    try:
        CudaContext(1)
    except OSError as error:
        print(error)
"""


def test_contexts_are_given_up_where_a_gpu_is_needed(project: GpuProject) -> None:
    command = [sys.executable, "-c", textwrap.dedent(GIVES_UP)]
    done = subprocess.run(command, env=project.env(), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "",
        "a GPU has only 3814 MiB of memory free",
        "compute mode 3 of GPU 1 gives it to one process",
    ]


def test_torch_runs_a_check_with_its_first_use_of_cuda() -> None:
    torch_cuda = pytest.importorskip("torch.cuda")
    assert (torch_cuda._initialized, callable(torch_cuda._lazy_init)) == (False, True)
    before = len(torch_cuda._queued_calls)
    torch_cuda._lazy_call(list)
    call, _ = torch_cuda._queued_calls.pop()
    assert (call, len(torch_cuda._queued_calls)) == (list, before)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('os.environ["CUDA_LAUNCH_BLOCKING"] = "1"', "CUDA_LAUNCH_BLOCKING"),
        ("monkeypatch.setenv('CUDA_DEVICE_MAX_CONNECTIONS', '1')", "CUDA_DEVICE_MAX_CONNECTIONS"),
        ("os.environ.pop('NVIDIA_TF32_OVERRIDE', None)", "NVIDIA_TF32_OVERRIDE"),
        # Megatron-LM, megatron/training/arguments.py.
        ("if os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS') != \"1\":", ""),
        ("if 'CUDA_VISIBLE_DEVICES' in os.environ:", ""),
        ("CUDA_HOME = os.getenv('CUDA_HOME')", ""),
        ("# set CUDA_LAUNCH_BLOCKING=1", ""),
    ],
)
def test_sources_that_may_set_a_variable_of_the_driver(source: str, found: str) -> None:
    match = _SET_BY_SOURCE.search(source)
    assert (match[0] if match else "") == found
