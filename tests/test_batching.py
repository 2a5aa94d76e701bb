from __future__ import annotations

import pytest
import torch
from builders import group, random_batch, response

from fsdp_async.batching import collate, micro_batches
from fsdp_async.errors import ConfigError, InputError


def test_prompts_are_padded_left_and_responses_right():
    groups = [
        group("a", [5, 6], [response("a", 0, [7, 8, 9], spans=((3, 1), (4, None)))]),
        group("b", [5], [response("b", 0, [7])]),
    ]
    batch = collate(groups, pad_token_id=0)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9], [0, 5, 7, 0, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1], [0, 1, 1, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4], [0, 0, 1, 1, 1]]
    assert batch.response_mask.tolist() == [[True, True, True], [True, False, False]]
    assert batch.versions.tolist() == [[3, 4, 4], [0, -1, -1]]
    assert batch.group_ids.tolist() == [0, 1]


def test_a_token_that_the_policy_did_not_sample_has_no_version():
    batch = collate([group("a", [5], [response("a", 0, [7, 8, 9], mask=[True, False, True])])], pad_token_id=0)
    assert batch.response_mask.tolist() == [[True, False, True]]
    assert batch.versions.tolist() == [[0, -1, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1]]


def test_an_unscored_response_is_refused_by_name():
    with pytest.raises(InputError, match=r"'a'\[3\] has no reward"):
        collate([group("a", [5], [response("a", 3, [7], reward=None)])], pad_token_id=0)


def test_a_batch_of_nothing_is_refused():
    with pytest.raises(InputError, match="at least one response"):
        collate([], pad_token_id=0)


@pytest.mark.parametrize("pad", [None, -1, 0.0])
def test_a_padding_token_that_is_none_is_refused(pad):
    with pytest.raises(InputError, match=r"pad_token_id=.* must be an integer of at least 0"):
        collate([group("a", [5], [response("a", 3, [7])])], pad_token_id=pad)


def _lengths(*pairs):
    """A batch of one response a prompt, by (prompt length, response length)."""
    return collate(
        [group(f"p{i}", [2] * p, [response(f"p{i}", 0, [3] * r)]) for i, (p, r) in enumerate(pairs)], pad_token_id=0
    )


def test_without_a_budget_all_rows_are_one_micro_batch_in_order():
    batch = random_batch(num_groups=5, group_size=1)
    assert [rows.tolist() for rows in micro_batches(batch, None)] == [[0, 1, 2, 3, 4]]
    assert micro_batches(batch.rows([]), None) == []


def test_rows_of_similar_length_share_a_micro_batch_within_the_budget():
    batch = _lengths((2, 6), (2, 1), (2, 5), (2, 2), (2, 1))
    # 2 rows of 3, then a third of 4 makes 3 * 4 = 12; the two long ones make 2 * 8.
    assert [rows.tolist() for rows in micro_batches(batch, 12)] == [[1, 4, 3], [2], [0]]
    assert [rows.tolist() for rows in micro_batches(batch, 16)] == [[1, 4, 3], [2, 0]]
    assert [rows.tolist() for rows in micro_batches(batch, 8)] == [[1, 4], [3], [2], [0]]


def test_the_budget_counts_padding_of_prompts_and_of_responses():
    batch = _lengths((4, 1), (1, 4))
    # Five tokens each, but together each row is padded to eight.
    assert [rows.tolist() for rows in micro_batches(batch, 15)] == [[0], [1]]
    assert [rows.tolist() for rows in micro_batches(batch, 16)] == [[0, 1]]


@pytest.mark.parametrize("budget", [9, 20, 33, 1000])
def test_every_row_is_in_one_micro_batch_whatever_the_budget(budget):
    batch = random_batch(num_groups=7, group_size=3)
    chunks = micro_batches(batch, budget)
    assert sorted(row for rows in chunks for row in rows.tolist()) == list(range(21))


def test_a_budget_below_one_sequence_is_refused():
    batch = random_batch()
    with pytest.raises(ConfigError, match="micro_batch_tokens=3 is below one sequence"):
        micro_batches(batch, 3)


def test_selected_rows_keep_the_given_order():
    batch = random_batch(num_groups=4, group_size=1)
    assert batch.rows([2, 0]).group_ids.tolist() == [2, 0]
    assert torch.equal(batch.rows(torch.tensor([3])).input_ids[0], batch.input_ids[3])
