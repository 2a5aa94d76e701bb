"""Log-probs of old policies: each token under the version that sampled it.

Owns the visits: which versions, in which order, with how many micro-batches on every rank. It promises that all
ranks make the same visits and the same number of forwards whatever versions their rows hold, since a visit and
an FSDP2 forward are collective. Gradients are never recorded here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fsdp_async.batching import micro_batches
from fsdp_async.errors import InputError
from fsdp_async.state_cache import StateCache
from fsdp_async.types import TrainBatch

Forward = Callable[[nn.Module, TrainBatch], Tensor]


def behaviour_log_probs(
    cache: StateCache, batch: TrainBatch, forward: Forward, *, micro_batch_tokens: int | None = None
) -> Tensor:
    """Evaluate every sampled token under its own behaviour version, in eval mode, without gradient.

    A response that spans several versions is forwarded once under each. Rows are grouped by version, each version
    is visited once; ranks without rows of a version run a dummy forward.

    Args:
        cache: holds every version in `batch.versions` (on all ranks together).
        batch: B rows of this rank; may be empty.
        forward: `forward(model, batch) -> [b,T]` log-probs of the response tokens, of a floating dtype.
        micro_batch_tokens: budget of padded tokens of one forward; None for one forward a version.

    Returns:
        [B,T] float32; 0 off `response_mask`.

    Raises:
        UnknownVersionError: a version that is not retained; raised before any forward of that version.
        InputError: `forward` returned another shape or no floating dtype.
    """
    result = torch.zeros_like(batch.rollout_log_prob)
    for version, num_forwards in _agreed_visits(batch, micro_batch_tokens, cache.process_group).items():
        rows = _rows_of(batch, version)
        values = log_probs_at(
            cache, version, batch.rows(rows), forward, micro_batch_tokens=micro_batch_tokens, num_forwards=num_forwards
        )
        result[rows] = torch.where(batch.versions[rows] == version, values, result[rows])
    return result


def log_probs_at(
    cache: StateCache,
    version: int | str,
    batch: TrainBatch,
    forward: Forward,
    *,
    micro_batch_tokens: int | None = None,
    num_forwards: int | None = None,
) -> Tensor:
    """Log-probs [B,T] of all rows under one retained state, in eval mode, without gradient.

    `num_forwards` is the number that all ranks agreed on; None asks them.
    """
    if num_forwards is None:
        num_forwards = agreed_max(len(micro_batches(batch, micro_batch_tokens)), cache.process_group)
    with cache.at(version) as model, torch.no_grad():
        model.eval()
        return forward_rows(model, batch, forward, micro_batch_tokens=micro_batch_tokens, num_forwards=num_forwards)


def forward_rows(
    model: nn.Module, batch: TrainBatch, forward: Forward, *, micro_batch_tokens: int | None, num_forwards: int
) -> Tensor:
    """Run `forward` over micro-batches and exactly `num_forwards` times, with dummies for what is missing; float32."""
    result = torch.zeros_like(batch.rollout_log_prob)
    chunks = micro_batches(batch, micro_batch_tokens)
    for rows in chunks:
        result[rows] = _checked(forward, model, batch.rows(rows))
    for _ in range(num_forwards - len(chunks)):
        _checked(forward, model, dummy_row(batch))
    return result


def _checked(forward: Forward, model: nn.Module, batch: TrainBatch) -> Tensor:
    """What `forward` returns, which would be broadcast over the tokens if it had another shape."""
    values: object = forward(model, batch)
    shape = list(batch.response_mask.shape)
    if not isinstance(values, Tensor) or list(values.shape) != shape or not values.is_floating_point():
        found = f"{values.dtype} {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise InputError(f"forward returned {found}; need floating log-probs {shape}: one for each response position")
    return values.float()


def dummy_row(batch: TrainBatch) -> TrainBatch:
    """One row of the same widths with nothing under its mask: a rank without rows still joins a collective forward."""

    def ones(like: Tensor) -> Tensor:
        return torch.ones((1, *like.shape[1:]), dtype=like.dtype, device=like.device)

    return TrainBatch(
        input_ids=ones(batch.input_ids) * 0,
        attention_mask=ones(batch.attention_mask),
        position_ids=ones(batch.position_ids).cumsum(dim=1) - 1,
        response_mask=~ones(batch.response_mask),
        rollout_log_prob=ones(batch.rollout_log_prob) * 0,
        versions=-ones(batch.versions),
        rewards=ones(batch.rewards) * 0,
        group_ids=ones(batch.group_ids) * 0,
        temperature=ones(batch.temperature),
    )


def agreed_max(value: int, group: ProcessGroup | None) -> int:
    """The largest `value` among the ranks of `group`; collective, except when `group` is None."""
    return max(_of_all_ranks(value, group))


def agreed_sum(value: int, group: ProcessGroup | None) -> int:
    """The sum of the ranks' `value`s; collective, except when `group` is None."""
    return sum(_of_all_ranks(value, group))


def _of_all_ranks(value: int, group: ProcessGroup | None) -> list[int]:
    if group is None:
        return [value]
    gathered: list[int] = [0] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def _rows_of(batch: TrainBatch, version: int) -> Tensor:
    """Indices of the rows of which `version` sampled a token."""
    return (batch.versions == version).any(dim=1).nonzero().squeeze(1)


def _agreed_visits(batch: TrainBatch, micro_batch_tokens: int | None, group: ProcessGroup | None) -> Mapping[int, int]:
    """Version -> number of forwards, ascending; the union over ranks, the largest number wins."""
    mine = {
        version: len(micro_batches(batch.rows(_rows_of(batch, version)), micro_batch_tokens))
        for version in batch.sampled_versions
    }
    gathered: list[dict[int, int]] = [mine]
    if group is not None:
        gathered = [{}] * dist.get_world_size(group)
        dist.all_gather_object(gathered, mine, group=group)
    versions = sorted({version for visits in gathered for version in visits})
    return {version: max(visits.get(version, 0) for visits in gathered) for version in versions}
