"""Ways in which a rank goes wrong, what it knows of its gang, and how it tells that it strikes."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist

FLOOD_BYTES = 1 << 25
REPORT_CHARS = 1 << 23


def tell(event: str, **values: object) -> None:
    """Append to the events; works in any process, without descriptors of its own."""
    line = json.dumps({"event": event, "at": time.time(), **values}) + "\n"
    path = os.path.join(os.environ["FAULT_DIR"], "events.jsonl")  # noqa: PTH118 - cheap
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def test_name() -> str:
    """Return the name of the running test."""
    return os.environ["PYTEST_CURRENT_TEST"].rpartition("::")[2].partition(" ")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """One rank of a gang, as a test sees it."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.world_size - 1

    def reduce(self) -> None:
        """Sum over all ranks, and look at the sum: what any rank missed shows here."""
        found = self.start().item()
        wanted = self.world_size * (self.world_size + 1) // 2
        assert found == wanted, f"a sum of {found}, expected {wanted}"

    def start(self, *, is_async: bool = False) -> torch.Tensor:
        tensor = torch.full((1,), self.rank + 1.0, device=self.device)
        dist.all_reduce(tensor, async_op=is_async)
        return tensor

    def sign(self) -> None:
        """Tell that the fault strikes now."""
        tell("sign", test=test_name(), rank=self.rank)


def fail() -> None:
    assert os.getpid() == 0, "struck"


def skip() -> None:
    pytest.skip("struck")


def sleep() -> NoReturn:
    while True:
        time.sleep(1000)


def hold_gil() -> NoReturn:
    sleep_with_gil = ctypes.PyDLL(None).sleep
    while True:
        sleep_with_gil(1000)


def stop_process() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def interrupt() -> None:
    raise KeyboardInterrupt


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segv() -> None:
    ctypes.string_at(0)


def kill_template() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    sleep()


def device_assert() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    index = torch.tensor([1 << 20], device=device)
    print(torch.zeros(4, device=device)[index].sum().item())


def illegal_access() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    code = "template <typename T> T wild(T x) { return x + *(T*)(0x10); }"
    wild = torch.cuda.jiterator._create_jit_fn(code)
    print(wild(torch.ones(4, device=device)).sum().item())


WAYS: dict[str, Callable[[], object]] = {
    "fail": fail,
    "skip": skip,
    "sys_exit0": lambda: sys.exit(0),
    "sys_exit3": lambda: sys.exit(3),
    "os_exit0": lambda: os._exit(0),
    "os_exit1": lambda: os._exit(1),
    "sigkill": kill,
    "segv": segv,
    "abort": os.abort,
    "sleep": sleep,
    "gil": hold_gil,
    "sigstop": stop_process,
    "interrupt": interrupt,
    "pytest_exit": lambda: pytest.exit("struck"),
    "template": kill_template,
    "device_assert": device_assert,
    "illegal_access": illegal_access,
}


def flood() -> None:
    line = b"x" * 1023 + b"\n"
    for _ in range(FLOOD_BYTES // (1 << 15)):
        os.write(1, line * 32)
    print("the end of the flood")


def leave_child(*, in_own_session: bool) -> None:
    """Fork a process that outlives the test and wants nothing to do with us."""
    if os.fork() == 0:
        if in_own_session:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if os.fork():
                os._exit(0)
        sleep()


def wait_while(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def is_dead(pid: int) -> bool:
    """Whether a process and all its threads ended, though nobody has collected it."""
    process = Path(f"/proc/{pid}")
    try:
        is_alone = len(list((process / "task").iterdir())) == 1
        return is_alone and ") Z" in (process / "stat").read_text()
    except OSError:  # it was collected
        return True
