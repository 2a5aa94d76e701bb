from __future__ import annotations

import pytest

from fsdp_async.config import parse_config
from fsdp_async.plan import effective_plan

TOKEN_TIS = {"level": "token", "mode": "truncate", "upper": 2.0}


def _line(mapping, name):
    lines = effective_plan(parse_config(mapping), num_parameters=1000)
    return next(line for line in lines if line.startswith(name))


def test_a_clip_that_cannot_act_is_said_in_words():
    text = _line({"trainer": {"anchor": "current", "mini_batches": 1}}, "loss")
    assert "CANNOT ACT" in text
    assert "ratio is 1" in text


def test_a_live_anchor_says_from_where_on_the_clip_acts():
    assert "from the second mini-batch on" in _line({"trainer": {"anchor": "current"}}, "loss")


def test_in_a_synchronous_run_the_behaviour_policy_is_the_live_one():
    synchronous = {"anchor": "behaviour", "max_staleness": 0}
    assert "CANNOT ACT" in _line({"trainer": synchronous | {"mini_batches": 1}}, "loss")
    assert "from the second mini-batch on" in _line({"trainer": synchronous}, "loss")
    assert "second mini-batch" not in _line({"trainer": synchronous | {"sync_every": 2}}, "loss")


@pytest.mark.parametrize("anchor", ["behaviour", "bypass"])
def test_an_anchor_at_the_sampling_policy_promises_nothing_about_the_clip(anchor):
    text = _line({"trainer": {"anchor": anchor, "mini_batches": 1}}, "loss")
    assert "CANNOT ACT" not in text
    assert "clipped to [0.8, 1.2]" in text


@pytest.mark.parametrize(
    ("warm_start", "expected"),
    [
        ({}, "100 supervised steps on sort_digits, made once and kept in outputs/warm_start"),
        ({"num_steps": 0}, "RL learns only if some responses are rewarded"),
        ({"path": "mine.safetensors"}, "the weights of mine.safetensors"),
    ],
)
def test_the_policy_that_training_starts_from_is_named(warm_start, expected):
    assert expected in _line({"warm_start": warm_start}, "start")


def test_the_optimizer_says_how_many_steps_its_schedule_is_for():
    optim = {"schedule": "linear", "warmup_steps": 10}
    text = _line({"optim": optim}, "optimizer")
    assert "lr 0.0001 linear after 10 steps of warm-up, over up to 200 steps" in text


def test_an_unset_anchor_is_the_behaviour_policy():
    assert _line({}, "old_log_prob").startswith("old_log_prob (anchor behaviour)")


def test_last_sync_at_every_batch_says_that_it_is_the_live_policy():
    assert "equals anchor `current`" in _line({"trainer": {"anchor": "last_sync"}}, "old_log_prob")
    assert "equals" not in _line({"trainer": {"anchor": "last_sync", "sync_every": 2}}, "old_log_prob")


def test_each_weight_names_its_factor_and_bounds():
    text = _line({"correction": {"mismatch": TOKEN_TIS}}, "correction")
    assert "mismatch pi_b/mu weight: token level, truncate to [-, 2]" in text
    assert "not weighted" in _line({}, "correction")


def test_the_cache_states_the_bytes_it_may_take():
    # max_staleness + 1 versions may be alive at once, plus one parking place: (3 + 1 + 1) * 1000 * 4 bytes.
    assert "20,000 bytes" in _line({"trainer": {"max_staleness": 3}}, "state cache")


@pytest.mark.parametrize(
    ("capacity", "sync_every", "expected"),
    [(32, 1, "0 to 1 versions"), (48, 1, "0 to 2 versions"), (96, 1, "0 to 3 versions"), (96, 2, "0 to 2 versions")],
)
def test_the_staleness_that_can_occur_follows_from_capacity(capacity, sync_every, expected):
    trainer = {"max_staleness": 3, "sync_every": sync_every}
    text = _line({"trainer": trainer, "queue": {"capacity_groups": capacity}}, "staleness")
    assert expected in text
    assert ("for want of queue capacity" in text) == (expected != "0 to 3 versions")


def test_the_synchronous_loop_is_called_by_its_name():
    assert "synchronous loop" in _line({"trainer": {"max_staleness": 0}}, "staleness")


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ({}, "1 for the right answer and its end, else 0"),
        ({"kind": "python", "function": "a:b", "timeout_s": 2, "max_failures": 3, "failure_value": -1},
         "a:b, in a process of its own; a response that it fails on, or takes more than 2 s for, gets -1, and more "
         "than 3 of them end the run"),
    ],
)  # fmt: skip
def test_what_a_response_earns_is_said_in_words(rewards, expected):
    assert _line({"rewards": rewards}, "reward") == f"reward: {expected}"
