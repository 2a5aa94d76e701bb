"""Sampling from a transformers model.

Owns the loop that draws responses with a KV cache and records what each token's log-prob was. It uses no global random
state: a response depends on the weights, the seed and the prompt's identity, not on what else is generated with it
(up to float32 rounding) or when.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from fsdp_async.batching import position_ids
from fsdp_async.logprobs import token_log_probs
from fsdp_async.rollout import SamplingParams
from fsdp_async.types import Prompt, Response, ResponseGroup, VersionSpan


def generate(
    model: nn.Module,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    version: int,
    seed: int,
    on_step: Callable[[], None] | None = None,
) -> list[ResponseGroup]:
    """Answer every prompt `params.num_samples` times.

    Args:
        model: a causal LM of transformers in eval mode, plain or under FSDP2; called through its root module.
        prompts: N prompts of any lengths.
        params: how to sample.
        version: what the tokens are labelled with, as behaviour and as submitted version.
        seed: with the prompt's identity, seeds the draws of its responses.
        on_step: called before every forward; may raise to give up.

    Returns:
        One group a prompt, in order. A sampled EOS is part of the response and under the mask; `finish_reason` is
        "length" for a response that reached `max_response_tokens` without it.
    """
    uniforms = torch.cat([_uniforms(prompt, params, seed) for prompt in prompts])
    with torch.no_grad():
        tokens, log_probs = _sample(model, prompts, params, uniforms, on_step)
    rows = list(zip(tokens.tolist(), log_probs.tolist(), strict=True))
    size = params.num_samples
    return [
        ResponseGroup(
            prompt,
            tuple(_response(prompt, i, *rows[index * size + i], params, version) for i in range(size)),
            version,
        )
        for index, prompt in enumerate(prompts)
    ]


def _sample(
    model: nn.Module,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    uniforms: Tensor,
    on_step: Callable[[], None] | None,
) -> tuple[Tensor, Tensor]:
    """Tokens [N*G,T] int64 and their log-probs [N*G,T] float32; meaningless behind an EOS."""
    ids, attention = _left_padded(prompts, params.pad_token_id)
    positions, cache = position_ids(attention), DynamicCache()
    finished = torch.zeros(len(uniforms), dtype=torch.bool)
    tokens, log_probs = [], []
    for step in range(params.max_response_tokens):
        if on_step is not None:
            on_step()
        logits = _next_logits(model, ids, attention, positions, cache)
        if step == 0:
            # Each prompt was read once; its responses share what was read.
            logits = logits.repeat_interleave(params.num_samples, dim=0)
            attention = attention.repeat_interleave(params.num_samples, dim=0)
            positions = positions[:, -1:].repeat_interleave(params.num_samples, dim=0)
            cache.batch_repeat_interleave(params.num_samples)
        token = _draw(logits, uniforms[:, step], params.temperature)
        tokens.append(token)
        log_probs.append(token_log_probs(logits, token, temperature=params.temperature))
        finished |= token == params.eos_token_id
        if bool(finished.all()):
            break
        ids, positions = token.unsqueeze(1), positions[:, -1:] + 1
        attention = torch.cat([attention, torch.ones_like(ids)], dim=1)
    return torch.stack(tokens, dim=1), torch.stack(log_probs, dim=1)


def _next_logits(model: nn.Module, ids: Tensor, attention: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
    output: Any = model(
        input_ids=ids,
        attention_mask=attention,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    logits: Tensor = output.logits[:, -1]
    return logits


def _draw(logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
    """Inverse-CDF sampling: the first token [R] whose cumulative probability exceeds `uniform` [R] in [0, 1)."""
    cumulative = (logits.double() / temperature).softmax(dim=-1).cumsum(dim=-1)
    # Normalised by its own last value, so that rounding cannot leave a uniform above the whole mass.
    return (cumulative / cumulative[:, -1:] <= uniform.unsqueeze(1)).sum(dim=-1)


def _uniforms(prompt: Prompt, params: SamplingParams, seed: int) -> Tensor:
    """Draws [G,T] float64 of one prompt."""
    digest = hashlib.sha256(f"{seed}/{prompt.prompt_id}/{prompt.epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.rand(params.num_samples, params.max_response_tokens, generator=generator, dtype=torch.float64)


def _left_padded(prompts: Sequence[Prompt], pad_token_id: int) -> tuple[Tensor, Tensor]:
    width = max(len(prompt.token_ids) for prompt in prompts)
    pads = [width - len(prompt.token_ids) for prompt in prompts]
    ids = [[pad_token_id] * pad + [*prompt.token_ids] for pad, prompt in zip(pads, prompts, strict=True)]
    attention = [[0] * pad + [1] * (width - pad) for pad in pads]
    return torch.tensor(ids), torch.tensor(attention)


def _response(
    prompt: Prompt, index: int, tokens: list[int], log_probs: list[float], params: SamplingParams, version: int
) -> Response:
    stopped = params.eos_token_id in tokens
    length = tokens.index(params.eos_token_id) + 1 if stopped else len(tokens)
    return Response(
        prompt_id=prompt.prompt_id,
        sample_index=index,
        token_ids=tuple(tokens[:length]),
        rollout_log_prob=tuple(log_probs[:length]),
        response_mask=(True,) * length,
        version_spans=(VersionSpan(version, 0, length),),
        finish_reason="stop" if stopped else "length",
        temperature=params.temperature,
    )
