"""Agreement with a peer: its losses and gradients, recorded on CPU in float32."""

import json
from pathlib import Path

import pytest
import torch

from fsdp_async.losses import LossConfig, policy_loss

GOLDEN = json.loads((Path(__file__).parent / "golden" / "policy_losses.json").read_text())
CASES = [case for case in GOLDEN["cases"] if case["loss_name"] == "vanilla"]


def name(case) -> str:
    weighted = "weighted" if case["inputs"]["rollout_is_weights"] else "plain"
    return f"{case['loss_agg_mode']}-{weighted}-{len(case['inputs']['log_prob'])}rows"


def run(case):
    inputs = {key: None if value is None else torch.tensor(value) for key, value in case["inputs"].items()}
    log_prob = inputs["log_prob"].requires_grad_()
    config = LossConfig.from_verl({"loss_agg_mode": case["loss_agg_mode"], **case["config"]})
    result = policy_loss(
        log_prob,
        inputs["old_log_prob"],
        inputs["advantages"],
        inputs["response_mask"].bool(),
        config,
        weights=inputs["rollout_is_weights"],
    )
    result.loss.backward()
    return result, log_prob.grad


def test_all_sixteen_cases_of_the_clipped_loss_are_there():
    assert len(CASES) == 16


@pytest.mark.parametrize("case", CASES, ids=name)
def test_loss_and_gradient_agree_with_the_peer(case):
    result, grad = run(case)
    # both sides are float32 sums of at most 23 terms in different orders
    torch.testing.assert_close(result.loss, torch.tensor(case["outputs"]["loss"]), rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(grad, torch.tensor(case["outputs"]["grad_log_prob"]), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("case", CASES, ids=name)
def test_statistics_agree_with_the_peer(case):
    ours, theirs = run(case)[0].statistics.to_dict(), case["outputs"]["metrics"]
    clipped = ours["clip_fraction_high"] + ours["clip_fraction_low"]
    assert clipped == pytest.approx(theirs["actor/pg_clipfrac"], rel=1e-6)  # recorded in float32
    assert ours["dual_clip_fraction"] == theirs["actor/pg_clipfrac_lower"]
    assert ours["kl_k1"] == pytest.approx(theirs["actor/ppo_kl"], rel=1e-5, abs=1e-7)  # a float32 mean of 19-21 terms
