"""The learner: model, optimizer, schedule and state cache of one rank.

Owns the arithmetic of a training step: log-probs by version, the anchor, correction, advantages, mini-batches and
the optimizer step. It does not know where batches come from or when weights are published (`trainer.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsdp_async.advantages import AdvantageConfig, compute_advantages
from fsdp_async.batching import micro_batches
from fsdp_async.behaviour import agreed_max, agreed_sum, behaviour_log_probs, dummy_row, forward_rows, log_probs_at
from fsdp_async.checks import require_choice
from fsdp_async.is_correction import Correction, CorrectionConfig, compute_correction
from fsdp_async.losses import LossConfig
from fsdp_async.metrics import Statistics
from fsdp_async.mini_batch import MiniBatch, count_globally, split_rows
from fsdp_async.modeling import eval_mode, response_log_prob
from fsdp_async.state_cache import StateCache
from fsdp_async.types import TrainBatch
from fsdp_async.update_report import StepOutcome, UpdateRecord, UpdateReport

Anchor = Literal["behaviour", "last_sync", "current", "bypass"]

NOTHING_LEFT = "every token was rejected or has weight 0"


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What a step optimises; `Config` is its door and has refused what cannot act."""

    anchor: Anchor
    correction: CorrectionConfig
    loss: LossConfig
    advantages: AdvantageConfig
    mini_batches: int = 1
    micro_batch_tokens: int | None = None
    max_grad_norm: float = 1.0
    skip_zero_variance: bool = True

    def __post_init__(self) -> None:
        require_choice("anchor", self.anchor, get_args(Anchor))

    @property
    def weights_inside_loss(self) -> bool:
        """With anchor `bypass`, REINFORCE weights by pi/mu, which is known only in the training forward."""
        return self.anchor == "bypass" and self.loss.kind == "reinforce"


@dataclass(frozen=True)
class PreparedBatch:
    """A batch with everything that is fixed before its first mini-batch. Tensors [B,T] unless said.

    `behaviour_log_prob` is None with anchor `bypass`; `advantages` is [B]; `trained_rows` holds row indices;
    `num_zero_variance_groups` counts those of all ranks.
    """

    batch: TrainBatch
    behaviour_log_prob: Tensor | None
    old_log_prob: Tensor
    correction: Correction
    advantages: Tensor
    trained_rows: Tensor
    num_zero_variance_groups: int


class Learner:
    """One rank's share of training. All methods but the constructor are collective over `process_group`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        schedule: LRScheduler,
        cache: StateCache,
        objective: Objective,
        *,
        process_group: ProcessGroup | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.schedule = schedule
        self.cache = cache
        self.objective = objective
        self.process_group = process_group

    def live_log_probs(self, batch: TrainBatch) -> Tensor:
        """Log-probs [B,T] under the live weights, in eval mode, without gradient."""
        budget = self.objective.micro_batch_tokens
        num_forwards = agreed_max(len(micro_batches(batch, budget)), self.process_group)
        with eval_mode(self.model), torch.no_grad():
            return forward_rows(
                self.model, batch, response_log_prob, micro_batch_tokens=budget, num_forwards=num_forwards
            )

    def behaviour_log_probs(self, batch: TrainBatch) -> Tensor:
        """Log-probs [B,T] of every token under the version that sampled it."""
        return behaviour_log_probs(
            self.cache, batch, response_log_prob, micro_batch_tokens=self.objective.micro_batch_tokens
        )

    def prepare(self, batch: TrainBatch, *, published_version: int, behaviour_log_prob: Tensor | None) -> PreparedBatch:
        """Anchor, correction and advantages of a batch; `behaviour_log_prob` is required unless bypassed."""
        old_log_prob = self._anchor(batch, published_version, behaviour_log_prob)
        config = self.objective.correction
        correction = compute_correction(
            old_log_prob,
            batch.rollout_log_prob,
            batch.response_mask,
            CorrectionConfig(nonfinite=config.nonfinite) if self.objective.weights_inside_loss else config,
            behaviour_log_prob=behaviour_log_prob,
            process_group=self.process_group,
        )
        advantages = compute_advantages(
            batch.rewards,
            batch.group_ids,
            self.objective.advantages,
            row_kept=correction.kept_mask.any(dim=1),
            process_group=self.process_group,
        )
        varied = varied_groups(batch.rewards, advantages, batch.group_ids)
        trained = varied if self.objective.skip_zero_variance else torch.ones_like(varied)
        num_groups = len(set(batch.group_ids.tolist()))
        num_varied = len(set(batch.group_ids[varied].tolist()))
        return PreparedBatch(
            batch=batch,
            behaviour_log_prob=behaviour_log_prob,
            old_log_prob=old_log_prob,
            correction=replace(correction, statistics=correction.statistics.all_reduce(self.process_group)),
            advantages=advantages,
            trained_rows=trained.nonzero().squeeze(1),
            num_zero_variance_groups=agreed_sum(num_groups - num_varied, self.process_group),
        )

    def update(self, prepared: PreparedBatch) -> UpdateReport:
        """Train on the mini-batches of `prepared`.

        One without anything to learn from (no row, or every advantage 0) is passed over. One of which every token was
        rejected or has weight 0, or whose loss or gradient is not finite, is skipped and its reason reported: even a
        gradient of zero would move the weights by momentum.
        """
        record = UpdateRecord(
            prepared.batch.response_mask, prepared.correction, forms_weights=self.objective.weights_inside_loss
        )
        lr = float(self.optimizer.param_groups[0]["lr"])
        self.model.train()
        trained_groups = prepared.batch.group_ids[prepared.trained_rows]
        for rows in split_rows(trained_groups, self.objective.mini_batches, self.process_group):
            selected = prepared.trained_rows[rows]
            mini_batch = self._mini_batch(prepared, selected)
            has_rows, has_kept_tokens, has_advantages = (
                self._any_rank(flag)
                for flag in (len(selected) > 0, mini_batch.has_kept_tokens, mini_batch.has_advantages)
            )
            if has_rows and not has_kept_tokens:
                record.ended(selected, StepOutcome(Statistics(), 0.0, NOTHING_LEFT))
            elif has_advantages:
                record.ended(selected, self._train_on(mini_batch, selected, record))
        return record.report(lr, self.process_group)

    def _mini_batch(self, prepared: PreparedBatch, rows: Tensor) -> MiniBatch:
        correction, objective = prepared.correction, self.objective
        mask = correction.kept_mask if objective.correction.denominator == "kept" else prepared.batch.response_mask
        return MiniBatch(
            batch=prepared.batch.rows(rows),
            old_log_prob=prepared.old_log_prob[rows],
            advantages=prepared.advantages[rows],
            kept_mask=correction.kept_mask[rows],
            weights=None if correction.weights is None else correction.weights[rows],
            denominator_mask=mask[rows],
            counts=count_globally(mask[rows], self.process_group),
            inner_correction=objective.correction if objective.weights_inside_loss else None,
        )

    def _anchor(self, batch: TrainBatch, published_version: int, behaviour_log_prob: Tensor | None) -> Tensor:
        anchor = self.objective.anchor
        if anchor == "bypass":
            return batch.rollout_log_prob
        if anchor == "current":
            return self.live_log_probs(batch)
        if anchor == "last_sync":
            budget = self.objective.micro_batch_tokens
            return log_probs_at(self.cache, published_version, batch, response_log_prob, micro_batch_tokens=budget)
        assert behaviour_log_prob is not None, "anchor `behaviour` needs behaviour log-probs"
        return behaviour_log_prob

    def _train_on(self, mini_batch: MiniBatch, rows: Tensor, record: UpdateRecord) -> StepOutcome:
        self.optimizer.zero_grad(set_to_none=True)
        chunks = micro_batches(mini_batch.batch, self.objective.micro_batch_tokens)
        statistics, is_alive, loss = Statistics(), False, 0.0
        for index in range(agreed_max(len(chunks), self.process_group)):
            if index < len(chunks):
                part = mini_batch.rows(chunks[index])
                log_prob = response_log_prob(self.model, part.batch)
                correction = part.corrected(log_prob)
                result = part.loss(log_prob, correction, self.objective.loss)
                result.loss.backward()
                record.forwarded(rows[chunks[index]], log_prob, correction)
                statistics, loss = statistics.merge(result.statistics), loss + result.loss.item()
                alive = correction.kept_mask if correction.weights is None else correction.weights != 0
                is_alive = is_alive or bool(alive.any())
            else:
                (response_log_prob(self.model, dummy_row(mini_batch.batch)).sum() * 0.0).backward()
        reason = None if self._any_rank(is_alive) else NOTHING_LEFT
        if self._any_rank(not math.isfinite(loss)):
            reason = f"the loss is not finite (on this rank: {loss})"
        return self._step(statistics, reason)

    def _any_rank(self, condition: bool) -> bool:
        return agreed_max(int(condition), self.process_group) > 0

    def _step(self, statistics: Statistics, reason: str | None) -> StepOutcome:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.objective.max_grad_norm)
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if reason is None and not math.isfinite(grad_norm):
            reason = f"the gradient norm is {grad_norm}"
        if reason is not None:
            self.optimizer.zero_grad(set_to_none=True)
            return StepOutcome(statistics, grad_norm, reason)
        self.optimizer.step()
        self.schedule.step()
        return StepOutcome(statistics, grad_norm, None)


def varied_groups(rewards: Tensor, advantages: Tensor, group_ids: Tensor) -> Tensor:
    """Rows [B] bool of the groups that hold a comparison: rewards that differ, or an advantage other than 0.

    By rewards, because a group whose advantages are 0 only since its responses were rejected stays in the denominator.
    """
    first = {int(g): float(r) for g, r in zip(group_ids.flip(0), rewards.flip(0), strict=True)}
    of_group = torch.tensor([first[int(g)] for g in group_ids], dtype=torch.float64)
    return torch.isin(group_ids, group_ids[(rewards.double() != of_group) | (advantages != 0)])
