from __future__ import annotations

import pytest

from pytest_megatron.verdict.signature import SIGNATURES, match_signature

GENUINE = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
TRANSIENT = "RuntimeError: The server socket has failed to listen: EADDRINUSE"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (GENUINE, ("cuda_oom", False)),
        (TRANSIENT, ("port_in_use", True)),
        ("RuntimeError: found NaN in local grad norm", ("nonfinite_loss", False)),
        ("CUDA error: device-side assert triggered", ("device_assert", False)),
        ("CUDA error: an illegal memory access was encountered", ("illegal_access", False)),
        ("ModuleNotFoundError: No module named 'apex'", ("import_error", False)),
        ("OSError: [Errno 28] No space left on device", ("disk_full", False)),
        ("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", ("gpu_lost", True)),
        ("Temporary failure in name resolution", ("dns", True)),
    ],
)
def test_a_line_tells_its_cause(line: str, expected: tuple[str, bool]) -> None:
    found = match_signature(["before", line, "after"])
    assert found is not None
    assert (found.id, found.is_transient) == expected


@pytest.mark.parametrize(
    "line",
    [
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
        "AssertionError: The following metrics failed: lm loss",
        "Segmentation fault (core dumped)",
        "ValueError: x",
        "",
    ],
)
def test_nothing_else_is_known_and_so_not_run_again(line: str) -> None:
    assert match_signature([line]) is None


def test_a_genuine_cause_comes_before_a_transient_one() -> None:
    found = match_signature([TRANSIENT, GENUINE])
    assert found is not None
    assert found.id == "cuda_oom"


def test_rows_are_told_apart_by_their_ids() -> None:
    ids = [signature.id for signature in SIGNATURES]
    assert len(set(ids)) == len(ids)
    kinds = [signature.is_transient for signature in SIGNATURES]
    assert kinds == sorted(kinds), "genuine causes must come first"
