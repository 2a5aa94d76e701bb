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


def test_micro_batches_cover_all_rows_in_order_within_the_budget():
    batch = random_batch(num_groups=5, group_size=1)
    width = batch.input_ids.shape[1]
    assert [rows.tolist() for rows in micro_batches(batch, 2 * width + 1)] == [[0, 1], [2, 3], [4]]
    assert [rows.tolist() for rows in micro_batches(batch, None)] == [[0, 1, 2, 3, 4]]
    assert micro_batches(batch.rows([]), None) == []


def test_a_budget_below_one_sequence_is_refused():
    batch = random_batch()
    with pytest.raises(ConfigError, match="micro_batch_tokens=3 is below one sequence"):
        micro_batches(batch, 3)


def test_selected_rows_keep_the_given_order():
    batch = random_batch(num_groups=4, group_size=1)
    assert batch.rows([2, 0]).group_ids.tolist() == [2, 0]
    assert torch.equal(batch.rows(torch.tensor([3])).input_ids[0], batch.input_ids[3])
