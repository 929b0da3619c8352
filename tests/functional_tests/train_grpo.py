"""Train a small GPT by group-relative policy optimization, on GPUs or on the CPU.

    python train_grpo.py --train-iters 10 --vocab-size 32

In each iteration the model answers prompts, several times each; an answer is worth the share of its
tokens that are even, an answer above the mean of its group becomes likelier and one below it less
likely. Logs as Megatron-LM's GRPO training does, and `mean-reward` beside it. Every rank has the
whole model; ranks answer prompts of their own.

To read on: gpt_policy.py is the iteration, gpt_sampling.py asks the model.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from gpt_arguments import Arguments, flag, make_parser, parse_with
from train_gpt import silence_what_was_chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoArguments(Arguments):
    """What one run is asked to do."""

    grpo_prompts_per_step: int = flag(2, "prompts in an iteration, over all ranks")
    grpo_group_size: int = flag(4, "answers to a prompt")
    grpo_iterations: int = flag(2, "optimizer steps with the same answers")
    grpo_clamp_eps: float = flag(0.2, "how far an answer's probability counts as it moves")
    num_prompt_tokens: int = flag(4, "tokens of a prompt")
    num_tokens_to_generate: int = flag(8, "tokens of an answer")


def main() -> None:
    """Read the flags, join the other ranks, train."""
    parser = make_parser(
        GrpoArguments, "train_grpo.py", "Train a small GPT by reinforcement with megatron-core."
    )
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    arguments = parse_with(parser, GrpoArguments, sys.argv[1:], world_size)
    if arguments.model_parallel_size != 1:
        parser.error("--tensor-model-parallel-size: every rank has the whole model, expected 1")
    if arguments.grpo_prompts_per_step % world_size:
        parser.error(
            f"--grpo-prompts-per-step: {arguments.grpo_prompts_per_step} is no multiple of the "
            f"{world_size} ranks"
        )
    silence_what_was_chosen()

    # As in train_gpt.py: torch comes after the flags.
    from gpt_distributed import joined_world
    from gpt_logging import RunLog
    from gpt_model import build
    from gpt_policy import train_policy
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def run() -> None:
        with joined_world(arguments) as device:
            trained = build(arguments, device)
            with RunLog(arguments, device) as log:
                train_policy(arguments, trained, device, log)

    run()


if __name__ == "__main__":
    main()
