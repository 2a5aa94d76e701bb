"""The learner: model, optimizer, schedule and state cache of one rank.

Owns the arithmetic of a training step: log-probs by version, the anchor, correction, advantages, mini-batches and
the optimizer step. It does not know where batches come from or when weights are published (`trainer.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fsdp_async.advantages import AdvantageConfig, compute_advantages
from fsdp_async.batching import micro_batches
from fsdp_async.behaviour import agreed_max, behaviour_log_probs, dummy_row, forward_rows, log_probs_at
from fsdp_async.is_correction import Correction, CorrectionConfig, compute_correction
from fsdp_async.losses import LossConfig
from fsdp_async.metrics import Statistics
from fsdp_async.mini_batch import MiniBatch, count_globally, split_rows
from fsdp_async.modeling import response_log_prob
from fsdp_async.state_cache import StateCache
from fsdp_async.types import TrainBatch

Anchor = Literal["behaviour", "last_sync", "current", "bypass"]


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

    @property
    def weights_inside_loss(self) -> bool:
        """With anchor `bypass`, REINFORCE weights by pi/mu, which is known only in the training forward."""
        return self.anchor == "bypass" and self.loss.kind == "reinforce"


@dataclass(frozen=True)
class PreparedBatch:
    """A batch with everything that is fixed before its first mini-batch. Tensors [B,T] unless said.

    `behaviour_log_prob` is None with anchor `bypass`; `advantages` is [B]; `trained_rows` holds row indices.
    """

    batch: TrainBatch
    behaviour_log_prob: Tensor | None
    old_log_prob: Tensor
    correction: Correction
    advantages: Tensor
    trained_rows: Tensor
    num_zero_variance_groups: int


@dataclass(frozen=True)
class UpdateReport:
    """What the mini-batches of one batch did.

    `log_prob` [B,T] is pi in the training forwards, 0 off `trained_mask` [B,T]: sampled tokens of the rows that an
    optimizer step was taken on.
    """

    log_prob: Tensor
    trained_mask: Tensor
    statistics: Statistics
    num_steps: int
    num_skipped: int
    skip_reasons: tuple[str, ...]
    grad_norm: float
    lr: float


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
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                return forward_rows(
                    self.model, batch, response_log_prob, micro_batch_tokens=budget, num_forwards=num_forwards
                )
        finally:
            self.model.train(was_training)

    def behaviour_log_probs(self, batch: TrainBatch) -> Tensor:
        """Log-probs [B,T] of every token under the version that sampled it."""
        return behaviour_log_probs(
            self.cache, batch, response_log_prob, micro_batch_tokens=self.objective.micro_batch_tokens
        )

    def prepare(self, batch: TrainBatch, *, published_version: int, behaviour_log_prob: Tensor | None) -> PreparedBatch:
        """Anchor, correction and advantages of a batch; `behaviour_log_prob` is required unless bypassed."""
        old_log_prob = self._anchor(batch, published_version, behaviour_log_prob)
        correction = compute_correction(
            old_log_prob,
            batch.rollout_log_prob,
            batch.response_mask,
            CorrectionConfig() if self.objective.weights_inside_loss else self.objective.correction,
            behaviour_log_prob=behaviour_log_prob,
            process_group=self.process_group,
        )
        row_kept = correction.kept_mask.any(dim=1)
        advantages = compute_advantages(
            batch.rewards,
            batch.group_ids,
            self.objective.advantages,
            row_kept=row_kept,
            process_group=self.process_group,
        )
        varied = varied_groups(advantages, batch.group_ids)
        trained = varied if self.objective.skip_zero_variance else torch.ones_like(varied)
        num_groups = len(set(batch.group_ids.tolist()))
        return PreparedBatch(
            batch=batch,
            behaviour_log_prob=behaviour_log_prob,
            old_log_prob=old_log_prob,
            correction=correction,
            advantages=advantages,
            trained_rows=trained.nonzero().squeeze(1),
            num_zero_variance_groups=num_groups - len(set(batch.group_ids[varied].tolist())),
        )

    def update(self, prepared: PreparedBatch) -> UpdateReport:
        """Train on the mini-batches of `prepared`; a mini-batch that cannot act, or is not finite, is skipped."""
        log_prob = torch.zeros_like(prepared.old_log_prob)
        trained_mask = torch.zeros_like(prepared.batch.response_mask)
        statistics, reasons, num_steps, grad_norm = Statistics(), [], 0, 0.0
        lr = float(self.optimizer.param_groups[0]["lr"])
        self.model.train()
        for rows in split_rows(prepared.batch.group_ids[prepared.trained_rows], self.objective.mini_batches):
            selected = prepared.trained_rows[rows]
            outcome = self._train_on(self._mini_batch(prepared, selected), selected, log_prob)
            statistics = statistics.merge(outcome.statistics)
            if outcome.skipped is None:
                num_steps, grad_norm = num_steps + 1, outcome.grad_norm
                trained_mask[selected] = prepared.batch.response_mask[selected]
            else:
                reasons.append(outcome.skipped)
        return UpdateReport(
            log_prob=torch.where(trained_mask, log_prob, 0.0),
            trained_mask=trained_mask,
            statistics=statistics.all_reduce(self.process_group),
            num_steps=num_steps,
            num_skipped=len(reasons),
            skip_reasons=tuple(reasons),
            grad_norm=grad_norm,
            lr=lr,
        )

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

    def _train_on(self, mini_batch: MiniBatch, rows: Tensor, log_prob_out: Tensor) -> _Outcome:
        self.optimizer.zero_grad(set_to_none=True)
        if self._cannot_act(mini_batch):
            return _Outcome(Statistics(), 0.0, "every token was rejected or has weight 0")
        chunks = micro_batches(mini_batch.batch, self.objective.micro_batch_tokens)
        statistics = Statistics()
        for index in range(agreed_max(len(chunks), self.process_group)):
            if index < len(chunks):
                part = mini_batch.rows(chunks[index])
                log_prob = response_log_prob(self.model, part.batch)
                result = part.loss(log_prob, self.objective.loss)
                result.loss.backward()
                recorded = torch.where(part.batch.response_mask, log_prob.detach(), 0.0)
                log_prob_out[rows[chunks[index]]] = recorded
                statistics = statistics.merge(result.statistics)
            else:
                (response_log_prob(self.model, dummy_row(mini_batch.batch)).sum() * 0.0).backward()
        return self._step(statistics)

    def _cannot_act(self, mini_batch: MiniBatch) -> bool:
        """True where no rank has a token with a weight: a step of zero gradient would still move with momentum."""
        alive = mini_batch.kept_mask if mini_batch.weights is None else mini_batch.weights != 0
        return agreed_max(int(alive.any()), self.process_group) == 0

    def _step(self, statistics: Statistics) -> _Outcome:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.objective.max_grad_norm)
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if not math.isfinite(grad_norm):
            self.optimizer.zero_grad(set_to_none=True)
            return _Outcome(statistics, grad_norm, f"the gradient norm is {grad_norm}")
        self.optimizer.step()
        self.schedule.step()
        return _Outcome(statistics, grad_norm, None)


@dataclass(frozen=True)
class _Outcome:
    statistics: Statistics
    grad_norm: float
    skipped: str | None


def varied_groups(advantages: Tensor, group_ids: Tensor) -> Tensor:
    """Rows [B] bool whose group has any advantage other than 0."""
    return torch.isin(group_ids, group_ids[advantages != 0])
