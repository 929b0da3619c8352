from __future__ import annotations

from pathlib import Path

import pytest

from pytest_megatron.errors import TraceError
from pytest_megatron.trace.files import (
    ParameterShard,
    TraceEnd,
    TraceHeader,
    TraceLayout,
    TraceRecord,
    TraceWriter,
    rank_files,
    read_end,
    read_header,
    read_records,
)

HEADER = TraceHeader(
    rank=0,
    world_size=1,
    device="cpu",
    torch="2.13.0",
    megatron_core=None,
    layout=TraceLayout(tp=(0, 2), vpp=2, sequence_parallel=True),
    values="full",
)


def record(at: tuple[int, int] | None) -> TraceRecord:
    return TraceRecord(
        order=0,
        step=1,
        microbatch=0,
        phase="gradient",
        module="a",
        kind="Linear",
        tensor="weight",
        shape=(2, 2),
        dtype="float32",
        norm=None,
        mean=None,
        hash="0" * 16,
        not_finite=1,
        at=at,
        parameter=ParameterShard(
            key="a.weight",
            global_shape=(4, 2),
            global_offset=(2, 0),
            flat=(1, 3),
            attributes={"partition_dim": 0},
        ),
    )


def written(directory: Path) -> tuple[Path, TraceRecord]:
    writer = TraceWriter(directory, 0, has_values=True)
    writer.write_header(HEADER)
    writer.write_values(b"1")
    one = record(writer.write_values(b"234"))
    writer.write_record(one)
    writer.close(TraceEnd(steps=1))
    return directory / "rank_0.jsonl", one


def test_a_trace_reads_as_it_was_written(tmp_path: Path) -> None:
    path, one = written(tmp_path)
    assert rank_files(tmp_path) == {0: path}
    assert read_header(path) == HEADER
    assert list(read_records(path)) == [one]
    assert one.at == (1, 3)
    assert path.with_suffix(".bin").read_bytes() == b"1234"
    assert read_end(path) == TraceEnd(steps=1)


def test_a_torn_trace_reads_up_to_there(tmp_path: Path) -> None:
    path, one = written(tmp_path)
    text = path.read_text()
    path.write_text(text[: text.index('{"end"') + 4])
    assert (list(read_records(path)), read_end(path)) == ([one], None)


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    path.write_text(path.read_text().replace('"world_size":1', '"world_size":2'))
    with pytest.raises(TraceError, match="has no trace of rank 1 of 2"):
        rank_files(tmp_path)


@pytest.mark.parametrize(
    ("found", "put"),
    [
        ('"step":1', '"step":"1"'),
        ('"step":1,', ""),
        ('"shape":[2,2]', '"shape":4'),
        ('"hash"', '"hush"'),
        ('"global_shape":[4,2],', ""),
        ('"attributes":{"partition_dim":0}', '"attributes":[]'),
    ],
)
def test_a_wrong_record_is_named(tmp_path: Path, found: str, put: str) -> None:
    path, _ = written(tmp_path)
    path.write_text(path.read_text().replace(found, put))
    with pytest.raises(TraceError, match=r"rank_0.jsonl:2: is no record of a trace"):
        list(read_records(path))


@pytest.mark.parametrize(
    ("found", "put"),
    [
        ('"rank":0', '"rank":"0"'),
        ('"tp":[0,2]', '"tp":2'),
        ('"layout"', '"l"'),
        ('"format_version":1', '"format_version":2'),
    ],
)
def test_a_wrong_header_is_named(tmp_path: Path, found: str, put: str) -> None:
    path, _ = written(tmp_path)
    path.write_text(path.read_text().replace(found, put))
    with pytest.raises(TraceError, match=r"rank_0.jsonl:1: is no header of a trace"):
        read_header(path)


def test_a_wrong_end_is_named(tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    path.write_text(path.read_text().replace('"steps":1', '"steps":"1"'))
    with pytest.raises(TraceError, match="last line: is no end of a trace: steps: found '1'"):
        read_end(path)
