"""Health of GPUs: what is read through NVML, in a process of its own, and what changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeAlias

import psutil
import pytest

from pytest_megatron.base.files import JsonValue, write_json_atomically
from pytest_megatron.gpu.health import GpuProcess, GpuState, Health, HealthWatch, Xid
from pytest_megatron.gpu.host import Gpu, this_host

Watchers: TypeAlias = Callable[[], list[psutil.Process]]
PRETENDED = Path(__file__).parent / "guests" / "pretend_nvml.py"
GPUS = tuple(Gpu(index=i, name="H", uuid=f"GPU-{i}", memory_bytes=100) for i in range(2))
SOUND = GpuState(
    uuid="GPU-1",
    index=1,
    ecc_volatile_corrected=3,
    ecc_volatile_uncorrected=0,
    memory_used_bytes=10,
    memory_total_bytes=80_000,
)


class Nvml:
    """A pretended NVML; what changes in `state` shows at the next call."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._file = directory / "state.json"
        shutil.copy(PRETENDED, directory / "pynvml.py")
        monkeypatch.setenv("PYTHONPATH", str(directory))
        monkeypatch.setenv("PRETEND_NVML", str(self._file))
        self.gpus: list[dict[str, JsonValue]] = [
            {"uuid": f"GPU-{i}", "name": "H", "bus_id": f"00000000:1{i}:00.0"} for i in range(2)
        ]
        self.write()

    def write(self, **more: JsonValue) -> None:
        # At once: the watch reads it at any time, and takes a half-written one for a crash.
        write_json_atomically(self._file, {"gpus": list[JsonValue](self.gpus), **more})


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nvml:
    return Nvml(tmp_path, monkeypatch)


@pytest.fixture
def watchers() -> Watchers:
    """What is left of watches: processes that run or that nothing has waited for.

    Not those that tests before this one left in their worker, such as their labs'.
    """
    others = psutil.Process().children()
    return lambda: [process for process in psutil.Process().children() if process not in others]


def change(**values: object) -> Health:
    """Return what is known of a GPU that changed."""
    after = replace(SOUND, **values)  # type: ignore[arg-type]
    return Health(before=(SOUND,), after=(after,))


def test_without_gpus_nothing_is_started_or_known(watchers: Watchers) -> None:
    with HealthWatch(()) as watch:
        assert watch.finish() is None
    assert watchers() == []


def test_states_are_read_before_and_after(nvml: Nvml, watchers: Watchers) -> None:
    nvml.gpus[1] |= {"ecc": [[3, 30], [0, 0]], "used": 5, "total": 100, "processes": [[7, 5]]}
    nvml.write()
    with HealthWatch(GPUS) as watch:
        nvml.gpus[1] |= {"ecc": [[4, 31], [2, 2]], "throttle": 0x40 | 0x1}
        nvml.write()
        health = watch.finish()
    assert health is not None
    assert [state.uuid for state in (*health.before, *health.after)] == ["GPU-0", "GPU-1"] * 2
    assert health.before[0] == GpuState(uuid="GPU-0", index=0)
    after = health.after[1]
    assert (after.ecc_aggregate_uncorrected, after.processes) == (
        2,
        (GpuProcess(pid=7, memory_bytes=5),),
    )
    assert [(f.gpu, f.signature, f.text) for f in health.faults] == [
        ("GPU-1", "ecc_dbe", "GPU 1 (GPU-1) had 2 new uncorrected ECC errors")
    ]
    assert health.notes == (
        "GPU 1 (GPU-1): 1 new corrected ECC errors",
        "GPU 1 (GPU-1): hardware thermal slowdown",
        "process 7, not of this run, held 0.0 GB of GPU 1 (GPU-1)",
    )
    assert watchers() == []


def test_an_xid_during_the_attempt_is_a_fault_also_of_a_gpu_that_is_lost_then(nvml: Nvml) -> None:
    with HealthWatch(GPUS) as watch:
        nvml.write(xids=[{"uuid": "GPU-0", "xid": 43}, {"uuid": "GPU-0", "xid": 79}])
        health = watch.finish()
    assert health is not None
    assert [x.xid for x in health.xids] == [43, 79]
    assert [(f.signature, f.text) for f in health.faults] == [
        ("gpu_lost", "GPU 0 (GPU-0) reported Xid 79, the GPU has fallen off the bus")
    ]


def test_a_gpu_that_does_not_answer_is_left_out(nvml: Nvml) -> None:
    with HealthWatch(GPUS) as watch:
        nvml.gpus[0]["lost"] = True
        nvml.write()
        health = watch.finish()
    assert health is not None
    assert [state.uuid for state in health.after] == ["GPU-1"]


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ("broken", "NVML: Driver/library version mismatch"),
        ("crash", "no answer before the attempt, NVML may have crashed"),
        ("hang", "no answer before the attempt within 0.5 s"),
    ],
)
def test_an_nvml_that_fails_is_noted_and_nothing_more(
    nvml: Nvml, watchers: Watchers, monkeypatch: pytest.MonkeyPatch, state: str, problem: str
) -> None:
    monkeypatch.setattr("pytest_megatron.gpu.health._LIMIT_S", 0.5 if state == "hang" else 20.0)
    nvml.write(**{state: []})
    with HealthWatch(GPUS) as watch:
        health = watch.finish()
    assert health == Health(problem=problem)
    assert health.notes == (f"not all could be read: {problem}",)
    assert watchers() == []


@pytest.mark.parametrize(
    ("health", "faults"),
    [
        pytest.param(change(), [], id="nothing"),
        pytest.param(change(ecc_volatile_corrected=9), [], id="corrected errors"),
        pytest.param(change(ecc_volatile_uncorrected=1), ["ecc_dbe"], id="uncorrected"),
        pytest.param(change(ecc_volatile_uncorrected=None), [], id="not to be had"),
        pytest.param(Health(xids=(Xid(gpu="a", xid=13),)), [], id="the program's"),
        pytest.param(
            Health(xids=(Xid(gpu="a", xid=94),) * 2),
            ["ecc_contained"],
            id="twice",
        ),
    ],
)
def test_only_failures_of_the_hardware_are_faults(health: Health, faults: list[str]) -> None:
    assert [fault.signature for fault in health.faults] == faults


@pytest.mark.parametrize(
    ("values", "foreign"),
    [
        (
            {"processes": (GpuProcess(pid=5, memory_bytes=4000),)},
            "process 5, not of this run, held 0.0 GB of GPU 1 (GPU-1)",
        ),
        ({"processes": (GpuProcess(pid=5, memory_bytes=3999),)}, None),
        ({"processes": (GpuProcess(pid=5, memory_bytes=None),)}, None),
        ({"memory_used_bytes": 4000}, "0.0 GB of GPU 1 (GPU-1) were held, not by this run"),
        ({"processes": (GpuProcess(pid=5, memory_bytes=9),), "memory_total_bytes": None}, None),
    ],
)
def test_another_program_counts_from_a_twentieth_of_the_memory_on(
    values: dict[str, object], foreign: str | None
) -> None:
    assert change(**values).foreign == foreign


@pytest.mark.skipif(not this_host().gpus, reason="needs an NVIDIA GPU")
def test_a_real_gpu_tells_of_itself(capsys: pytest.CaptureFixture[str]) -> None:
    gpus = this_host().gpus
    with HealthWatch(gpus) as watch:
        health = watch.finish()
    assert health is not None
    with capsys.disabled():
        print(json.dumps(asdict(health), indent=1))  # noqa: T201 - for a person who looks
    assert health.problem is None
    assert [state.uuid for state in health.after] == [gpu.uuid for gpu in gpus]
    assert health.faults == ()
    for state in health.after:
        assert state.memory_total_bytes is not None
