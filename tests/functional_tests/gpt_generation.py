"""Answer requests in batches, and write the answers as Megatron-LM's inference programs do."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from generate_gpt import GenerateArguments
from gpt_logging import memory_bytes
from gpt_model import Trained
from gpt_sampling import logits_of, logprobs_of, next_tokens

Json: TypeAlias = float | str | list[float] | list[int]


@dataclass(slots=True, kw_only=True)
class Running:
    """A request while it is answered.

    Attributes:
        text: Token ids of the prompt and of the answer so far.
        num_wanted: Tokens of the answer.
    """

    name: str
    prompt: tuple[int, ...]
    num_wanted: int
    text: list[int]
    num_steps: int = 0

    @property
    def answer(self) -> list[int]:
        """Token ids that the model gave."""
        return self.text[len(self.prompt) :]


def generate(arguments: GenerateArguments, trained: Trained, device: torch.device) -> None:
    """Answer every request, as often as is asked; rank 0 writes the last answers."""
    trained.model.eval()
    answered: list[Running] = []
    throughput = []
    for _ in range(arguments.inference_repeat_n):
        start = time.perf_counter()
        answered = answer_all(arguments, trained, device)
        num_tokens = sum(len(request.answer) for request in answered)
        throughput.append(num_tokens / (time.perf_counter() - start))
    found: dict[str, Mapping[str, Json] | Json] = {
        request.name: describe(arguments, trained, device, request) for request in answered
    }
    if arguments.inference_engine == "dynamic":  # static inference writes the requests alone
        found["throughput"] = throughput
        found["mem-max-allocated-bytes"] = memory_bytes(device)[1]
        found["lifetime_prefill_token_count"] = sum(len(request.prompt) for request in answered)
    if arguments.output_path is not None and torch.distributed.get_rank() == 0:
        arguments.output_path.write_text(json.dumps(found), encoding="utf-8")


def answer_all(
    arguments: GenerateArguments, trained: Trained, device: torch.device
) -> list[Running]:
    """Answer every request, in the order of the prompts."""
    waiting = requests_of(arguments)
    is_static = arguments.inference_engine == "static"
    room = len(waiting) if is_static else arguments.inference_max_requests
    done: list[Running] = []
    active: list[Running] = []
    while waiting or active:
        while waiting and len(active) < room:
            active.append(waiting.pop(0))
        tokens = next_tokens(trained, [request.text for request in active], device)
        for request, token in zip(active, tokens, strict=True):
            request.text.append(token)
            request.num_steps += 1
        done += [request for request in active if len(request.answer) == request.num_wanted]
        active = [request for request in active if len(request.answer) < request.num_wanted]
    return sorted(done, key=lambda request: int(request.name))


def requests_of(arguments: GenerateArguments) -> list[Running]:
    """Make a request of every prompt; the first wants most tokens, so that not all end at once."""
    found = []
    for number, prompt in enumerate(arguments.prompts):
        tokens = tuple(prompt.encode("latin-1"))
        wanted = max(1, arguments.num_tokens_to_generate - number)
        found.append(Running(name=str(number), prompt=tokens, num_wanted=wanted, text=list(tokens)))
    return found


def describe(
    arguments: GenerateArguments, trained: Trained, device: torch.device, request: Running
) -> dict[str, Json]:
    """Return a request as the output file has it."""
    found: dict[str, Json] = {
        "input_prompt": text_of(request.prompt),
        "generated_text": text_of(request.answer),
        "generated_tokens": request.answer,
        "step_count": request.num_steps,
    }
    if arguments.return_log_probs:
        with torch.no_grad():
            logits = logits_of(trained.bare, [request.text], device)
        logprobs: list[float] = logprobs_of(logits[0], request.text).tolist()
        found["logprobs"] = logprobs
        found["prompt_logprobs"] = logprobs[: len(request.prompt) - 1]
        found["generated_logprobs"] = logprobs[len(request.prompt) - 1 :]
    return found


def text_of(tokens: Sequence[int]) -> str:
    """Return the text that bytes stand for."""
    return bytes(tokens).decode("latin-1")
