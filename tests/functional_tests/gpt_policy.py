"""Group-relative policy optimization: answers, their worth, and the step that follows from it.

What is drawn is a function of seed, iteration and rank, from a generator on the CPU.

Source: Shao et al. 2024, DeepSeekMath, section 4.1 (the objective; without its KL term).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from gpt_data import Dataset
from gpt_logging import RunLog, Step
from gpt_model import Trained
from gpt_sampling import logits_of, logprobs_of, next_tokens
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from train_grpo import GrpoArguments

_SAME_REWARD = 1e-6  # a group whose answers are all worth the same teaches nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Answers of this rank in one iteration.

    Attributes:
        texts: (num_answers,) token ids of prompt and answer.
        num_prompt_tokens: Of each of them.
        old: (num_answers, num_answer_tokens) log-probabilities as they were drawn.
        advantages: (num_answers,) how much better than its group, in standard deviations.
    """

    texts: Sequence[Sequence[int]]
    num_prompt_tokens: int
    old: torch.Tensor
    advantages: torch.Tensor
    reward: float


def train_policy(
    arguments: GrpoArguments, trained: Trained, device: torch.device, log: RunLog
) -> None:
    """Run the iterations from the first to the last."""
    last = arguments.exit_interval or arguments.train_iters
    for iteration in range(1, last + 1):
        log.tell(train_step(arguments, trained, device, iteration))


def train_step(
    arguments: GrpoArguments, trained: Trained, device: torch.device, iteration: int
) -> Step:
    """Answer, then take the optimizer's steps with the answers."""
    start = time.perf_counter()
    learning_rate = trained.optimizer.param_groups[0]["lr"]
    rollout = roll_out(arguments, trained, device, iteration)
    losses, grad_norm, num_zeros = [], 0.0, None
    for _ in range(arguments.grpo_iterations):
        trained.model.zero_grad_buffer()
        trained.optimizer.zero_grad()
        loss = policy_loss(arguments, rollout, logprobs_now(trained, rollout, device))
        torch.autograd.backward(loss)
        finalize_model_grads([trained.model], None)
        _, norm, num_zeros = trained.optimizer.step()
        grad_norm = 0.0 if norm is None else float(norm)
        losses.append(loss.detach())
    trained.scheduler.step(increment=arguments.global_batch_size)
    means = torch.stack([torch.stack(losses).mean(), torch.tensor(rollout.reward, device=device)])
    torch.distributed.all_reduce(means)
    means /= torch.distributed.get_world_size()
    return Step(
        iteration=iteration,
        loss=float(means[0]),
        learning_rate=learning_rate,
        grad_norm=grad_norm,
        num_zeros=None if num_zeros is None else int(num_zeros),
        is_skipped=False,
        time_s=time.perf_counter() - start,
        reward=float(means[1]),
    )


def roll_out(
    arguments: GrpoArguments, trained: Trained, device: torch.device, iteration: int
) -> Rollout:
    """Answer this rank's prompts, each in a group, and say what the answers are worth."""
    rank = parallel_state.get_data_parallel_rank()
    size = parallel_state.get_data_parallel_world_size()
    data = Dataset(seed=arguments.seed, vocab_size=arguments.vocab_size, seq_length=8)
    num_prompts, group = arguments.grpo_prompts_per_step, arguments.grpo_group_size
    indices = range((iteration - 1) * num_prompts + rank, iteration * num_prompts, size)
    prompts = [data.sample(i)[: arguments.num_prompt_tokens].tolist() for i in indices]
    texts = [list(prompt) for prompt in prompts for _ in range(group)]
    seed = (arguments.seed * 1_000_003 + iteration) * 1_009 + rank
    generator = torch.Generator().manual_seed(seed)
    trained.model.eval()
    for _ in range(arguments.num_tokens_to_generate):
        tokens = next_tokens(trained, texts, device, generator)
        for text, token in zip(texts, tokens, strict=True):
            text.append(token)
    trained.model.train()
    rewards = torch.tensor([worth(text[arguments.num_prompt_tokens :]) for text in texts])
    groups = rewards.view(-1, group)
    off = groups - groups.mean(dim=1, keepdim=True)
    advantages = (off / (groups.std(dim=1, keepdim=True) + _SAME_REWARD)).flatten().to(device)
    rollout = Rollout(
        texts=texts,
        num_prompt_tokens=arguments.num_prompt_tokens,
        old=torch.empty(0),
        advantages=advantages,
        reward=float(rewards.mean()),
    )
    with torch.no_grad():
        old = logprobs_now(trained, rollout, device)
    return Rollout(
        texts=texts,
        num_prompt_tokens=rollout.num_prompt_tokens,
        old=old,
        advantages=advantages,
        reward=rollout.reward,
    )


def worth(answer: Sequence[int]) -> float:
    """Return the share of even tokens in an answer."""
    return sum(token % 2 == 0 for token in answer) / len(answer)


def logprobs_now(trained: Trained, rollout: Rollout, device: torch.device) -> torch.Tensor:
    """Return (num_answers, num_answer_tokens) log-probabilities of the answers' tokens."""
    logits = logits_of(trained.model, rollout.texts, device)
    rows = [logprobs_of(row, text) for row, text in zip(logits, rollout.texts, strict=True)]
    return torch.stack(rows)[:, rollout.num_prompt_tokens - 1 :]


def policy_loss(arguments: GrpoArguments, rollout: Rollout, now: torch.Tensor) -> torch.Tensor:
    """Return the clipped objective, negated, averaged over all tokens of the answers."""
    ratio = torch.exp(now - rollout.old)
    low, high = 1 - arguments.grpo_clamp_eps, 1 + arguments.grpo_clamp_eps
    advantages = rollout.advantages[:, None]
    gain = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    return -gain.mean()
