"""What the machine does to a training: signals, memory, disks, limits, rights."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

from typing_extensions import override
from ways import way

if TYPE_CHECKING:
    from training import Training

FULL_DISK = "FAILURES_FULL_DISK"  # names a directory on a file system with no room
SPARE_BYTES = 64 << 20


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:  # noqa: PTH123 - as short as it gets
        used = int(file.read().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, used + SPARE_BYTES))


@way("step")
def memory_python(training: Training) -> None:
    _limit_memory()
    cache = bytearray(1 << 30)
    print(len(cache))


@way("step")
def memory_numpy(training: Training) -> None:
    import numpy as np

    _limit_memory()
    print(np.ones((1 << 28,)).sum())


@way("step")
def memory_torch(training: Training) -> None:
    import torch

    _limit_memory()
    print(torch.ones(1 << 28).sum())


@way("step")
def killed(training: Training) -> None:
    """Killed from outside, as the kernel's OOM killer or an operator does."""
    subprocess.run(["kill", "-KILL", str(os.getpid())], check=False)
    signal.pause()


@way("step")
def killed_agent(training: Training) -> None:
    os.kill(os.getppid(), signal.SIGKILL)


@way("step")
def terminated_agent(training: Training) -> None:
    """Somebody cancels the job."""
    os.kill(os.getppid(), signal.SIGTERM)
    signal.pause()


@way("step")
def segfault(training: Training) -> None:
    faulthandler.enable()
    ctypes.string_at(0)


@way("step")
def segfault_silent(training: Training) -> None:
    faulthandler.disable()
    ctypes.string_at(0)


@way("step")
def abort(training: Training) -> None:
    os.abort()


@way("step")
def double_free(training: Training) -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    address = ctypes.c_void_p(libc.malloc(24))
    libc.free(address)
    libc.free(address)


@way("step")
def invalid_pointer(training: Training) -> None:
    libc = ctypes.CDLL(None)
    buffer = ctypes.create_string_buffer(64)
    libc.free(ctypes.c_void_p(ctypes.addressof(buffer) + 8))


@way("step")
def bus_error(training: Training) -> None:
    """A memory-mapped index file that somebody truncates."""
    path = training.work / f"index_{training.rank}.bin"
    path.write_bytes(bytes(1 << 16))
    with path.open("r+b") as file:
        view = mmap.mmap(file.fileno(), 0)
        os.truncate(path, 0)
        print(view[4096])


@way("step")
def disk_full(training: Training) -> None:
    import torch

    path = os.path.join(os.environ[FULL_DISK], f"rank_{training.rank}.pt")  # noqa: PTH118
    torch.save({"weights": torch.randn(1 << 18)}, path)


@way("step")
def disk_full_text(training: Training) -> None:
    with open("/dev/full", "w") as file:  # noqa: PTH123
        file.write("loss 3.14\n" * 1000)


@way("step")
def file_too_large(training: Training) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    path = training.work / f"shard_{training.rank}.bin"
    path.write_bytes(bytes(2 << 20))


@way("step")
def disk_full_in_a_thread(training: Training) -> None:
    """An asynchronous save: the thread that writes fails, the main thread finds out later."""
    problems: list[BaseException] = []

    def save() -> None:
        try:
            disk_full_text(training)
        except OSError as error:
            problems.append(error)

    thread = threading.Thread(target=save, name="async-save")
    thread.start()
    thread.join()
    if problems:
        raise RuntimeError("asynchronous save of iteration 4 failed") from problems[0]


@way("step")
def descriptors(training: Training) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    path = training.work / f"shards_{training.rank}"
    path.mkdir()
    files = [(path / str(i)).open("w") for i in range(100)]
    print(len(files))


@way("setup")
def permission(training: Training) -> None:
    path = training.work / f"secrets_{training.rank}.json"
    path.write_text("{}")
    path.chmod(0)
    if os.geteuid() == 0:
        os.seteuid(65534)
    with path.open() as file:
        print(file.read())


@way("step")
def exit_code_3(training: Training) -> None:
    sys.stdout.flush()
    os._exit(3)


@way("step")
def exit_code_0(training: Training) -> None:
    sys.exit(0)


@way("setup")
def loader_worker_killed(training: Training) -> None:
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Samples(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 64

        @override
        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 9:
                os.kill(os.getpid(), signal.SIGKILL)
            return torch.ones(4)

    loader: DataLoader[torch.Tensor] = DataLoader(Samples(), batch_size=4, num_workers=1)
    for batch in loader:
        print(batch.shape)


@way("setup")
def loader_worker_raises(training: Training) -> None:
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Samples(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 64

        @override
        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 9:
                raise ValueError("document 9 has 0 tokens")
            return torch.ones(4)

    loader: DataLoader[torch.Tensor] = DataLoader(Samples(), batch_size=4, num_workers=1)
    for batch in loader:
        assert batch.shape


@way("step")
def hang_sleep(training: Training) -> None:
    time.sleep(3600)


@way("step")
def hang_stopped(training: Training) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@way("step")
def hang_gil(training: Training) -> None:
    """A loop in C that never gives the interpreter back."""
    ctypes.PyDLL(None).sleep(3600)


@way("step")
def slow(training: Training) -> None:
    """Never fails, never ends: what a time limit is for."""
    while True:
        time.sleep(0.1)


@way("start")
def never_starts(training: Training) -> None:
    """A node that is stuck before it comes to the rendezvous."""
    time.sleep(3600)
