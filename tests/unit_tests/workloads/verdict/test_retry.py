"""What is run again, after which pause, and when it is deterministic."""

from __future__ import annotations

from pathlib import Path

import pytest
from recipe_rows import row_of

from pytest_megatron.base.files import JsonValue
from pytest_megatron.errors import RecipeError
from pytest_megatron.runs.layout import AttemptDirs
from pytest_megatron.triage.signatures import builtin_table, match_signature
from pytest_megatron.workloads.verdict.attempt import Attempt, FailureCause
from pytest_megatron.workloads.verdict.retry import (
    Retry,
    RetryPolicy,
    StopRetrying,
    fingerprint,
    next_step,
    policy_of,
    with_policy,
)

DNS = match_signature(["Temporary failure in name resolution"])
PORT = match_signature(["EADDRINUSE"])


def cause(text: str = "rank 0 raised OSError", signature: object = DNS) -> FailureCause:
    assert signature is DNS or signature is PORT or signature is None
    return FailureCause(text=text, rank=0, signature=signature)


def attempts(*causes: FailureCause | None) -> list[Attempt]:
    return [
        Attempt(
            repeat=1,
            number=number,
            dirs=AttemptDirs(root=Path()),
            ends=(),
            metrics=(),
            cause=found,
        )
        for number, found in enumerate(causes, 1)
    ]


@pytest.mark.parametrize(
    "causes",
    [
        pytest.param([None], id="clean"),
        pytest.param([cause(signature=None)], id="unknown"),
        pytest.param(
            [FailureCause(text="x", signature=match_signature(["found NaN in"]))], id="nan"
        ),
    ],
)
def test_the_default_is_not_to_run_again(causes: list[FailureCause | None]) -> None:
    assert next_step(attempts(*causes), RetryPolicy(), 0.5) == StopRetrying()


def test_pauses_grow_up_to_a_limit_and_differ_between_runs() -> None:
    found = attempts(*(cause(f"at iteration {n}") for n in range(8)))
    policy = RetryPolicy(max_attempts=99)
    steps = [next_step(found[:n], policy, 0.5) for n in (1, 2, 3, 8)]
    assert steps == [Retry(pause_s=s) for s in (5.0, 10.0, 20.0, 120.0)]
    ends = [next_step(found[:1], policy, draw) for draw in (0.0, 0.999)]
    assert ends == [Retry(pause_s=3.8), Retry(pause_s=6.2)]


def test_a_port_in_use_does_not_wait() -> None:
    assert next_step(attempts(cause(signature=PORT)), RetryPolicy(), 0.5) == Retry(pause_s=0.0)


@pytest.mark.parametrize("name", ["engine_node_fail", "engine_preempted"])
def test_what_machines_do_may_happen_twice_with_the_same_words(name: str) -> None:
    row = builtin_table()[name]
    text = "job 41235 on node0007 ended as it did: the numbers are no part of a fingerprint"
    found = attempts(*(FailureCause(text=text.replace("7", n), signature=row) for n in "78"))
    assert len({fingerprint(a.cause) for a in found if a.cause is not None}) == 1
    assert next_step(found, RetryPolicy(), 0.5) == Retry(pause_s=0.0)


def test_the_same_failure_twice_is_not_by_chance() -> None:
    texts = [
        f"rank 0 raised OSError: 10.0.0.5:{port} in 0x7f{port} after iteration 3; see {log}"
        for port, log in ((41235, "/run/attempt_1/0.log"), (5001, "/run/attempt_2/0.log"))
    ]
    found = attempts(*map(cause, texts))
    assert fingerprint(cause(texts[0])) == fingerprint(cause(texts[1]))
    assert next_step(found, RetryPolicy(), 0.5) == StopRetrying(
        reason="it failed as attempt 1 did, at the same place: not by chance"
    )


@pytest.mark.parametrize(
    "other",
    [
        cause("rank 0 raised OSError after iteration 7"),
        FailureCause(text="rank 0 raised OSError", rank=1, signature=DNS),
        cause(signature=PORT),
    ],
    ids=["another iteration", "another rank", "another cause"],
)
def test_another_failure_has_another_fingerprint(other: FailureCause) -> None:
    assert fingerprint(other) != fingerprint(cause())


def test_the_limit_of_an_item_holds() -> None:
    found = attempts(cause("a"), cause("b"), cause("c"))
    assert next_step(found, RetryPolicy(), 0.5) == StopRetrying(
        reason="it was the last of 3 attempts"
    )


def test_a_row_has_its_own_limit_and_the_user_the_last_word() -> None:
    limits = [
        policy_of(row_of(max_attempts=given), max_attempts=typed, backoff_s=1.0).max_attempts
        for given, typed in ((None, None), (7, None), (7, 2))
    ]
    assert limits == [3, 7, 2]


def test_a_row_says_what_is_transient_for_it() -> None:
    disk = match_signature(["No space left on device"])
    policy = policy_of(
        row_of(transient=["disk_full"], never_transient=["dns"]), max_attempts=None, backoff_s=1.0
    )
    found = [with_policy(FailureCause(text="x", signature=s), policy) for s in (disk, DNS, PORT)]
    assert [c is not None and c.is_transient for c in found] == [True, False, True]


def test_a_failed_assertion_is_never_transient_whatever_it_quotes() -> None:
    quoting = FailureCause(text="x", evidence=("AssertionError: not EADDRINUSE",), signature=PORT)
    found = with_policy(quoting, RetryPolicy(transient=frozenset(("port_in_use",))))
    assert found is not None
    assert not found.is_transient


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"transient": ["nds"]},
            "transient: unknown signature 'nds', expected some of ",
        ),
        (
            {"transient": ["cuda_oom"]},
            "transient: 'cuda_oom' is never transient; remove",
        ),
        (
            {"transient": ["dns"], "never_transient": ["dns"]},
            "transient: 'dns' is in never_transient too; remove it",
        ),
        ({"transient": "dns"}, "transient: found 'dns', expected a list of ids"),
        (
            {"quarantine": {"reason": "x"}},
            "quarantine: until: is missing, expected the",
        ),
    ],
)
def test_a_row_that_means_nothing_is_an_error(values: dict[str, JsonValue], message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        policy_of(row_of(**values), max_attempts=None, backoff_s=1.0)
    assert str(raised.value).startswith(f"recipes/r.yaml:7: {message}")
