"""Identities that weights must satisfy, in float64, on the enumerated policy of `tabular.py`."""

from __future__ import annotations

import math

import pytest
import torch
from tabular import EVERYTHING, SEQUENCES, gradient, log_probs, probability, table

from fsdp_async.correction_config import Bounds, CorrectionConfig
from fsdp_async.is_correction import compute_correction
from fsdp_async.losses import LossConfig, policy_loss
from fsdp_async.metrics import kl_k3

PI, OLD, BEHAVIOUR, MU = (log_probs(table(seed)) for seed in range(4))
P_MU = probability(MU)
REWARDS = torch.linspace(-1, 2, len(SEQUENCES), dtype=torch.float64).roll(5)
REINFORCE = LossConfig(kind="reinforce", aggregate="token-sum")
EXACT = {"rtol": 1e-12, "atol": 1e-14}  # float64 rounding of sums of 81 terms


def _weights(numerator, denominator, behaviour=None, **config):
    return compute_correction(
        numerator, denominator, EVERYTHING, CorrectionConfig(**config), behaviour_log_prob=behaviour
    ).weights


def _surrogate_gradient(weights):
    """Expected gradient of the weighted loss over sequences that mu samples."""
    advantages = REWARDS * P_MU

    def objective(logits):
        return -policy_loss(log_probs(logits), OLD, advantages, EVERYTHING, REINFORCE, weights=weights).loss

    return gradient(objective, table(0))


def _policy_gradient():
    return gradient(lambda logits: (log_probs(logits).sum(dim=1).exp() * REWARDS).sum(), table(0))


def test_the_sequence_weight_has_expectation_one():
    weights = _weights(PI, MU, combined=Bounds(level="sequence"))
    torch.testing.assert_close((P_MU * weights[:, 0]).sum(), torch.tensor(1.0).double(), **EXACT)


def test_sequence_weights_give_the_on_policy_gradient_and_token_weights_do_not():
    sequence = _surrogate_gradient(_weights(PI, MU, combined=Bounds(level="sequence")))
    token = _surrogate_gradient(_weights(PI, MU, combined=Bounds()))
    unweighted = _surrogate_gradient(None)
    exact = _policy_gradient()
    torch.testing.assert_close(sequence, exact, **EXACT)
    assert (token - exact).norm() > 0.05 * exact.norm()
    assert (unweighted - exact).norm() > 0.05 * exact.norm()


def test_token_weights_give_the_gradient_of_the_surrogate_that_keeps_the_states_of_mu():
    token = _surrogate_gradient(_weights(PI, MU, combined=Bounds()))

    def surrogate(logits):
        return (P_MU[:, None] * (log_probs(logits) - MU).exp() * REWARDS[:, None]).sum()

    torch.testing.assert_close(token, gradient(surrogate, table(0)), **EXACT)


def test_mismatch_times_lag_is_combined_and_times_update_the_whole_ratio():
    split = _weights(OLD, MU, BEHAVIOUR, mismatch=Bounds(), lag=Bounds())
    torch.testing.assert_close(split, _weights(OLD, MU, combined=Bounds()), rtol=1e-14, atol=0)
    update = (PI - OLD).exp()
    torch.testing.assert_close(split * update, (PI - MU).exp(), rtol=1e-14, atol=0)


def test_dropping_a_factor_biases_the_gradient():
    whole = _surrogate_gradient(
        _weights(PI, MU, BEHAVIOUR, mismatch=Bounds(level="sequence"), lag=Bounds(level="sequence"))
    )
    only = _surrogate_gradient(_weights(PI, MU, BEHAVIOUR, mismatch=Bounds(level="sequence")))
    torch.testing.assert_close(whole, _policy_gradient(), **EXACT)
    assert (only - whole).norm() > 0.05 * whole.norm()


def test_the_bias_of_truncation_vanishes_as_its_bound_grows():
    exact = _policy_gradient()
    bias = [
        (_surrogate_gradient(_weights(PI, MU, combined=Bounds(level="sequence", upper=upper))) - exact).norm().item()
        for upper in (1.0, 4.0, 16.0, 64.0, 1e6)
    ]
    assert bias == sorted(bias, reverse=True)
    assert bias[0] > 1e-2
    assert bias[-1] < 1e-12


def test_k1_and_k3_are_unbiased_and_k2_is_not():
    log_ratio = PI - MU
    # Both KL(mu || pi): the expectation under mu of -L.
    divergence = (P_MU * -log_ratio.sum(dim=1)).sum()
    k3 = (P_MU[:, None] * kl_k3(log_ratio)).sum()
    k2 = (P_MU[:, None] * log_ratio.square() / 2).sum()
    torch.testing.assert_close(k3, divergence, **EXACT)
    assert abs(k2 - divergence) > 0.05 * divergence


def test_the_product_of_ratios_telescopes_into_its_tokens():
    rho = (PI - MU).exp()
    behind = [rho[:, t + 1 :].prod(dim=1) for t in range(rho.shape[1])]
    summed = sum((rho[:, t] - 1) * behind[t] for t in range(rho.shape[1]))
    sequence = _weights(PI, MU, combined=Bounds(level="sequence"))[:, 0]
    torch.testing.assert_close(summed, sequence - 1, rtol=1e-12, atol=1e-14)


def test_the_effective_share_of_many_samples_is_that_of_the_chi_square_divergence():
    """Each sequence stands as often as mu samples it: ESS/N = 1 / (1 + chi2) up to the rounding of counts."""
    counts = (P_MU * 20_000).round().long()
    rows = torch.arange(len(SEQUENCES)).repeat_interleave(counts)
    mask = EVERYTHING[rows]
    config = CorrectionConfig(combined=Bounds(level="sequence"))
    metrics = compute_correction(PI[rows], MU[rows], mask, config).metrics()
    chi2 = float((P_MU * (PI - MU).sum(dim=1).mul(2).exp()).sum() - 1)
    # Counts are rounded to one in some hundred for the rarest sequences.
    assert metrics["combined/chi2_seq"] == pytest.approx(chi2, rel=0.02)
    assert metrics["combined/ess_raw"] == pytest.approx(1 / (1 + chi2), rel=0.02)


def test_levels_agree_on_responses_of_one_token():
    mask = torch.ones(len(SEQUENCES), 1, dtype=torch.bool)
    token, sequence, geometric = (
        compute_correction(
            PI[:, :1], MU[:, :1], mask, CorrectionConfig(combined=Bounds(level=level, upper=1.5))
        ).weights
        for level in ("token", "sequence", "geometric")
    )
    assert torch.equal(token, sequence)
    assert torch.equal(token, geometric)


def test_an_infinite_upper_bound_is_none():
    lower = _weights(PI, MU, combined=Bounds(lower=0.9))
    assert (lower >= 0.9).all()
    assert torch.equal(_weights(PI, MU, combined=Bounds(lower=0.9, upper=math.inf)), lower)


def test_with_the_engine_as_anchor_decoupled_is_plain_ppo():
    weights = _weights(MU, MU, combined=Bounds(upper=2.0))
    assert torch.equal(weights, torch.ones_like(weights))


def test_truncated_top_p_sampling_shows_as_the_kept_mass():
    """An engine that drops the rarest token and renormalises: every ratio is the mass it kept, whatever the policy."""
    full = table(0).log_softmax(dim=-1)
    keep = full > full.min(dim=-1, keepdim=True).values
    kept_mass = torch.where(keep, full.exp(), 0.0).sum(dim=-1)
    engine = torch.where(keep, full - kept_mass.log()[:, None], -torch.inf)
    states, tokens = keep.nonzero(as_tuple=True)
    mask = torch.ones(len(states), 1, dtype=torch.bool)
    weights = compute_correction(
        full[states, tokens][:, None], engine[states, tokens][:, None], mask, CorrectionConfig(combined=Bounds())
    ).weights
    torch.testing.assert_close(weights[:, 0], kept_mass[states], **EXACT)
