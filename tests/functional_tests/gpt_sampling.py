"""Ask a GPT for the tokens that follow: greedily or by chance, with their log-probabilities.

Every step runs the whole text through the model again; there is no cache of keys and values, which
would be another implementation to trust. The model must not be cut into pipeline stages. Shorter
texts are padded at the end, where causal attention does not look.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from gpt_model import Trained
from megatron.core import tensor_parallel
from torch import nn


def logits_of(
    model: nn.Module, texts: Sequence[Sequence[int]], device: torch.device
) -> torch.Tensor:
    """Return (num_texts, longest, vocab_size) float32: what the model says after each token."""
    longest = max(map(len, texts))
    padded = [[*text, *[0] * (longest - len(text))] for text in texts]
    tokens = torch.tensor(padded, device=device)
    positions = torch.arange(longest, device=device).expand_as(tokens).contiguous()
    part = model(tokens, positions, None)
    # Each tensor-parallel rank has the logits of its part of the vocabulary.
    whole: torch.Tensor = tensor_parallel.gather_from_tensor_model_parallel_region(part)
    return whole.float()


def logprobs_of(logits: torch.Tensor, text: Sequence[int]) -> torch.Tensor:
    """Return (len(text) - 1,) log-probabilities of each token of a text but the first."""
    chances = torch.log_softmax(logits[: len(text) - 1], dim=-1)
    following = torch.tensor(text[1:], device=logits.device)
    return chances.gather(-1, following[:, None])[:, 0]


@torch.no_grad()
def next_tokens(
    trained: Trained,
    texts: Sequence[Sequence[int]],
    device: torch.device,
    generator: torch.Generator | None = None,
) -> list[int]:
    """Return the token that follows each text.

    Args:
        trained: Whose GPT is asked; its dropout must be off.
        texts: Token ids, at least one each.
        device: Where the model is.
        generator: Draws by the model's probabilities; None takes the likeliest, the first of
            several.
    """
    logits = logits_of(trained.bare, texts, device)
    ends = torch.tensor([len(text) - 1 for text in texts], device=device)
    last = logits[torch.arange(len(texts), device=device), ends].cpu()
    if generator is None:
        return [int(token) for token in last.argmax(dim=-1)]
    drawn = torch.multinomial(last.softmax(dim=-1), 1, generator=generator)
    return [int(token) for token in drawn[:, 0]]
