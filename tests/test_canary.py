from __future__ import annotations

import dataclasses

import pytest
import torch
from builders import random_batch

from fsdp_async.canary import NUM_FIRST_ROWS, Canary
from fsdp_async.errors import CanaryError, NonFiniteError


def test_each_version_is_measured_once_on_its_own_tokens():
    batch = random_batch(versions=(1, 2))
    behaviour = torch.where(batch.versions == 2, batch.rollout_log_prob + 0.25, batch.rollout_log_prob - 0.125)
    canary = Canary(0.5)
    assert canary.check(batch, behaviour, engine="engine-0") == {1: 0.125, 2: 0.25}
    assert canary.unseen(batch) == []
    assert canary.check(batch, behaviour + 9, engine="engine-0") == {}


def test_wrong_weights_stop_the_run_naming_version_engine_and_gap():
    batch = random_batch(versions=(4,))
    with pytest.raises(CanaryError, match=r"version 4, engine-7: .* 66 nats .*bound 0\.1"):
        Canary(0.1).check(batch, batch.rollout_log_prob + 66, engine="engine-7")


def test_a_version_that_failed_is_still_unseen():
    batch = random_batch(versions=(4,))
    canary = Canary(0.1)
    with pytest.raises(CanaryError):
        canary.check(batch, batch.rollout_log_prob + 66, engine="e")
    assert canary.unseen(batch) == [4]


def test_a_single_token_without_a_log_prob_does_not_hide_the_others():
    batch = random_batch(versions=(1,))
    behaviour = batch.rollout_log_prob + 0.25
    behaviour[0, 0] = float("nan")
    assert Canary(0.5).check(batch, behaviour, engine="e") == {1: 0.25}


def test_weights_that_are_no_numbers_are_the_trainers_fault_not_the_engines():
    batch = random_batch(versions=(1,))
    with pytest.raises(NonFiniteError, match=r"version 1: the trainer's own log-probs .*lower optim\.lr"):
        Canary(0.5).check(batch, torch.full_like(batch.rollout_log_prob, torch.nan), engine="e")


def test_an_engine_that_states_no_log_prob_at_all_fails():
    batch = random_batch(versions=(1,))
    batch = dataclasses.replace(batch, rollout_log_prob=torch.full_like(batch.rollout_log_prob, torch.nan))
    with pytest.raises(CanaryError, match="nan nats"):
        Canary(0.5).check(batch, torch.zeros_like(batch.rollout_log_prob), engine="e")


def test_the_first_rows_of_each_unseen_version_are_enough_and_those_without_log_probs_come_last():
    batch = random_batch(num_groups=40, versions=(1, 2))
    canary = Canary(0.5)
    holds = {version: (batch.versions == version).any(dim=1).nonzero().squeeze(1).tolist() for version in (1, 2)}
    assert min(map(len, holds.values())) > NUM_FIRST_ROWS
    expected = sorted({*holds[1][:NUM_FIRST_ROWS], *holds[2][:NUM_FIRST_ROWS]})
    assert canary.first_rows(batch).tolist() == expected
    # The engine could not state the log-probs of the first row.
    batch.rollout_log_prob[holds[1][0]] = float("-inf")
    assert holds[1][NUM_FIRST_ROWS] in canary.first_rows(batch).tolist()
    batch.rollout_log_prob[:] = float("-inf")
    assert canary.first_rows(batch).tolist() == expected
    canary.check(one_version := random_batch(versions=(1,)), one_version.rollout_log_prob, engine="e")
    assert canary.first_rows(random_batch(versions=(1,))).tolist() == []
