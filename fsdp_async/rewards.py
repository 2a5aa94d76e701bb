"""Verifiable rewards.

Owns the score of one response against its prompt's known answer. Pure; a reward that is no number is an error here and
never reaches a gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from fsdp_async.errors import InputError, NonFiniteError
from fsdp_async.types import Prompt, Response, ResponseGroup


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """How a response is scored.

    `exact`: 1 for the whole right answer and its end, else 0. `graded`: share of right positions, the end included.
    """

    kind: Literal["exact", "graded"] = "exact"


class Reward(Protocol):
    """Scores one response."""

    def score(self, prompt: Prompt, response: Response) -> float:
        """A finite number, larger is better."""
        ...


@dataclass(frozen=True)
class AnswerMatch:
    """Compares the sampled tokens with `prompt.info["answer_ids"]`, which end in EOS."""

    graded: bool

    def score(self, prompt: Prompt, response: Response) -> float:
        """1.0 for equality; with `graded` the share of positions that agree, over the longer of the two.

        Raises:
            InputError: the prompt carries no answer.
        """
        if not prompt.info.get("answer_ids"):
            raise InputError(
                f"prompt {prompt.prompt_id!r} has no info['answer_ids'] (token ids that end in EOS); add them, or "
                "score with a reward of your own"
            )
        answer: tuple[int, ...] = tuple(prompt.info["answer_ids"])
        if not self.graded:
            return float(response.token_ids == answer)
        agree = sum(a == b for a, b in zip(response.token_ids, answer, strict=False))
        return agree / max(len(answer), len(response.token_ids))


def build_reward(config: RewardConfig) -> Reward:
    """The configured reward, for prompts that carry their answers."""
    return AnswerMatch(graded=config.kind == "graded")


def score_group(group: ResponseGroup, reward: Reward) -> ResponseGroup:
    """The same group with every response scored.

    Raises:
        NonFiniteError: a reward is NaN or infinite.
    """
    scored = []
    for response in group.responses:
        value = float(reward.score(group.prompt, response))
        if not math.isfinite(value):
            raise NonFiniteError(
                f"reward of {response.prompt_id!r}[{response.sample_index}] is {value}; it must be a finite number"
            )
        scored.append(response.with_reward(value))
    return replace(group, responses=tuple(scored))
