from __future__ import annotations

import math
from dataclasses import replace

import numpy
import pytest
import torch
from builders import random_batch, response

from fsdp_async.errors import InputError
from fsdp_async.rewards import AnswerMatch
from fsdp_async.types import Prompt, VersionSpan

WHOLE = response("p", 2, [7, 8, 9])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, r"'p'\[2\]: temperature=0\.0 must be above 0 and finite"),
        ({"temperature": -1.0}, r"temperature=-1\.0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": None}, "temperature=None"),
        ({"token_ids": (-1, 8, 9)}, r"'p'\[2\]: token_ids must be plain integers of at least 0"),
        ({"token_ids": (7.0, 8.0, 9.0)}, "token_ids must be plain integers"),
        ({"token_ids": (True, 8, 9)}, "token_ids must be plain integers"),
        ({"token_ids": torch.tensor([7, 8, 9])}, r"token_ids must be plain integers .*tolist"),
        ({"token_ids": tuple(numpy.arange(3))}, r"token_ids must be plain integers .*tolist"),
        ({"response_mask": (1, 0, 1)}, "response_mask must hold True and False only"),
        ({"rollout_log_prob": torch.zeros(3)}, "rollout_log_prob must hold plain numbers"),
        ({"reward": math.nan}, "reward=nan must be a finite number"),
        ({"reward": "1"}, "reward='1' must be a finite number"),
        ({"sample_index": -1}, "sample_index must be an integer of at least 0"),
    ],
)
def test_a_response_that_no_policy_sampled_is_refused_where_it_is_made(change, message):
    with pytest.raises(InputError, match=message):
        replace(WHOLE, **change)


def test_a_log_prob_that_is_not_finite_is_the_corrections_to_judge():
    assert math.isnan(replace(WHOLE, rollout_log_prob=(math.nan, -1.0, -math.inf)).rollout_log_prob[0])


def test_a_response_made_of_lists_equals_one_made_of_tuples():
    names = ("token_ids", "rollout_log_prob", "response_mask", "version_spans")
    made = replace(WHOLE, **{name: list(getattr(WHOLE, name)) for name in names})
    assert made == WHOLE
    prompt = Prompt("p", [5, 6], "test", {"answer_ids": [7, 8, 9]})
    assert prompt == Prompt("p", (5, 6), "test", {"answer_ids": [7, 8, 9]})
    assert AnswerMatch(graded=False).score(prompt, made) == 1.0


@pytest.mark.parametrize("tokens", [(1.5,), (-1,), ("a",)])
def test_a_prompt_is_made_of_token_ids(tokens):
    with pytest.raises(InputError, match="prompt 'p': token_ids must be plain integers"):
        Prompt("p", tokens, "test")


@pytest.mark.parametrize(
    "span", [(1, 2, 2), (1, -1, 2), (-1, 0, 1), (1.5, 0, 1), (True, 0, 1), ("1", 0, 1), (0, 0, 1.5)]
)
def test_a_span_is_made_of_integers_in_order(span):
    with pytest.raises(InputError, match="is no span"):
        VersionSpan(*span)


@pytest.mark.parametrize(
    "index",
    [torch.tensor([True, False, True]), [False, True, True], torch.tensor([0.0, 1.0]), [1.0], torch.tensor(1)],
)
def test_rows_are_selected_by_integers_only(index):
    batch = random_batch(num_groups=3, group_size=1)
    with pytest.raises(InputError, match=r"rows are selected by integers \[b\]"):
        batch.rows(index)
