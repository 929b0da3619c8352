"""Generate text with a small GPT, and write what Megatron-LM's inference programs write.

    python generate_gpt.py --train-iters 20 --prompts "What follows?" --output-path out.json

Without a checkpoint to load there are no weights worth asking, so the model is trained first, for
`--train-iters` iterations, as train_gpt.py does it. A token is a byte. Requests are answered
greedily, so that the answers are a function of the flags; `--inference-engine` says whether all
requests start together (static) or one that is done makes room for the next (dynamic).

To read on: gpt_generation.py answers the requests, gpt_sampling.py asks the model.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from gpt_arguments import Arguments, flag, make_parser, parse_with
from train_gpt import silence_what_was_chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateArguments(Arguments):
    """What one inference run is asked to do."""

    prompts: tuple[str, ...] = flag(("What follows?",), "texts to go on with, one request each")
    num_tokens_to_generate: int = flag(16, "tokens of an answer; each further request has one less")
    inference_engine: str = flag("static", "how requests are batched", ("static", "dynamic"))
    inference_max_requests: int = flag(2, "requests in one step of the dynamic engine")
    inference_repeat_n: int = flag(1, "how often all requests are answered, to time it")
    top_k: int = flag(1, "only 1: greedy")
    return_log_probs: bool = flag(default=False, text="write log-probabilities")
    output_path: Path | None = field(
        default=None, metadata={"help": "file to write the answers to", "choices": None}
    )


def main() -> None:
    """Read the flags, join the other ranks, train, generate."""
    parser = make_parser(
        GenerateArguments, "generate_gpt.py", "Generate text with a small GPT of megatron-core."
    )
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    arguments = parse_with(parser, GenerateArguments, sys.argv[1:], world_size)
    if arguments.pipeline_model_parallel_size != 1:
        parser.error("--pipeline-model-parallel-size: this program cuts no pipeline, expected 1")
    if arguments.top_k != 1:
        parser.error("--top-k: this program takes the likeliest token, expected 1")
    silence_what_was_chosen()

    # As in train_gpt.py: torch comes after the flags.
    from gpt_distributed import joined_world
    from gpt_generation import generate
    from gpt_logging import RunLog
    from gpt_model import build
    from gpt_training import train
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def run() -> None:
        with joined_world(arguments) as device:
            trained = build(arguments, device)
            with RunLog(arguments, device) as log:
                train(arguments, trained, device, log)
            generate(arguments, trained, device)

    run()


if __name__ == "__main__":
    main()
