"""The table of signatures: every row does what its own examples say, and users may add rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pytest_megatron.errors import TriageError
from pytest_megatron.triage.api import triage
from pytest_megatron.triage.signatures import (
    TABLE,
    LineRole,
    RetryAdvice,
    Signature,
    Table,
    builtin_table,
    check_rules,
    load_table,
)

OWN = """
[families]
license = "a licence is not there"

[[signature]]
id = "licence_server"
family = "license"
pattern = 'no licence for \\S+'
transient = true
policy = "backoff"
advice = "ask the licence server's owner"
examples = ["RuntimeError: no licence for solver"]
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    return path


def test_every_rule_does_what_its_examples_say() -> None:
    assert check_rules(builtin_table()) == ()


def test_the_table_of_the_package_is_what_is_asked_of_users() -> None:
    assert load_table([TABLE]).signatures == builtin_table().signatures


PORT = replace(builtin_table()["port_in_use"], examples=("EADDRINUSE",), seen=("https://a.b",))


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (replace(PORT, policy=RetryAdvice.NEVER), "is transient, and its policy never does not"),
        (replace(PORT, is_transient=False), "is not transient, and its policy new_port does not"),
        (replace(PORT, seen=()), "seen: found 0 addresses, expected one for each of its examples"),
        (replace(PORT, seen=("http://a.b",)), "seen: expected addresses that begin with https://"),
    ],
)
def test_a_row_of_the_package_that_contradicts_itself_is_reported(
    row: Signature, problem: str
) -> None:
    """An example that was made up beside its pattern shows nothing, so it needs a source."""
    table = Table(signatures=(row,), families={"port_in_use": "a port"})
    (found,) = check_rules(table)
    assert found.problem.startswith(problem)
    assert check_rules(replace(table, users=frozenset({row.id}))) == ()


@pytest.mark.parametrize(
    ("message", "signature"),
    [
        ("ConnectionError: no store", "exception"),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/x.bin'", "shm_full"),
        ("OSError: [Errno 28] No space left on device: '/mnt/x.bin'", "disk_full"),
        ("openai.InternalServerError: Error code: 500 - {'detail': 'x'}", "exception"),
        ("urllib.error.HTTPError: HTTP Error 500: Internal Server Error", "exception"),
    ],
)
def test_what_looks_like_a_networks_or_machines_failure_and_is_none(
    message: str, signature: str
) -> None:
    found = builtin_table().raised(message)
    assert found is not None
    assert (found.id, found.is_transient) == (signature, False)


def test_every_family_has_a_row() -> None:
    table = builtin_table()
    assert {row.family for row in table.signatures} == set(table.families)


@pytest.mark.parametrize(
    "message",
    [
        pytest.param("AssertionError: The following metrics failed: lm loss", id="golden"),
        pytest.param("RuntimeError: found NaN in local grad norm", id="nan"),
        pytest.param("torch.OutOfMemoryError: CUDA out of memory", id="oom"),
        pytest.param(
            "RuntimeError: CUDA error: an illegal memory access was encountered", id="ima"
        ),
        pytest.param("AssertionError: expected a Read timed out, EADDRINUSE", id="assertion"),
        pytest.param("Failed: DID NOT RAISE <class 'TimeoutError'>", id="did-not-raise"),
        pytest.param("ModuleNotFoundError: No module named 'zmq'", id="import"),
        pytest.param("OSError: [Errno 28] No space left on device", id="disk"),
        pytest.param("KeyError: 'Connection refused'", id="quoted"),
    ],
)
def test_what_the_code_caused_is_never_transient(message: str) -> None:
    """A golden mismatch and bugs of the product are not flaky."""
    found = builtin_table().raised(message)
    assert found is not None
    assert not found.is_transient


def test_the_advice_that_every_cuda_error_prints_says_nothing() -> None:
    found = builtin_table().raised(
        "RuntimeError: CUDA error: misaligned address\n"
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1"
    )
    assert found is not None
    assert found.id == "kernel_fault"
    assert (
        builtin_table().raised("For debugging consider passing CUDA_LAUNCH_BLOCKING=1")
        == (builtin_table()["exception"])
    )


def test_users_rows_come_first(own: Path) -> None:
    table = load_table([own])
    found = table.raised("RuntimeError: no licence for solver")
    assert found == Signature(
        id="licence_server",
        family="license",
        pattern=r"no licence for \S+",
        is_transient=True,
        policy=RetryAdvice.BACKOFF,
        advice="ask the licence server's owner",
        examples=("RuntimeError: no licence for solver",),
    )
    assert check_rules(table) == ()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('policy = "backoff"\n', "transient: it is expected to pass when it is submitted again"),
        ("transient = true\n", "not transient: running it again unchanged gives the same"),
    ],
    ids=["no-policy", "not-transient"],
)
def test_a_row_without_a_policy_that_fits_does_not_contradict_itself(
    own: Path, tmp_path: Path, line: str, reason: str
) -> None:
    own.write_text(OWN.replace(line, ""))
    log = tmp_path / "job.log"
    log.write_text("RuntimeError: no licence for solver\n")
    (group,) = triage([log], load_table([own])).groups
    assert (group.first.signature, group.first.reason) == ("licence_server", reason)


def test_a_users_row_replaces_ours_of_the_same_id(own: Path) -> None:
    own.write_text(OWN.replace('"licence_server"', '"dns"'))
    table = load_table([own])
    found = table.raised("socket.gaierror: Name or service not known")
    assert found is None or found.id == "exception"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(
            ('family = "license"', 'family = "x"'), "unknown family 'x', expected", id="family"
        ),
        pytest.param(
            ("transient = true", "transiant = true"),
            "transiant: unknown key, expected one of",
            id="key",
        ),
        pytest.param(
            ("transient = true", 'transient = "no"'),
            "transient: found 'no', expected true or",
            id="flag",
        ),
        pytest.param(
            ('"backoff"', '"later"'), "policy: found 'later', expected one of", id="policy"
        ),
        pytest.param(("\\\\S+", "("), "is no regular expression", id="pattern"),
        pytest.param(('id = "licence_server"', ""), "id: is missing; add it", id="id"),
        pytest.param(
            ("pattern =", 'literals = ["no"]\npattern ='),
            "expected at least 4 characters",
            id="short",
        ),
        pytest.param(("[families]", "[families"), "cannot be read as a table", id="toml"),
        pytest.param(
            ("[[signature]]", "[[signatures]]"), "unknown key, expected one of families", id="none"
        ),
        pytest.param(("examples =", "x ="), "examples: is missing; add it", id="examples"),
    ],
)
def test_a_bad_row_is_one_clear_error(own: Path, change: tuple[str, str], expected: str) -> None:
    own.write_text(OWN.replace("\\S+", "\\\\S+").replace(*change).replace("\\\\S+", "\\S+"))
    with pytest.raises(TriageError) as caught:
        load_table([own])
    assert str(caught.value).startswith(f"{own}: ")
    assert expected in str(caught.value)


def test_a_row_that_its_examples_contradict_is_reported(own: Path) -> None:
    own.write_text(OWN + 'counterexamples = ["ValueError: no licence for x"]\n')
    (problem,) = check_rules(load_table([own]))
    assert problem.problem == "licence_server matches it, expected not"


def test_roles_are_told_apart() -> None:
    roles = {row.role for row in builtin_table().signatures}
    assert {LineRole.CAUSE, LineRole.CASCADE, LineRole.CONFIRMATION} <= roles
