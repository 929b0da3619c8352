from __future__ import annotations

import random
from dataclasses import replace

import pytest
from recorded_runs import ENTRY

from pytest_megatron.flaky.statistics import (
    HistoryRecord,
    failure_streak,
    flaky_records,
)
from pytest_megatron.runs.history import HistoryEntry


def entries(node_id: str, *verdicts: str, commit: str | None = None) -> list[HistoryEntry]:
    return [
        replace(
            ENTRY,
            node_id=node_id,
            time=f"2026-01-{day:02}T00:00:00Z",
            verdict=verdict,
            commit=commit or f"c{day}",
            causes=("dns",) if verdict in ("flaky", "broken") else (),
        )
        for day, verdict in enumerate(verdicts, 1)
    ]


def test_the_worst_item_comes_first() -> None:
    given = [
        *entries("sometimes", "passed", "flaky", "passed", "failed"),
        *entries("often", "flaky", "broken", "flaky"),
        *entries("never", "passed", "failed"),
    ]
    assert flaky_records(given) == (
        HistoryRecord(
            node_id="often",
            num_runs=3,
            num_flaky=2,
            num_bad=1,
            causes=(("dns", 3),),
            num_contradictory=0,
            first_seen="2026-01-01T00:00:00Z",
            last_seen="2026-01-03T00:00:00Z",
            is_in_quarantine=False,
        ),
        HistoryRecord(
            node_id="sometimes",
            num_runs=4,
            num_flaky=1,
            num_bad=1,
            causes=(("dns", 1),),
            num_contradictory=0,
            first_seen="2026-01-02T00:00:00Z",
            last_seen="2026-01-04T00:00:00Z",
            is_in_quarantine=False,
        ),
    )


def test_an_item_that_passed_and_failed_at_one_commit_is_flaky_too() -> None:
    (record,) = flaky_records(entries("item", "passed", "failed", commit="c"))
    assert (record.is_contradictory, record.num_flaky) == (True, 0)


def test_failures_of_a_revision_that_also_passed_count_as_flaky() -> None:
    verdicts = ("passed", "failed") * 4
    (record,) = flaky_records(entries("t.py::a", *verdicts, commit="c1"))
    assert (record.share, record.num_contradictory) == (0.5, 4)
    dirty = [replace(e, is_dirty=True) for e in entries("item", "passed", "failed", commit="c")]
    assert flaky_records(dirty) == ()


def test_old_runs_are_left_out() -> None:
    given = entries("item", "flaky", "flaky", "flaky")
    (record,) = flaky_records(given, since="2026-01-02T00:00:00Z")
    assert record.num_runs == 2


def test_one_revision_on_two_platforms_contradicts_nothing() -> None:
    elsewhere = [replace(e, platform="cuda x8") for e in entries("item", "failed")]
    assert flaky_records([*entries("item", "passed"), *elsewhere]) == ()


@pytest.mark.parametrize(
    ("before", "num_failed", "is_likely"),
    [
        pytest.param("......f.......f.......f.", 15, False, id="one-of-eight-and-a-long-streak"),
        pytest.param("......f.......f.......f.", 5, False, id="one-of-eight"),
        pytest.param("......f.......f.......f.", 4, True, id="one-of-eight-four-times"),
        pytest.param("f.f.f.f.ff..f.f..f.f.f..", 4, True, id="every-other"),
        pytest.param("....................", 2, True, id="two-failures"),
        pytest.param("", 11, True, id="never-passed"),
        pytest.param("", 12, False, id="never-passed-for-long"),
        pytest.param("f", 0, True, id="passed-last"),
    ],
)
def test_failures_in_a_row_that_are_no_chance_are_a_regression(
    before: str, num_failed: int, *, is_likely: bool
) -> None:
    verdicts = ["failed" if one == "f" else "passed" for one in before]
    runs = [
        replace(ENTRY, time=f"2026-01-01T00:{number:02}:00Z", verdict=verdict, commit=f"c{number}")
        for number, verdict in enumerate([*verdicts, *["failed"] * num_failed])
    ]
    elsewhere = replace(ENTRY, time="2026-02-01T00:00:00Z", platform="dgx_h100")
    dirty = replace(ENTRY, time="2026-02-01T00:00:00Z", is_dirty=True)
    found = failure_streak([*runs, elsewhere, dirty], "cpu")
    assert (found.num_failed < found.num_needed) is is_likely
    if num_failed and before:
        assert (found.since, found.num_before) == (f"c{len(before)}", len(before))


def test_an_item_that_nobody_repaired_seldom_counts_as_a_regression() -> None:
    """In 200 runs in quarantine, with rates from 2 % to 60 %: at most 5 % of the items."""
    chance = random.Random(7)
    num_wrong = 0
    for number in range(100):
        rate = (0.02, 0.125, 0.3, 0.6)[number % 4]
        runs: list[HistoryEntry] = []
        for run in range(200):
            verdict = "failed" if chance.random() < rate else "passed"
            time = f"2026-01-01T{run // 60:02}:{run % 60:02}:00Z"
            until = "2026-12-31" if run > 20 else ""
            runs.append(replace(ENTRY, time=time, verdict=verdict, quarantined_until=until))
            if verdict == "failed" and run > 20:
                found = failure_streak(runs, "cpu")
                if found.num_failed >= found.num_needed:
                    num_wrong += 1
                    break
    assert num_wrong <= 5
