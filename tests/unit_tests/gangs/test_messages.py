from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_megatron.gangs.ipc.messages import (
    AskStacks,
    AskToCollect,
    Broken,
    Close,
    Closed,
    Collected,
    DebuggerAnswer,
    DebuggerLeft,
    DebuggerWanted,
    Died,
    Done,
    Hello,
    Interrupt,
    Joined,
    Kill,
    Killed,
    Message,
    PhaseEnded,
    PhaseReport,
    RankConfig,
    Ready,
    Register,
    Run,
    SessionEnded,
    Stacks,
    Start,
    Welcome,
    decode,
    encode,
    encode_within,
)

CONFIG = RankConfig(
    gang=1,
    rank=3,
    world_size=4,
    node_rank=1,
    device="cpu",
    env={"RANK": "3", "WORD": "ü\n\udcff"},
    log_dir="logs/3",
    base_temp="tmp/3",
    coverage={"branch": True, "source": ["a", "b"]},
    coverage_file=".coverage",
)
REPORT = PhaseReport("call", "failed", full={"sections": [["out", "x\0y"]]})
MESSAGES: tuple[Message, ...] = (
    Register(role="agent", node_rank=2),
    Hello(pid=7),
    AskToCollect(workerinput="{}", base_temp="temp/rank0", digest="1f"),
    Collected(is_same=False, node_ids=("t.py::a",), problems={"u.py": "no"}, obstacle="CUDA"),
    Ready(missing={"test_a.py::test_1": "ImportError: b"}),
    PhaseEnded(run=1, when="call", outcome="failed", report=REPORT),
    Done(
        run=1,
        reports=(PhaseReport("setup", "passed", 1.0, 2.0), REPORT),
        late=REPORT,
        warnings=({"text": "old"},),
        num_collectives=4,
        num_rendezvous=1,
        poison="an illegal memory access",
        stop=("exit", "enough", 3),
        printed="SETUP",
    ),
    Closed(problem="E"),
    Broken(problem="Traceback"),
    DebuggerWanted(reason="breakpoint", pid=7),
    DebuggerLeft(),
    Run(
        run=1,
        index=2,
        node_id="test_a.py::test[\N{SNOWMAN}]",
        next_index=-1,
        next_node_id="",
        shared_dir="tmp",
        is_last_if_failed=True,
    ),
    Close(),
    DebuggerAnswer(may_enter=True),
    Start(gang=1, configs=(CONFIG, CONFIG), has_store=True),
    Died(gang=1, rank=3, exit_code=-11, phase="setup"),
    Kill(gang=1),
    Killed(gang=1),
    Interrupt(gang=1),
    AskStacks(gang=1, ranks=(0, 3)),
    Stacks(gang=1, stacks={"3": "File"}, flights={"3": "{}"}, phases={"3": "call"}),
    Welcome(
        num_nodes=2,
        ranks_per_node=2,
        num_gpus=0,
        node_ids=("test_a.py::test_1",),
        is_collecting=True,
    ),
    Joined(problem="1 error during collection"),
    SessionEnded(exit_code=2, text="KeyboardInterrupt"),
)


@pytest.mark.parametrize("message", MESSAGES, ids=[type(m).__name__ for m in MESSAGES])
def test_a_message_survives_the_wire(message: Message) -> None:
    assert decode(encode(message)) == message


def test_every_kind_of_message_is_tried_here() -> None:
    assert {type(m) for m in MESSAGES} == set(Message.__args__)


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xff\xfe", id="no-text"),
        pytest.param(b"7", id="number"),
        pytest.param(b"[]", id="no-name"),
        pytest.param(b'["Close"]', id="no-fields"),
        pytest.param(b'["Close", []]', id="fields-without-names"),
        pytest.param(b'["Close", {"now": 1}]', id="unknown-field"),
        pytest.param(b'["Closed", {}]', id="missing-field"),
        pytest.param(b'["Popen", {"args": "rm"}]', id="unknown-name"),
        pytest.param(b"[[], {}]", id="name-that-is-none"),
        pytest.param(b'["Start", {"configs": [1]}]', id="config-that-is-none"),
        pytest.param(b'["Done", {"run": 1, "reports": [1]}]', id="report-that-is-none"),
        pytest.param(b"[" * 100_000, id="deep"),
    ],
)
def test_nonsense_is_refused(frame: bytes) -> None:
    with pytest.raises(ValueError, match="not a message"):
        decode(frame)


def test_what_is_no_message_is_not_sent() -> None:
    with pytest.raises(TypeError, match="cannot be sent: <object"):
        encode(Done(run=1, reports=(object(),)))  # type: ignore[arg-type]  # the point of it


def test_a_message_that_is_too_long_is_cut_and_says_so() -> None:
    done = Done(
        run=1,
        reports=(replace(REPORT, full={"longrepr": "a" * 900_000, "more": ["\n" * 900_000]}),),
        warnings=(),
        num_collectives=0,
        num_rendezvous=0,
        poison="",
        stop=(),
        printed="b" * 900_000,
        printed_late="short",
        is_clean=True,
    )
    assert encode_within(done, 10_000_000) == encode(done)
    cut = decode(encode_within(done, 1_000_000))
    assert isinstance(cut, Done)
    left = f"{'b' * 31_250}\n[837500 of 900000 characters are left out here]\n{'b' * 31_250}"
    assert (cut.run, cut.printed, cut.printed_late) == (1, left, "short")
    assert len(encode(cut)) < 1_000_000


def test_a_message_of_too_many_values_is_cut() -> None:
    broken = Done(
        run=1,
        reports=(replace(REPORT, full={"user_properties": [["p", list(range(100_000))]]}),),
        warnings=(),
        num_collectives=0,
        num_rendezvous=0,
        poison="",
        stop=(),
        printed="",
        printed_late="",
        is_clean=True,
    )
    assert len(encode_within(broken, 50_000)) < 50_000
