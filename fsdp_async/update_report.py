"""What the optimizer steps of one batch did.

Owns the report and how it is collected, mini-batch by mini-batch. It decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_async.is_correction import Correction
from fsdp_async.metrics import Statistics


@dataclass(frozen=True)
class UpdateReport:
    """What the mini-batches of one batch did.

    Attributes:
        log_prob: [B,T] pi in the training forwards, 0 off `trained_mask`.
        trained_mask: [B,T] sampled tokens of the rows that an optimizer step was taken on.
        correction: kept mask, weights and statistics that the losses used. Where they are formed inside the loss, rows
            that were not forwarded are not kept.
        statistics: of the losses of the steps that were taken.
        outcomes: one entry for each mini-batch that had something to learn from, in order: None for a step, else why
            it was skipped.
        grad_norm: of the last step, before clipping.
        lr: learning rate of the first mini-batch.
    """

    log_prob: Tensor
    trained_mask: Tensor
    correction: Correction
    statistics: Statistics
    outcomes: tuple[str | None, ...]
    grad_norm: float
    lr: float

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken."""
        return self.outcomes.count(None)

    @property
    def skip_reasons(self) -> tuple[str, ...]:
        """Why mini-batches were skipped."""
        return tuple(reason for reason in self.outcomes if reason is not None)


@dataclass(frozen=True)
class StepOutcome:
    """What became of one mini-batch: `skipped` is None for an optimizer step, else the reason."""

    statistics: Statistics
    grad_norm: float
    skipped: str | None


class UpdateRecord:
    """Collects an `UpdateReport`.

    Args:
        response_mask: [B,T] of the batch.
        correction: of the batch, as it was prepared.
        forms_weights: the losses form weights of their own, which replace those of `correction`.
    """

    def __init__(self, response_mask: Tensor, correction: Correction, *, forms_weights: bool) -> None:
        self._mask = response_mask
        self._forms_weights = forms_weights
        self._correction = correction
        if forms_weights:
            nothing = torch.zeros_like(response_mask)
            self._correction = Correction(torch.zeros(response_mask.shape), nothing, Statistics())
        self._log_prob = torch.zeros(response_mask.shape)
        self._trained_mask = torch.zeros_like(response_mask)
        self._statistics = Statistics()
        self._outcomes: list[str | None] = []
        self._grad_norm = 0.0

    def forwarded(self, rows: Tensor, log_prob: Tensor, correction: Correction) -> None:
        """`rows` (int64) went through a training forward that gave `log_prob` [b,T] and used `correction`."""
        self._log_prob[rows] = log_prob.detach()
        if self._forms_weights:
            self._merge(rows, correction)

    def ended(self, rows: Tensor, outcome: StepOutcome) -> None:
        """The mini-batch of `rows` ended."""
        self._outcomes.append(outcome.skipped)
        if outcome.skipped is None:
            self._statistics = self._statistics.merge(outcome.statistics)
            self._grad_norm = outcome.grad_norm
            self._trained_mask[rows] = self._mask[rows]

    def report(self, lr: float, group: ProcessGroup | None) -> UpdateReport:
        """Everything so far; statistics are those of all ranks of `group` (collective)."""
        correction = self._correction
        if self._forms_weights:
            correction = replace(correction, statistics=correction.statistics.all_reduce(group))
        return UpdateReport(
            log_prob=torch.where(self._trained_mask, self._log_prob, 0.0),
            trained_mask=self._trained_mask,
            correction=correction,
            statistics=self._statistics.all_reduce(group),
            outcomes=tuple(self._outcomes),
            grad_norm=self._grad_norm,
            lr=lr,
        )

    def _merge(self, rows: Tensor, part: Correction) -> None:
        whole = self._correction
        whole.kept_mask[rows] = part.kept_mask
        weights = whole.weights
        if weights is None or part.weights is None:
            weights = None
        else:
            weights[rows] = part.weights
        self._correction = Correction(weights, whole.kept_mask, whole.statistics.merge(part.statistics))
