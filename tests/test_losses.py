import math
from dataclasses import replace

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from fsdp_async.errors import ConfigError, InputError
from fsdp_async.losses import GlobalCounts, LossConfig, aggregate, kl_penalty, policy_loss
from fsdp_async.metrics import merge_all

MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
PPO = LossConfig()
DUAL = LossConfig(dual_clip=3.0)
REINFORCE = LossConfig(kind="reinforce")
KINDS = pytest.mark.parametrize("config", [PPO, DUAL, REINFORCE], ids=["ppo", "dual", "reinforce"])
AGGREGATES = pytest.mark.parametrize("mode", MODES)


def batch(num_rows: int = 6, width: int = 5, seed: int = 0) -> dict[str, Tensor]:
    """Random inputs of `policy_loss`; rows have 0 to `width` tokens, row 1 none, and half of the rest are kept."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (num_rows, 1), generator=generator)
    lengths[1] = 0
    response_mask = torch.arange(width) < lengths
    old = -torch.rand(num_rows, width, generator=generator) * 3
    return {
        "log_prob": old + torch.randn(num_rows, width, generator=generator) * 0.6,
        "old_log_prob": old,
        "advantages": torch.randn(num_rows, generator=generator),
        "mask": response_mask & (torch.rand(num_rows, width, generator=generator) < 0.7),
        "weights": torch.rand(num_rows, width, generator=generator) * 2,
        "denominator_mask": response_mask,
    }


def evaluate(inputs: dict[str, Tensor], config: LossConfig, **kwargs):
    """Loss result, and gradient with respect to log_prob."""
    log_prob = inputs["log_prob"].detach().clone().requires_grad_()
    result = policy_loss(config=config, **{**inputs, "log_prob": log_prob}, **kwargs)
    result.loss.backward()
    return result, log_prob.grad


def rows(inputs: dict[str, Tensor], index) -> dict[str, Tensor]:
    return {name: tensor[index] for name, tensor in inputs.items()}


def counts(mask: Tensor, data_parallel_size: int = 1) -> GlobalCounts:
    return GlobalCounts(int(mask.sum()), int(mask.any(dim=1).sum()), data_parallel_size)


def one_token(ratio: float, advantage: float, config: LossConfig) -> tuple[float, float]:
    """Objective (minus the loss) of a single token, and its derivative with respect to log pi."""
    log_prob = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    loss = policy_loss(
        log_prob, torch.zeros_like(log_prob), torch.tensor([advantage]), torch.ones(1, 1, dtype=torch.bool), config
    ).loss
    loss.backward()
    return -loss.item(), -log_prob.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "slope"),
    [
        (1.1, 2.0, 2.2, 2.2),  # inside the bounds: r A
        (1.5, 2.0, 2.56, 0.0),  # beyond 1.28, A > 0: capped
        (0.5, 2.0, 1.0, 1.0),  # below .8, A > 0: the way back stays open
        (0.9, -2.0, -1.8, -1.8),
        (0.5, -2.0, -1.6, 0.0),  # below .8, A < 0: floored
        (2.0, -2.0, -4.0, -4.0),  # above 1.28, A < 0: the way back stays open
        (3.5, -2.0, -6.0, 0.0),  # dual clip at 3 A
    ],
)
def test_ppo_clip_on_each_side_of_its_bounds(ratio, advantage, objective, slope):
    config = LossConfig(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    # rounding of exp(log(ratio)) in float64
    assert one_token(ratio, advantage, config) == (pytest.approx(objective, rel=1e-14), pytest.approx(slope, rel=1e-14))


def test_without_dual_clip_a_negative_advantage_is_unbounded():
    assert one_token(3.5, -2.0, PPO) == (pytest.approx(-7.0, rel=1e-14), pytest.approx(-7.0, rel=1e-14))


def test_reinforce_is_advantage_times_log_prob():
    assert one_token(0.25, 2.0, REINFORCE) == (pytest.approx(2 * math.log(0.25), rel=1e-14), 2.0)


def test_each_aggregation_by_hand():
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 50.0, 60.0], [70.0, 80.0, 90.0], [5.0, 6.0, 70.0]])
    counted = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]]).bool()
    kept = counted.clone()
    kept[0, 2] = kept[3, 0] = False
    expected = {  # kept sums 3, 4, 0, 6; counted tokens 3, 1, 0, 2; non-empty rows 3
        "token-mean": 13 / 6,
        "token-sum": 13.0,
        "seq-mean-token-sum": 13 / 3,
        "seq-mean-token-mean": (3 / 3 + 4 / 1 + 6 / 2) / 3,
        "seq-mean-token-sum-norm": 13 / (3 * 3),
    }
    for mode, value in expected.items():
        # one float32 division
        assert aggregate(values, kept, mode, denominator_mask=counted).item() == pytest.approx(value, rel=1e-6)
    by_kept = aggregate(values, kept, "seq-mean-token-mean")  # tokens 2, 1, 0, 1
    assert by_kept.item() == pytest.approx((3 / 2 + 4 + 6) / 3, rel=1e-6)
    normed = aggregate(values, kept, "seq-mean-token-sum-norm", denominator_mask=counted, norm_length=10)
    assert normed.item() == pytest.approx(13 / 30, rel=1e-6)


@KINDS
@AGGREGATES
def test_the_loss_honours_its_aggregation_denominator_and_norm_length(config, mode):
    inputs = batch()
    log_ratio = inputs["log_prob"] - inputs["old_log_prob"]
    a = inputs["advantages"].unsqueeze(1).expand_as(log_ratio)
    ratio = log_ratio.exp()
    upper = torch.where(a > 0, 1.2, 3.0 if config.dual_clip else math.inf)
    lower = torch.where(a > 0, -math.inf, 0.8)
    objective = inputs["log_prob"] * a if config.kind == "reinforce" else ratio.clamp(lower, upper) * a
    length = 7 if mode == "seq-mean-token-sum-norm" else None
    for denominator_mask in (None, inputs["denominator_mask"]):
        kwargs = {"denominator_mask": denominator_mask, "norm_length": length}
        expected = -aggregate(objective * inputs["weights"], inputs["mask"], mode, **kwargs)
        chosen = replace(config, aggregate=mode, norm_length=length)
        result, _ = evaluate({**inputs, "denominator_mask": denominator_mask}, chosen)
        torch.testing.assert_close(result.loss, expected)


@KINDS
@AGGREGATES
def test_garbage_off_the_mask_changes_neither_loss_nor_gradient(config, mode):
    config = replace(config, aggregate=mode)
    inputs = batch()
    inputs["advantages"] = inputs["advantages"].unsqueeze(1).repeat(1, 5)
    clean, clean_grad = evaluate(inputs, config)
    for garbage in (math.nan, math.inf, -math.inf, 1e38):
        dirty = {
            name: torch.where(inputs["mask"], tensor, garbage) if tensor.is_floating_point() else tensor
            for name, tensor in inputs.items()
        }
        result, grad = evaluate(dirty, config)
        assert torch.equal(result.loss, clean.loss)
        assert torch.equal(grad, clean_grad)
        assert (grad[~inputs["mask"]] == 0).all()
        assert result.statistics == clean.statistics


@KINDS
@AGGREGATES
def test_a_fully_masked_micro_batch_has_loss_zero_and_gradient_zero(config, mode):
    config = replace(config, aggregate=mode)
    inputs = batch()
    inputs["mask"] = torch.zeros_like(inputs["mask"])
    inputs["log_prob"] = torch.full_like(inputs["log_prob"], math.nan)
    nothing = torch.zeros_like(inputs["mask"])
    for denominator_mask, total in ((inputs["denominator_mask"], None), (nothing, None), (nothing, GlobalCounts(8, 3))):
        result, grad = evaluate({**inputs, "denominator_mask": denominator_mask}, config, global_counts=total)
        assert result.loss.item() == 0.0
        assert (grad == 0).all()
        assert result.statistics.to_dict() == {}


@KINDS
@AGGREGATES
def test_micro_batches_and_ranks_add_up_to_the_whole(config, mode):
    config = replace(config, aggregate=mode)
    inputs = batch(num_rows=9)
    inputs = {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}
    whole, whole_grad = evaluate(inputs, config)
    # Two ranks of unequal size; the first takes three micro-batches, one of them (row 1) empty. Gradients are summed
    # over micro-batches and averaged over ranks, as FSDP does.
    ranks = [[[0, 2], [1], [3, 4, 5, 6]], [[7], [8]]]
    total = counts(inputs["denominator_mask"], data_parallel_size=2)
    grad, loss, parts = torch.zeros_like(whole_grad), 0.0, []
    for micro_batches in ranks:
        for index in micro_batches:
            result, part = evaluate(rows(inputs, index), config, global_counts=total)
            grad[index] += part / len(ranks)
            loss += result.loss.item() / len(ranks)
            parts.append(result.statistics)
    # float64 rounding
    torch.testing.assert_close(grad, whole_grad, rtol=1e-13, atol=1e-16)
    assert loss == pytest.approx(whole.loss.item(), rel=1e-13)
    merged, at_once = merge_all(parts).to_dict(), whole.statistics.to_dict()
    assert merged == {name: pytest.approx(value, rel=1e-12, abs=1e-15) for name, value in at_once.items()}


@KINDS
@AGGREGATES
def test_row_order_does_not_matter(config, mode):
    config = replace(config, aggregate=mode)
    inputs = batch()
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    result, grad = evaluate(inputs, config)
    permuted, permuted_grad = evaluate(rows(inputs, order), config)
    torch.testing.assert_close(permuted.loss, result.loss)
    assert torch.equal(permuted_grad, grad[order])  # a denominator is a count: no rounding depends on the order


@KINDS
@AGGREGATES
def test_padding_does_not_matter(config, mode):
    length = 5 if mode == "seq-mean-token-sum-norm" else None  # without it L is the padded width
    config = replace(config, aggregate=mode, norm_length=length)
    inputs = batch()
    result, grad = evaluate(inputs, config)
    wide = {
        name: torch.nn.functional.pad(t, (0, 3), value=math.nan if t.is_floating_point() else False)
        if t.dim() == 2
        else t
        for name, t in inputs.items()
    }
    wider = {name: torch.cat([t, t[:2]]) for name, t in wide.items()}
    for name in ("mask", "denominator_mask"):
        wider[name][-2:] = False
    padded, padded_grad = evaluate(wider, config)
    torch.testing.assert_close(padded.loss, result.loss)
    assert torch.equal(padded_grad[:6, :5], grad)
    assert (padded_grad[6:] == 0).all()


@KINDS
def test_weights_of_one_equal_no_weights(config):
    inputs = batch()
    ones, ones_grad = evaluate({**inputs, "weights": torch.ones_like(inputs["weights"])}, config)
    none, none_grad = evaluate({**inputs, "weights": None}, config)
    assert torch.equal(ones.loss, none.loss)
    assert torch.equal(ones_grad, none_grad)


@KINDS
def test_advantages_per_row_and_per_token_are_the_same(config):
    inputs = batch()
    per_row = evaluate(inputs, config)
    per_token = evaluate({**inputs, "advantages": inputs["advantages"].unsqueeze(1).repeat(1, 5)}, config)
    assert torch.equal(per_row[0].loss, per_token[0].loss)
    assert torch.equal(per_row[1], per_token[1])


@KINDS
def test_float32_is_within_1e_5_of_float64(config):
    inputs = batch(num_rows=64, width=32)
    exact = evaluate({n: t.double() if t.is_floating_point() else t for n, t in inputs.items()}, config)
    result, grad = evaluate(inputs, config)
    assert result.loss.dtype == torch.float32
    torch.testing.assert_close(result.loss.double(), exact[0].loss, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(grad.double(), exact[1], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_are_computed_in_float32(dtype):
    log_prob = torch.tensor([[0.0]], dtype=dtype, requires_grad=True)
    old = torch.tensor([[-12.0]], dtype=dtype)  # e^12 = 162755 is beyond float16
    mask = torch.ones(1, 1, dtype=torch.bool)
    result = policy_loss(log_prob, old, torch.tensor([-1.0]), mask, PPO)
    assert result.loss.dtype == torch.float32
    assert result.loss.item() == pytest.approx(math.exp(12), rel=1e-6)


def test_a_huge_finite_log_ratio_is_bounded():
    # r = e^300 overflows float32; bounded at e^20 it stays finite, as does what it is multiplied with
    log_prob = torch.tensor([[0.0, 0.0]], requires_grad=True)
    old = torch.tensor([[-300.0, 300.0]])
    result = policy_loss(log_prob, old, torch.tensor([-1.0]), torch.ones(1, 2, dtype=torch.bool), PPO)
    result.loss.backward()
    assert result.loss.item() == pytest.approx((math.exp(20) + 0.8) / 2, rel=1e-6)
    assert log_prob.grad.isfinite().all()
    assert result.statistics.to_dict()["ratio/max"] == pytest.approx(math.exp(300))  # statistics are of raw values


def test_a_vanishing_ratio_is_bounded_from_below():
    assert one_token(math.exp(-30), 1.0, PPO) == (pytest.approx(math.exp(-20), rel=1e-12), 0.0)


@pytest.mark.parametrize("config", [PPO, DUAL])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize(("new", "old"), [(math.nan, -1.0), (-math.inf, -1.0), (-1.0, -math.inf), (-1.0, math.nan)])
def test_a_non_finite_ratio_under_the_mask_reaches_loss_and_gradient(config, advantage, new, old):
    log_prob = torch.tensor([[new, -1.0]], requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    result = policy_loss(log_prob, torch.tensor([[old, -1.0]]), torch.tensor([advantage]), mask, config)
    result.loss.backward()
    assert result.loss.isnan()
    assert log_prob.grad[0, 0].isnan()


@pytest.mark.parametrize("new", [math.nan, -math.inf])
def test_a_non_finite_log_prob_under_the_mask_reaches_the_reinforce_loss(new):
    mask = torch.ones(1, 1, dtype=torch.bool)
    result = policy_loss(torch.tensor([[new]]), torch.tensor([[-1.0]]), torch.ones(1), mask, REINFORCE)
    assert not result.loss.isfinite()


def test_a_rejected_row_counts_in_the_original_denominator_and_not_in_the_kept():
    inputs = batch()
    inputs["mask"] = inputs["denominator_mask"] & (torch.arange(6) < 3).unsqueeze(1)
    first = rows(inputs, [0, 2])
    for mode, original, kept in (
        ("token-mean", int(inputs["denominator_mask"].sum()), int(inputs["mask"].sum())),
        ("seq-mean-token-sum", 5, 2),
    ):
        config = LossConfig(aggregate=mode)
        total = -policy_loss(config=LossConfig(aggregate="token-sum"), **first).loss.item()
        by_original = evaluate(inputs, config)[0].loss.item()
        by_kept = evaluate({**inputs, "denominator_mask": inputs["mask"]}, config)[0].loss.item()
        assert by_original == pytest.approx(-total / original, rel=1e-6)  # float32 sums
        assert by_kept == pytest.approx(-total / kept, rel=1e-6)


@AGGREGATES
@pytest.mark.parametrize("denominator", ["original", "kept"])
def test_a_rejected_row_gives_one_loss_in_bypass_and_in_decoupled_mode(mode, denominator):
    # Bypass clips round mu without a weight; decoupled with pi_p = mu carries the weight pi_p / mu = 1 on kept tokens.
    inputs = batch(num_rows=2)
    inputs["denominator_mask"] = torch.ones(2, 5, dtype=torch.bool)
    inputs["mask"] = torch.tensor([[True] * 5, [False] * 5])
    if denominator == "kept":
        inputs["denominator_mask"] = inputs["mask"]
    config = LossConfig(aggregate=mode)
    bypass, bypass_grad = evaluate({**inputs, "weights": None}, config)
    decoupled, decoupled_grad = evaluate({**inputs, "weights": inputs["mask"].float()}, config)
    assert torch.equal(bypass.loss, decoupled.loss)
    assert torch.equal(bypass_grad, decoupled_grad)
    assert bypass.loss.item() != 0.0


def test_all_weights_zero_give_gradient_zero():
    inputs = batch()
    result, grad = evaluate({**inputs, "weights": torch.zeros_like(inputs["weights"])}, PPO)
    assert result.loss.item() == 0.0
    assert (grad == 0).all()


def test_statistics_by_hand():
    ratio = torch.tensor([[0.5, 1.0, 2.0, 4.0], [0.5, 1.0, 2.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]).bool()
    result = policy_loss(ratio.log().double(), torch.zeros(2, 4), torch.tensor([-1.0, 1.0]), mask, DUAL)
    reported = result.statistics.to_dict()
    logs = [math.log(x) for x in (0.5, 1, 2, 4, 0.5, 1, 2)]
    assert reported == {
        "kl_k1": pytest.approx(-sum(logs) / 7, rel=1e-6),  # logs taken in float32 here
        "kl_k3": pytest.approx(sum(math.exp(x) - 1 - x for x in logs) / 7, rel=1e-6),
        "clip_fraction_high": 1 / 7,
        "clip_fraction_low": 1 / 7,
        "dual_clip_fraction": 1 / 7,
        "ratio/mean": pytest.approx(11 / 7, rel=1e-6),
        "ratio/std": pytest.approx(math.sqrt((0.5 + 2 + 8 + 16) / 7 - (11 / 7) ** 2), rel=1e-6),
        "ratio/min": pytest.approx(0.5, rel=1e-6),
        "ratio/max": pytest.approx(4.0, rel=1e-6),
    }


def test_only_what_a_loss_bounds_is_reported():
    inputs = batch()
    assert "dual_clip_fraction" not in evaluate(inputs, PPO)[0].statistics.entries
    assert set(evaluate(inputs, REINFORCE)[0].statistics.entries) == {"kl_k1", "kl_k3", "ratio"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"old_log_prob": torch.zeros(6, 4)}, r"old_log_prob has shape \[6, 4\], log_prob has \[6, 5\]"),
        ({"advantages": torch.zeros(5)}, r"advantages has shape \[5\]"),
        ({"weights": torch.ones(6, 1)}, r"weights has shape \[6, 1\]"),
        ({"mask": torch.ones(6, 5)}, "mask is torch.float32; need bool"),
        ({"denominator_mask": torch.ones(6, 5)}, "denominator_mask is torch.float32"),
        ({"denominator_mask": torch.zeros(6, 5, dtype=torch.bool)}, "outside denominator_mask"),
        ({"weights": torch.ones(6, 5, requires_grad=True)}, r"weights.detach\(\)"),
        ({"old_log_prob": torch.zeros(6, 5, requires_grad=True)}, r"old_log_prob.detach\(\)"),
        ({"advantages": torch.zeros(6, requires_grad=True)}, r"advantages.detach\(\)"),
        ({"rollout_log_prob": torch.zeros(6, 5)}, "'ppo_clip' is not defined on it"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        policy_loss(config=PPO, **{**batch(), **changes})


def test_one_dimensional_log_probs_are_refused():
    ones = torch.ones(3)
    with pytest.raises(InputError, match=r"must be \[B,T\]"):
        policy_loss(ones, ones, ones, ones.bool(), PPO)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "ppo"}, "loss.kind='ppo' is unknown"),
        ({"aggregate": "mean"}, "loss.aggregate='mean' is unknown"),
        ({"clip_low": 0.0}, "loss.clip_low=0.0"),
        ({"clip_low": 1.5}, "loss.clip_low=1.5"),
        ({"clip_high": math.nan}, "loss.clip_high=nan"),
        ({"clip_high": -0.2}, "loss.clip_high=-0.2"),
        ({"clip_high": True}, "loss.clip_high=True"),
        ({"clip_high": "0.2"}, "loss.clip_high='0.2'"),
        ({"dual_clip": 1.0}, "loss.dual_clip=1.0"),
        ({"dual_clip": math.inf}, "loss.dual_clip=inf"),
        ({"norm_length": 0, "aggregate": "seq-mean-token-sum-norm"}, "loss.norm_length=0"),
        ({"norm_length": 2.5, "aggregate": "seq-mean-token-sum-norm"}, "loss.norm_length=2.5"),
        ({"norm_length": 8}, "has no effect with loss.aggregate='token-mean'"),
        ({"kind": "reinforce", "dual_clip": 3.0}, "loss.dual_clip=3.0 has no effect"),
        ({"kind": "reinforce", "clip_low": 0.1}, "loss.clip_low=0.1 has no effect"),
        ({"kind": "reinforce", "clip_high": 0.28}, "loss.clip_high=0.28 has no effect"),
    ],
)
def test_settings_that_cannot_act_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        LossConfig(**options)


def test_the_config_parses_from_plain_data():
    parsed = TypeAdapter(LossConfig).validate_python({"clip_high": 0.28, "dual_clip": 3, "aggregate": "token-sum"})
    assert parsed == LossConfig(clip_high=0.28, dual_clip=3.0, aggregate="token-sum")


def test_from_verl_takes_missing_keys_from_verl_and_not_from_here():
    assert LossConfig.from_verl({}) == LossConfig(dual_clip=3.0)
    assert LossConfig.from_verl(None) == LossConfig(dual_clip=3.0)
    assert LossConfig.from_verl(
        {
            "loss_mode": "vanilla",
            "loss_agg_mode": "seq-mean-token-sum-norm",
            "clip_ratio_low": 0.1,
            "clip_ratio_high": 0.28,
            "clip_ratio_c": 10,
        }
    ) == LossConfig(clip_low=0.1, clip_high=0.28, dual_clip=10, aggregate="seq-mean-token-sum-norm")


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"clip_ratio_hi": 0.3}, "clip_ratio_hi"),
        ({"loss_mode": "vanila"}, "loss_mode='vanila'"),
        ({"loss_agg_mode": "mean"}, "loss_agg_mode='mean'"),
        ({"clip_ratio_c": None}, "clip_ratio_c=None"),
        ({"clip_ratio_low": True}, "clip_ratio_low=True"),
        ({"clip_ratio_high": "0.2"}, "clip_ratio_high='0.2'"),
        ({"tau_pos": 1.0}, "tau_pos"),
    ],
)
def test_from_verl_refuses_what_it_cannot_translate(mapping, message):
    with pytest.raises(ConfigError, match=message):
        LossConfig.from_verl(mapping)


@pytest.mark.parametrize("bad", [(-1, 0, 1), (3, 4, 1), (4, 3, 0), (8.5, 2, 1), (8, 2.0, 1), (8, 2, True)])
def test_impossible_global_counts_are_refused(bad):
    with pytest.raises(InputError, match="num_rows <= num_tokens"):
        GlobalCounts(*bad)


@KINDS
@pytest.mark.parametrize(("num_tokens", "num_rows"), [(-1, 0), (0, -1)])
def test_counts_of_a_whole_that_are_below_those_of_its_part_are_refused(config, num_tokens, num_rows):
    inputs = batch()
    own = counts(inputs["denominator_mask"])
    evaluate(inputs, config, global_counts=own)
    short = GlobalCounts(own.num_tokens + num_tokens, own.num_rows + num_rows)
    with pytest.raises(InputError, match=rf"are below the {own.num_tokens} tokens in {own.num_rows} rows"):
        evaluate(inputs, config, global_counts=short)
    # Without a denominator mask it is the mask that is counted.
    kept = counts(inputs["mask"])
    assert kept.num_tokens < own.num_tokens
    evaluate(inputs | {"denominator_mask": None}, config, global_counts=kept)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": None}, "config is NoneType; need a LossConfig"),
        ({"config": {}}, "config is dict; need a LossConfig"),
        ({"log_prob": None}, "log_prob is NoneType; need a Tensor"),
        ({"old_log_prob": None}, "old_log_prob is NoneType; need a Tensor"),
        ({"advantages": [1.0] * 6}, "advantages is list; need a Tensor"),
        ({"mask": None}, "mask is NoneType; need a Tensor"),
        ({"global_counts": (30, 6)}, "global_counts is tuple; need a GlobalCounts"),
    ],
)
def test_what_is_no_tensor_or_no_config_is_named(change, message):
    with pytest.raises(InputError, match=message):
        policy_loss(**(batch() | {"config": PPO} | change))


def test_aggregate_refuses_an_unknown_mode_and_an_inert_length():
    values, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(InputError, match="mode 'mean' is unknown"):
        aggregate(values, mask, "mean")
    with pytest.raises(InputError, match="norm_length=4 has no effect"):
        aggregate(values, mask, "token-mean", norm_length=4)


def test_kl_estimators_by_hand():
    log_prob, ref = torch.tensor([[math.log(0.5)]]), torch.tensor([[math.log(0.25)]])
    for estimator, value in (("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", 0.5 - 1 + math.log(2))):
        # float32 logs
        assert kl_penalty(log_prob, ref, estimator).item() == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_off_the_mask_is_zero_with_gradient_zero(estimator):
    log_prob = torch.tensor([[-1.0, math.nan, -math.inf, -1.0]], requires_grad=True)
    ref = torch.tensor([[-2.0, -1.0, math.inf, math.nan]])
    mask = torch.tensor([[True, False, False, False]])
    values = kl_penalty(log_prob, ref, estimator, mask=mask)
    aggregate(values, mask, "token-mean").backward()
    assert values[0, 1:].tolist() == [0.0, 0.0, 0.0]
    assert log_prob.grad[0, 1:].tolist() == [0.0, 0.0, 0.0]
    assert log_prob.grad[0, 0] != 0.0


def test_k3_stays_finite_for_a_token_the_policy_has_given_up():
    log_prob = torch.tensor([-500.0, -math.inf], requires_grad=True)
    values = kl_penalty(log_prob, torch.zeros(2), "k3")
    assert values[0].item() == pytest.approx(math.exp(20) - 21, rel=1e-6)
    assert values[1].isnan()  # infinity is not bounded away


def test_kl_refuses_what_does_not_fit():
    with pytest.raises(InputError, match="'k4' is unknown"):
        kl_penalty(torch.zeros(2), torch.zeros(2), "k4")
    with pytest.raises(InputError, match="ref_log_prob has shape"):
        kl_penalty(torch.zeros(2), torch.zeros(3))
    with pytest.raises(InputError, match=r"ref_log_prob.detach\(\)"):
        kl_penalty(torch.zeros(2), torch.zeros(2, requires_grad=True))
