"""Loose lines, looked up in the one table of signatures."""

from __future__ import annotations

import pytest

from pytest_megatron.triage.signatures import is_raised, match_signature

GENUINE = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
TRANSIENT = "RuntimeError: The server socket has failed to listen: EADDRINUSE"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (GENUINE, ("cuda_oom", False)),
        (TRANSIENT, ("port_in_use", True)),
        ("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", ("gpu_lost", True)),
    ],
)
def test_a_line_tells_its_cause(line: str, expected: tuple[str, bool]) -> None:
    found = match_signature(["before", line, "after"])
    assert found is not None
    assert (found.id, found.is_transient) == expected


@pytest.mark.parametrize(
    "line", ["For debugging consider passing CUDA_LAUNCH_BLOCKING=1", "ValueError: x", ""]
)
def test_nothing_else_is_known_and_so_not_run_again(line: str) -> None:
    assert match_signature([line]) is None


def test_a_genuine_cause_comes_before_a_transient_one() -> None:
    found = match_signature([TRANSIENT, GENUINE])
    assert found is not None
    assert found.id == "cuda_oom"


@pytest.mark.parametrize(
    "line", [f"KeyError: {TRANSIENT}", f"RuntimeError: TypeError({TRANSIENT!r})", "KeyError: 'x'"]
)
def test_no_lines_of_an_own_mistake_are_transient(line: str) -> None:
    assert match_signature([line]) is None
    assert match_signature([f"    raise Bad({TRANSIENT!r})", "KeyError: 1", line]) is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("OSError: [Errno 98] Address already in use", True),
        ("socket.gaierror: [Errno -2] Name or service not known", True),
        ("GPU has fallen off the bus", True),
        ("retrying after Connection reset by peer (1/3)... ok", False),
        ("0 uncorrectable ECC errors", False),
    ],
)
def test_what_a_log_only_mentions_was_not_raised(line: str, *, expected: bool) -> None:
    assert is_raised(line) is expected
