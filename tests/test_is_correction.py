from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_async.correction_config import Bounds, CorrectionConfig, Rejection
from fsdp_async.correction_statistics import FactorView
from fsdp_async.errors import ConfigError, InputError, NonFiniteError
from fsdp_async.is_correction import compute_correction
from fsdp_async.losses import LossConfig, policy_loss
from fsdp_async.metrics import merge_all

INF, NAN = math.inf, math.nan
# Two roundings of float32 between exp, log and the product of three terms.
CLOSE = {"rtol": 1e-6, "atol": 1e-7}


def _tensor(rows):
    return torch.as_tensor(rows, dtype=torch.float32)


def _correct(rho, config, *, mask=None, base=None, **inputs):
    """Correction of `combined` ratios `rho` [B,T]; the anchor is `base` (-1, or what keeps it a log-prob) plus logs."""
    ratios = _tensor(rho)
    base = min(-1.0, -ratios.log().max().item()) if base is None else base
    mu = torch.full_like(ratios, base)
    mask = torch.ones_like(ratios, dtype=torch.bool) if mask is None else torch.tensor(mask).bool()
    return compute_correction(mu + ratios.log(), mu, mask, config, **inputs)


def _combined(**bounds):
    return CorrectionConfig(combined=Bounds(**bounds))


def _kept(rho, mask=None, base=None, **rule):
    config = CorrectionConfig(rejections=(Rejection(factor="combined", **rule),))
    return _correct(rho, config, mask=mask, base=base).kept_mask.int().tolist()


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({"upper": 2.0}, [[0.5, 2.0, 2.0], [0.1, 1.0, 0.0]]),
        ({"lower": 0.4, "upper": 2.0}, [[0.5, 2.0, 2.0], [0.4, 1.0, 0.0]]),
        ({"mode": "mask", "lower": 0.4, "upper": 3.0}, [[0.5, 0.0, 2.0], [0.0, 1.0, 0.0]]),
        ({}, [[0.5, 4.0, 2.0], [0.1, 1.0, 0.0]]),
        # W = .5 * 4 * 2 = 4 and .1 * 1 = .1
        ({"level": "sequence"}, [[4.0, 4.0, 4.0], [0.1, 0.1, 0.0]]),
        ({"level": "sequence", "upper": 3.0}, [[3.0, 3.0, 3.0], [0.1, 0.1, 0.0]]),
        ({"level": "sequence", "mode": "mask", "upper": 3.0}, [[0.0, 0.0, 0.0], [0.1, 0.1, 0.0]]),
        # g = 4^(1/3) and .1^(1/2)
        ({"level": "geometric"}, [[4 ** (1 / 3)] * 3, [0.1**0.5] * 2 + [0.0]]),
        ({"level": "geometric", "lower": 0.5, "upper": 1.5}, [[1.5] * 3, [0.5, 0.5, 0.0]]),
        ({"level": "geometric", "mode": "mask", "lower": 0.5}, [[4 ** (1 / 3)] * 3, [0.0, 0.0, 0.0]]),
    ],
)
def test_a_weight_is_formed_on_its_level_and_bounded_by_its_mode(bounds, expected):
    result = _correct([[0.5, 4.0, 2.0], [0.1, 1.0, 7.0]], _combined(**bounds), mask=[[1, 1, 1], [1, 1, 0]])
    torch.testing.assert_close(result.weights, _tensor(expected), **CLOSE)
    assert result.kept_mask.int().tolist() == [[1, 1, 1], [1, 1, 0]]


def test_split_weights_bound_each_factor_and_multiply():
    mu = torch.zeros(1, 3) - 3
    behaviour = mu + _tensor([[4.0, 0.5, 1.0]]).log()
    old = behaviour + _tensor([[0.25, 4.0, 0.1]]).log()
    config = CorrectionConfig(mismatch=Bounds(upper=2.0), lag=Bounds(mode="mask", lower=0.2, upper=5.0))
    result = compute_correction(old, mu, torch.ones(1, 3, dtype=torch.bool), config, behaviour_log_prob=behaviour)
    # min(4,2) * .25; .5 * 4; 1 * (.1 is below .2)
    torch.testing.assert_close(result.weights, _tensor([[0.5, 2.0, 0.0]]), **CLOSE)
    whole = compute_correction(old, mu, torch.ones(1, 3, dtype=torch.bool), _combined(upper=2.0))
    torch.testing.assert_close(whole.weights, _tensor([[1.0, 2.0, 0.1]]), **CLOSE)


@pytest.mark.parametrize(
    ("rule", "rho", "expected"),
    [
        ({"lower": 0.5, "upper": 5.0}, [[0.3, 1.0, 3.0]], [[0, 1, 1]]),
        ({"aggregate": "sum", "lower": 0.5, "upper": 2.0}, [[0.1, 10.0, 1.5], [2.0, 2.0, 1.0]], [[1] * 3, [0] * 3]),
        ({"aggregate": "mean", "upper": 1.1}, [[2.0, 0.5, 1.0], [1.2, 1.2, 1.2]], [[1, 1, 1], [0, 0, 0]]),
        ({"aggregate": "max", "upper": 2.5}, [[2.0, 0.1, 1.0], [3.0, 1.0, 1.0]], [[1, 1, 1], [0, 0, 0]]),
        ({"aggregate": "min", "lower": 1e-4}, [[2.0, 1e-5, 1.0], [3.0, 1e-3, 1.0]], [[0, 0, 0], [1, 1, 1]]),
        # L^2/2: .24 for 2, .003 for 1.08
        ({"statistic": "k2", "upper": 0.1}, [[2.0, 1.08, 0.5]], [[0, 1, 0]]),
        (
            {"statistic": "k2", "aggregate": "mean", "upper": 0.1},
            [[2.0, 1.0, 1.0], [2.0, 2.0, 1.0]],
            [[1] * 3, [0] * 3],
        ),
        ({"statistic": "k2", "aggregate": "sum", "upper": 0.3}, [[2.0, 1.0, 1.0], [2.0, 2.0, 1.0]], [[1] * 3, [0] * 3]),
        # e^L - 1 - L: .307 for 2, .193 for .5
        ({"statistic": "k3", "upper": 0.25}, [[2.0, 0.5, 1.0]], [[0, 1, 1]]),
        ({"statistic": "k3", "aggregate": "max", "upper": 0.25}, [[2.0, 0.5, 1.0], [0.5] * 3], [[0] * 3, [1] * 3]),
        # |p - q| with q = e^-1 = .368: .368, .184, 0
        ({"statistic": "tv", "upper": 0.2}, [[2.0, 0.5, 1.0]], [[0, 1, 1]]),
        # p = .736, q = .368: .736 log 2 - .264 log(.632/.264) = .280
        # p = .184, q = .368: -.184 log 2 + .816 log(.816/.632) = .081
        ({"statistic": "binary_kl", "upper": 0.27}, [[2.0, 0.5, 1.0]], [[0, 1, 1]]),
        ({"statistic": "binary_kl", "upper": 0.08}, [[2.0, 0.5, 1.0]], [[0, 0, 1]]),
        ({"statistic": "binary_kl", "upper": 0.29}, [[2.0, 0.5, 1.0]], [[1, 1, 1]]),
        ({"statistic": "binary_kl", "upper": 0.09}, [[2.0, 0.5, 1.0]], [[0, 1, 1]]),
    ],
)
def test_a_rule_keeps_what_lies_within_its_bounds(rule, rho, expected):
    assert _kept(rho, **rule) == expected


def test_rules_are_joined_and_each_judges_the_mask_as_it_was_given():
    by_token = Rejection(factor="combined", upper=2.5)
    by_row = Rejection(factor="combined", aggregate="max", upper=3.5)
    config = CorrectionConfig(combined=Bounds(), rejections=(by_token, by_row))
    result = _correct([[1.0, 3.0, 2.0], [1.0, 4.0, 2.0]], config)
    # Were `max` judged on what the first rule left, the second row would be kept in part.
    assert result.kept_mask.int().tolist() == [[1, 0, 1], [0, 0, 0]]
    torch.testing.assert_close(result.weights, _tensor([[1, 0, 2], [0, 0, 0]]), **CLOSE)
    metrics = result.metrics()
    assert metrics["rejected/combined_token_ratio"] == pytest.approx(2 / 6)
    assert metrics["rejected/combined_max_ratio"] == pytest.approx(3 / 6)
    assert metrics["rejected_rows/combined_max_ratio"] == pytest.approx(1 / 2)


def test_sign_cancelling_mismatch_passes_the_geometric_mean_but_not_k3():
    rho = [[math.e, 1 / math.e] * 4]
    assert _kept(rho, aggregate="mean", lower=0.999, upper=1.001) == [[1] * 8]
    assert _kept(rho, aggregate="mean", statistic="k3", upper=0.5) == [[0] * 8]
    metrics = _correct(rho, CorrectionConfig()).metrics()
    assert metrics["combined/kl_k3"] == pytest.approx((math.e - 2 + 1 / math.e) / 2, rel=1e-6)
    assert metrics["combined/kl_k3"] == pytest.approx(0.543, abs=5e-4)


def test_batch_normalisation_gives_mean_one_over_tokens_or_rows():
    mask = [[1, 1, 1], [1, 0, 0], [0, 0, 0]]
    rho = [[1.0, 2.0, 3.0], [6.0, 9.0, 9.0], [9.0, 9.0, 9.0]]
    by_token = _correct(rho, CorrectionConfig(combined=Bounds(), batch_normalize=True), mask=mask)
    # (1 + 2 + 3 + 6) / 4 = 3
    torch.testing.assert_close(by_token.weights, _tensor([[1, 2, 3], [6, 0, 0], [0, 0, 0]]) / 3, **CLOSE)
    by_row = _correct(rho, CorrectionConfig(combined=Bounds(level="sequence"), batch_normalize=True), mask=mask)
    # W = 6 and 6; the empty row counts nothing.
    torch.testing.assert_close(by_row.weights, _tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]]), **CLOSE)


def test_batch_normalisation_leaves_equal_weights_at_one_and_the_statistics_as_they_were():
    config = CorrectionConfig(combined=Bounds(upper=2.0), batch_normalize=True)
    tiny = _correct([[math.exp(-20.0)] * 4], config)
    torch.testing.assert_close(tiny.weights, torch.ones(1, 4), **CLOSE)
    # Normalised, a batch whose every ratio is e^-20 looks like an ordinary one; the report does not.
    assert tiny.metrics()["combined/weight/mean"] == pytest.approx(math.exp(-20.0), rel=1e-5)
    assert tiny.metrics()["combined/kl_k1"] == pytest.approx(20.0, rel=1e-6)


@pytest.mark.parametrize("config", [_combined(upper=2.0), CorrectionConfig(combined=Bounds(), batch_normalize=True)])
def test_a_batch_without_a_single_valid_token_gives_zeros_and_no_numbers(config):
    result = _correct([[1.0, 2.0]], config, mask=[[0, 0]])
    assert result.weights.tolist() == [[0.0, 0.0]]
    assert not result.kept_mask.any()
    assert result.metrics() == {"nonfinite_tokens": 0.0}


def test_when_every_weight_is_masked_the_applied_sample_size_is_zero_and_the_raw_one_whole():
    result = _correct([[10.0, 10.0, 10.0]], _combined(mode="mask", lower=0.5, upper=5.0))
    assert result.weights.tolist() == [[0.0, 0.0, 0.0]]
    assert result.metrics()["combined/ess_applied"] == 0.0
    assert result.metrics()["combined/ess_raw"] == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize(
    ("rho", "expected"),
    [
        ([[1e-6] * 4], 1.0),
        # (1 + 3)^2 / (2 * (1 + 9))
        ([[1.0, 3.0]], 0.8),
        # One weight outweighs all others: 1/N, though clamped logs would make them equal.
        ([[1e30, 1e20, 1e20, 1e20]], 0.25),
    ],
)
def test_the_effective_sample_size_comes_from_raw_weights_and_stays_in_its_range(rho, expected):
    value = _correct(rho, _combined(upper=2.0), base=-80.0).metrics()["combined/ess_raw"]
    assert 0 < value <= 1
    assert value == pytest.approx(expected, rel=1e-5)


def test_fractions_beyond_bounds_count_raw_weights():
    metrics = _correct([[10.0, 1.0, 0.1, 1.0]], _combined(lower=0.5, upper=2.0)).metrics()
    assert metrics["combined/fraction_above"] == 0.25
    assert metrics["combined/fraction_below"] == 0.25
    assert metrics["combined/weight/max"] == pytest.approx(10.0, rel=1e-6)
    assert metrics["combined/weight/mean"] == pytest.approx(12.1 / 4, rel=1e-6)


def test_clamping_is_counted_and_does_not_reach_the_report():
    metrics = _correct([[math.exp(25.0), 1.0]], _combined(), base=-30.0).metrics()
    assert metrics["combined/fraction_clamped"] == 0.5
    assert metrics["combined/weight/max"] == pytest.approx(math.exp(25.0), rel=1e-5)


def test_divergences_have_their_hand_values():
    metrics = _correct([[2.0, 0.5]], CorrectionConfig()).metrics()
    assert metrics["combined/kl_k1"] == pytest.approx(0.0, abs=1e-7)
    assert metrics["combined/kl_k3"] == pytest.approx((1.0 - math.log(2) - 0.5 + math.log(2)) / 2, rel=1e-6)
    assert metrics["combined/chi2_token"] == pytest.approx((4 + 0.25) / 2 - 1, rel=1e-6)
    assert metrics["combined/chi2_seq"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["combined/exp_abs_log_ratio"] == pytest.approx(2.0, rel=1e-6)
    assert metrics["combined/abs_prob_difference"] == pytest.approx(1.5 * math.exp(-1) / 2, rel=1e-6)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["old", "rollout", "behaviour"])
def test_a_log_prob_that_is_not_finite_follows_the_policy_and_is_counted(bad, where):
    inputs = {"old": torch.zeros(2, 2) - 1, "rollout": torch.zeros(2, 2) - 1, "behaviour": torch.zeros(2, 2) - 1}
    inputs["old"][:, 1] += math.log(1.5)
    inputs[where][0, 0] = bad
    mask = torch.ones(2, 2, dtype=torch.bool)

    def correct(nonfinite):
        return compute_correction(
            inputs["old"],
            inputs["rollout"],
            mask,
            CorrectionConfig(mismatch=Bounds(), lag=Bounds(), nonfinite=nonfinite),
            behaviour_log_prob=inputs["behaviour"],
        )

    with pytest.raises(NonFiniteError, match=r"1 log-probs under the mask.*row 0, position 0: .*nonfinite to 'mask'"):
        correct("raise")
    masked, unit = correct("mask"), correct("unit")
    torch.testing.assert_close(masked.weights, _tensor([[0.0, 1.5], [1.0, 1.5]]), **CLOSE)
    torch.testing.assert_close(unit.weights, _tensor([[1.0, 1.5], [1.0, 1.5]]), **CLOSE)
    assert masked.kept_mask.int().tolist() == [[0, 1], [1, 1]]
    assert unit.kept_mask.all()
    for result in (masked, unit):
        assert result.metrics()["nonfinite_tokens"] == 1
        assert all(math.isfinite(value) for value in result.metrics().values())


def test_what_lies_under_padding_reaches_neither_weights_nor_loss_nor_gradient():
    mask = torch.tensor([[1, 1, 0]]).bool()
    mu, old = torch.tensor([[-1.0, -2.0, NAN]]), torch.tensor([[-1.5, -1.0, -INF]])
    result = compute_correction(old, mu, mask, _combined(upper=2.0))
    torch.testing.assert_close(result.weights, _tensor([[math.exp(-0.5), 2.0, 0.0]]), **CLOSE)
    log_prob = torch.tensor([[-1.0, -1.0, NAN]], requires_grad=True)
    loss = policy_loss(log_prob, old, torch.ones(1), result.kept_mask, LossConfig(), weights=result.weights).loss
    loss.backward()
    assert loss.isfinite()
    assert log_prob.grad.isfinite().all()
    assert log_prob.grad[0, 2] == 0


def test_extreme_but_finite_log_probs_give_finite_weights_and_numbers():
    old, mu = torch.tensor([[-3e4, -1.0, 0.0]]), torch.tensor([[-1.0, -3e4, 0.0]])
    result = compute_correction(old, mu, torch.ones(1, 3, dtype=torch.bool), _combined())
    torch.testing.assert_close(result.weights, _tensor([[math.exp(-20), math.exp(20), 1.0]]), **CLOSE)
    assert all(math.isfinite(value) for value in result.metrics().values())


def test_weights_carry_no_gradient():
    old = torch.full((1, 2), -1.0, requires_grad=True)
    result = compute_correction(old, old.detach() - 0.1, torch.ones(1, 2, dtype=torch.bool), _combined())
    assert not result.weights.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    old, mu = torch.tensor([[-1.0, -2.0]], dtype=dtype), torch.tensor([[-13.0, -2.0]], dtype=dtype)
    result = compute_correction(old, mu, torch.ones(1, 2, dtype=torch.bool), _combined())
    assert result.weights.dtype == torch.float32
    torch.testing.assert_close(result.weights, _tensor([[math.exp(12), 1.0]]), rtol=1e-6, atol=0)  # above fp16's 65504


def test_float32_agrees_with_float64():
    generator = torch.Generator().manual_seed(0)
    old, mu, behaviour = (-3 * torch.rand(6, 9, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(6, 9, generator=generator) > 0.3
    rule = Rejection(statistic="k3", aggregate="mean", upper=0.6)
    config = CorrectionConfig(mismatch=Bounds(upper=2.0), lag=Bounds(level="geometric"), rejections=(rule,))
    wide = compute_correction(old, mu, mask, config, behaviour_log_prob=behaviour)
    narrow = compute_correction(old.float(), mu.float(), mask, config, behaviour_log_prob=behaviour.float())
    assert wide.weights.dtype == torch.float64
    assert torch.equal(wide.kept_mask, narrow.kept_mask)
    # Sums of nine float32 terms of size 3.
    torch.testing.assert_close(narrow.weights.double(), wide.weights, rtol=1e-5, atol=1e-6)


def test_a_factor_that_is_one_only_because_its_policies_are_one_tensor_is_not_reported():
    mu, old, mask = torch.zeros(1, 2) - 1, torch.zeros(1, 2) - 1.1, torch.ones(1, 2, dtype=torch.bool)
    bypass = compute_correction(mu, mu, mask, CorrectionConfig())
    assert bypass.metrics() == {"nonfinite_tokens": 0.0}
    anchored = compute_correction(old, mu, mask, CorrectionConfig(), behaviour_log_prob=old)
    reported = {name.split("/")[0] for name in anchored.metrics()} - {"nonfinite_tokens"}
    assert reported == {"mismatch"}
    split = compute_correction(old, mu, mask, CorrectionConfig(), behaviour_log_prob=old - 0.2)
    assert {"mismatch", "lag", "combined"} <= {name.split("/")[0] for name in split.metrics()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": None}, "config is NoneType; need a CorrectionConfig"),
        ({"config": {}}, "config is dict; need a CorrectionConfig"),
        ({"rollout": None}, "rollout_log_prob is NoneType; need a Tensor"),
        ({"mask": [[True, True]] * 2}, "response_mask is list; need a Tensor"),
        (
            {"old": torch.full((2, 2), 0.5)},
            r"old_log_prob is up to 0\.5 under the mask.*negative log-likelihoods passed",
        ),
        ({"rollout": torch.full((2, 2), 0.0011)}, r"rollout_log_prob is up to 0\.0011 under the mask"),
        ({"rollout": torch.zeros(2, 3)}, r"all inputs must be \[B,T\] alike"),
        ({"mask": torch.ones(2, 2)}, "response_mask must be bool"),
        ({"old": torch.zeros(2, 2, dtype=torch.int64)}, "log-probs floating point"),
        ({"config": CorrectionConfig(mismatch=Bounds())}, r"\['mismatch'\], which need behaviour_log_prob"),
        ({"config": CorrectionConfig(rejections=(Rejection(factor="lag", upper=2.0),))}, r"\['lag'\], which need"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change, message):
    inputs = {
        "old": torch.zeros(2, 2),
        "rollout": torch.zeros(2, 2),
        "mask": torch.ones(2, 2, dtype=torch.bool),
        "config": CorrectionConfig(),
    } | change
    with pytest.raises(InputError, match=message):
        compute_correction(*inputs.values())


def test_a_log_prob_above_zero_off_the_mask_or_by_rounding_is_none():
    old, mask = torch.tensor([[0.0009, 7.0]]), torch.tensor([[True, False]])
    assert compute_correction(old, torch.zeros(1, 2), mask, CorrectionConfig()).kept_mask.tolist() == [[True, False]]


@pytest.mark.parametrize(
    "call",
    [
        lambda view: view.log_weight("seq"),
        lambda view: view.statistic("k1", "token"),
        lambda view: view.statistic("k3", "avg"),
    ],
)
def test_a_word_that_no_branch_knows_takes_none(call):
    view = FactorView(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool))
    with pytest.raises(ConfigError, match="is unknown; choose one of"):
        call(view)


RULES = st.builds(
    Rejection,
    factor=st.just("combined"),
    statistic=st.sampled_from(["ratio", "k2", "k3", "binary_kl", "tv"]),
    aggregate=st.sampled_from(["token", "sum", "mean", "max", "min"]),
    upper=st.floats(0.01, 0.9),
)


@settings(max_examples=60, deadline=None)
@given(rule=RULES, seed=st.integers(0, 1000), factor=st.floats(1.0, 9.0))
def test_rejection_is_idempotent_and_monotone_in_its_bound(rule, seed, factor):
    most = 0.99 if rule.statistic == "tv" and rule.aggregate != "sum" else INF  # an upper bound of 1 is refused
    generator = torch.Generator().manual_seed(seed)
    old, mu = (-2 * torch.rand(4, 5, generator=generator) for _ in range(2))
    mask = torch.rand(4, 5, generator=generator) > 0.2

    def kept(mask, upper):
        wide = Rejection(factor="combined", statistic=rule.statistic, aggregate=rule.aggregate, upper=upper)
        return compute_correction(old, mu, mask, CorrectionConfig(rejections=(wide,))).kept_mask

    once = kept(mask, rule.upper)
    assert torch.equal(kept(once, rule.upper), once)
    assert (kept(mask, min(rule.upper * factor, most)) | ~once).all()
    assert (mask | ~once).all()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), cut=st.integers(0, 6), pad=st.integers(0, 3))
def test_the_result_does_not_depend_on_order_padding_or_partition_of_rows(seed, cut, pad):
    generator = torch.Generator().manual_seed(seed)
    old, mu, behaviour = (-2 * torch.rand(6, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(6, 4, generator=generator) > 0.3
    config = CorrectionConfig(
        mismatch=Bounds(upper=1.5),
        lag=Bounds(level="sequence", mode="mask", lower=0.2, upper=3.0),
        rejections=(Rejection(factor="combined", aggregate="max", upper=3.0),),
    )

    def correct(rows, padding=0):
        padded = [torch.nn.functional.pad(x[rows], (0, padding), value=NAN) for x in (old, mu, behaviour)]
        wide_mask = torch.nn.functional.pad(mask[rows], (0, padding))
        return compute_correction(padded[0], padded[1], wide_mask, config, behaviour_log_prob=padded[2])

    whole = correct(torch.arange(6))
    order = torch.randperm(6, generator=generator)
    parts = [correct(order[:cut], pad), correct(order[cut:], pad)]
    weights = torch.cat([part.weights[:, :4] for part in parts])
    torch.testing.assert_close(weights, whole.weights[order], rtol=1e-14, atol=0)
    merged = merge_all(part.statistics for part in parts).to_dict()
    # float64 sums in another order
    assert merged == pytest.approx(whole.metrics(), rel=1e-9, abs=1e-12)
