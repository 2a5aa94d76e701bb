"""Sampled accuracy on fixed items.

Owns the measure by which runs are compared: one sampled response to each evaluation prompt, by a generator that is the
same at every evaluation, so that only the weights differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from fsdp_async.generation import generate
from fsdp_async.rewards import Reward
from fsdp_async.rollout import SamplingParams
from fsdp_async.types import Prompt


def sampled_accuracy(
    model: nn.Module, prompts: Sequence[Prompt], reward: Reward, sampling: SamplingParams, *, seed: int
) -> float:
    """Mean reward of one sampled response to each of `prompts`, in [0, 1] for a reward in [0, 1].

    The model is put into eval mode for the duration; the global RNG is not used.
    """
    was_training = model.training
    model.eval()
    try:
        groups = generate(model, prompts, replace(sampling, num_samples=1), version=0, seed=seed)
    finally:
        model.train(was_training)
    scores = [reward.score(group.prompt, response) for group in groups for response in group.responses]
    return sum(scores) / len(scores)
