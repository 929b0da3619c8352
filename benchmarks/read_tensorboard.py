"""Measures our reader of TensorBoard files against TensorBoard's own, in one run.

    .venv/bin/python benchmarks/read_tensorboard.py [--steps 10000] [--metrics 10] [--repeats 3]

Writes one event file with TensorBoard's record writer, reads it with both, checks that both found
the same numbers, and prints the best time of each and their ratio. Not called `tensorboard.py`: a
script's own directory comes first on the import path.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from pytest_megatron.workloads.golden.formats.tensorboard import read_tensorboard

Result = TypeVar("Result")


def main() -> None:
    """Write, read twice, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--metrics", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    names = [f"metric {i}" for i in range(arguments.metrics)]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "events.out.tfevents.1.benchmark"
        write_events(path, names, arguments.steps)
        print(f"{arguments.metrics} metrics x {arguments.steps} steps, {path.stat().st_size} bytes")
        ours_s, ours = best_of(arguments.repeats, lambda: read_tensorboard(path).metrics)
        theirs_s, theirs = best_of(
            arguments.repeats,
            lambda: EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload(),
        )
    for name in names:
        assert list(ours[name].items()) == [(e.step, e.value) for e in theirs.Scalars(name)]
    print(f"read_tensorboard  {ours_s:7.3f} s")
    print(f"EventAccumulator  {theirs_s:7.3f} s, {theirs_s / ours_s:.1f} times as long")


def write_events(path: Path, names: list[str], num_steps: int) -> None:
    """Write one event a metric and step, as a training does."""
    with path.open("wb") as file:
        writer = RecordWriter(file)
        for step in range(1, num_steps + 1):
            for i, name in enumerate(names):
                value = Summary.Value(tag=name, simple_value=4.0 + i / (step + 3))
                event = Event(wall_time=step, step=step, summary=Summary(value=[value]))
                writer.write(event.SerializeToString())


def best_of(repeats: int, read: Callable[[], Result]) -> tuple[float, Result]:
    """Return the shortest wall time in seconds of `repeats` calls, and the last result."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = read()
        times.append(time.perf_counter() - start)
    return min(times), result


if __name__ == "__main__":
    main()
