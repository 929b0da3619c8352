"""The look after a test, in one process: it finds patches whether dicts have versions or not."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from pytest_megatron.gangs.rank.audit import LeakAudit
from pytest_megatron.gangs.rank.logs import RankLogs
from pytest_megatron.gangs.rank.process_state import StateKeeper

NAME = "megatron.of_this_test"
LOGS = RankLogs(Path("not-written"))
BESIDE_LIBRARIES = """
import ctypes, subprocess, sys, threading
from pytest_megatron.gangs.rank.audit import LeakAudit

library = ctypes.CDLL(None)
for _ in range(50):
    library.pthread_create(ctypes.byref(ctypes.c_ulong()), None, library.pause, None)
children, is_started, is_over = [], threading.Event(), threading.Event()

def start():
    children.append(subprocess.Popen(["sleep", "60"]))
    is_started.set()
    is_over.wait()

threading.Thread(target=start).start()
is_started.wait()
opened = set()
sys.addaudithook(lambda event, args: opened.add(str(args[0])) if event == "open" else None)
held = LeakAudit().look()
is_over.set()
children[0].kill()
assert ("processes", children[0].pid) in held, held
assert len([path for path in opened if "/task/" in path]) == 2, opened
"""
KINDS = ("allocated", "reserved")


def original() -> None: ...


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of Megatron, as far as its name goes."""
    made = ModuleType(NAME)
    vars(made).update(first=original, second=original, number=1)
    monkeypatch.setitem(sys.modules, NAME, made)
    return made


@pytest.fixture(params=[True, False], ids=["versions", "no versions"])
def keeper(
    request: pytest.FixtureRequest, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> StateKeeper:
    if not request.param:
        monkeypatch.setattr("pytest_megatron.gangs.rank.settings._WITHOUT_VERSIONS", (3,))
    audit = LeakAudit()
    assert audit._has_versions is (request.param and sys.version_info < (3, 14))
    assert audit._patched[NAME].attributes is vars(module)
    return StateKeeper(1, LOGS, lambda: None, audit)


def left(keeper: StateKeeper, kind: str) -> list[str]:
    return [leak.text for leak in keeper.find_leaks() if leak.kind == kind]


def test_a_patch_is_found_by_the_next_look_alone(keeper: StateKeeper, module: ModuleType) -> None:
    assert left(keeper, "patches") == []
    module.number = 2  # type: ignore[attr-defined]
    assert left(keeper, "patches") == []
    module.first = print  # type: ignore[attr-defined]
    assert left(keeper, "patches") == [f"patched {NAME}.first"]
    assert left(keeper, "patches") == []
    vars(module)["second"] = print
    assert left(keeper, "patches") == [f"patched {NAME}.second"]
    module.first = original  # type: ignore[attr-defined]
    assert left(keeper, "patches") == []
    del module.first
    assert left(keeper, "patches") == [f"patched {NAME}.first"]


def test_what_a_fixture_holds_is_not_of_the_test_and_what_it_left_is(
    keeper: StateKeeper, module: ModuleType
) -> None:
    left(keeper, "patches")
    before = keeper.look()
    module.first = print  # type: ignore[attr-defined]
    keeper.accept("fixture", "name", before)
    assert left(keeper, "patches") == []
    keeper.release("fixture")
    (leak,) = [leak for leak in keeper.find_leaks() if leak.kind == "patches"]
    assert (leak.text, leak.fixture) == (f"patched {NAME}.first", "name")


def test_a_process_is_looked_for_in_threads_that_can_start_one() -> None:
    """Libraries have thousands of others."""
    subprocess.run([sys.executable, "-c", BESIDE_LIBRARIES], check=True)


def test_a_file_of_another_rank_is_not_of_the_test_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 made it while this rank had ended the test, and its look, already."""
    monkeypatch.chdir(tmp_path)
    keeper = StateKeeper(2, LOGS, lambda: None, LeakAudit())
    assert left(keeper, "working-directory") == []
    (tmp_path / "of_rank_0").touch()
    keeper.begin()
    assert left(keeper, "working-directory") == []
    keeper.begin()
    (tmp_path / "own").touch()
    assert left(keeper, "working-directory") == [str(tmp_path / "own")]


def test_pipes_that_libraries_keep_are_no_leak_and_shared_memory_is(keeper: StateKeeper) -> None:
    left(keeper, "files")
    of_libuv = os.pipe()  # as torch's store makes it, with a byte as its lock
    os.write(of_libuv[1], b"*")
    memory = SharedMemory(create=True, size=1)  # starts Python's resource tracker, too
    own = os.pipe()
    try:
        pipes, shared = sorted(left(keeper, "files"), key=lambda text: memory.name in text)
    finally:
        memory.close()
        memory.unlink()
        for number in (*of_libuv, *own):
            os.close(number)
    assert pipes == "2 open pipes"
    assert memory.name in shared
    assert left(keeper, "files") == []


def test_a_handler_is_named_with_the_one_before(keeper: StateKeeper) -> None:
    left(keeper, "signals")
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        found = left(keeper, "signals")
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert found == ["handler of SIGUSR2: SIG_IGN, was the default"]


def test_a_descriptor_is_found_where_another_one_was_closed(keeper: StateKeeper) -> None:
    low, middle, high = (os.open(os.devnull, os.O_RDONLY) for _ in range(3))
    new = -1
    try:
        os.close(low)
        left(keeper, "files")
        os.close(high)  # so that there are as many as before
        new = os.open(__file__, os.O_RDONLY)
        found = left(keeper, "files")
        again = left(keeper, "files")
    finally:
        for number in {middle, new}:
            os.close(number)
    assert new == low
    assert found == [f"1 open file ({__file__})"]
    assert again == []


def test_groups_are_found_where_all_others_were_destroyed(
    keeper: StateKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as before, with the same counter of torch, which begins anew as well."""

    def world() -> SimpleNamespace:
        groups = [SimpleNamespace(size=lambda: 2) for _ in range(3)]
        return SimpleNamespace(default_pg=groups[0], pg_names=groups, group_count=3)

    distributed = ModuleType("torch.distributed.distributed_c10d")
    monkeypatch.setitem(sys.modules, distributed.__name__, distributed)
    vars(distributed)["_world"] = world()
    assert left(keeper, "groups") == ["2 process groups (2 ranks)"]
    assert left(keeper, "groups") == []
    vars(distributed)["_world"] = world()
    assert left(keeper, "groups") == ["2 process groups (2 ranks)"]


def test_state_of_megatron_is_named_by_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [
        ModuleType("megatron.core.parallel_state"),
        ModuleType("megatron.training.global_vars"),
    ]
    for module in modules:
        vars(module)["_GLOBAL_ARGS"] = None
        monkeypatch.setitem(sys.modules, module.__name__, module)
    keeper = StateKeeper(2, LOGS, lambda: None, LeakAudit())
    for module in modules:
        vars(module)["_GLOBAL_ARGS"] = object()
    assert left(keeper, "megatron") == [
        "parallel state of megatron-core (_GLOBAL_ARGS)",
        "global variables of megatron.training (_GLOBAL_ARGS)",
    ]


class Gpu:
    """A torch with CUDA, as far as the audit asks for its current device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = 0
        self._cuda, torch = ModuleType("torch.cuda"), ModuleType("torch")
        bindings = ModuleType("torch._C")
        self.memory = {f"{name}_bytes": {"all": {"current": 0, "peak": 0}} for name in KINDS}
        self.stream = 0
        vars(bindings).update(
            _cuda_synchronize=lambda: None,
            _cuda_getDevice=lambda: self.device,
            _cuda_memoryStats=lambda _: self.memory,
            _cuda_getCurrentRawStream=lambda _: self.stream,
        )
        vars(torch).update(zeros=list, cuda=self._cuda, _C=bindings)
        for module in (torch, self._cuda, bindings):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr("pytest_megatron.gangs.rank.bootstrap._cuda", None)
        monkeypatch.setenv("LOCAL_RANK", "1")

    def use(self, device: int) -> None:
        """Make a device the current one; the first use initialises CUDA."""
        vars(self._cuda)["_initialized"] = True
        self.device = device


def test_another_current_gpu_is_named_once_the_own_one_was_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu(monkeypatch)
    keeper = StateKeeper(2, LOGS, lambda: None, LeakAudit())
    found = []
    for device in (0, 1, 0, 1):
        gpu.use(device)
        found.append(left(keeper, "torch"))
    assert found == [[], [], ["current CUDA device 0, was 1"], []]


def test_the_own_gpu_of_a_fixture_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    keeper = StateKeeper(2, LOGS, lambda: None, LeakAudit())
    before = keeper.look()
    gpu.use(1)
    keeper.accept("fixture", "process_group", before)
    assert left(keeper, "torch") == []
    gpu.use(0)
    assert left(keeper, "torch") == ["current CUDA device 0, was 1"]
    keeper.release("fixture")
    assert left(keeper, "torch") == []  # named before


def test_memory_that_the_first_test_on_a_gpu_keeps_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu(monkeypatch)
    keeper = StateKeeper(2, LOGS, lambda: None, LeakAudit())
    gpu.use(1)
    for kind in gpu.memory.values():
        kind["all"]["current"] = 3 << 30
    assert left(keeper, "cuda-memory") == ["3072.0 MiB of CUDA memory (3072.0 MiB reserved)"]
    assert left(keeper, "cuda-memory") == []


def test_another_current_stream_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    keeper = StateKeeper(2, LOGS, lambda: None, LeakAudit())
    gpu.use(1)
    assert left(keeper, "torch") == []
    gpu.stream = 77
    assert left(keeper, "torch") == ["current CUDA stream 77, was 0"]


def test_a_thread_of_the_pool_that_inductor_compiles_in_is_no_leak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class AsyncCompile:
        pool = staticmethod(functools.cache(lambda: ThreadPoolExecutor(1)))

    module = ModuleType("torch._inductor.async_compile")
    vars(module)["AsyncCompile"] = AsyncCompile
    monkeypatch.setitem(sys.modules, module.__name__, module)
    keeper = StateKeeper(2, LOGS, lambda: None, LeakAudit())
    with AsyncCompile.pool() as of_inductor, ThreadPoolExecutor(1) as own:
        of_inductor.submit(int).result()
        assert left(keeper, "threads") == []
        own.submit(int).result()
        assert [text.partition(" (")[0] for text in left(keeper, "threads")] == ["1 thread"]
