"""Reward answers: an agent without a data set, under a name of Megatron-LM's registry."""

from __future__ import annotations

from megatron.rl.agent.reward_only_agent import RewardOnlyAgent

_PROMPTS = ("one and one is", "two and two is", "three and three is", "four and four is")


class AceMathAgent(RewardOnlyAgent):
    """The reward is the share of small letters in the answer."""

    env_id: str = "lab"
    _next: int = 0

    def get_dataset(self, validation: bool = False):
        return _PROMPTS

    async def get_prompt(self, validation: bool = False):
        self._next += 1
        return _PROMPTS[self._next % len(_PROMPTS)], {}

    async def evaluation_prompts(self, num_prompts: int, validation: bool = False):
        return [(_PROMPTS[i % len(_PROMPTS)], {}) for i in range(num_prompts)]

    async def get_reward(self, response: str, golden: dict, finish_reason: str) -> float:
        return sum(c.islower() for c in response) / max(len(response), 1)
