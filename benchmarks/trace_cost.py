"""Cost of a trace: the tiny GPT's training step with and without one, in turns.

    python benchmarks/trace_cost.py [--turns N] [FLAG ...]

Flags are those of tests/functional_tests/train_gpt.py. Prints the median step and its ratio to the
step without a trace, for traces of hashes and of whole values. Processor time on the CPU, which a
busy machine hardly moves; wall time on a GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar

from pytest_megatron.workloads.training.plan.trace_settings import VARIABLE, TraceSettings

PROGRAMS = Path(__file__).parents[1] / "tests/functional_tests"
NUM_STEPS = 12
_P = ParamSpec("_P")
_T = TypeVar("_T")


def step_ms(values: Literal["hash", "full"] | None, flags: list[str]) -> float:
    """Return the median step of one training."""
    with tempfile.TemporaryDirectory() as directory:
        # As torch.distributed.run sets it for several ranks; idle threads would spin otherwise.
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        if values is not None:
            settings = TraceSettings(directory=Path(directory), steps=NUM_STEPS, values=values)
            env[VARIABLE] = settings.to_json()
        done = subprocess.run(
            [sys.executable, __file__, "--train", *flags],
            env=env,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    found = re.search(r"^step_ms=(.*)$", done.stdout, re.MULTILINE)
    assert found is not None
    return float(found[1])


def train(flags: list[str]) -> None:
    """Train in this process and print the median step."""
    sys.path.insert(0, str(PROGRAMS))
    sys.argv = ["train_gpt.py", "--train-iters", str(NUM_STEPS), *flags]
    import gpt_training  # noqa: PLC0415 - only where it trains
    import torch  # noqa: PLC0415 - only where it trains
    import train_gpt  # noqa: PLC0415 - only where it trains

    from pytest_megatron import trace  # noqa: PLC0415 - only where it trains

    trace.start()
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    steps: list[float] = []

    def timed(original: Callable[_P, _T]) -> Callable[_P, _T]:
        def step(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            start = clock()
            result = original(*args, **kwargs)
            steps.append((clock() - start) * 1000)
            return result

        return step

    vars(gpt_training)["train_step"] = timed(gpt_training.train_step)
    train_gpt.main()
    print(f"step_ms={statistics.median(steps[2:])}")


def main() -> None:
    """Measure in turns and print a line for each kind of trace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    arguments, flags = parser.parse_known_args()
    if arguments.train:
        train(flags)
        return
    kinds: tuple[Literal["hash", "full"] | None, ...] = (None, "hash", "full")
    turns = [[step_ms(kind, flags) for kind in kinds] for _ in range(arguments.turns)]
    plain, *traced = (statistics.median(one) for one in zip(*turns, strict=True))
    print(f"no trace  {plain:7.1f} ms")
    for kind, found in zip(kinds[1:], traced, strict=True):
        print(f"{kind:8}  {found:7.1f} ms  {found / plain:.2f} times")


if __name__ == "__main__":
    main()
