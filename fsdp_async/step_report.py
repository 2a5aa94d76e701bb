"""What is told and kept of one training step.

Owns the values of a step's event and the tensors of a recorded batch. Statistics come in reduced over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from fsdp_async.lead import Lead
from fsdp_async.learner import PreparedBatch
from fsdp_async.metrics import Entry, Histogram, Mean, Statistics
from fsdp_async.types import TrainBatch
from fsdp_async.update_report import UpdateReport

KEPT, WEIGHTS = "kept_fraction", "weight_histogram"


def step_values(
    version: int, batch: TrainBatch, prepared: PreparedBatch, report: UpdateReport, measured: Statistics
) -> dict[str, Any]:
    """What observers hear of a step.

    Args:
        version: published when the batch was taken.
        batch: the rows of all ranks.
        prepared: the rows of this rank.
        report: what was done with them; its statistics are of all ranks.
        measured: factors and what `usage` gave, of all ranks.
    """
    factors = {name: m for name, m in measured.entries.items() if isinstance(m, Mean) and name != KEPT}
    kept, histogram = measured.entries[KEPT], measured.entries.get(WEIGHTS)
    assert isinstance(kept, Mean)
    staleness = version - batch.versions[batch.response_mask]
    return {
        "version": version,
        "reward_mean": float(batch.rewards.mean()),
        "behaviour_versions": batch.sampled_versions,
        "staleness_total": int(staleness.sum()),
        "staleness_max": int(staleness.max()) if staleness.numel() else 0,
        "num_tokens": staleness.numel(),
        "num_zero_variance_groups": prepared.num_zero_variance_groups,
        "num_optimizer_steps": report.num_steps,
        "num_skipped_steps": len(report.skip_reasons),
        "skip_reasons": list(report.skip_reasons),
        "grad_norm": report.grad_norm,
        "lr": report.lr,
        "kept_fraction": kept.value,
        "weight_histogram": list(histogram.counts) if isinstance(histogram, Histogram) else None,
        "factors": {name: [m.total, m.count] for name, m in factors.items()},
        "correction": report.correction.metrics(),
        "update": report.statistics.to_dict(),
    }


def usage(batch: TrainBatch, report: UpdateReport) -> dict[str, Entry]:
    """The share of sampled tokens that the correction kept, and how the weights of those are spread."""
    correction = report.correction
    entries: dict[str, Entry] = {KEPT: Mean.of(correction.kept_mask.double(), batch.response_mask)}
    if correction.weights is not None:
        entries[WEIGHTS] = Histogram.of(correction.weights, correction.kept_mask)
    return entries


def all_rows(lead: Lead, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rows of all ranks, in order of ranks."""
    shares = lead.gather(dict(tensors))
    return {name: torch.cat([share[name] for share in shares]) for name in tensors}


def recorded_tensors(prepared: PreparedBatch, report: UpdateReport) -> dict[str, Tensor]:
    """Tensors from which every factor of a step can be computed again."""
    tensors = {field.name: getattr(prepared.batch, field.name) for field in fields(prepared.batch)}
    tensors |= {
        "old_log_prob": prepared.old_log_prob,
        "log_prob": report.log_prob,
        "trained_mask": report.trained_mask,
        "kept_mask": report.correction.kept_mask,
        "advantages": prepared.advantages,
    }
    if prepared.behaviour_log_prob is not None:
        tensors["behaviour_log_prob"] = prepared.behaviour_log_prob
    if report.correction.weights is not None:
        tensors["weights"] = report.correction.weights
    return tensors
