from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pytest_megatron.base.files import JsonValue
from pytest_megatron.gangs.ipc.messages import (
    Done,
    Outcome,
    PhaseReport,
    crash_message,
    longrepr_text,
)
from pytest_megatron.gangs.merge import Merged, RankResult, Reason, RunEnd, merge

STACK = 'Thread 0x7f (most recent call first):\n  File "/w/test_a.py", line 7 in reduce'
CONSEQUENCE = "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:4321"


def quick(when: str, at: float = 1.0) -> PhaseReport:
    return PhaseReport(when, "passed", at, at + 0.5)


def longrepr(message: str, *lines: str) -> JsonValue:
    place: JsonValue = {"path": "test_a.py", "lineno": 3, "message": message.partition(":")[0]}
    entry: JsonValue = {
        "type": "ReprEntry",
        "data": {"lines": [*lines, f"E   {message}"], "reprfileloc": place},
    }
    return {
        "reprcrash": {"path": "test_a.py", "lineno": 3, "message": message},
        "reprtraceback": {"reprentries": [entry]},
        "chain": None,
    }


def full(when: str, outcome: Outcome, about: JsonValue = None, **more: JsonValue) -> PhaseReport:
    content = {
        "$report_type": "TestReport",
        "when": when,
        "outcome": outcome,
        "longrepr": about,
        "start": 1.0,
        "stop": 1.5,
        **more,
    }
    return PhaseReport(when, outcome, 1.0, 1.5, content)


def failing(message: str, *lines: str, when: str = "call") -> PhaseReport:
    return full(when, "failed", longrepr(message, *lines))


def skipping(reason: str, when: str = "setup") -> PhaseReport:
    return full(when, "skipped", ["test_a.py", 3, f"Skipped: {reason}"])


def rank(
    number: int,
    *calls: PhaseReport,
    setup: PhaseReport | None = None,
    teardown: PhaseReport | None = None,
    at: float | None = None,
    num_collectives: int = 3,
) -> RankResult:
    """A rank that reported: by default it passed."""
    reports = (setup or quick("setup"), *(calls or (quick("call"),)), teardown or quick("teardown"))
    done = Done(run=1, num_collectives=num_collectives)
    return RankResult(rank=number, done=done, reports=reports, at=at, log_dir=f"logs/{number}")


def skipped(number: int, reason: str) -> RankResult:
    reports = (skipping(reason), quick("teardown"))
    return RankResult(
        rank=number, done=Done(run=1), reports=reports, at=1.0, log_dir=f"logs/{number}"
    )


def dead(
    number: int, exit_code: int, *, phase: str = "call", at: float = 2.0, problem: str = ""
) -> RankResult:
    return RankResult(
        rank=number,
        exit_code=exit_code,
        phase=phase,
        at=at,
        problem=problem,
        log_dir=f"logs/{number}",
    )


def late(number: int, *, phase: str = "call", stack: str = "") -> RankResult:
    return RankResult(rank=number, phase=phase, stack=stack, log_dir=f"logs/{number}")


def merge_ranks(
    *ranks: RankResult, reason: Reason = Reason.DONE, limit_s: float = 0.0
) -> dict[str, Merged]:
    """Merge; return the reports by phase. Every phase has at most one here."""
    end = RunEnd(run=1, reason=reason, ranks=ranks, limit_s=limit_s, duration_s=4.0, is_kept=False)
    merged = merge(end, len(ranks))
    assert merged[0].when == "setup"
    assert merged[-1].when == "teardown"
    return {m.when: m for m in merged}


def outcomes(merged: dict[str, Merged]) -> tuple[str, ...]:
    return tuple(m.outcome for m in merged.values())


def blocks(merged: Merged) -> dict[str, str]:
    return dict(merged.blocks)


def test_a_test_that_every_rank_passed_passed_from_the_first_start_to_the_last_end() -> None:
    merged = merge_ranks(rank(0), rank(1, quick("call", 0.5)), rank(2, quick("call", 3.0)))
    assert merged == {
        "setup": Merged(when="setup", outcome="passed", start=1.0, stop=1.5),
        "call": Merged(when="call", outcome="passed", start=0.5, stop=3.5),
        "teardown": Merged(when="teardown", outcome="passed", start=1.0, stop=1.5),
    }


def test_one_failed_rank_fails_the_test_and_is_named() -> None:
    merged = merge_ranks(rank(0), rank(1, failing("AssertionError: 1 != 2")), rank(2))
    call = merged["call"]
    assert outcomes(merged) == ("passed", "failed", "passed")
    assert call.message == "[rank 1] AssertionError: 1 != 2"
    assert call.base == failing("AssertionError: 1 != 2").full
    assert call.ranks == {"0": "passed", "1": "failed: AssertionError: 1 != 2", "2": "passed"}
    assert call.blocks == (
        ("ranks", "rank 1: failed: AssertionError: 1 != 2\nranks 0, 2: passed"),
        ("logs", "logs/1/stderr.log"),
    )


def test_equal_tracebacks_of_several_ranks_are_shown_once() -> None:
    first = failing("ValueError: <object at 0x7f01>")
    second = failing("ValueError: <object at 0x7f02>")
    other = failing("KeyError: 'x'", "def test():")
    call = merge_ranks(rank(0, first), rank(1, second), rank(2, other))["call"]
    assert call.message == "[rank 0] ValueError: <object at 0x7f01>"
    assert blocks(call)["failure of rank 2"] == (
        "def test():\nE   KeyError: 'x'\ntest_a.py:3: KeyError"
    )
    assert [title for title in blocks(call) if title.startswith("failure")] == ["failure of rank 2"]


def test_the_first_failure_in_time_is_the_headline() -> None:
    call = merge_ranks(
        rank(0, failing("KeyError: 0"), at=5.0), rank(1, failing("KeyError: 1"), at=4.0)
    )["call"]
    assert call.message == "[rank 1] KeyError: 1"


def test_a_consequence_of_another_death_is_never_the_headline_nor_shown() -> None:
    call = merge_ranks(rank(0, failing(CONSEQUENCE), at=1.0), dead(1, -11, at=1.1))["call"]
    assert call.message == "rank 1 of 2 was killed by SIGSEGV"
    assert call.base is None
    assert blocks(call) == {
        "ranks": "rank 1: was killed by SIGSEGV\n"
        "rank 0: failed: Connection closed by peer (a consequence)",
        "logs": "logs/1/stderr.log",
    }
    assert call.sections == ()


def test_a_lone_consequence_is_the_headline_all_the_same() -> None:
    call = merge_ranks(rank(0, failing(CONSEQUENCE), at=1.0), rank(1))["call"]
    assert call.message == f"[rank 0] {CONSEQUENCE}"


@pytest.mark.parametrize("phase", ["setup", "call", "teardown"])
def test_a_death_fails_the_phase_that_it_happened_in(phase: str) -> None:
    merged = merge_ranks(rank(0), dead(1, 3, phase=phase), reason=Reason.DIED)
    where = "" if phase == "call" else f" in {phase}"
    assert merged[phase].message == f"rank 1 of 2 exited with code 3{where}"
    assert [m.when for m in merged.values() if m.outcome == "failed"] == [phase]


def test_a_death_at_no_phase_fails_the_call() -> None:
    merged = merge_ranks(rank(0), dead(1, 0, phase=""), reason=Reason.DIED)
    assert merged["call"].message == "rank 1 of 2 exited with code 0"


def test_ranks_that_all_died_alike_are_named_together() -> None:
    merged = merge_ranks(dead(0, -14), dead(1, -14), reason=Reason.DIED)
    assert merged["call"].message == "ranks 0-1 were killed by SIGALRM"


def test_of_two_deaths_the_first_is_the_cause_and_both_are_told() -> None:
    call = merge_ranks(dead(0, -9, at=3.0), rank(1), dead(2, -6, at=2.0), reason=Reason.DIED)[
        "call"
    ]
    assert call.message == "rank 2 of 3 was killed by SIGABRT"
    assert blocks(call)["ranks"].splitlines() == [
        "rank 2: was killed by SIGABRT",
        "rank 0: was killed by SIGKILL",
        "rank 1: passed",
    ]


def test_a_hang_shows_the_stack_of_every_late_rank_equal_ones_once() -> None:
    stack = 'Thread 0x{} (most recent call first):\n  File "/w/test_a.py", line 7 in test_hang'
    call = merge_ranks(
        late(0, stack=stack.format("7f01")),
        rank(1),
        late(2, stack=stack.format("7f02")),
        late(3, stack=""),
        reason=Reason.HUNG,
        limit_s=300.0,
    )["call"]
    assert call.headline == (
        "ranks 0, 2-3 did not end in 300 s at test_a.py:7 in test_hang (ranks 0, 2)"
    )
    assert blocks(call) == {
        "ranks": "ranks 0, 2: was still in call at test_a.py:7 in test_hang, and was stopped\n"
        "rank 1: passed\n"
        "rank 3: was still in call, and was stopped",
        "stack of ranks 0, 2": "Thread (most recent call first):\n"
        '  File "/w/test_a.py", line 7 in test_hang',
        "logs": "logs/0/stderr.log\nlogs/0/stacks.txt\nlogs/2/stderr.log\nlogs/2/stacks.txt\n"
        "logs/3/stderr.log",
    }


def test_ranks_that_were_stopped_because_of_a_failure_are_told_not_blamed() -> None:
    call = merge_ranks(
        rank(0, failing("KeyError: 0"), at=1.0), late(1), reason=Reason.FAILED, limit_s=10.0
    )["call"]
    assert call.message == "[rank 0] KeyError: 0"
    assert blocks(call)["ranks"].splitlines()[1] == "rank 1: was still in call, and was stopped"


def still_set_up(number: int) -> RankResult:
    """A rank that was stopped in the last collective of its set-up."""
    return late(number, phase="setup", stack=STACK)


def test_a_death_in_the_call_is_no_error_of_the_set_up_that_others_had_not_ended() -> None:
    merged = merge_ranks(dead(0, -9), still_set_up(1), still_set_up(2), reason=Reason.DIED)
    assert outcomes(merged) == ("passed", "failed", "passed")
    assert merged["call"].message == "rank 0 of 3 was killed by SIGKILL"
    assert blocks(merged["call"])["ranks"].splitlines() == [
        "rank 0: was killed by SIGKILL",
        "ranks 1-2: was still in setup at test_a.py:7 in reduce, and was stopped",
    ]


@pytest.mark.parametrize("end", ["done", "hung"])
def test_a_death_in_the_call_is_no_error_of_the_set_up_in_which_others_lost_it(end: str) -> None:
    lost = failing(CONSEQUENCE, when="setup")
    peer = RankResult(rank=1, done=Done(run=1), reports=(lost, quick("teardown")), at=3.0)
    if end == "hung":
        peer = replace(late(1, phase="teardown"), reports=(lost,), at=3.0)
    merged = merge_ranks(dead(0, -11), peer, still_set_up(2), reason=Reason.DIED)
    assert outcomes(merged) == ("passed", "failed", "passed")
    assert merged["call"].message == "rank 0 of 3 was killed by SIGSEGV"
    first, second, _ = blocks(merged["call"])["ranks"].splitlines()
    assert first == "rank 0: was killed by SIGSEGV"
    assert second.startswith("rank 1: failed: Connection closed by peer")


@pytest.mark.parametrize("end", ["done", "hung"])
def test_a_failure_in_the_call_is_shown_though_others_had_not_ended_their_set_up(
    end: str,
) -> None:
    failed = rank(0, failing("KeyError: 0"), at=1.0)
    if end == "hung":  # it went on to hang in its teardown
        failed = replace(
            late(0, phase="teardown"), reports=(failing("KeyError: 0"),), at=1.0, done=None
        )
    merged = merge_ranks(failed, still_set_up(1), reason=Reason.FAILED)
    assert outcomes(merged) == ("passed", "failed", "passed")
    assert merged["call"].message == "[rank 0] KeyError: 0"
    assert "rank 1: was still in setup at" in blocks(merged["call"])["ranks"]


@pytest.mark.parametrize("culprit", ["death", "failure", "hang"])
def test_trouble_in_set_up_is_an_error_of_it_though_others_were_in_the_call(culprit: str) -> None:
    ranks = {
        "death": dead(0, -9, phase="setup"),
        "failure": rank(0, setup=failing("OSError: 0", when="setup"), at=1.0),
        "hang": still_set_up(0),
    }
    merged = merge_ranks(ranks[culprit], late(1), still_set_up(2), reason=Reason.HUNG, limit_s=2.0)
    assert merged["setup"].outcome == "failed"
    assert "call" not in merged


def test_a_skip_on_every_rank_is_a_skip() -> None:
    merged = merge_ranks(skipped(0, "no GPU"), skipped(1, "no GPU"))
    assert outcomes(merged) == ("skipped", "passed")
    assert merged["setup"].base == skipping("no GPU").full


def test_a_skip_on_some_ranks_is_a_failure_that_says_who_did_what() -> None:
    merged = merge_ranks(skipped(0, "no GPU"), rank(1), rank(2))
    assert outcomes(merged) == ("passed", "failed", "passed")
    assert merged["call"].message == "rank 0 skipped, ranks 1-2 did not"
    assert blocks(merged["call"])["ranks"] == "rank 0: skipped: no GPU\nranks 1-2: passed"


def test_a_skip_in_the_call_on_some_ranks_is_a_failure() -> None:
    merged = merge_ranks(rank(0), rank(1, skipping("no", "call")))
    assert merged["call"].message == "rank 1 skipped, rank 0 did not"
    all_of_them = merge_ranks(rank(0, skipping("no", "call")), rank(1, skipping("no", "call")))
    assert outcomes(all_of_them) == ("passed", "skipped", "passed")


def test_a_skip_in_set_up_on_one_rank_and_a_failure_on_another_is_the_failure() -> None:
    merged = merge_ranks(skipped(0, "no"), rank(1, failing("KeyError: 1"), at=0.5))
    assert merged["call"].message == "[rank 1] KeyError: 1"


def test_an_error_in_set_up_ends_the_test_there() -> None:
    broken = RankResult(
        rank=1,
        done=Done(run=1),
        reports=(failing("OSError: no", when="setup"), quick("teardown")),
        at=1.0,
    )
    merged = merge_ranks(rank(0), broken)
    assert list(merged) == ["setup", "teardown"]
    assert merged["setup"].message == "[rank 1] OSError: no"


def test_an_error_in_teardown_fails_the_teardown_alone() -> None:
    merged = merge_ranks(rank(0), rank(1, teardown=failing("OSError: no", when="teardown")))
    assert outcomes(merged) == ("passed", "passed", "failed")


def test_an_expected_failure_on_one_rank_is_the_expected_failure_of_the_test() -> None:
    xfail = full("call", "skipped", longrepr("KeyError: 1"), wasxfail="issue 1")
    xpass = full("call", "passed", wasxfail="issue 1")
    strict = full("call", "failed", "[XPASS(strict)] issue 1")
    assert merge_ranks(rank(0, xfail), rank(1, xfail))["call"].base == xfail.full
    assert merge_ranks(rank(0, xpass), rank(1, xfail))["call"].outcome == "skipped"
    assert merge_ranks(rank(0, strict), rank(1, xfail))["call"].outcome == "skipped"
    assert merge_ranks(rank(0, xpass), rank(1, xpass))["call"].base == xpass.full
    assert merge_ranks(rank(0, strict), rank(1, strict))["call"].outcome == "failed"


def test_different_collectives_fail_a_test_that_every_rank_passed() -> None:
    call = merge_ranks(rank(0, num_collectives=2), rank(1), rank(2), reason=Reason.DESYNCHRONISED)[
        "call"
    ]
    assert call.message == (
        "every rank passed, but they took part in different collectives of the default process "
        "group; the next test would have met what is left"
    )
    assert blocks(call)["ranks"] == (
        "rank 0: passed after 2 collectives\nranks 1-2: passed after 3 collectives"
    )


def test_a_gang_that_did_not_start_fails_the_test() -> None:
    merged = merge_ranks(
        late(0, phase=""),
        dead(1, 70, phase="", problem="Traceback\n  ...\nImportError: torch"),
        reason=Reason.NOT_STARTED,
    )
    assert merged["call"].message == "rank 1 of 2 did not start: ImportError: torch"
    assert blocks(merged["call"]) == {
        "ranks": "rank 1: did not start: ImportError: torch\nrank 0: was stopped before it started",
        "rank 1": "Traceback\n  ...\nImportError: torch",
        "logs": "logs/1/stderr.log",
    }
    never = merge_ranks(late(0), late(1), reason=Reason.NOT_STARTED, limit_s=300.0)
    assert never["call"].message == "the gang did not start in 300 s"


def test_a_silent_rank_fails_the_test_whatever_the_reason_says() -> None:
    merged = merge_ranks(rank(0), late(1))
    assert merged["call"].outcome == "failed"


def with_output(*pairs: tuple[str, str], **more: JsonValue) -> PhaseReport:
    return full("call", "passed", sections=[list(p) for p in pairs], **more)


def test_output_says_which_ranks_printed_it() -> None:
    hi = with_output(("Captured stdout call", "hi\n"))
    ho = with_output(("Captured stdout call", "ho\n"))
    call = merge_ranks(rank(0, hi), rank(1, hi), rank(2, ho))["call"]
    assert call.sections == (
        ("Captured stdout call of ranks 0-1", "hi\n"),
        ("Captured stdout call of rank 2", "ho\n"),
    )


def test_equal_properties_of_ranks_are_kept_once() -> None:
    reports = [full("call", "passed", user_properties=[["loss", loss]]) for loss in (1.5, 1.5, 2)]
    call = merge_ranks(*(rank(n, report) for n, report in enumerate(reports)))["call"]
    assert call.properties == (("loss", 1.5), ("loss", 2))


def subtest(name: str, outcome: Outcome) -> PhaseReport:
    about = None if outcome == "passed" else longrepr(f"E: {name}")
    context: dict[str, JsonValue] = {"msg": name, "kwargs": {}}
    kind: JsonValue = "SubtestReport"
    return full("call", outcome, about, **{"$report_type": kind, "_subtest.context": context})


def test_subtests_are_merged_by_name_before_their_test() -> None:
    ranks: Sequence[RankResult] = (
        rank(0, subtest("a", "passed"), subtest("b", "passed"), quick("call")),
        rank(1, subtest("a", "passed"), subtest("b", "failed"), quick("call")),
    )
    end = RunEnd(
        run=1, reason=Reason.DONE, ranks=tuple(ranks), limit_s=0, duration_s=1, is_kept=True
    )
    assert [(m.when, m.outcome) for m in merge(end, 2)] == [
        ("setup", "passed"),
        ("call", "passed"),
        ("call", "failed"),
        ("call", "passed"),
        ("teardown", "passed"),
    ]


@pytest.mark.parametrize(
    ("about", "text", "message"),
    [
        pytest.param(None, "", "failed", id="nothing"),
        pytest.param("one\ntwo\n", "one\ntwo\n", "two", id="text"),
        pytest.param(
            longrepr("KeyError: 1\nmore", "def f():"),
            "def f():\nE   KeyError: 1\nmore\ntest_a.py:3: KeyError",
            "KeyError: 1",
            id="traceback",
        ),
        pytest.param({"reprcrash": {"message": "killed"}}, "killed", "killed", id="no-traceback"),
    ],
)
def test_a_serialised_traceback_is_read_as_text(about: JsonValue, text: str, message: str) -> None:
    assert (longrepr_text(about), crash_message(about)) == (text, message)


def test_ranks_that_fail_at_one_line_with_values_of_their_own_have_one_traceback() -> None:
    ranks = [
        rank(n, failing(f"assert {n} == 9", f">   assert rank_value({n}) == 9"), at=2.0 + n)
        for n in range(8)
    ]
    call = merge_ranks(*ranks)["call"]
    assert call.message == "[rank 0] assert 0 == 9"
    assert [title for title, _ in call.blocks] == ["ranks", "logs"]
    assert "rank 7: failed: assert 7 == 9" in blocks(call)["ranks"]


def test_other_exceptions_of_one_line_keep_their_tracebacks() -> None:
    kinds = ("KeyError", "ValueError", "KeyError", "ValueError", "KeyError")
    ranks = [rank(n, failing(f"{kind}: {n}"), at=2.0 + n) for n, kind in enumerate(kinds)]
    titles = [title for title, _ in merge_ranks(*ranks)["call"].blocks]
    assert titles == ["ranks", "failure of rank 1", "logs"]
