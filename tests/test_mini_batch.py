from __future__ import annotations

import pytest
import torch
from builders import random_batch

from fsdp_async.correction_config import Bounds, CorrectionConfig, Rejection
from fsdp_async.is_correction import compute_correction
from fsdp_async.losses import GlobalCounts, LossConfig
from fsdp_async.mini_batch import MiniBatch, count_globally, split_rows

GROUPS = torch.tensor([4, 4, 7, 7, 7, 9])


@pytest.mark.parametrize(
    ("num", "expected"),
    [
        (1, [[0, 1, 2, 3, 4, 5]]),
        (2, [[0, 1, 2, 3, 4], [5]]),
        (3, [[0, 1], [2, 3, 4], [5]]),
        (5, [[0, 1], [2, 3, 4], [5], [], []]),
    ],
)
def test_groups_are_dealt_whole_and_in_order_into_as_many_sets_as_were_asked_for(num, expected):
    assert [rows.tolist() for rows in split_rows(GROUPS, num)] == expected


def test_nothing_is_dealt_into_empty_sets():
    assert [rows.tolist() for rows in split_rows(GROUPS[:0], 2)] == [[], []]


def test_counts_are_of_tokens_and_of_rows_that_have_any():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0]]).bool()
    assert count_globally(mask, None) == GlobalCounts(num_tokens=3, num_rows=2)


def _mini_batch(batch, *, weights=None, kept=None, denominator=None, inner=None):
    mask = batch.response_mask
    denominator = mask if denominator is None else denominator
    return MiniBatch(
        batch=batch,
        old_log_prob=torch.where(mask, batch.rollout_log_prob, 0.0),
        advantages=batch.rewards - batch.rewards.mean(),
        kept_mask=mask if kept is None else kept,
        weights=weights,
        denominator_mask=denominator,
        counts=count_globally(denominator, None),
        inner_correction=inner,
    )


def test_selected_rows_keep_the_counts_of_the_whole_step():
    mini_batch = _mini_batch(random_batch())
    part = mini_batch.rows(torch.tensor([3, 1]))
    assert part.counts is mini_batch.counts
    assert torch.equal(part.batch.input_ids, mini_batch.batch.input_ids[[3, 1]])
    assert torch.equal(part.advantages, mini_batch.advantages[[3, 1]])


def test_micro_batches_sum_to_the_loss_of_the_whole():
    batch = random_batch(num_groups=4)
    log_prob = torch.where(batch.response_mask, batch.rollout_log_prob - 0.3, 0.0).double()
    mini_batch = _mini_batch(batch)
    config = LossConfig(aggregate="seq-mean-token-mean")
    whole = mini_batch.loss(log_prob, mini_batch.corrected(log_prob), config).loss
    parts = []
    for rows in torch.arange(8).split(3):
        part = mini_batch.rows(rows)
        parts.append(part.loss(log_prob[rows], part.corrected(log_prob[rows]), config).loss)
    torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=1e-15)  # float64, another order


def test_rejected_tokens_stay_in_the_original_denominator_and_leave_the_kept_one():
    batch = random_batch(num_groups=2)
    kept = batch.response_mask.clone()
    kept[0] = False
    log_prob = torch.where(batch.response_mask, batch.rollout_log_prob, 0.0)
    losses = {}
    for name, denominator in (("original", batch.response_mask), ("kept", kept)):
        mini_batch = _mini_batch(batch, kept=kept, denominator=denominator)
        losses[name] = mini_batch.loss(log_prob, mini_batch.corrected(log_prob), LossConfig()).loss
    ratio = int(kept.sum()) / int(batch.response_mask.sum())
    torch.testing.assert_close(losses["original"], losses["kept"] * ratio)


def test_weights_inside_the_loss_are_those_of_the_policy_being_trained():
    batch = random_batch(num_groups=2)
    rule = Rejection(factor="combined", aggregate="max", upper=1.9)
    config = CorrectionConfig(combined=Bounds(upper=1.5), rejections=(rule,))
    log_prob = torch.where(batch.response_mask, batch.rollout_log_prob + 0.5, 0.0)
    log_prob[1] += 0.5
    mini_batch = _mini_batch(batch, inner=config)
    found = mini_batch.corrected(log_prob.requires_grad_())
    expected = compute_correction(log_prob, batch.rollout_log_prob, batch.response_mask, config)
    assert torch.equal(found.weights, expected.weights)
    assert torch.equal(found.kept_mask, expected.kept_mask)
    assert not found.kept_mask[1].any()
    assert found.metrics()["rejected_rows/combined_max_ratio"] == 0.25


def test_rows_without_any_advantage_have_nothing_to_learn_from():
    batch = random_batch(num_groups=2)
    mini_batch = _mini_batch(batch)
    assert mini_batch.has_advantages
    assert not mini_batch.rows(torch.tensor([], dtype=torch.int64)).has_advantages
