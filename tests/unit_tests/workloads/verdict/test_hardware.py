from __future__ import annotations

import pytest

from pytest_megatron.gpu.health import HARDWARE_XIDS, GpuProcess, GpuState, Health, Xid
from pytest_megatron.triage.signatures import builtin_table, match_line, match_signature
from pytest_megatron.workloads.verdict.attempt import FailureCause
from pytest_megatron.workloads.verdict.driver import with_health

BEFORE = GpuState(
    uuid="GPU-a", index=2, ecc_volatile_uncorrected=0, memory_total_bytes=80, memory_used_bytes=1
)
LOST = Health(before=(BEFORE,), xids=(Xid(gpu="GPU-a", xid=79),))
PROCESS = GpuProcess(pid=7, memory_bytes=40)
SHARED = Health(before=(GpuState(uuid="GPU-a", memory_total_bytes=80, processes=(PROCESS,)),))
OOM = FailureCause(text="rank 1 raised", signature=match_signature(["CUDA out of memory"]))


def signature_of(cause: FailureCause | None) -> tuple[str, bool] | None:
    assert cause is not None
    return None if cause.signature is None else (cause.signature.id, cause.is_transient)


def test_a_failure_of_the_hardware_is_the_cause_whatever_the_program_says() -> None:
    cause = with_health(FailureCause(text="rank 1 raised", evidence=("CUDA error",)), LOST)
    assert signature_of(cause) == ("gpu_lost", True)
    assert cause is not None
    said = "GPU 2 (GPU-a) reported Xid 79, the GPU has fallen off the bus"
    assert (cause.text, cause.evidence) == (f"{said}; rank 1 raised", (said, "CUDA error"))


def test_an_oom_on_a_gpu_that_another_program_holds_is_that_programs() -> None:
    cause = with_health(OOM, SHARED)
    assert signature_of(cause) == ("cuda_oom", True)
    assert cause is not None
    assert cause.text == "rank 1 raised; process 7, not of this run, held 0.0 GB of GPU-a"


def test_an_oom_of_our_own_is_ours() -> None:
    assert with_health(OOM, Health(before=(BEFORE,), after=(BEFORE,))) is OOM


def test_other_failures_have_nothing_to_do_with_memory_of_others() -> None:
    crash = FailureCause(text="rank 1 raised ValueError")
    assert with_health(crash, SHARED) is crash


GRADED = range(144, 151)  # whose severity the kernel's log alone has


@pytest.mark.parametrize("number", HARDWARE_XIDS)
def test_every_xid_of_the_hardware_has_a_signature_that_is_transient(number: int) -> None:
    logged = match_line(
        builtin_table(), f"NVRM: Xid (PCI:0000:1b:00): {number}, NETIR Fatal XC0 i0 Link -1"
    )
    assert logged is not None
    assert (logged[0].id, logged[0].is_transient) == (HARDWARE_XIDS[number][0], True)
    crash = FailureCause(text="rank 1 raised")
    found = with_health(crash, Health(xids=(Xid(gpu="GPU-a", xid=number),)))
    if number in GRADED:
        assert found is crash
    else:
        assert signature_of(found) == (HARDWARE_XIDS[number][0], True)


@pytest.mark.parametrize("number", GRADED)
def test_an_nvlink_error_that_is_not_fatal_is_no_fault(number: int) -> None:
    text = f"NVRM: Xid (PCI:0018:01:00): {number}, RLW_RXPIPE Nonfatal XC0 i0"
    assert match_line(builtin_table(), text) is None


def test_without_gpus_or_without_a_failure_nothing_changes() -> None:
    crash = FailureCause(text="rank 1 raised ValueError")
    assert with_health(crash, None) is crash
    assert with_health(None, LOST) is None
