"""Train a small GPT with megatron-core, on GPUs or on the CPU.

    python train_gpt.py --train-iters 20
    python -m torch.distributed.run --nproc-per-node 2 train_gpt.py --tensor-model-parallel-size 2

The flags have Megatron-LM's names (`--help`, docs/reference/training-program.md). The run is a
function of its flags: text, weights and dropout follow from `--seed`, and the losses of all
parallel layouts agree but for rounding. Nothing is written outside the directories that are given.

To read on: gpt_training.py is the loop, gpt_model.py what is trained, gpt_data.py the text,
gpt_checkpoint.py and gpt_logging.py what is written, gpt_distributed.py how a rank joins the
others, cpu_device.py how megatron-core runs without a GPU.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

from gpt_arguments import parse_arguments


def main() -> None:
    """Read the flags, join the other ranks, train."""
    arguments = parse_arguments(sys.argv[1:], int(os.environ.get("WORLD_SIZE", "1")))
    silence_what_was_chosen()

    # Imported only now: a wrong flag is told before torch is loaded.
    from gpt_distributed import joined_world
    from gpt_logging import RunLog
    from gpt_model import build
    from gpt_training import train
    from torch.distributed.elastic.multiprocessing.errors import record

    @record  # a launcher that asks for it gets the exception in a file
    def run() -> None:
        with joined_world(arguments) as device:
            trained = build(arguments, device)
            with RunLog(arguments, device) as log:
                train(arguments, trained, device, log)

    run()


def silence_what_was_chosen() -> None:
    """Keep out of the log what megatron-core says of choices that this program makes on purpose.

    It takes the plain torch parts, leaves the rerun state machine off, and calls torch's older
    names, which is megatron-core's affair.
    """
    warnings.filterwarnings("ignore", message=".*(?:Falling back to|full scope is deprecated)")
    warnings.filterwarnings("ignore", message="moe_ffn_hidden_size is not set|The .grad attribute")
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)


if __name__ == "__main__":
    main()
