"""Plugins of pytest, what each is for, and what has to come out of it on gangs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

STANDARD = {
    "test_gang.py": """
        import logging
        import pytest
        import torch
        import torch.distributed as dist

        @pytest.fixture(scope="module")
        def once():
            return []

        def test_reduces(process_group, rank):
            total = torch.tensor([rank + 1.0])
            dist.all_reduce(total)
            assert total.item() == 3

        @pytest.mark.parametrize("n", [1])
        def test_fails_on_one(rank, n):
            assert rank != n

        def test_skips():
            pytest.skip("not today")

        @pytest.mark.xfail
        def test_xfails():
            raise ValueError

        def test_prints(once, capsys):
            print("out")
            logging.warning("logged")
            once.append(1)
            assert "out" in capsys.readouterr().out

        class TestClass:
            def test_keeps(self, once, rank, shared_tmp_path, tmp_path):
                (tmp_path / "a").touch()
                (shared_tmp_path / str(rank)).touch()
                assert len(once) < 2
        """,
    "test_plain.py": """
        import pytest

        pytestmark = pytest.mark.controller

        def test_plain(tmp_path): assert not list(tmp_path.iterdir())
        def test_plain_fails(): assert 1 == 2
        def test_plain_skips(): pytest.skip("no")
        def test_plain_prints(capsys): print("x")
        """,
}
STANDARD_OUTCOMES = {
    "test_reduces": "passed",
    "test_fails_on_one[1]": "failed",
    "test_skips": "skipped",
    "test_xfails": "xfailed",
    "test_prints": "passed",
    "test_keeps": "passed",
    "test_plain": "passed",
    "test_plain_fails": "failed",
    "test_plain_skips": "skipped",
    "test_plain_prints": "passed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One run of pytest on what a plugin is for.

    Attributes:
        outcomes: Name of each test -> passed, failed, error, skipped or xfailed.
        prints: What has to be in its output.
        check: Returns what else is wrong with the project and the output, or "".
    """

    args: tuple[str, ...] = ()
    outcomes: Mapping[str, str] = field(default_factory=dict)
    exit_code: int = 0
    prints: tuple[str, ...] = ()
    check: Callable[[Path, str], str] | None = None
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """One plugin.

    Attributes:
        requirement: Its name and version.
        is_installed_apart: Whether it is not a part of every environment of this project.
        verdict: A word for the table.
        note: What holds of it on gangs.
    """

    requirement: str
    files: Mapping[str, str]
    sessions: tuple[Session, ...]
    is_installed_apart: bool = True
    verdict: Literal["works", "in part", "refused"] = "works"
    note: str = ""

    @property
    def name(self) -> str:
        """The name without the version."""
        return self.requirement.partition("==")[0]


TABLE_HEAD = ("| plugin | version | on gangs | what holds |", "|---|---|---|---|")


def row_of(case: Case) -> str:
    """Return the row of a plugin in docs/reference/other-plugins.md."""
    name, _, version = case.requirement.partition("==")
    return f"| {name} | {version} | {case.verdict} | {case.note} |"


def _one(
    requirement: str,
    test: str,
    *args: str,
    note: str = "",
    verdict: Literal["works", "in part", "refused"] = "works",
    **more: object,
) -> Case:
    """Return a case of one session with one file."""
    session = {k: more.pop(k) for k in list(more) if k in Session.__dataclass_fields__}
    return Case(
        requirement=requirement,
        files={"test_it.py": test, **more.pop("files", {})},  # type: ignore[dict-item]
        sessions=(Session(args=args, **session),),  # type: ignore[arg-type]
        note=note,
        verdict=verdict,
        **more,  # type: ignore[arg-type]
    )


_PASSES = {"test_it": "passed"}
_AGREE = """
    import torch.distributed as dist

    def agree(value):
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, value)
        assert len(set(every)) == 1, every
    """


def _html(project: Path, output: str) -> str:
    del output
    text = (project / "report.html").read_text()
    counts = [f"{n} {word}" for n, word in ((1, "Failed"), (1, "Passed")) if f"{n} {word}" in text]
    return "" if len(counts) == 2 and "rank 1" in text else f"report.html has {counts}"


def _json_report(project: Path, output: str) -> str:
    del output
    report = json.loads((project / ".report.json").read_text())
    tests = {t["nodeid"].split("::")[1]: t for t in report["tests"]}
    found = {name: t["outcome"] for name, t in tests.items()}
    if found != {"test_it": "passed", "test_fails": "failed", "test_plain": "passed"}:
        return f".report.json has {found}"
    logged = [record["msg"] for record in tests["test_it"]["call"].get("log", [])]
    is_there = logged == ["logged"] and tests["test_it"]["metadata"] == {"mine": 1}
    return "" if is_there else f".report.json has of a rank {tests['test_it']}"


def _allure(project: Path, output: str) -> str:
    del output
    results = [json.loads(p.read_text()) for p in (project / "allure").glob("*-result.json")]
    found = sorted((r["name"], r["status"]) for r in results)
    wanted = [("test_fails", "failed"), ("test_it", "passed"), ("test_plain", "passed")]
    return "" if found == wanted else f"results {found}"


def _snapshots(project: Path, output: str) -> str:
    del output
    names = re.findall("name: (.*)", (project / "__snapshots__/test_it.ambr").read_text())
    wanted = ["test_it", "test_of_rank[0]", "test_of_rank[1]", "test_plain"]
    return "" if names == wanted else f"__snapshots__ has {names}"


def _durations(project: Path, output: str) -> str:
    del output
    found = json.loads((project / ".test_durations").read_text())
    return "" if len(found) == 2 else f".test_durations has {found}"


def _covered(project: Path, output: str) -> str:
    del project
    return "" if re.search(r"mine\.py +4 +0 +100%", output) else "mine.py is not covered wholly"


def _measured(project: Path, output: str) -> str:
    names = [b["name"] for b in json.loads((project / "b.json").read_text())["benchmarks"]]
    is_shown = "Name (time in" in output
    return "" if names == ["test_plain"] and is_shown else f"b.json has {names}"


def _change(project: Path, output: str) -> str:
    """Change the project, for the session after."""
    del output
    (project / "mine.py").write_text("def double(n): return 2 * n + 10\n")
    return ""


_TWO = """
    def test_it(rank): pass
    def test_fails(rank): assert rank != 1
    """
_TWO_OUTCOMES = {"test_it": "passed", "test_fails": "failed"}
_BENCHMARKS = """
    import pytest
    import torch.distributed as dist

    def test_it(benchmark, process_group):
        assert benchmark(lambda: dist.barrier() or 5) == 5

    @pytest.mark.controller
    def test_plain(benchmark):
        benchmark(lambda: 5)
    """
_SNAPSHOTS = """
    import pytest

    def test_it(snapshot): assert {"a": 1} == snapshot

    @pytest.mark.parametrize("at", [0, 1])
    def test_of_rank(snapshot, rank, at):
        if rank == at:
            assert rank == snapshot

    @pytest.mark.controller
    def test_plain(snapshot): assert [1] == snapshot
    """
_SNAPSHOT_OUTCOMES = dict.fromkeys(
    ("test_it", "test_of_rank[0]", "test_of_rank[1]", "test_plain"), "passed"
)
_HANGS = """
    import threading
    import pytest

    def test_it(rank):
        if rank == 1:
            threading.Event().wait(100)

    @pytest.mark.timeout(100)
    def test_mark_wins(): threading.Event().wait(3)
    """
_SEEDS = """
    import random
    import numpy
    import torch
    from agree import agree

    def test_it(process_group):
        agree((random.random(), numpy.random.random(), torch.rand(1).item()))
    """

CASES: tuple[Case, ...] = (
    _one(
        "pytest-timeout==2.4.0",
        _HANGS,
        *("--timeout", "2"),
        outcomes={"test_it": "failed", "test_mark_wins": "passed"},
        exit_code=1,
        prints=("rank 1 did not end in 2 s",),
        note="Its limit is the gang's, for each phase; see below.",
    ),
    _one(
        "pytest-xdist==3.8.0",
        "def test_it(process_group, pytestconfig): pass",
        *("-n", "2"),
        outcomes=_PASSES,
        is_installed_apart=False,
        note="Each worker has gangs of its own.",
    ),
    _one(
        "pytest-randomly==5.1.0",
        _SEEDS,
        outcomes=_PASSES,
        files={"agree.py": _AGREE},
        note="All ranks have the same seed; torch is seeded as well. On several nodes with forked "
        "ranks, type `--randomly-seed`.",
    ),
    _one(
        "pytest-random-order==1.2.0",
        "def test_it(process_group): pass\ndef test_next(rank): pass\n",
        "--random-order",
        outcomes={**_PASSES, "test_next": "passed"},
        note="Orders tests; wide gangs still come first.",
    ),
    _one(
        "pytest-rerunfailures==16.7",
        """
        from pathlib import Path

        def test_it(rank):
            if rank == 1 and not Path("was").exists():
                Path("was").touch()
                raise OSError("first")
        """,
        *("--reruns", "1"),
        outcomes=_PASSES,
        prints=("1 rerun",),
        note="A rerun is on all ranks.",
    ),
    _one(
        "pytest-cov==7.1.0",
        "import mine\n\ndef test_it(rank): mine.half(rank)\n",
        *("--cov", "mine", "--cov-report", "term-missing"),
        outcomes=_PASSES,
        check=_covered,
        files={"mine.py": "def half(rank):\n    if rank:\n        return 1\n    return 0\n"},
        note="Lines of all ranks.",
    ),
    _one(
        "pytest-html==4.2.0",
        _TWO,
        *("--html", "report.html"),
        outcomes=_TWO_OUTCOMES,
        exit_code=1,
        check=_html,
    ),
    _one(
        "pytest-json-report==1.5.0",
        """
        import logging
        import pytest

        def test_it(json_metadata):
            json_metadata["mine"] = 1
            logging.warning("logged")

        def test_fails(rank): assert rank != 1

        @pytest.mark.controller
        def test_plain(): pass
        """,
        "--json-report",
        outcomes={**_TWO_OUTCOMES, "test_plain": "passed"},
        exit_code=1,
        check=_json_report,
        note="Logs and metadata are those of the first rank that has any.",
    ),
    _one(
        "allure-pytest==2.16.2",
        """
        import time
        import allure
        import pytest

        def test_it(rank):
            with allure.step("step"):
                time.sleep(0.2)

        def test_fails(rank): assert rank != 1

        @pytest.mark.controller
        def test_plain(): pass
        """,
        *("--alluredir", "allure", "--clean-alluredir"),
        outcomes={**_TWO_OUTCOMES, "test_plain": "passed"},
        exit_code=1,
        check=_allure,
        prints=("in part on ranks, as docs/reference/other-plugins.md has it: allure;",),
        verdict="in part",
        note="One result for a test, with name, outcome and output: labels, times, and steps and "
        "attachments that ranks make are left out. Allure reads JUnit XML as well.",
    ),
    Case(
        requirement="syrupy==7.0.2",
        files={"test_it.py": _SNAPSHOTS},
        sessions=(
            Session(args=("--snapshot-update",), outcomes=_SNAPSHOT_OUTCOMES, check=_snapshots),
            Session(outcomes=_SNAPSHOT_OUTCOMES, check=_snapshots),
            Session(args=("--snapshot-update",), outcomes=_SNAPSHOT_OUTCOMES, check=_snapshots),
        ),
        verdict="in part",
        note="Ranks compare and write; a snapshot has to be the same on all ranks that take it. "
        "Unused ones are not looked for where tests on ranks take any, and the snapshot report "
        "leaves those of ranks out.",
    ),
    Case(
        requirement="inline-snapshot==0.36.1",
        files={
            "test_it.py": """
                from inline_snapshot import snapshot

                def test_it(): assert 5 == snapshot(5)
                def test_other(rank): assert rank == snapshot(0)
                """
        },
        sessions=(
            Session(outcomes={**_PASSES, "test_other": "failed"}, exit_code=1),
            Session(
                args=("--inline-snapshot=fix",),
                outcomes={**_PASSES, "test_other": "failed"},
                exit_code=1,
                prints=("in part on ranks, as docs/reference/other-plugins.md has it: inline-",),
            ),
        ),
        verdict="in part",
        note="Compares, also with `create`, `fix`, `trim` and the other words that write: nothing "
        "of ranks is written.",
    ),
    Case(
        requirement="pytest-benchmark==5.3.1",
        files={"test_it.py": _BENCHMARKS},
        sessions=(
            Session(
                outcomes={**_PASSES, "test_plain": "passed"},
                prints=("in part on ranks, as docs/reference/other-plugins.md has it: pytest-",),
            ),
            Session(
                args=("--benchmark-json", "b.json"),
                outcomes={**_PASSES, "test_plain": "passed"},
                prints=("in part on ranks, as docs/reference/other-plugins.md has it: pytest-",),
                check=_measured,
            ),
        ),
        verdict="in part",
        note="Ranks would choose different numbers of rounds: a benchmark runs once there, and is "
        "not measured, saved or compared. Tests of the controller are.",
    ),
    Case(
        requirement="hypothesis==6.170.15",
        files={
            "agree.py": _AGREE,
            "test_it.py": """
                from agree import agree
                from hypothesis import HealthCheck, given, settings, strategies as st

                ours = settings(deadline=None, max_examples=20, suppress_health_check=HealthCheck)

                @ours
                @given(st.integers())
                def test_it(process_group, n): agree(n)

                @ours
                @given(st.integers())
                def test_fails(process_group, n):
                    agree(n)
                    assert n < 100

                @ours
                @given(st.integers())
                def test_hangs(process_group, rank, n):
                    agree(n)
                    assert rank == 0 or n < 100
                """,
        },
        sessions=(
            Session(
                args=("--rank-timeout", "15"),
                outcomes={**_PASSES, "test_fails": "failed", "test_hangs": "failed"},
                exit_code=1,
                prints=("--hypothesis-seed=",),
            ),
        ),
        note="All ranks draw the same examples, by a seed for each run that a failure names; its "
        "database stays out. An example that fails on some ranks only may leave others waiting "
        "in a collective, as that rank runs simpler ones; "
        "`@settings(phases=[Phase.explicit, Phase.generate])` leaves those out.",
    ),
    _one(
        "pytest-asyncio==1.5.0",
        "import asyncio, pytest\n\n@pytest.mark.asyncio\nasync def test_it(rank):\n"
        "    await asyncio.sleep(0)\n    assert rank < 2\n",
        outcomes=_PASSES,
    ),
    Case(
        requirement="pytest-split==0.11.0",
        files={"test_it.py": "def test_it(rank): pass\ndef test_next(rank): pass\n"},
        sessions=(
            Session(
                args=("--store-durations",),
                outcomes={**_PASSES, "test_next": "passed"},
                check=_durations,
            ),
            Session(args=("--splits", "2", "--group", "2"), outcomes={"test_next": "passed"}),
        ),
    ),
    _one("pytest-sugar==1.1.1", _TWO, outcomes=_TWO_OUTCOMES, exit_code=1, prints=("1 failed",)),
    _one(
        "pytest-dependency==0.6.1",
        "import pytest\n\n@pytest.mark.dependency\ndef test_a(rank): pass\n\n"
        "@pytest.mark.dependency\ndef test_b(rank): assert 0\n\n"
        "@pytest.mark.dependency(depends=['test_a'])\ndef test_it(rank): pass\n\n"
        "@pytest.mark.dependency(depends=['test_b'])\ndef test_never(rank): pass\n",
        outcomes={**_PASSES, "test_a": "passed", "test_b": "failed", "test_never": "skipped"},
        exit_code=1,
        verdict="in part",
        note="Each rank knows what it ran itself: after a gang was replaced, tests that depend on "
        "earlier ones are skipped.",
    ),
    _one(
        "time-machine==3.6.0",
        "import datetime\nimport torch.distributed as dist\n\n"
        "def test_it(time_machine, process_group):\n"
        "    time_machine.move_to(datetime.datetime(2020, 1, 1), tick=False)\n"
        "    dist.barrier()\n    assert datetime.date.today().year == 2020\n\n"
        "def test_next(): assert datetime.date.today().year > 2020\n",
        outcomes={**_PASSES, "test_next": "passed"},
    ),
    _one(
        "pytest-forked==1.7.5",
        "def test_it(process_group): pass\ndef test_fails(rank): assert rank != 1\n",
        "--forked",
        exit_code=4,
        prints=("runs on ranks, which are processes of their own",),
        verdict="refused",
        note="`--forked` and its mark; `@pytest.mark.isolated` gives a test ranks of its own.",
    ),
    Case(
        requirement="pytest-testmon==2.2.0",
        files={
            "mine.py": "def double(n): return 2 * n\n",
            "test_it.py": "import mine\n\ndef test_it(rank): assert mine.double(rank) < 4\n",
        },
        sessions=(
            Session(args=("--testmon",), outcomes=_PASSES),
            Session(args=("--testmon",), prints=("no tests ran",), check=_change),
            Session(args=("--testmon",), outcomes={"test_it": "failed"}, exit_code=1),
            Session(args=("--testmon",), outcomes={"test_it": "failed"}, exit_code=1),
        ),
        is_installed_apart=False,
        note="What all ranks of a test execute counts; see below.",
    ),
    _one(
        "pytest-socket==0.8.1",
        "import socket\nimport pytest\nimport pytest_socket\n\n"
        "def test_it(process_group):\n"
        "    with pytest.raises(pytest_socket.SocketBlockedError):\n        socket.socket()\n",
        *("--disable-socket", "--allow-unix-socket"),
        outcomes=_PASSES,
    ),
)

# What CI runs of it: requirement -> the one way.
SAMPLE: Mapping[str, str] = {
    "pytest-random-order==1.2.0": "collecting",
    "pytest-randomly==5.1.0": "collecting",
    "pytest-json-report==1.5.0": "forked",
    "allure-pytest==2.16.2": "forked",
    "syrupy==7.0.2": "forked",
    "inline-snapshot==0.36.1": "forked",
    "pytest-benchmark==5.3.1": "forked",
    "hypothesis==6.170.15": "forked",
}
