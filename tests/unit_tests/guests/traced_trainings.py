"""Trains tiny GPTs with traces, all ranks forked from this process, which loads torch only once.

python traced_trainings.py '[[directory, world size, port, argument, ...], ...]'
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import gpt_training  # noqa: F401 - and torch and megatron-core with it

from pytest_megatron.trace import run
from pytest_megatron.trace.settings import VARIABLE, TraceSettings

_PROGRAM = Path(__file__).parents[2] / "traces/buggy_train.py"


def train(rank: int, directory: str, world_size: int, port: int, arguments: list[str]) -> None:
    """Train as one rank."""
    settings = TraceSettings(directory=Path(directory), steps=1, values="full")
    os.environ[VARIABLE] = settings.to_json()
    if world_size > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    sys.argv = ["run", str(_PROGRAM), *arguments]
    run.main()


def main() -> None:
    children = []
    gc.freeze()  # no rank searches all of torch for garbage
    for directory, world_size, port, *arguments in json.loads(sys.argv[1]):
        for rank in range(world_size):
            child = os.fork()
            if not child:
                train(rank, directory, world_size, port, arguments)
                os._exit(0)
            children.append(child)
    if any(os.waitpid(child, 0)[1] for child in children):
        sys.exit(1)


if __name__ == "__main__":
    main()
