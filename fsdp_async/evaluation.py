"""Sampled accuracy on fixed items.

Owns the measure by which runs are compared: one sampled response to each evaluation prompt, by a generator that is the
same at every evaluation, so that only the weights differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from fsdp_async.errors import InputError, NonFiniteError
from fsdp_async.generation import generate
from fsdp_async.lead import Lead
from fsdp_async.modeling import eval_mode
from fsdp_async.rewards import Reward
from fsdp_async.rollout import SamplingParams
from fsdp_async.types import Prompt


def sampled_accuracy(
    model: nn.Module,
    prompts: Sequence[Prompt],
    reward: Reward,
    sampling: SamplingParams,
    *,
    seed: int,
    lead: Lead | None = None,
) -> float:
    """Mean reward of one sampled response to each of `prompts`, in [0, 1] for a reward in [0, 1].

    The model is put into eval mode for the duration; the global RNG is not used. With `lead` the prompts are shared out
    among its ranks (collective), and each gets the mean of all.

    Raises:
        InputError: no prompts.
        NonFiniteError: a reward is NaN or infinite; on all ranks.
    """
    if not prompts:
        raise InputError("sampled_accuracy needs at least one prompt; got none (task.eval_items)")
    lead = lead or Lead()
    share = prompts[lead.rank :: lead.num_ranks]
    with eval_mode(model):
        groups = generate(
            model,
            share or prompts[:1],  # a rank without prompts takes part in the forwards of the others
            replace(sampling, num_samples=1),
            version=0,
            seed=seed,
            is_over=lambda is_done: all(lead.gather(is_done)),
        )
    answers = [response for g in groups[: len(share)] for response in g.responses]
    scores = [float(reward.score(g.prompt, response)) for g in groups[: len(share)] for response in g.responses]
    bad = [(a.prompt_id, score) for a, score in zip(answers, scores, strict=True) if not math.isfinite(score)]
    totals = lead.gather((sum(scores), len(scores), bad))
    for _, _, found in totals:
        for name, score in found:
            raise NonFiniteError(f"reward of {name!r}[0] is {score}; it must be a finite number: mend the reward")
    return sum(total for total, _, _ in totals) / sum(count for _, count, _ in totals)
