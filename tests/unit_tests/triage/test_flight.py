from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from typing_extensions import override

from pytest_megatron.errors import TriageError
from pytest_megatron.triage.collectives import Desync, analyse
from pytest_megatron.triage.logs.flight_recorder import (
    FlightDump,
    FlightFrame,
    is_flight_name,
    parse_flight,
    read_flight,
)

GUEST = Path(__file__).parents[1] / "guests" / "flights.py"
WORLD = 4


def raw_entry(seq: int, op: str = "all_reduce", **changes: object) -> dict[str, object]:
    """An entry as torch 2.11 writes it."""
    return {
        "frames": [
            {"name": "all_reduce", "filename": "/x/site-packages/torch/dist.py", "line": 1},
            {"name": "step", "filename": "/home/me/train.py", "line": 14},
        ],
        "record_id": seq - 1,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": f"nccl:{op}",
        "time_created_ns": 1_790_000_000_000_000_000 + seq,
        "duration_ms": 0.5,
        "input_sizes": [[4, 3]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4, 3]],
        "output_dtypes": ["Float"],
        "state": "completed",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": True,
        "timeout_ms": 10000,
        "is_p2p": False,
        **changes,
    }


def open_entry(seq: int, op: str = "all_reduce", **changes: object) -> dict[str, object]:
    return raw_entry(seq, op) | {"state": "started", "retired": False} | changes


def raw_dump(
    *entries: dict[str, object], groups: dict[str, str] | None = None
) -> dict[str, object]:
    ranks = groups or {"0": str(list(range(WORLD)))}
    return {
        "version": "2.10",
        "pg_config": {g: {"name": g, "desc": "default_pg", "ranks": r} for g, r in ranks.items()},
        "pg_status": {"0": {"last_enqueued_collective": len(entries)}},
        "entries": list(entries),
    }


def dumped(*entries: dict[str, object], groups: dict[str, str] | None = None) -> FlightDump:
    return parse_flight(pickle.dumps(raw_dump(*entries, groups=groups), protocol=2), Path("t_0"))


def findings(dumps: dict[int, FlightDump]) -> list[tuple[Desync, tuple[int, ...], bool]]:
    return [(f.kind, f.ranks, f.is_certain) for f in analyse(dumps, WORLD)]


def test_pickle_and_json_read_the_same(tmp_path: Path) -> None:
    raw = raw_dump(raw_entry(1), open_entry(2, "broadcast"))
    (tmp_path / "nccl_trace_rank_3").write_bytes(pickle.dumps(raw, protocol=2))
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "nccl_flight_recorder.json").write_text(json.dumps(raw))
    first = read_flight(tmp_path / "nccl_trace_rank_3")
    second = read_flight(tmp_path / "3" / "nccl_flight_recorder.json")
    assert (first.rank, second.rank, first.version) == (3, 3, "2.10")
    assert first.entries == second.entries
    assert first.groups == second.groups == {"0": (0, 1, 2, 3)}
    assert [(e.op, e.seq, e.is_open) for e in first.entries] == [
        ("all_reduce", 1, False),
        ("broadcast", 2, True),
    ]
    assert first.entries[0].own_frame == FlightFrame(file="/home/me/train.py", line=14, name="step")


class Hostile:
    @override
    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.system, ("touch hostile_pickle_ran",)


def test_a_pickle_that_asks_for_code_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps({"entries": [Hostile()]}))
    with pytest.raises(TriageError, match=r"system.*a dump is plain data"):
        read_flight(path)
    assert not (tmp_path / "hostile_pickle_ran").exists()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x00\xff" * 40, id="noise"),
        pytest.param(b'{"entries": [', id="torn json"),
        pytest.param(b'{"loss": 1.5}', id="other json"),
        pytest.param(b'{"entries": 3}', id="entries are a number"),
        pytest.param(b'{"entries": [7]}', id="an entry is a number"),
        pytest.param(b'{"entries": [{"record_id": 1}]}', id="an entry lacks its keys"),
        pytest.param(b'{"entries": [], "pg_config": []}', id="groups are a list"),
        pytest.param(pickle.dumps([1, 2]), id="other pickle"),
        pytest.param(pickle.dumps(raw_dump(raw_entry(1)))[:-40], id="torn pickle"),
        pytest.param(
            pickle.dumps(raw_dump(raw_entry(1, input_sizes=[["a"]]))), id="size is a word"
        ),
    ],
)
def test_what_is_no_dump_is_one_clear_error(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(data)
    with pytest.raises(TriageError, match=r"is no flight recorder's dump: .*; expected ") as caught:
        read_flight(path)
    assert caught.value.where == str(path)


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(TriageError, match="nowhere_1: cannot be read: No such file"):
        read_flight(tmp_path / "nowhere_1")


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("nccl_trace_rank_3", True),
        ("comm_lib_trace_rank_12", True),
        ("nccl_flight_recorder.json", True),
        ("fr_trace.log", False),
        ("stderr.log", False),
        ("nccl_trace_rank_3.txt", False),
    ],
)
def test_names_of_dumps(name: str, is_one: bool) -> None:  # noqa: FBT001 - a parameter
    assert is_flight_name(name) == is_one


def test_agreement_is_no_finding() -> None:
    assert analyse({rank: dumped(raw_entry(1), open_entry(2)) for rank in range(WORLD)}) == ()
    assert analyse({}) == ()


def test_a_missed_collective_names_who_missed_it() -> None:
    dumps = {rank: dumped(raw_entry(1), open_entry(2)) for rank in range(WORLD)}
    dumps[2] = dumped(raw_entry(1))
    (found,) = analyse(dumps)
    called = "collective 2 of group 0 (default_pg): called"
    assert (found.kind, found.ranks, found.text) == (
        Desync.MISSED,
        (2,),
        f"all_reduce, {called} by ranks 0-1, 3, not by rank 2 at train.py:14 in step",
    )


def test_a_collective_that_one_rank_calls_alone_is_its_fault() -> None:
    dumps = {rank: dumped(raw_entry(1)) for rank in range(WORLD)}
    dumps[1] = dumped(raw_entry(1), open_entry(2))
    assert findings(dumps) == [(Desync.EXTRA, (1,), True)]


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"input_sizes": [[5, 3]]}, Desync.SIZE),
        ({"input_dtypes": ["Half"]}, Desync.DTYPE),
        ({"profiling_name": "nccl:broadcast"}, Desync.OP),
    ],
)
def test_a_mismatch_names_the_minority(changes: dict[str, object], kind: Desync) -> None:
    dumps = {rank: dumped(open_entry(1)) for rank in range(WORLD)}
    dumps[3] = dumped(open_entry(1) | changes)
    assert findings(dumps) == [(kind, (3,), True)]


def test_two_against_two_names_nobody_for_certain() -> None:
    sizes = [[[5]], [[5]], [[6]], [[6]]]
    dumps = {rank: dumped(open_entry(1, input_sizes=s)) for rank, s in enumerate(sizes)}
    assert findings(dumps) == [(Desync.SIZE, (0, 1, 2, 3), False)]


def test_the_same_number_of_elements_in_another_shape_is_no_mismatch() -> None:
    dumps = {rank: dumped(open_entry(1)) for rank in range(WORLD)}
    dumps[3] = dumped(open_entry(1, input_sizes=[[12]]))
    assert findings(dumps) == []


def test_uneven_all_to_all_is_no_mismatch() -> None:
    dumps = {
        rank: dumped(open_entry(1, "all_to_all", input_sizes=[[rank + 1]])) for rank in range(WORLD)
    }
    assert findings(dumps) == []


def test_a_rank_without_a_dump_is_the_one_that_others_wait_for() -> None:
    dumps = {rank: dumped(raw_entry(1), open_entry(2)) for rank in (0, 1, 3)}
    assert findings(dumps) == [(Desync.NO_DUMP, (2,), True)]


def test_a_dump_says_more_than_a_missing_one() -> None:
    dumps = {0: dumped(open_entry(1)), 1: dumped(open_entry(1)), 2: dumped()}
    assert findings(dumps) == [(Desync.MISSED, (2,), True)]


def test_a_busy_gpu_is_the_one_whose_collective_has_not_started() -> None:
    dumps = {rank: dumped(open_entry(1)) for rank in range(WORLD)}
    dumps[1] = dumped(open_entry(1, state="scheduled"))
    assert findings(dumps) == [(Desync.NOT_STARTED, (1,), True)]


def test_the_rank_that_waits_in_another_group_is_a_victim_there() -> None:
    """Rank 3 misses group 1's collective; so rank 2 hangs in it, and misses group 0's."""
    groups = {"0": "[0, 1, 2]", "1": "[2, 3]"}
    pair = ("1", "TENSOR_MODEL_PARALLEL_GROUP")
    dumps = {
        0: dumped(open_entry(1), groups=groups),
        1: dumped(open_entry(1), groups=groups),
        2: dumped(open_entry(1, process_group=pair), groups=groups),
        3: dumped(groups=groups),
    }
    assert [f.entry.group for f in analyse(dumps)] == ["1", "0"]


def test_collectives_that_fell_out_of_a_full_buffer_are_not_missed() -> None:
    dumps = {rank: dumped(raw_entry(2), open_entry(3)) for rank in range(WORLD)}
    dumps[0] = dumped(open_entry(3))
    assert findings(dumps) == []


def test_real_dumps_name_the_rank_that_missed_a_collective(tmp_path: Path) -> None:
    """Real ranks, torch's own recorder, both of its formats, and one dump lost."""
    done = subprocess.run(
        [sys.executable, GUEST, tmp_path], check=True, capture_output=True, text=True
    )
    if "no recorder" in done.stdout:
        pytest.skip("this torch records no gloo collectives")
    pickles = {r: read_flight(tmp_path / f"nccl_trace_rank_{r}") for r in range(3)}
    jsons = {r: read_flight(tmp_path / str(r) / "nccl_flight_recorder.json") for r in range(3)}
    for dumps in (pickles, jsons):
        (found,) = analyse(dumps)
        assert (found.kind, found.ranks, found.entry.seq) == (Desync.MISSED, (1,), 3)
        assert {d.rank for d in dumps.values()} == {0, 1, 2}
        assert analyse({rank: dumps[rank] for rank in (0, 2)})[0].ranks == (1,)
    frame = pickles[0].entries[-1].own_frame
    assert frame is not None
    assert (Path(frame.file).name, frame.name) == ("flights.py", "run")


def queued(*numbers: int) -> FlightDump:
    """A rank whose GPU has not ended the first of these: all are only in its queue."""
    return dumped(*(open_entry(n, state="scheduled") for n in numbers))


def test_what_is_queued_behind_an_open_collective_proves_nothing() -> None:
    dumps = {0: queued(4, 5, 6), 1: queued(4, 5, 6, 7), 2: queued(4, 5, 6, 7), 3: queued(4)}
    assert findings(dumps) == []  # rank 3 waits for the fourth, and so cannot come to the fifth


def test_a_rank_without_a_dump_is_blamed_before_one_that_waits() -> None:
    dumps = {0: queued(4, 5, 6), 2: queued(4, 5, 6, 7), 3: queued(4)}
    assert findings(dumps) == [(Desync.NO_DUMP, (1,), True)]
