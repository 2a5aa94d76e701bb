"""Small real objects for tests: prompts, responses, groups, batches, models."""

from __future__ import annotations

import torch

from fsdp_async.batching import collate
from fsdp_async.modeling import ModelConfig, build_model
from fsdp_async.types import Prompt, Response, ResponseGroup, VersionSpan

TINY = ModelConfig(
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_position_embeddings=64,
)
VOCAB = 19


def tiny_model(seed=0):
    """A Qwen3 of a few thousand parameters."""
    return build_model(TINY, vocab_size=VOCAB, seed=seed)


def response(prompt_id, index, tokens, *, spans=((0, None),), log_prob=-1.0, reward=1.0, mask=None):
    """A response whose spans are `(version, stop)` pairs; a stop of None means the end."""
    edges, version_spans = 0, []
    for version, stop in spans:
        stop = len(tokens) if stop is None else stop
        version_spans.append(VersionSpan(version, edges, stop))
        edges = stop
    return Response(
        prompt_id=prompt_id,
        sample_index=index,
        token_ids=tuple(tokens),
        rollout_log_prob=(log_prob,) * len(tokens),
        response_mask=tuple(mask or [True] * len(tokens)),
        version_spans=tuple(version_spans),
        finish_reason="stop",
        temperature=1.0,
        reward=reward,
    )


def group(prompt_id, prompt_tokens, responses, *, version=0, epoch=0):
    """A group of ready responses."""
    return ResponseGroup(Prompt(prompt_id, tuple(prompt_tokens), "test", epoch=epoch), tuple(responses), version)


def random_batch(num_groups=3, group_size=2, *, versions=(0,), seed=0, prompt_len=4, response_len=5):
    """A collated batch of random tokens; response i of a batch is sampled by versions[i % len(versions)]."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(length):
        return torch.randint(2, VOCAB, (length,), generator=generator).tolist()

    groups, row = [], 0
    for g in range(num_groups):
        responses = []
        for i in range(group_size):
            version = versions[row % len(versions)]
            length = 1 + (row % response_len)
            responses.append(response(f"p{g}", i, tokens(length), spans=((version, None),), reward=float(i)))
            row += 1
        groups.append(group(f"p{g}", tokens(1 + g % prompt_len), responses))
    return collate(groups, pad_token_id=0)
