"""Reads the health of GPUs around an attempt, in a process of its own.

`python -m pytest_megatron.gpu.nvml_probe UUID...` prints a line of JSON with the state of each GPU,
waits until its stdin ends, and prints another with the states and what the driver reported
meanwhile. It is a process of its own because NVML can hang or crash with a GPU that is lost, and
the session must not. Must import nothing of ours but the plain data that it prints.
"""

from __future__ import annotations

import contextlib
import json
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from types import ModuleType
from typing import TypeVar

from pytest_megatron.base.files import JsonValue
from pytest_megatron.gpu.health import THROTTLES, GpuProcess, GpuState, Xid

_Value = TypeVar("_Value")
_POLL_MS = 200
_MOST_LATE = 100  # events; a GPU that fails can report without end


def main() -> None:
    """Watch the GPUs of the command line."""
    import pynvml  # noqa: PLC0415 - only here, and only in this process

    uuids = sys.argv[1:]
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        _say({"gpus": [], "problem": f"NVML: {error}"})
        return
    events = _register(pynvml, uuids)
    _say({"gpus": [asdict(state) for state in _states(pynvml, uuids)]})
    xids = [asdict(xid) for xid in _wait_for_end(pynvml, events)]
    after = [asdict(state) for state in _states(pynvml, uuids)]
    _say({"gpus": list[JsonValue](after), "xids": list[JsonValue](xids)})


def read_state(nvml: ModuleType, uuid: str) -> GpuState | None:
    """Return the state of a GPU; None where it does not answer at all."""
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        return None

    def ask(read: Callable[[], _Value]) -> _Value | None:
        """Return an answer, None where this GPU or driver has none."""
        try:
            return read()
        except (nvml.NVMLError, AttributeError):  # or these bindings
            return None

    def ecc(kind: int, counter: int) -> int | None:
        return ask(lambda: int(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, counter)))

    memory = ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    rows = ask(lambda: nvml.nvmlDeviceGetRemappedRows(handle)) or (None,) * 4
    return GpuState(
        uuid=uuid,
        index=ask(lambda: int(nvml.nvmlDeviceGetIndex(handle))),
        throttles=ask(lambda: _throttles(nvml, handle)),
        ecc_volatile_corrected=ecc(0, 0),
        ecc_volatile_uncorrected=ecc(1, 0),
        ecc_aggregate_uncorrected=ecc(1, 1),
        is_remap_pending=None if rows[2] is None else bool(rows[2]),
        has_remap_failed=None if rows[3] is None else bool(rows[3]),
        memory_used_bytes=None if memory is None else int(memory.used),
        memory_total_bytes=None if memory is None else int(memory.total),
        processes=ask(lambda: _processes(nvml, handle)) or (),
    )


def _states(nvml: ModuleType, uuids: Sequence[str]) -> list[GpuState]:
    return [state for uuid in uuids if (state := read_state(nvml, uuid)) is not None]


def _processes(nvml: ModuleType, handle: object) -> tuple[GpuProcess, ...]:
    """Return the processes that use a GPU."""
    found = ((p.pid, p.usedGpuMemory) for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    return tuple(
        GpuProcess(pid=int(pid), memory_bytes=None if memory is None else int(memory))
        for pid, memory in found
    )


def _throttles(nvml: ModuleType, handle: object) -> tuple[str, ...]:
    bits = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    return tuple(text for bit, text in THROTTLES.items() if bits & bit)


def _register(nvml: ModuleType, uuids: Sequence[str]) -> object | None:
    """Return an event set that gets the Xids of these GPUs; None where there are no events."""
    try:
        events: object = nvml.nvmlEventSetCreate()
        for uuid in uuids:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
    except nvml.NVMLError:
        return None
    return events


def _wait_for_end(nvml: ModuleType, events: object | None) -> Iterator[Xid]:
    """Yield the Xids that come until our stdin ends."""
    while events is not None and not select.select([sys.stdin], [], [], 0)[0]:
        yield from _next_xid(nvml, events)
    if events is None:
        sys.stdin.read()
        return
    for _ in range(_MOST_LATE):  # what came in the last moment
        late = list(_next_xid(nvml, events))
        if not late:
            return
        yield from late


def _next_xid(nvml: ModuleType, events: object) -> Iterator[Xid]:
    """Wait for a short time, and yield what came."""
    try:
        data = nvml.nvmlEventSetWait_v2(events, _POLL_MS)
        uuid = _text(nvml.nvmlDeviceGetUUID(data.device))
    except nvml.NVMLError_Timeout:
        return
    except nvml.NVMLError:  # a GPU that is lost; do not ask again at once
        select.select([sys.stdin], [], [], _POLL_MS / 1000)
        return
    yield Xid(gpu=uuid, xid=int(data.eventData))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _say(found: dict[str, JsonValue]) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(found), flush=True)  # noqa: T201 - our parent reads it


if __name__ == "__main__":
    main()
