"""What the ratio of two policies is made of.

[Note: three factors]

    pi/mu  =  (pi_b/mu)   x  (pi_p/pi_b)   x  (pi/pi_p)
              mismatch       lag              update

mu is the engine's policy, pi_b the trainer's forward under the weights that really sampled the token, pi_p the anchor
of the clip and pi the policy being trained. Mismatch is what the engine's numerics do at equal weights, lag is the age
of the weights relative to the anchor, update is what the clip bounds. This file measures them always, whatever is
corrected: mismatch and lag over all sampled tokens (with anchor `bypass`, mismatch over the rows that the canary looked
at), update over the tokens that were trained on. A factor that is 1 only because its two policies are one tensor is
left out.
"""

from __future__ import annotations

from torch import Tensor

from fsdp_async.learner import PreparedBatch
from fsdp_async.metrics import Mean, kl_k3
from fsdp_async.types import TrainBatch
from fsdp_async.update_report import UpdateReport


def lag_and_update_factors(prepared: PreparedBatch, report: UpdateReport) -> dict[str, Mean]:
    """k3 divergences, token-weighted: `lag_kl_k3` where anchor and behaviour differ, and `update_kl_k3`."""
    factors = {"update_kl_k3": _mean_k3(report.log_prob, prepared.old_log_prob, report.trained_mask)}
    behaviour = prepared.behaviour_log_prob
    if behaviour is not None and behaviour is not prepared.old_log_prob:
        factors["lag_kl_k3"] = _mean_k3(prepared.old_log_prob, behaviour, prepared.batch.response_mask)
    return factors


def mismatch_factor(batch: TrainBatch, behaviour_log_prob: Tensor) -> dict[str, Mean]:
    """`mismatch_kl_k3` over all sampled tokens of `batch`."""
    return {"mismatch_kl_k3": _mean_k3(behaviour_log_prob, batch.rollout_log_prob, batch.response_mask)}


def _mean_k3(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Mean:
    log_ratio = (numerator - denominator).double()
    return Mean.of(kl_k3(log_ratio), mask & log_ratio.isfinite())
