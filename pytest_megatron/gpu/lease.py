"""GPUs held by one attempt: two runs on a host never share a device by accident.

A lock file per device, locked by the kernel: a process that dies in whatever way holds nothing any
longer. The guard of a training inherits the locks, so that they last until its ranks are gone.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_megatron.errors import LaunchError
from pytest_megatron.gpu.host import Gpu

_DIRECTORY_VARIABLE = "PYTEST_MEGATRON_LEASES"
_WAITING_FILE = "waiting.lock"
_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Devices that are ours until `close`, for `contextlib.closing`.

    Attributes:
        gpus: In the order of the host; may be empty.
        descriptors: Open lock files, for a child process to inherit.
    """

    gpus: tuple[Gpu, ...]
    descriptors: tuple[int, ...]

    def close(self) -> None:
        """Let go of the devices, unless a child process still holds them."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def lease_gpus(gpus: Sequence[Gpu], num_gpus: int, on_wait: Callable[[str], None]) -> Lease:
    """Wait until `num_gpus` of `gpus` are free, and hold them.

    All or none: a run that waits holds nothing, so that two that wait cannot block each other.

    Args:
        gpus: Any of these will do; at least `num_gpus` of them.
        num_gpus: May be 0.
        on_wait: Told once, if there is something to wait for.

    Raises:
        LaunchError: Lock files cannot be made.
    """
    assert len(gpus) >= num_gpus
    waiting: LeaseWaiter | None = None
    try:
        while (lease := try_lease(gpus, num_gpus)) is None:
            if waiting is None:
                on_wait(waiting_text(gpus, num_gpus))
                waiting = LeaseWaiter()
            time.sleep(_POLL_S)
    finally:
        if waiting is not None:
            waiting.close()
    return lease


def try_lease(gpus: Sequence[Gpu], num_gpus: int) -> Lease | None:
    """Hold `num_gpus` of `gpus`, or none and return None where fewer are free.

    Raises:
        LaunchError: Lock files cannot be made.
    """
    held: list[tuple[Gpu, int]] = []
    for gpu in gpus:
        if len(held) < num_gpus and (descriptor := _try_lock(f"{gpu.uuid}.lock")) is not None:
            held.append((gpu, descriptor))
    if len(held) == num_gpus:
        return Lease(gpus=tuple(g for g, _ in held), descriptors=tuple(d for _, d in held))
    for _, descriptor in held:
        os.close(descriptor)
    return None


def waiting_text(gpus: Sequence[Gpu], num_gpus: int) -> str:
    """Return the message for a user who has to wait."""
    return f"waiting for {num_gpus} of {len(gpus)} GPUs; other runs hold the rest"


class LeaseWaiter:
    """Lets other runs know, until `close`, that somebody waits for devices.

    Who holds devices and has nothing to run lets go of them then. The kernel ends it with the
    process that waits.
    """

    def __init__(self) -> None:
        self._descriptor = _open_lock_file(_WAITING_FILE)
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)  # who looks holds it for a moment only

    def close(self) -> None:
        """Wait no longer."""
        os.close(self._descriptor)


def is_awaited() -> bool:
    """Return true if some run on this host waits for devices.

    Raises:
        LaunchError: Lock files cannot be made.
    """
    descriptor = _try_lock(_WAITING_FILE)
    if descriptor is None:
        return True
    os.close(descriptor)
    return False


def lease_directory() -> Path:
    """Return where the lock files are; `PYTEST_MEGATRON_LEASES` names another place."""
    named = os.environ.get(_DIRECTORY_VARIABLE)
    return Path(named) if named else Path(tempfile.gettempdir()) / "pytest-megatron-leases"


def _try_lock(name: str) -> int | None:
    """Lock a file; return it open, or None where another process has it."""
    descriptor = _open_lock_file(name)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _open_lock_file(name: str) -> int:
    directory = lease_directory()
    try:
        if not directory.is_dir():
            directory.mkdir(parents=True, exist_ok=True)
            directory.chmod(0o1777)  # other users of the host lease the same devices
        return _open(_own_directory(directory) / name)
    except OSError as error:
        raise LaunchError(
            str(error.filename or directory),
            f"{error.strerror}; set {_DIRECTORY_VARIABLE} to a directory for GPU locks",
        ) from error


def _own_directory(directory: Path) -> Path:
    """Return the directory, which in a place of everybody's must be none that a link leads to.

    Raises:
        OSError: It is a link.
    """
    if _DIRECTORY_VARIABLE not in os.environ and directory.is_symlink():
        raise OSError(errno.ELOOP, "is a link, expected a directory", str(directory))
    return directory


def _open(path: Path) -> int:
    """Open a lock file for locking; another user's can be read, but not written or made again.

    The directory is everybody's: a link would have us make a file wherever it leads, and opening a
    FIFO would wait for ever.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        descriptor = os.open(path, flags | os.O_CREAT, 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "is a link, expected a lock file", str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no regular file, expected a lock file", str(path))
    return descriptor
