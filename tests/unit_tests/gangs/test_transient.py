"""Which failures of distributed tests are worth running again."""

from __future__ import annotations

import pytest

from pytest_megatron.base.files import JsonValue
from pytest_megatron.gangs.merge import Merged
from pytest_megatron.gangs.record import transient_cause, why_not_again

OOM = "torch.OutOfMemoryError: CUDA out of memory"
PORT = "RuntimeError: bind: Address already in use"


def failure(message: str, longrepr: JsonValue = "", block: str = "") -> Merged:
    return Merged(
        when="call",
        outcome="failed",
        message=f"[rank 1] {message}",
        base={"longrepr": longrepr},
        blocks=(("failure of rank 2", block),),
    )


@pytest.mark.parametrize(
    ("merged", "log_lines", "signature"),
    [
        pytest.param(failure(PORT), [], "port_in_use", id="headline"),
        pytest.param(failure("stopped", f"E   {PORT}"), [], "port_in_use", id="raised"),
        pytest.param(failure("stopped", block=f"E   {PORT}"), [], "port_in_use", id="other-rank"),
        pytest.param(failure("did not end in 3 s"), [PORT], None, id="deadlock"),
        pytest.param(failure("KeyError: 'x'"), [PORT], None, id="another-exception"),
        pytest.param(failure("KeyError: 'x'", block=f"E   {PORT}"), [], None, id="consequence"),
        pytest.param(failure("KeyError: 'x'", f"E   {PORT}"), [], None, id="chained"),
        pytest.param(failure(f"KeyError: a log:\n{PORT}"), [], None, id="lines"),
        pytest.param(failure("died", f"    raise {PORT}"), [], None, id="quoted-source"),
        pytest.param(failure(f"AssertionError: {PORT}"), [PORT], None, id="assertion"),
        pytest.param(failure("assert 1 == 2"), [PORT], None, id="bare-assertion"),
        pytest.param(failure("Failed: no"), [PORT], None, id="pytest.fail"),
        pytest.param(
            failure(PORT),
            ["torch.OutOfMemoryError: CUDA out of memory"],
            None,
            id="genuine-cause-beside",
        ),
        pytest.param(failure("RuntimeError: no"), [], None, id="unknown"),
        pytest.param(Merged(when="call", outcome="passed"), [PORT], None, id="passed"),
    ],
)
def test_transient_cause(merged: Merged, log_lines: list[str], signature: str | None) -> None:
    found = transient_cause([Merged(when="setup", outcome="passed"), merged], log_lines)
    assert (found.id if found else None) == signature


@pytest.mark.parametrize(
    ("last_stderr_lines", "signature"),
    [
        pytest.param(["x", PORT], "port_in_use", id="stderr"),
        pytest.param([f"retrying after {PORT}... ok"], None, id="mentioned"),
        pytest.param(["Segmentation fault (core dumped)", PORT], None, id="crash"),
        pytest.param([], None, id="silent"),
    ],
)
def test_of_a_rank_that_died_its_last_words_count(
    last_stderr_lines: list[str], signature: str | None
) -> None:
    found = transient_cause([failure("exited with code 1")], last_stderr_lines, last_stderr_lines)
    assert (found.id if found else None) == signature
    assert transient_cause([failure("exited with code 1")], last_stderr_lines) is None


REMOTE = (
    "torch.distributed.DistBackendError: NCCL error in: a.cpp:1, remote process exited or there "
    "was a network error"
)


@pytest.mark.parametrize(
    ("merged", "why"),
    [
        pytest.param(failure(REMOTE), "known as nccl_remote, which follows from", id="cascade"),
        pytest.param(failure(OOM), "known as cuda_oom, which is not transient", id="genuine"),
        pytest.param(failure(PORT), "known as port_in_use; a cause beside it", id="beside"),
        pytest.param(failure("RuntimeError: no"), None, id="unknown"),
        pytest.param(Merged(when="call", outcome="passed"), None, id="passed"),
    ],
)
def test_why_a_failure_that_is_known_does_not_run_again(merged: Merged, why: str | None) -> None:
    assert (why_not_again([merged]) or "None").startswith(why or "None")
