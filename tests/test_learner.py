"""One rank's arithmetic on a real small model after fully_shard."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from builders import random_batch, tiny_model

from fsdp_async.advantages import AdvantageConfig
from fsdp_async.behaviour import behaviour_log_probs
from fsdp_async.correction_config import Bounds, CorrectionConfig, Rejection
from fsdp_async.errors import InputError
from fsdp_async.factors import lag_and_update_factors, mismatch_factor
from fsdp_async.learner import Learner, Objective, varied_groups
from fsdp_async.losses import LossConfig
from fsdp_async.modeling import OptimConfig, apply_fsdp2, build_optimizer, build_schedule, response_log_prob
from fsdp_async.state_cache import StateCache

pytestmark = pytest.mark.usefixtures("single_rank")

# One forward with a KV-less model on rows padded to another width: float32 sums of 64 terms in another order.
FP32 = {"rtol": 0, "atol": 2e-6}


def _learner(**objective):
    settings = {
        "anchor": "behaviour",
        "correction": CorrectionConfig(),
        "loss": LossConfig(),
        "advantages": AdvantageConfig(),
    } | objective
    model = tiny_model(seed=1)
    apply_fsdp2(model)
    config = OptimConfig(lr=1e-2)
    optimizer = build_optimizer(model, config)
    cache = StateCache(model)
    cache.watch(optimizer)
    return Learner(model, optimizer, build_schedule(optimizer, config, total_steps=100), cache, Objective(**settings))


def _batch(learner, *, gap=0.0, **options):
    """A batch of version 0 whose engine reported the live policy's log-probs less `gap`."""
    batch = random_batch(**options)
    mu = learner.live_log_probs(batch) - gap
    return dataclasses.replace(batch, rollout_log_prob=torch.where(batch.response_mask, mu, 0.0))


def _prepare(learner, batch, version=0):
    bypass = learner.objective.anchor == "bypass"
    behaviour = None if bypass else learner.behaviour_log_probs(batch)
    return learner.prepare(batch, published_version=version, behaviour_log_prob=behaviour)


def _weights(learner):
    return [p.full_tensor().clone() for p in learner.model.parameters()]


def _state(learner):
    state = learner.optimizer.state_dict()["state"]
    return [value.full_tensor().clone() if hasattr(value, "full_tensor") else torch.as_tensor(value).clone()
            for entry in state.values() for value in entry.values()]  # fmt: skip


def _same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _stepped(**objective):
    """A learner with momentum, at version 1, which is snapshotted as its live weights."""
    learner = _learner(**objective)
    learner.cache.snapshot(0, lazy=True)
    report = learner.update(_prepare(learner, _batch(learner)))
    assert report.num_steps == learner.objective.mini_batches
    learner.cache.snapshot(1, lazy=True)
    return learner


@pytest.mark.parametrize(
    "objective",
    [
        {"correction": CorrectionConfig(mismatch=Bounds(mode="mask", lower=0.5, upper=5.0))},
        {"correction": CorrectionConfig(rejections=(Rejection(upper=2.0),))},
        {
            "anchor": "bypass",
            "loss": LossConfig(kind="reinforce"),
            "correction": CorrectionConfig(combined=Bounds(mode="mask", lower=0.5, upper=5.0)),
        },
    ],
    ids=["weights", "rejected", "inside the loss"],
)
def test_a_step_of_which_every_token_is_out_of_bounds_is_skipped_and_moves_nothing(objective):
    learner = _stepped(**objective)
    before, state = _weights(learner), _state(learner)
    # rho = 10 for every token
    batch = _batch(learner, gap=2.302585, versions=(1,))
    report = learner.update(_prepare(learner, batch, version=1))
    assert report.outcomes == ("every token was rejected or has weight 0",)
    assert (report.num_steps, len(report.skip_reasons)) == (0, 1)
    assert not report.trained_mask.any()
    assert report.correction.weights is None or not report.correction.weights.any()
    assert _same(_weights(learner), before), "momentum alone would have moved the weights"
    assert _same(_state(learner), state)


def test_a_gradient_that_is_not_finite_is_skipped_and_moves_nothing(monkeypatch):
    learner = _stepped()
    prepared = _prepare(learner, _batch(learner, versions=(1,)), version=1)
    before, state = _weights(learner), _state(learner)

    def steep(model, batch):
        """The same value, with the infinite slope of a square root at 0."""
        log_prob = response_log_prob(model, batch)
        return log_prob + (log_prob - log_prob.detach()).sqrt()

    with monkeypatch.context() as patch:
        patch.setattr("fsdp_async.learner.response_log_prob", steep)
        report = learner.update(prepared)
    assert len(report.outcomes) == 1
    assert report.outcomes[0].startswith("the gradient norm is ")
    assert report.statistics.entries == {}, "a skipped step must not spoil the statistics of the others"
    assert _same(_weights(learner), before)
    assert _same(_state(learner), state)
    assert learner.update(prepared).outcomes == (None,), "the next one is a good step"


def test_a_loss_that_is_not_finite_is_skipped_though_its_gradient_is(monkeypatch):
    learner = _stepped(loss=LossConfig(kind="reinforce"))
    prepared = _prepare(learner, _batch(learner, versions=(1,)), version=1)
    before = _weights(learner)

    def hopeless(model, batch):
        """One token of probability 0: log pi = -inf, whose gradient under REINFORCE is the finite A."""
        log_prob = response_log_prob(model, batch)
        offset = torch.zeros_like(log_prob)
        offset[1, 0] = -torch.inf
        return log_prob + offset

    monkeypatch.setattr("fsdp_async.learner.response_log_prob", hopeless)
    report = learner.update(prepared)
    assert report.outcomes[0].startswith("the loss is not finite (on this rank: ")
    assert _same(_weights(learner), before)


def test_a_batch_without_a_comparison_is_neither_a_step_nor_a_fault():
    for skip in (True, False):
        learner = _stepped(skip_zero_variance=skip, mini_batches=2)
        batch = dataclasses.replace(_batch(learner, versions=(1,)), rewards=torch.ones(6))
        prepared = _prepare(learner, batch, version=1)
        before = _weights(learner)
        assert prepared.num_zero_variance_groups == 3
        assert learner.update(prepared).outcomes == ()
        assert _same(_weights(learner), before)


def test_groups_that_hold_no_comparison_are_left_out_and_counted():
    learner = _learner()
    learner.cache.snapshot(0, lazy=True)
    batch = _batch(learner)
    rewards = batch.rewards.clone()
    rewards[2:4] = 1.0
    prepared = _prepare(learner, dataclasses.replace(batch, rewards=rewards))
    assert prepared.trained_rows.tolist() == [0, 1, 4, 5]
    assert prepared.num_zero_variance_groups == 1
    report = learner.update(prepared)
    assert not report.trained_mask[2:4].any()
    assert torch.equal(report.trained_mask[[0, 1, 4, 5]], batch.response_mask[[0, 1, 4, 5]])


def test_a_group_without_comparison_only_because_of_rejection_stays_in_the_denominator():
    rewards, ids = torch.tensor([0.0, 1.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
    assert varied_groups(rewards, torch.zeros(4), ids).tolist() == [True, True, False, False]
    # A batch-wide baseline gives advantages to groups whose own rewards are equal.
    assert varied_groups(torch.ones(4), torch.tensor([0.0, 0, 1, 1]), ids).tolist() == [False, False, True, True]


@pytest.mark.parametrize("budget", [None, 9, 18, 40])
def test_micro_batches_change_nothing_but_the_order_of_sums(budget):
    learner = _learner(micro_batch_tokens=budget, mini_batches=2)
    learner.cache.snapshot(0, lazy=True)
    report = learner.update(_prepare(learner, _batch(learner, num_groups=4)))
    expected = _learner(mini_batches=2)
    expected.cache.snapshot(0, lazy=True)
    whole = expected.update(_prepare(expected, _batch(expected, num_groups=4)))
    assert report.num_steps == whole.num_steps == 2
    assert report.grad_norm == pytest.approx(whole.grad_norm, rel=1e-4)
    torch.testing.assert_close(report.log_prob, whole.log_prob, rtol=0, atol=1e-3)  # after an Adam step of 1e-2


def test_one_row_of_two_rejected_gives_the_same_step_in_bypass_and_decoupled_mode():
    """The policy is the sampler's here, so pi/mu and pi_p/mu reject the same row and weigh the others alike."""
    rule = Rejection(factor="combined", aggregate="mean", upper=2.0)
    config = CorrectionConfig(combined=Bounds(upper=1.5), rejections=(rule,))
    grads = {}
    for anchor in ("bypass", "behaviour"):
        learner = _learner(
            anchor=anchor, loss=LossConfig(kind="reinforce"), correction=config,
            advantages=AdvantageConfig(over="all", normalize_std=False), max_grad_norm=1e9,
        )  # fmt: skip
        learner.cache.snapshot(0, lazy=True)
        batch = _batch(learner, num_groups=1)
        mu = batch.rollout_log_prob.clone()
        mu[0] -= 1.0  # rho = e on row 0: rejected
        mu[1] -= 0.2
        batch = dataclasses.replace(batch, rollout_log_prob=torch.where(batch.response_mask, mu, 0.0))
        report = learner.update(_prepare(learner, batch))
        assert report.outcomes == (None,)
        assert report.correction.kept_mask.any(dim=1).tolist() == [False, True]
        grads[anchor] = (report.grad_norm, [p.grad.full_tensor().clone() for p in learner.model.parameters()])
    assert grads["bypass"][0] == pytest.approx(grads["behaviour"][0], rel=1e-5)
    for inside, outside in zip(grads["bypass"][1], grads["behaviour"][1], strict=True):
        torch.testing.assert_close(inside, outside, rtol=1e-4, atol=1e-7)  # exp(train forward - eval forward), float32


def test_what_is_recorded_inside_the_loss_is_what_the_loss_used():
    config = CorrectionConfig(combined=Bounds(upper=1.5))
    learner = _learner(anchor="bypass", loss=LossConfig(kind="reinforce"), correction=config)
    learner.cache.snapshot(0, lazy=True)
    batch = _batch(learner, gap=0.2)
    report = learner.update(_prepare(learner, batch))
    weights = (report.log_prob - batch.rollout_log_prob).exp().clamp(max=1.5) * report.trained_mask
    torch.testing.assert_close(report.correction.weights, weights, rtol=1e-5, atol=0)
    assert torch.equal(report.correction.kept_mask, report.trained_mask)
    assert report.correction.metrics()["combined/weight/mean"] == pytest.approx(1.2214, rel=1e-3)  # e^.2


@pytest.mark.parametrize("nonfinite", ["mask", "unit"])
def test_a_policy_for_missing_log_probs_acts_inside_the_loss_too(nonfinite):
    config = CorrectionConfig(combined=Bounds(upper=1.5), nonfinite=nonfinite)
    learner = _learner(anchor="bypass", loss=LossConfig(kind="reinforce"), correction=config)
    learner.cache.snapshot(0, lazy=True)
    batch = _batch(learner)
    batch.rollout_log_prob[1, 0] = torch.nan
    report = learner.update(_prepare(learner, batch))
    assert report.outcomes == (None,)
    assert report.correction.metrics()["nonfinite_tokens"] == 1
    assert bool(report.correction.kept_mask[1, 0]) == (nonfinite == "unit")


@pytest.mark.parametrize("anchor", ["behaviour", "last_sync", "current", "bypass"])
def test_each_anchor_is_the_policy_that_it_names(anchor):
    learner = _stepped(anchor=anchor)
    batch = _batch(learner, gap=0.1, versions=(0, 1))
    live = learner.live_log_probs(batch)
    prepared = _prepare(learner, batch, version=1)
    behaviour = prepared.behaviour_log_prob
    mask = batch.response_mask
    expected = {"behaviour": behaviour, "last_sync": live, "current": live, "bypass": batch.rollout_log_prob}[anchor]
    torch.testing.assert_close(prepared.old_log_prob[mask], expected[mask], **FP32)
    if anchor != "bypass":
        of_old = mask & (batch.versions == 0)
        assert (behaviour - live)[of_old].abs().max() > 1e-3, "version 0 is another policy"
        torch.testing.assert_close(behaviour[mask & ~of_old], live[mask & ~of_old], **FP32)
    report = learner.update(prepared)
    factors = lag_and_update_factors(prepared, report)
    assert ("lag_kl_k3" in factors) == (anchor in ("last_sync", "current"))
    assert factors["update_kl_k3"].count == int(report.trained_mask.sum())


def test_the_mismatch_factor_has_its_hand_value():
    learner = _learner()
    learner.cache.snapshot(0, lazy=True)
    batch = _batch(learner, gap=0.5)
    mean = mismatch_factor(batch, learner.behaviour_log_probs(batch))["mismatch_kl_k3"]
    assert mean.count == int(batch.response_mask.sum())
    assert mean.value == pytest.approx(1.6487213 - 1 - 0.5, rel=1e-4)  # e^.5 - 1 - .5


def test_log_probs_of_old_versions_leave_modes_and_random_state_alone():
    learner = _stepped()
    batch = random_batch(versions=(0, 1))
    for mode in (True, False):
        learner.model.train(mode)
        torch.manual_seed(7)
        learner.behaviour_log_probs(batch)
        learner.live_log_probs(batch)
        assert all(module.training == mode for module in learner.model.modules())
        drawn = torch.rand(3)
        torch.manual_seed(7)
        assert torch.equal(drawn, torch.rand(3))


def test_every_module_has_its_own_mode_back_after_log_probs_of_live_weights():
    learner = _stepped()
    learner.model.train()
    learner.model.model.layers[0].mlp.eval()
    before = [module.training for module in learner.model.modules()]
    learner.live_log_probs(random_batch(versions=(0, 1)))
    assert [module.training for module in learner.model.modules()] == before


RETURNS = {
    "a row each": lambda values: values[:, :1],
    "one number a row": lambda values: values.sum(dim=1),
    "a scalar": lambda values: values.sum(),
    "one position too many": lambda values: torch.cat([values, values[:, :1]], dim=1),
    "too few rows": lambda values: values[:1],
    "integers": lambda values: values.long(),
    "nothing": lambda values: None,
}


@pytest.mark.parametrize("returned", RETURNS)
def test_a_forward_that_returns_no_log_prob_for_each_token_is_refused(returned):
    learner = _stepped()
    batch = random_batch(versions=(0, 1))
    with pytest.raises(InputError, match=r"forward returned .*; need floating log-probs \[3, 5\]"):
        behaviour_log_probs(learner.cache, batch, lambda *args: RETURNS[returned](response_log_prob(*args)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_log_probs_of_old_versions_are_float32_whatever_the_forward_returns(dtype):
    learner = _stepped()
    batch = random_batch(versions=(0, 1))
    values = behaviour_log_probs(learner.cache, batch, lambda *args: response_log_prob(*args).to(dtype))
    exact = learner.behaviour_log_probs(batch)
    assert values.dtype == torch.float32
    assert torch.equal(values, exact.to(dtype).float())


def test_the_gradient_norm_is_reported_as_it_was_before_clipping():
    loose, tight = _learner(max_grad_norm=1e9), _learner(max_grad_norm=1e-3)
    reports = []
    for learner in (loose, tight):
        learner.cache.snapshot(0, lazy=True)
        reports.append(learner.update(_prepare(learner, _batch(learner))))
    assert reports[0].grad_norm == reports[1].grad_norm > 1e-3
    norm = torch.stack([p.grad.full_tensor().square().sum() for p in tight.model.parameters()]).sum().sqrt()
    assert norm.item() == pytest.approx(1e-3, rel=1e-3)


def test_the_learning_rate_of_the_first_step_is_not_zero():
    learner = _learner()
    learner.cache.snapshot(0, lazy=True)
    before = _weights(learner)
    report = learner.update(_prepare(learner, _batch(learner)))
    assert report.lr == 1e-2
    assert not _same(_weights(learner), before)
