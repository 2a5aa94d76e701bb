"""From response groups to tensors, and from tensors to micro-batches.

Owns padding and the token budget. Pure functions; what a token means is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp_async.checks import require_whole
from fsdp_async.errors import ConfigError, InputError
from fsdp_async.types import Prompt, Response, ResponseGroup, TrainBatch


def collate(groups: Sequence[ResponseGroup], *, pad_token_id: int) -> TrainBatch:
    """Pad scored groups into one batch; row order is group order, `group_ids` count from 0.

    Raises:
        InputError: no groups, no tokens at all, a response without a reward, or a padding token that is none.
    """
    require_whole("pad_token_id", pad_token_id, 0, InputError)
    rows = [(index, group.prompt, response) for index, group in enumerate(groups) for response in group.responses]
    if not rows:
        raise InputError("collate needs at least one response; got no groups, or groups without responses")
    prompt_len = max(len(prompt.token_ids) for _, prompt, _ in rows)
    response_len = max(len(response.token_ids) for _, _, response in rows)
    if response_len == 0:
        raise InputError(f"all {len(rows)} responses are empty; there is nothing to train on")
    padded = [_pad_row(prompt, response, prompt_len, response_len, pad_token_id) for _, prompt, response in rows]
    attention_mask = torch.tensor([row[1] for row in padded])
    return TrainBatch(
        input_ids=torch.tensor([row[0] for row in padded]),
        attention_mask=attention_mask,
        position_ids=position_ids(attention_mask),
        response_mask=torch.tensor([row[2] for row in padded]),
        rollout_log_prob=torch.tensor([row[3] for row in padded], dtype=torch.float32),
        versions=torch.tensor([row[4] for row in padded]),
        rewards=torch.tensor([_reward(response) for _, _, response in rows], dtype=torch.float32),
        group_ids=torch.tensor([index for index, _, _ in rows]),
        temperature=torch.tensor([response.temperature for _, _, response in rows], dtype=torch.float32),
    )


def shard_rows(batch: TrainBatch, num_ranks: int) -> list[Tensor]:
    """Deal whole groups to ranks; row indices (int64, ascending) of each.

    Of every `num_ranks` consecutive groups each rank gets one, the longest going to the rank with the fewest tokens so
    far: tokens are balanced, and every mini-batch of consecutive groups is spread over all ranks.
    """
    tokens = batch.attention_mask.sum(dim=1)
    groups = sorted(set(batch.group_ids.tolist()))
    size = {group: int(tokens[batch.group_ids == group].sum()) for group in groups}
    load = [0] * num_ranks
    owner: dict[int, int] = {}
    for start in range(0, len(groups), num_ranks):
        free = set(range(num_ranks))
        for group in sorted(groups[start : start + num_ranks], key=lambda g: (-size[g], g)):
            rank = min(free, key=lambda r: (load[r], r))
            free.remove(rank)
            owner[group] = rank
            load[rank] += size[group]
    owners = torch.tensor([owner[group] for group in batch.group_ids.tolist()])
    return [(owners == rank).nonzero().squeeze(1) for rank in range(num_ranks)]


def position_ids(attention_mask: Tensor) -> Tensor:
    """Positions [B,S] that count real tokens from 0; padding before the first token stays at 0."""
    return (attention_mask.cumsum(dim=-1) - 1).clamp(min=0)


def check_token_budget(sequence_len: int, micro_batch_tokens: int | None) -> None:
    """Refuse a budget that not even one row of `sequence_len` tokens fits; None is no budget.

    Raises:
        ConfigError: it does not.
    """
    if micro_batch_tokens is not None and micro_batch_tokens < sequence_len:
        raise ConfigError(
            f"trainer.micro_batch_tokens={micro_batch_tokens} is below one sequence of {sequence_len} tokens; "
            "raise it, or shorten prompts or responses"
        )


def micro_batches(batch: TrainBatch, micro_batch_tokens: int | None) -> list[Tensor]:
    """Row indices (int64) of micro-batches of at most `micro_batch_tokens` tokens each, padding included.

    With a budget, rows of similar length come together, shortest first, so that little of it is padding (a forward
    cuts off what is padding in every row); without one, all rows in order.

    Raises:
        ConfigError: one row alone is longer than the budget.
    """
    if not batch.num_rows:
        return []
    if micro_batch_tokens is None:
        return [torch.arange(batch.num_rows)]
    num_prompt = batch.input_ids.shape[1] - batch.num_response_positions
    prompts, responses = (part.sum(dim=1).tolist() for part in batch.attention_mask.tensor_split([num_prompt], dim=1))
    chunks: list[list[int]] = [[]]
    widest = (0, 0)
    for row in sorted(range(batch.num_rows), key=lambda row: prompts[row] + responses[row]):
        check_token_budget(prompts[row] + responses[row], micro_batch_tokens)
        widest = (max(widest[0], prompts[row]), max(widest[1], responses[row]))
        if (len(chunks[-1]) + 1) * sum(widest) > micro_batch_tokens:
            chunks.append([])
            widest = (prompts[row], responses[row])
        chunks[-1].append(row)
    return [torch.tensor(rows) for rows in chunks]


def _pad_row(
    prompt: Prompt, response: Response, prompt_len: int, response_len: int, pad_token_id: int
) -> tuple[list[int], list[int], list[bool], list[float], list[int]]:
    left, right = prompt_len - len(prompt.token_ids), response_len - len(response.token_ids)
    num_tokens = len(prompt.token_ids) + len(response.token_ids)
    versions = [span.version for span in response.version_spans for _ in range(span.stop - span.start)]
    masked = [v if m else -1 for v, m in zip(versions, response.response_mask, strict=True)]
    return (
        [pad_token_id] * left + [*prompt.token_ids, *response.token_ids] + [pad_token_id] * right,
        [0] * left + [1] * num_tokens + [0] * right,
        [*response.response_mask] + [False] * right,
        [*response.rollout_log_prob] + [0.0] * right,
        masked + [-1] * right,
    )


def _reward(response: Response) -> float:
    if response.reward is None:
        raise InputError(
            f"response {response.prompt_id!r}[{response.sample_index}] has no reward; score it before it is batched"
        )
    return response.reward
