"""Identities that the losses must satisfy, in float64, on the enumerated policy of `tabular.py`."""

import math

import pytest
import torch
from tabular import EVERYTHING, SEQUENCES, STATES, T, gradient, log_probs, probability, table
from torch import Tensor

from fsdp_async.advantages import AdvantageConfig, compute_advantages
from fsdp_async.losses import LossConfig, aggregate, kl_penalty, policy_loss

REINFORCE = LossConfig(kind="reinforce", aggregate="token-sum")
UNCLIPPED = LossConfig(clip_low=1.0, clip_high=math.inf, aggregate="token-sum")
CLIPPED = LossConfig(aggregate="token-sum")
EXACT = {"rtol": 1e-12, "atol": 1e-15}  # float64 rounding of sums of 81 terms


def loss(log_prob, old, advantages, config, weights=None) -> Tensor:
    return policy_loss(log_prob, old, advantages, EVERYTHING, config, weights=weights).loss


PI, OLD, MU = table(0), table(1), table(2)
REWARDS = torch.linspace(-1, 2, len(SEQUENCES), dtype=torch.float64).roll(5)


def test_the_enumeration_is_complete():
    assert probability(log_probs(PI)).sum().item() == pytest.approx(1.0, rel=1e-14)
    assert STATES.unique().tolist() == list(range(13))


@pytest.mark.parametrize("weight", ["token", "sequence"])
def test_a_weight_outside_the_minimum_equals_the_weight_inside(weight):
    log_rho = log_probs(OLD) - log_probs(MU)
    w = (log_rho if weight == "token" else log_rho.sum(dim=1, keepdim=True).expand(-1, T)).exp()
    a = REWARDS.unsqueeze(1)

    def inside(logits: Tensor) -> Tensor:
        r = (log_probs(logits) - log_probs(OLD)).exp()
        return -torch.minimum(w * r * a, w * r.clamp(0.8, 1.2) * a).sum()

    def outside(logits: Tensor) -> Tensor:
        return loss(log_probs(logits), log_probs(OLD), REWARDS, CLIPPED, w)

    torch.testing.assert_close(outside(PI), inside(PI), **EXACT)
    torch.testing.assert_close(gradient(outside, PI), gradient(inside, PI), **EXACT)


def test_ppo_without_bounds_has_the_gradient_of_ratio_weighted_reinforce():
    ratio = (log_probs(PI) - log_probs(OLD)).exp()
    ppo = gradient(lambda x: loss(log_probs(x), log_probs(OLD), REWARDS, UNCLIPPED), PI)
    weighted = gradient(lambda x: loss(log_probs(x), log_probs(OLD), REWARDS, REINFORCE, ratio), PI)
    torch.testing.assert_close(ppo, weighted, **EXACT)
    clipped = gradient(lambda x: loss(log_probs(x), log_probs(OLD), REWARDS, CLIPPED), PI)
    assert not torch.allclose(ppo, clipped)


def test_without_bounds_the_anchor_cancels_out_of_decoupled_ppo():
    # pi_p / mu times pi / pi_p is pi / mu, whatever pi_p is
    def decoupled(anchor: Tensor) -> Tensor:
        w = (log_probs(anchor) - log_probs(MU)).exp()
        return gradient(lambda x: loss(log_probs(x), log_probs(anchor), REWARDS, UNCLIPPED, w), PI)

    straight = gradient(lambda x: loss(log_probs(x), log_probs(MU), REWARDS, UNCLIPPED), PI)
    for anchor in (OLD, MU, PI):
        torch.testing.assert_close(decoupled(anchor), straight, **EXACT)


def test_decoupled_ppo_is_ppo_where_anchor_and_rollout_agree():
    weights = (log_probs(OLD) - log_probs(OLD.clone())).exp()
    decoupled = gradient(lambda x: loss(log_probs(x), log_probs(OLD), REWARDS, CLIPPED, weights), PI)
    plain = gradient(lambda x: loss(log_probs(x), log_probs(OLD), REWARDS, CLIPPED), PI)
    assert torch.equal(decoupled, plain)


def test_sequence_weights_make_the_expected_gradient_that_of_the_return():
    # E_mu[W sum_t A log pi] with W = pi(y) / mu(y) has the gradient of E_pi[A]
    weights = (probability(log_probs(PI)) / probability(log_probs(MU))).unsqueeze(1).expand(-1, T)
    expectation = probability(log_probs(MU)).unsqueeze(1) * weights
    estimated = gradient(lambda x: loss(log_probs(x), log_probs(MU), REWARDS, REINFORCE, expectation), PI)
    exact = gradient(lambda x: -(log_probs(x).sum(dim=1).exp() * REWARDS).sum(), PI)
    torch.testing.assert_close(estimated, exact, **EXACT)


@pytest.mark.parametrize("config", [CLIPPED, REINFORCE, LossConfig(dual_clip=3.0)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_step_moves_the_sampled_sequence_the_way_its_advantage_points(config, sign):
    one = torch.zeros(len(SEQUENCES), T, dtype=torch.bool)
    one[11] = True

    def of_one(logits: Tensor) -> Tensor:
        advantages = torch.full((len(SEQUENCES),), sign, dtype=torch.float64)
        return policy_loss(log_probs(logits), log_probs(PI), advantages, one, config).loss

    stepped = PI - 0.1 * gradient(of_one, PI)
    change = (log_probs(stepped) - log_probs(PI))[11] * sign
    assert (change > 0).all()


def kl_gradients() -> dict[str, Tensor]:
    """Expected gradient, under y ~ pi, of each per-token estimator summed over tokens."""
    p = probability(log_probs(PI)).unsqueeze(1)
    return {
        estimator: gradient(lambda x, e=estimator: (p * kl_penalty(log_probs(x), log_probs(OLD), e)).sum(), PI)
        for estimator in ("k1", "k2", "k3")
    }


def test_kl_gradients_are_zero_reverse_and_forward():
    # How often a prefix is visited is a constant of each per-token term.
    visits = torch.zeros(13, dtype=torch.float64)
    visits.index_add_(0, STATES.flatten(), probability(log_probs(PI)).repeat_interleave(T))
    ref = OLD.log_softmax(-1)

    def reverse(logits: Tensor) -> Tensor:
        pi = logits.log_softmax(-1)
        return (visits * (pi.exp() * (pi - ref)).sum(-1)).sum()

    def forward(logits: Tensor) -> Tensor:
        return (visits * (ref.exp() * (ref - logits.log_softmax(-1))).sum(-1)).sum()

    grads = kl_gradients()
    torch.testing.assert_close(grads["k1"], torch.zeros_like(PI), rtol=0, atol=1e-14)
    torch.testing.assert_close(grads["k2"], gradient(reverse, PI), **EXACT)
    torch.testing.assert_close(grads["k3"], gradient(forward, PI), **EXACT)
    assert not torch.allclose(grads["k2"], grads["k3"])


def test_kl_values_of_k1_and_k3_are_unbiased_and_of_k2_is_not():
    p = probability(log_probs(PI))
    exact = (p * (log_probs(PI) - log_probs(OLD)).sum(dim=1)).sum().item()
    values = {
        e: (p.unsqueeze(1) * kl_penalty(log_probs(PI), log_probs(OLD), e)).sum().item() for e in ("k1", "k2", "k3")
    }
    assert values["k1"] == pytest.approx(exact, rel=1e-12)
    assert values["k3"] == pytest.approx(exact, rel=1e-12)
    assert abs(values["k2"] - exact) > 0.05 * exact


def test_kl_under_another_sampler_needs_the_weights():
    # The term is sampled from mu as well; with sequence weights its expectation is that under pi.
    weights = (probability(log_probs(PI)) / probability(log_probs(MU))).unsqueeze(1)
    q = probability(log_probs(MU)).unsqueeze(1)

    def term(logits: Tensor) -> Tensor:
        values = kl_penalty(log_probs(logits), log_probs(OLD), "k2") * weights * q
        return aggregate(values, EVERYTHING, "token-sum")

    torch.testing.assert_close(gradient(term, PI), kl_gradients()["k2"], **EXACT)


@pytest.mark.parametrize("kind", ["group_relative", "leave_one_out", "reinforce_pp"])
def test_equal_rewards_move_nothing(kind):
    advantages = compute_advantages(torch.full((27,), 0.7), torch.arange(27) // 9, AdvantageConfig(kind=kind))
    for config in (CLIPPED, REINFORCE):
        grad = gradient(lambda x, c=config: loss(log_probs(x), log_probs(OLD), advantages, c), PI)
        assert (grad == 0).all()


def test_a_group_reduced_to_one_kept_response_moves_nothing():
    # rewards 100 and 1, the first rejected: no baseline is left for the second
    rewards, groups = torch.tensor([100.0, 1.0]), torch.zeros(2, dtype=torch.int64)
    mask = torch.tensor([[False] * T, [True] * T])
    advantages = compute_advantages(rewards, groups, AdvantageConfig(), row_kept=mask.any(dim=1))

    def two_rows(logits: Tensor) -> Tensor:
        return policy_loss(log_probs(logits)[:2], log_probs(OLD)[:2], advantages, mask, CLIPPED).loss

    assert (gradient(two_rows, PI) == 0).all()


def test_leave_one_out_is_unbiased_and_lowers_the_variance():
    # Two independent responses: all 27 x 27 pairs, each row's score times its advantage.
    p = probability(log_probs(PI))
    score = torch.stack([gradient(lambda x, i=i: log_probs(x)[i].sum(), PI).flatten() for i in range(27)])
    exact = gradient(lambda x: (log_probs(x).sum(dim=1).exp() * REWARDS).sum(), PI).flatten()
    first, second = torch.meshgrid(torch.arange(27), torch.arange(27), indexing="ij")
    rewards = torch.stack([REWARDS[first], REWARDS[second]], dim=-1).flatten() + 5
    groups = torch.arange(27 * 27).repeat_interleave(2)
    advantages = compute_advantages(rewards, groups, AdvantageConfig(kind="leave_one_out")).double().reshape(27, 27, 2)
    estimate = (advantages[..., :1] * score[first] + advantages[..., 1:] * score[second]) / 2
    plain = (
        (REWARDS[first] + 5).unsqueeze(-1) * score[first] + (REWARDS[second] + 5).unsqueeze(-1) * score[second]
    ) / 2
    pairs = (p[first] * p[second]).unsqueeze(-1)
    mean = (pairs * estimate).sum(dim=(0, 1))
    torch.testing.assert_close(mean, exact, rtol=0, atol=1e-6)  # advantages are rounded to float32
    variance = (pairs * (estimate - mean).square()).sum()
    assert variance < 0.5 * (pairs * (plain - mean).square()).sum()
