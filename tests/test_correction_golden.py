"""A peer's outputs: weights on kept tokens, masks everywhere, and the statistics that mean the same."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

from fsdp_async.is_correction import CorrectionConfig, compute_correction

CASES = json.loads((Path(__file__).parent / "golden" / "rollout_correction.json").read_text())["cases"]
# Both sides compute in float32; sums of up to 12 terms and one exp.
RTOL = 2e-5
SAME_MEANING = {
    "rollout_corr/kl": "combined/kl_k1",
    "rollout_corr/k3_kl": "combined/kl_k3",
    "rollout_corr/chi2_token": "combined/chi2_token",
    "rollout_corr/chi2_seq": "combined/chi2_seq",
    "rollout_corr/training_log_ppl": "combined/log_numerator_ppl",
    "rollout_corr/rollout_log_ppl": "combined/log_denominator_ppl",
    "rollout_corr/log_ppl_abs_diff": "combined/log_ppl_abs_difference",
}


def _correct(case):
    inputs = {name: torch.tensor(values) for name, values in case["inputs"].items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = CorrectionConfig.from_verl(case["config"])
    return config, compute_correction(
        inputs["old_log_prob"], inputs["rollout_log_prob"], inputs["response_mask"].bool(), config
    )


def _name(case):
    return "-".join(f"{key.removeprefix('rollout_')}={value}" for key, value in case["config"].items())


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_weights_and_masks_agree_with_the_peer(case):
    config, correction = _correct(case)
    expected_mask = torch.tensor(case["outputs"]["mask"]).bool()
    assert torch.equal(correction.kept_mask, expected_mask)
    expected = case["outputs"]["weights"]
    assert (expected is None) == (correction.weights is None) == (config.combined is None)
    if expected is not None:
        torch.testing.assert_close(
            correction.weights[expected_mask], torch.tensor(expected)[expected_mask], rtol=RTOL, atol=1e-7
        )
        assert (correction.weights[~expected_mask] == 0).all()


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_statistics_of_the_same_meaning_agree_with_the_peer(case):
    _, correction = _correct(case)
    metrics, theirs = correction.metrics(), case["outputs"]["metrics"]
    compared = {key: ours for key, ours in SAME_MEANING.items() if key in theirs}
    assert len(compared) >= 5
    for key, ours in compared.items():
        assert metrics[ours] == pytest.approx(theirs[key], rel=1e-4, abs=1e-6), key


def test_all_cases_are_here():
    assert len(CASES) == 63
