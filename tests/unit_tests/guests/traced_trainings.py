"""Trains tiny models with traces, all ranks forked from this process, which loads torch only once.

python traced_trainings.py PROGRAM '[[settings, world size, port, argument, ...], ...]'
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

from pytest_megatron.trace import recorder, run  # noqa: F401 - the recorder for all ranks
from pytest_megatron.trace.settings import VARIABLE

_GPT = "buggy_train.py"


def train(rank: int, settings: str, world_size: int, port: int, arguments: list[str]) -> None:
    """Train as one rank."""
    os.environ[VARIABLE] = settings
    if world_size > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    sys.argv = ["run", *arguments]
    run.main()


def await_all(children: list[int]) -> None:
    """Wait for the end of all trainings that were started, and forget them."""
    while children:
        if os.waitpid(children.pop(), 0)[1]:
            sys.exit(1)


def main() -> None:
    children: list[int] = []
    are_weights_written = True
    program = sys.argv[1]
    if Path(program).name == _GPT:  # what all ranks need, once
        import gpt_training  # noqa: F401 - megatron-core
    else:
        import torch._dynamo  # of optimizers
        import torch.distributed.tensor.parallel  # noqa: F401
    gc.freeze()  # no rank searches all of torch for garbage
    for settings, world_size, port, *arguments in json.loads(sys.argv[2]):
        if json.loads(settings)["weights_from"] is not None and not are_weights_written:
            await_all(children)
        are_weights_written = json.loads(settings)["weights_from"] is not None
        for rank in range(world_size):
            child = os.fork()
            if not child:
                train(rank, settings, world_size, port, [program, *arguments])
                os._exit(0)
            children.append(child)
    await_all(children)


if __name__ == "__main__":
    main()
