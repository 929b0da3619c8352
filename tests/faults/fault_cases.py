"""The faults: where each strikes, and what the session must say of it. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["passed", "failed", "error", "skipped", "none"]
Place = Literal["call", "setup", "first_setup", "late_setup", "teardown", "end"]
# What ends the wait for ranks: the fault itself, the grace after it, or the time limit.
Sign = Literal["grace", "limit"]
STOPPED = "stopped"  # file that tells ranks that the controller reads nothing any more
Driver = Literal["", "int", "int_int", "kill", "stop_kill", "full_disk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One fault.

    Attributes:
        name: Of the test; also of its body, unless `body` or `place` say otherwise.
        body: What the test does.
        place: Where it strikes; the test itself is sound if that is in a fixture.
        way: How a fixture strikes, where the fault is in one.
        outcome: Of the guilty test; `none` where it has none, as the session ends in it.
        says: Pattern in the failure's text; `{g}` is the guilty rank, `{w}` the world size.
        sign: What ends the wait.
        has_stacks: Whether ranks that hang show their stacks: those are all but the guilty one
            (`others`), it alone (`guilty`), or all.
        has_flight: Whether the report shows what NCCL's flight recorder has.
        exit_code: Of a session that the fault ends; None where the session goes on.
        prints: Pattern in the output of a session that the fault ends.
        driver: What is done to the session from outside.
        devices: Where it applies.
        options: More options of its session.
        text: What its file ends with, at module level; `{test}` is the test's name.
        has_own_file: Whether the fault concerns all tests of its file, so that it stands alone.
        is_first_rank: Whether rank 0 is guilty; by default it is the last one.
    """

    name: str
    body: str = ""
    place: Place = "call"
    way: str = ""
    outcome: Outcome = "failed"
    says: str = ""
    sign: Sign = "grace"
    has_stacks: Literal["", "others", "guilty", "all"] = ""
    has_flight: bool = False
    exit_code: int | None = None
    prints: str = ""
    driver: Driver = ""
    devices: tuple[str, ...] = ("cpu", "cuda")
    options: tuple[str, ...] = ()
    text: str = ""
    has_own_file: bool = False
    is_first_rank: bool = False

    @property
    def guest_body(self) -> str:
        """What the test calls."""
        return self.body or (self.name if self.place == "call" else "sound")

    @property
    def is_alone(self) -> bool:
        """Whether it needs a session of its own."""
        return self.exit_code is not None or bool(self.driver) or self.place == "end"


_COLLECT = (
    "-o",
    "megatron_gang_start=collect",
    "--continue-on-collection-errors",
)  # else the session ends
_IF_LAST = 'if os.environ.get("RANK") == str(int(os.environ.get("WORLD_SIZE", 1)) - 1):'
_SPLIT = r"rank {g} skipped, ranks? \S+ did not"
_STRUCK = r"\[rank {g}\] AssertionError: struck"
_GONE = {
    "os_exit0": "exited with code 0",
    "os_exit1": "exited with code 1",
    "sigkill": "was killed by SIGKILL",
    "segv": "was killed by SIGSEGV",
    "abort": "was killed by SIGABRT",
}


def _deaths() -> tuple[Case, ...]:
    return tuple(
        Case(
            name=f"{way}_{when}",
            says=f"^rank {{g}} of {{w}} {says}",
        )
        for way, says in _GONE.items()
        for when in ("before", "after")
    )


CASES: tuple[Case, ...] = (
    Case(name="fail_before", says=_STRUCK, has_stacks="others"),
    Case(name="fail_in", says=_STRUCK),
    Case(name="fail_after", says=_STRUCK),
    Case(name="skip_before", says=_SPLIT, has_stacks="others"),
    Case(name="skip_after", says=_SPLIT),
    Case(
        name="setup_skips",
        place="setup",
        way="skip",
        outcome="error",
        says=_SPLIT,
        has_stacks="others",
    ),
    Case(name="sys_exit0_before", says=r"\[rank {g}\] SystemExit: 0", has_stacks="others"),
    Case(name="sys_exit0_after", says=r"\[rank {g}\] SystemExit: 0"),
    Case(name="sys_exit3_before", says=r"\[rank {g}\] SystemExit: 3", has_stacks="others"),
    Case(name="sys_exit3_after", says=r"\[rank {g}\] SystemExit: 3"),
    *_deaths(),
    Case(name="sigkill_in", says="^rank {g} of {w} was killed by SIGKILL"),
    Case(name="first_rank_dies", says="^rank 0 of {w} was killed by SIGKILL", is_first_rank=True),
    Case(name="two_die", says=r"(?s)rank {g}: was killed by SIGSEGV.*|rank 0: exited with code 1"),
    Case(name="all_die", says=r"exited with code 1"),
    Case(name="sleep_before", sign="limit", says="in sleep", has_stacks="all"),
    Case(name="sleep_after", sign="limit", says="in sleep", has_stacks="guilty"),
    Case(name="dies_when_done", says="^rank {g} of {w} was killed by SIGKILL"),
    Case(name="dies_untold", says="^rank {g} of {w} was killed by SIGKILL"),
    Case(name="gil_before", sign="limit", says="in hold_gil", has_stacks="all"),
    Case(name="sigstop_before", sign="limit", says=r"ranks 0-\d did not end", has_stacks="all"),
    Case(
        name="missed",
        sign="limit",
        says="rank {g}: passed",
        has_stacks="others",
        has_flight=True,
    ),
    Case(name="extra", sign="limit", says="rank {g}: was still in call at", has_stacks="guilty"),
    Case(name="extra_async", says="different collectives", devices=("cpu",)),
    Case(name="setup_fails", place="setup", way="fail", outcome="error", says=_STRUCK),
    Case(
        name="setup_dies",
        place="setup",
        way="sigkill",
        outcome="error",
        says="rank {g} of {w} was killed by SIGKILL in setup",
    ),
    Case(
        name="first_setup_dies",
        place="first_setup",
        way="os_exit1",
        outcome="error",
        says="rank {g} of {w} exited with code 1 in setup",
    ),
    Case(
        name="setup_hangs",
        place="setup",
        way="sleep",
        outcome="error",
        sign="limit",
        says="was still in setup at fault_ways.py:\\d+ in sleep",
        has_stacks="all",
    ),
    # The guilty rank is in its call, and the others are in set-up still.
    Case(
        name="dies_ahead",
        body="sigkill_before",
        place="late_setup",
        says="^rank {g} of {w} was killed by SIGKILL",
        has_stacks="others",
    ),
    Case(
        name="fails_ahead",
        body="fail_before",
        place="late_setup",
        says=_STRUCK,
        has_stacks="others",
    ),
    Case(name="teardown_fails", place="teardown", way="fail", outcome="error", says=_STRUCK),
    Case(
        name="teardown_dies",
        place="teardown",
        way="segv",
        outcome="error",
        says="rank {g} of {w} was killed by SIGSEGV in teardown",
    ),
    Case(
        name="teardown_hangs",
        place="teardown",
        way="sleep",
        outcome="error",
        sign="limit",
        says="was still in teardown at fault_ways.py:\\d+ in sleep",
        has_stacks="all",
    ),
    Case(
        name="fails_then_hangs",
        body="fail_after",
        place="teardown",
        way="sleep",
        says=_STRUCK,
        has_stacks="all",
    ),
    Case(
        name="fails_then_dies",
        body="fail_after",
        place="teardown",
        way="sigkill",
        says=_STRUCK,
    ),
    Case(name="flood_passes", outcome="passed"),
    Case(name="flood_fails", says="(?s)" + _STRUCK),
    Case(name="flood_dies", says="^rank {g} of {w} was killed by SIGKILL"),
    Case(name="child_passes", outcome="passed"),
    Case(name="child_dies", says="^rank {g} of {w} was killed by SIGKILL"),
    Case(name="daemon_passes", outcome="passed"),
    Case(name="daemon_dies", says="^rank {g} of {w} was killed by SIGKILL"),
    # What happens first is up to the libraries: gloo aborts, NCCL may not notice.
    Case(
        name="closes_descriptors", says="^rank {g} of {w} (closed its connection|was killed|exited)"
    ),
    Case(
        name="closes_all_descriptors",
        says="^rank {g} of {w} (closed its connection|was killed|exited)",
    ),
    Case(
        name="template_after", says=r"ranks 0-\d ended, as the process that starts ranks was killed"
    ),
    Case(name="kills_keeper", says="^rank {g} of {w} was killed by SIGKILL"),
    Case(name="device_assert_after", says="^.?rank {g}.*(CUDA error|SIGABRT)", devices=("cuda",)),
    Case(name="illegal_access_after", says="^.?rank {g}.*(CUDA error|SIGABRT)", devices=("cuda",)),
    # Alone in their sessions
    Case(
        name="end_fails",
        place="end",
        way="fail",
        outcome="error",
        says=_STRUCK,
    ),
    Case(
        name="end_dies",
        place="end",
        way="sigkill",
        outcome="error",
        says="rank {g} of {w} was killed by SIGKILL in teardown",
    ),
    Case(
        name="interrupt_before",
        outcome="none",
        exit_code=2,
        prints=r"KeyboardInterrupt: rank {g} of {w} in \S+::test_\d+_interrupt_before",
    ),
    Case(
        name="pytest_exit_after",
        outcome="none",
        exit_code=2,
        prints=r"Exit: struck \(rank {g} of {w} in \S+::test_\d+_pytest_exit_after\)",
    ),
    Case(name="sleeps_everywhere", driver="int", outcome="none", exit_code=2),
    Case(name="stuck_in_collective", driver="int", outcome="none", exit_code=2),
    Case(name="ignores_interrupt", driver="int_int", outcome="none", exit_code=2),
    Case(
        name="controller_killed",
        body="sleeps_everywhere",
        driver="kill",
        outcome="none",
        exit_code=-9,
    ),
    Case(
        name="controller_killed_full",
        body="reports_to_nobody",
        driver="stop_kill",
        outcome="none",
        exit_code=-9,
    ),
    Case(name="floods_full_disk", driver="full_disk", outcome="passed"),
    Case(
        name="collect_import_error",
        body="sound",
        says="rank {g}.*ImportError: struck",
        options=_COLLECT,
        text=f'import os\n\n{_IF_LAST}\n    raise ImportError("struck")',
        has_own_file=True,
    ),
    Case(
        name="collect_other_tests",
        body="sound",
        says="rank {g} ",
        options=_COLLECT,
        text=f"import os\n\n{_IF_LAST}\n    del {{test}}",
    ),
    Case(
        name="collect_other_parameters",
        body="sound",
        says="rank {g} ",
        options=_COLLECT,
        text=f"import os\n\n{_IF_LAST}\n"
        '    {test} = pytest.mark.parametrize("other", ["here"])(lambda gang, other: None)',
    ),
)
