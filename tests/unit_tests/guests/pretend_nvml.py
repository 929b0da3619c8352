"""Stands in for `pynvml`, as a module of that name: GPUs as the JSON file PRETEND_NVML has them.

Each GPU has `uuid`, `name`, `bus_id`, `ecc` (corrected and uncorrected, each volatile and
aggregate), `used`, `total`, `processes` (pid and bytes) and `throttle`; what a GPU lacks is not
supported. `xids` are the events that come. The file is read at every call.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
nvmlEventTypeXidCriticalError = 8


class NVMLError(Exception):
    pass


class NVMLError_Timeout(NVMLError):  # noqa: N801, N818 - NVML's name
    pass


def _state() -> dict[str, list[dict[str, object]]]:
    state: dict[str, list[dict[str, object]]] = json.loads(
        Path(os.environ["PRETEND_NVML"]).read_text()
    )
    return state


def _value(handle: int, key: str) -> object:
    gpu = _state()["gpus"][handle]
    if key not in gpu:
        raise NVMLError(f"{key} is not supported")
    return gpu[key]


def nvmlInit() -> None:
    if "crash" in _state():
        os.abort()
    if "hang" in _state():
        time.sleep(3600)
    if "broken" in _state():
        raise NVMLError("Driver/library version mismatch")


def nvmlShutdown() -> None:
    pass


def nvmlSystemGetDriverVersion() -> str:
    return "600.1"


def nvmlDeviceGetCount() -> int:
    return len(_state()["gpus"])


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetHandleByUUID(uuid: str) -> int:
    for index, gpu in enumerate(_state()["gpus"]):
        if gpu["uuid"] == uuid:
            if "lost" in gpu:
                raise NVMLError("GPU is lost")
            return index
    raise NVMLError("Not found")


def nvmlDeviceGetIndex(handle: int) -> int:
    return handle


def nvmlDeviceGetName(handle: int) -> object:
    return _value(handle, "name")


def nvmlDeviceGetUUID(handle: int) -> object:
    return _value(handle, "uuid")


def nvmlDeviceGetPciInfo(handle: int) -> SimpleNamespace:
    return SimpleNamespace(busId=_value(handle, "bus_id"))


def nvmlDeviceGetMemoryInfo(handle: int) -> SimpleNamespace:
    return SimpleNamespace(used=_value(handle, "used"), total=_value(handle, "total"))


def nvmlDeviceGetTotalEccErrors(handle: int, kind: int, counter: int) -> int:
    ecc = _value(handle, "ecc")
    assert isinstance(ecc, list)
    return int(ecc[kind][counter])


def nvmlDeviceGetComputeRunningProcesses(handle: int) -> list[SimpleNamespace]:
    found = _value(handle, "processes")
    assert isinstance(found, list)
    return [SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in found]


def nvmlDeviceGetCurrentClocksThrottleReasons(handle: int) -> object:
    return _value(handle, "throttle")


def nvmlEventSetCreate() -> list[int]:
    if "crash_at_events" in _state():
        os.abort()
    return [0]


def nvmlDeviceRegisterEvents(handle: int, types: int, events: list[int]) -> None:
    pass


def nvmlEventSetWait_v2(events: list[int], timeout_ms: int) -> SimpleNamespace:
    xids = _state().get("xids", [])
    if events[0] == len(xids):
        time.sleep(timeout_ms / 10_000)
        raise NVMLError_Timeout("Timeout")
    xid = xids[events[0]]
    events[0] += 1
    device = nvmlDeviceGetHandleByUUID(str(xid["uuid"]))
    return SimpleNamespace(eventData=xid["xid"], device=device)
