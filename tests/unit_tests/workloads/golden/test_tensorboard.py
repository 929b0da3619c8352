from __future__ import annotations

import contextlib
import math
import random
import re
import struct
from pathlib import Path

import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.summary.writer.record_writer import RecordWriter

from pytest_megatron.errors import MetricsError
from pytest_megatron.workloads.golden.formats.tensorboard import read_tensorboard


def simple(tag: str, value: float) -> Summary.Value:
    return Summary.Value(tag=tag, simple_value=value)


def event(step: int, *values: Summary.Value) -> Event:
    return Event(wall_time=1.0, step=step, summary=Summary(value=values))


def write_events(path: Path, *events: Event) -> Path:
    """Write an event file with TensorBoard's own record writer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        writer = RecordWriter(file)
        writer.write(Event(wall_time=1.0, file_version="brain.Event:2").SerializeToString())
        for item in events:
            writer.write(item.SerializeToString())
    return path


def losses(path: Path) -> dict[int, float | str]:
    return dict(read_tensorboard(path).metrics["lm loss"].items())


def test_what_torch_writes_is_read_as_float32_in_order_of_steps(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    steps = [1, 2, 127, 128, 129, 16383, 16384, 3_000_000]
    for step in reversed(steps):
        writer.add_scalar("lm loss", 1 / step, step)
        writer.add_scalar("new style", 2 / step, step, new_style=True)
    writer.add_text("args", "--lr 1", 1)
    writer.close()
    observed = read_tensorboard(tmp_path)
    expected = [struct.unpack("<f", struct.pack("<f", 1 / s))[0] for s in steps]
    assert list(observed.metrics) == ["lm loss", "new style"]
    assert list(observed.metrics["lm loss"].steps) == steps
    assert list(observed.metrics["lm loss"].values) == expected
    assert observed.metrics["new style"].values[0] == 2.0
    assert observed.metrics["lm loss"].is_full_precision


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(TensorProto(dtype=1, float_val=[2.5]), id="float_val"),
        pytest.param(TensorProto(dtype=2, double_val=[2.5]), id="double_val"),
        pytest.param(
            TensorProto(dtype=1, tensor_content=struct.pack("<f", 2.5)), id="float-content"
        ),
        pytest.param(
            TensorProto(
                dtype=2,
                tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
                tensor_content=struct.pack("<d", 2.5),
            ),
            id="double-content",
        ),
    ],
)
def test_a_scalar_may_be_a_tensor(tmp_path: Path, tensor: TensorProto) -> None:
    path = write_events(
        tmp_path / "events.out.tfevents.1.h",
        event(3, Summary.Value(tag="lm loss", tensor=tensor)),
        event(4, Summary.Value(tag="lm loss", tensor=tensor)),
    )
    assert losses(path) == {3: 2.5, 4: 2.5}


def test_other_tensors_and_histograms_are_no_scalars(tmp_path: Path) -> None:
    vector = TensorProto(
        dtype=1,
        tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=2)]),
        float_val=[1.0, 2.0],
    )
    write_events(
        tmp_path / "events.out.tfevents.1.h",
        event(1, Summary.Value(tag="vector", tensor=vector), simple("lm loss", 1.0)),
    )
    assert list(read_tensorboard(tmp_path).metrics) == ["lm loss"]


def test_several_values_in_one_event_and_step_0_and_non_finite_values(tmp_path: Path) -> None:
    path = write_events(
        tmp_path / "events.out.tfevents.1.h",
        event(0, simple("lm loss", 9.0)),
        event(1, simple("grad-norm", 0.5), simple("lm loss", math.inf)),
        event(2, simple("lm loss", math.nan)),
        event(3, simple("lm loss", -math.inf)),
    )
    read = losses(path)
    assert {s: str(v) for s, v in read.items()} == {0: "9.0", 1: "inf", 2: "nan", 3: "-inf"}


@pytest.mark.parametrize("is_first", [True, False])  # the first event of a kind is read otherwise
@pytest.mark.parametrize("other", [500.0, math.nan])
def test_two_values_of_a_step_disagree_and_two_that_are_equal_do_not(
    tmp_path: Path, other: float, *, is_first: bool
) -> None:
    path = tmp_path / "events.out.tfevents.1.h"
    odd = 1 if is_first else 3
    events = [
        event(step, simple(name, value))
        for step in (1, 2, 3)
        for name in ("lm loss", "time")
        for value in (0.5, other if (step, name) == (odd, "lm loss") else 0.5)
    ]
    write_events(path, *events, event(4, simple("lm loss", math.nan), simple("lm loss", math.nan)))
    observed = read_tensorboard(path)
    assert list(observed.disagreements) == ["lm loss"]
    where, text = observed.disagreements["lm loss"]
    assert where.startswith(f"{path}: byte ")
    assert text.startswith(f"step {odd} has two values of 'lm loss', 0.5 and then {other}; have")
    assert [str(value) for value in losses(path).values()] == ["0.5", "0.5", "0.5", "nan"]


def test_several_files_are_one_where_they_agree(tmp_path: Path) -> None:
    later = tmp_path / "again" / "events.out.tfevents.20.h"
    first = tmp_path / "events.out.tfevents.3.h"
    write_events(later, *(event(s, simple("lm loss", 2.0)) for s in (2, 3, 4)))
    write_events(first, *(event(s, simple("lm loss", 2.0)) for s in (1, 2, 3)))
    observed = read_tensorboard(tmp_path)
    assert dict(observed.metrics["lm loss"].items()) == {1: 2.0, 2: 2.0, 3: 2.0, 4: 2.0}
    assert observed.disagreements == {}
    write_events(first, event(3, simple("lm loss", 1.0)))
    text = f"step 3 has two values of 'lm loss', 2.0 here and 1.0 in {first}; have one rank"
    where, problem = read_tensorboard(tmp_path).disagreements["lm loss"]
    assert (where, problem.partition(" write")[0]) == (str(later), text)


@pytest.mark.parametrize("num_bytes_cut", [1, 4, 5, 30, 40])
def test_a_torn_last_record_is_dropped(tmp_path: Path, num_bytes_cut: int) -> None:
    path = write_events(
        tmp_path / "events.out.tfevents.1.h", *(event(s, simple("lm loss", 1.0)) for s in (1, 2))
    )
    whole = path.read_bytes()
    path.write_bytes(whole[:-num_bytes_cut])
    observed = read_tensorboard(path)
    assert observed.metrics["lm loss"].steps == (1,)


def test_a_damaged_length_is_an_error_with_its_offset(tmp_path: Path) -> None:
    path = write_events(
        tmp_path / "events.out.tfevents.1.h", *(event(s, simple("lm loss", 1.0)) for s in (1, 2))
    )
    data = bytearray(path.read_bytes())
    second = 12 + data[0] + 4
    data[second] ^= 0x01
    path.write_bytes(data)
    with pytest.raises(MetricsError, match=f"{re.escape(str(path))}: byte {second}: damaged"):
        read_tensorboard(path)


@pytest.mark.parametrize("junk", [b"\x80" * 30, b"\x09" + b"\x10" * 9 + b"\xff" * 30, b"\x0f"])
def test_a_record_that_is_no_event_is_an_error_with_its_offset(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / "events.out.tfevents.1.h"
    with path.open("wb") as file:
        RecordWriter(file).write(junk)
    with pytest.raises(MetricsError, match="byte 0: damaged event file: "):
        read_tensorboard(path)


def test_no_event_file_and_no_scalar_are_errors(tmp_path: Path) -> None:
    with pytest.raises(MetricsError, match="no metrics: no file"):
        read_tensorboard(tmp_path)
    write_events(tmp_path / "events.out.tfevents.1.h")
    with pytest.raises(MetricsError, match=r"1 event file\(s\) without a scalar"):
        read_tensorboard(tmp_path)


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_file_is_read_or_named_but_never_crashes(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = write_events(
        tmp_path / "events.out.tfevents.1.h",
        *(event(s, simple("lm loss", 1.0)) for s in range(120, 140)),
    )
    whole = path.read_bytes()
    for _ in range(100):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        with contextlib.suppress(MetricsError):
            read_tensorboard(path)
