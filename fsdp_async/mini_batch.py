"""Mini-batches: which rows one optimizer step sees, and its loss over micro-batches.

Owns the split into mini-batches and the counts that make the loss independent of micro-batches and ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_async.is_correction import Correction, CorrectionConfig, compute_correction
from fsdp_async.losses import GlobalCounts, LossConfig, PolicyLoss, policy_loss
from fsdp_async.metrics import Statistics
from fsdp_async.types import TrainBatch


@dataclass(frozen=True)
class MiniBatch:
    """Rows of one optimizer step, or of one of its micro-batches. Tensors [b,T], `advantages` [b].

    `inner_correction` is set where weights depend on the policy being trained (anchor `bypass` with REINFORCE);
    `weights` is None then. `counts` belong to the whole step on all ranks, whatever rows are selected.
    """

    batch: TrainBatch
    old_log_prob: Tensor
    advantages: Tensor
    kept_mask: Tensor
    weights: Tensor | None
    denominator_mask: Tensor
    counts: GlobalCounts
    inner_correction: CorrectionConfig | None = None

    def rows(self, index: Tensor) -> MiniBatch:
        """The same step restricted to the rows in `index` (int64)."""
        return MiniBatch(
            batch=self.batch.rows(index),
            old_log_prob=self.old_log_prob[index],
            advantages=self.advantages[index],
            kept_mask=self.kept_mask[index],
            weights=None if self.weights is None else self.weights[index],
            denominator_mask=self.denominator_mask[index],
            counts=self.counts,
            inner_correction=self.inner_correction,
        )

    @property
    def has_advantages(self) -> bool:
        """False where no row could move the policy, whatever its weight."""
        return bool((self.advantages != 0).any())

    @property
    def has_kept_tokens(self) -> bool:
        """False where everything was rejected, or there is no row."""
        return bool(self.kept_mask.any())

    def corrected(self, log_prob: Tensor) -> Correction:
        """Weights and kept mask of these rows; where they are formed inside the loss, from `log_prob` [b,T]."""
        if self.inner_correction is None:
            return Correction(self.weights, self.kept_mask, Statistics())
        return compute_correction(
            log_prob.detach(), self.batch.rollout_log_prob, self.batch.response_mask, self.inner_correction
        )

    def loss(self, log_prob: Tensor, correction: Correction, config: LossConfig) -> PolicyLoss:
        """Policy loss of these rows; `log_prob` [b,T] carries the gradient, `correction` is from `corrected`."""
        return policy_loss(
            log_prob,
            self.old_log_prob,
            self.advantages,
            correction.kept_mask,
            config,
            weights=correction.weights,
            denominator_mask=self.denominator_mask,
            global_counts=self.counts,
        )


def split_rows(group_ids: Tensor, num_mini_batches: int, group: ProcessGroup | None = None) -> list[Tensor]:
    """Deal whole groups, in order and as evenly as possible, into `num_mini_batches` sets of row indices.

    The groups of all ranks of `group` are dealt together (collective), so that a mini-batch holds the same groups
    however many ranks share them. Sets may be empty: every rank takes as many steps, however many groups it holds.
    """
    mine = set(group_ids.tolist())
    held = [mine]
    if group is not None:
        held = [set()] * dist.get_world_size(group)
        dist.all_gather_object(held, mine, group=group)
    groups = torch.tensor(sorted(set().union(*held)), dtype=group_ids.dtype)
    return [torch.isin(group_ids, share).nonzero().squeeze(1) for share in groups.tensor_split(num_mini_batches)]


def count_globally(mask: Tensor, group: ProcessGroup | None) -> GlobalCounts:
    """Tokens and non-empty rows under `mask` [b,T], summed over the ranks of `group`."""
    counts = torch.stack([mask.sum(), mask.any(dim=1).sum()])
    size = 1
    if group is not None:
        dist.all_reduce(counts, group=group)
        size = dist.get_world_size(group)
    return GlobalCounts(num_tokens=int(counts[0]), num_rows=int(counts[1]), data_parallel_size=size)
