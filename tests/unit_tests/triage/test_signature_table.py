"""The table of signatures: every row does what its own examples say, and users may add rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_megatron.errors import TriageError
from pytest_megatron.triage.signatures import (
    TABLE,
    LineRole,
    RetryAdvice,
    Signature,
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

OUT_OF_SHARED_MEMORY = (  # https://github.com/pytorch/pytorch/issues/108861
    "RuntimeError: DataLoader worker (pid 11011) is killed by signal: Bus error. It is possible "
    "that dataloader's workers are out of shared memory. Please try to raise your shared memory "
    "limit"
)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    return path


def test_every_rule_does_what_its_examples_say() -> None:
    assert check_rules(builtin_table()) == ()


def test_the_table_of_the_package_is_what_is_asked_of_users() -> None:
    assert load_table([TABLE]).signatures == builtin_table().signatures


def test_every_rule_can_be_searched_and_has_examples() -> None:
    for row in builtin_table().signatures:
        row.search("x")  # compiles
        assert row.examples, row.id
        assert row.family in builtin_table().families, row.id


def test_every_example_of_every_rule_has_a_source() -> None:
    """An example that was made up beside its pattern shows nothing."""
    for row in builtin_table().signatures:
        assert len(row.seen) == len(row.examples), row.id
        assert all(address.startswith("https://") for address in row.seen), row.id


@pytest.mark.parametrize(
    ("message", "signature"),
    [
        (OUT_OF_SHARED_MEMORY, "shared_memory"),
        ("ConnectionError: no store", "exception"),
        ("botocore.exceptions.ClientError: An error occurred (AccessDenied) when", "exception"),
        ("fatal: repository 'https://github.com/example/none.git/' not found", "exception"),
    ],
)
def test_what_looks_like_a_networks_or_machines_failure_and_is_none(
    message: str, signature: str
) -> None:
    found = builtin_table().raised(message)
    assert found is not None
    assert (found.id, found.is_transient) == (signature, False)


def test_nothing_transient_is_never_worth_another_run() -> None:
    kinds = {(row.is_transient, row.policy) for row in builtin_table().signatures}
    assert (True, RetryAdvice.NEVER) not in kinds
    assert (True, RetryAdvice.DIAGNOSE) not in kinds


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
    """FORMATS.md 9, lines 4, 5: a golden mismatch and bugs of the product are not flaky."""
    found = builtin_table().raised(message)
    assert found is not None
    assert not found.is_transient


@pytest.mark.parametrize(
    ("message", "signature"),
    [
        ("RuntimeError: The server socket has failed to listen: EADDRINUSE", "port_in_use"),
        ("socket.gaierror: [Errno -2] Name or service not known", "dns"),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "ecc_dbe"),
        ("RuntimeError: Unexpected error. Error 802: system not yet initialized", "cuda_not_ready"),
        ("huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests", "hf_hub"),
        ("RuntimeError: NCCL error: ncclRemoteError: x", "nccl_remote"),
    ],
)
def test_what_the_machine_or_network_caused_is_transient(message: str, signature: str) -> None:
    """FORMATS.md 9, line 5: what Megatron-LM's lists lack is here."""
    found = builtin_table().raised(message)
    assert found is not None
    assert (found.id, found.is_transient) == (signature, True)


def test_the_advice_that_every_cuda_error_prints_says_nothing() -> None:
    """FORMATS.md 9, line 5."""
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
            ("[[signature]]", "[[signatures]]"), "signature: is missing; add it", id="none"
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
