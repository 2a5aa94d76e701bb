from __future__ import annotations

import dataclasses

import pytest
import torch
from builders import TINY, VOCAB, random_batch, tiny_model

from fsdp_async.errors import ConfigError
from fsdp_async.modeling import (
    ModelConfig,
    OptimConfig,
    build_model,
    build_optimizer,
    build_schedule,
    ensure_process_group,
    response_log_prob,
)


def test_the_default_policy_has_about_six_hundred_thousand_parameters_with_tied_embeddings():
    model = build_model(ModelConfig(), vocab_size=48, seed=0)
    assert sum(p.numel() for p in model.parameters()) == 597_376
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_weights_are_a_function_of_the_seed_and_leave_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = tiny_model(seed=1), tiny_model(seed=1), tiny_model(seed=2)
    assert torch.equal(torch.rand(3), expected)
    pairs = list(zip(first.parameters(), again.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not all(torch.equal(a, c) for a, _, c in pairs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dropout": 0.1}, r"model\.dropout=0\.1: must be 0"),
        ({"num_layers": 0}, r"model\.num_layers=0"),
        ({"head_dim": 7}, r"model\.head_dim=7: rotary"),
        ({"num_heads": 3, "num_kv_heads": 2}, r"num_heads=3 is not divisible by model\.num_kv_heads=2"),
    ],
)
def test_sizes_that_cannot_be_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(TINY, **change)


@pytest.mark.parametrize("change", [{"lr": 0.0}, {"beta2": 1.0}, {"eps": 0.0}, {"weight_decay": -1.0}])
def test_optimizer_settings_that_cannot_be_are_refused(change):
    with pytest.raises(ConfigError, match=rf"optim\.{next(iter(change))}"):
        OptimConfig(**change)


def _rates(num, **settings):
    model = torch.nn.Linear(1, 1)
    config = OptimConfig(lr=1.0, **settings)
    optimizer = build_optimizer(model, config)
    schedule = build_schedule(optimizer, config, total_steps=num)
    rates = []
    for _ in range(num):
        rates.append(optimizer.param_groups[0]["lr"])
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1, 1, 1, 1]),
        ({"warmup_steps": 1}, [1 / 2, 1, 1, 1]),
        ({"warmup_steps": 3}, [1 / 4, 2 / 4, 3 / 4, 1]),
        ({"schedule": "linear"}, [1, 3 / 4, 2 / 4, 1 / 4]),
        ({"schedule": "linear", "warmup_steps": 2}, [1 / 3, 2 / 3, 1, 1 / 2]),
        ({"schedule": "cosine"}, [1, (1 + 0.5**0.5) / 2, 1 / 2, (1 - 0.5**0.5) / 2]),
    ],
)
def test_the_learning_rate_follows_its_schedule_and_is_never_zero(settings, expected):
    rates = _rates(4, **settings)
    assert rates == pytest.approx(expected, rel=1e-12)
    assert min(rates) > 0


@pytest.mark.parametrize(("warmup", "total"), [(4, 4), (9, 4), (0, 0)])
def test_a_schedule_that_does_not_fit_the_run_is_refused(warmup, total):
    config = OptimConfig(warmup_steps=warmup)
    with pytest.raises(ConfigError, match=r"warmup_steps=\d is not below the 4|total_steps=0"):
        build_schedule(build_optimizer(torch.nn.Linear(1, 1), config), config, total_steps=total)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_response_log_probs_are_those_of_a_forward_of_each_row_alone(temperature):
    model = tiny_model().eval()
    batch = random_batch(num_groups=4)
    batch = dataclasses.replace(batch, temperature=torch.full_like(batch.temperature, temperature))
    with torch.no_grad():
        found = response_log_prob(model, batch)
    prompt_len = batch.input_ids.shape[1] - batch.num_response_positions
    for row in range(batch.num_rows):
        ids = batch.input_ids[row][batch.attention_mask[row].bool()]
        with torch.no_grad():
            full = (model(input_ids=ids[None]).logits[0].double() / temperature).log_softmax(-1)
        num_prompt = int(batch.attention_mask[row, :prompt_len].sum())
        expected = full[num_prompt - 1 : -1].gather(1, ids[num_prompt:, None]).squeeze(1)
        # float32 attention over another padding
        torch.testing.assert_close(found[row, : len(expected)].double(), expected, rtol=0, atol=2e-6)


def test_a_group_of_one_is_started_only_where_there_is_none(single_rank):
    assert ensure_process_group() is False


def test_the_vocabulary_is_that_of_the_task():
    assert build_model(TINY, vocab_size=VOCAB, seed=0).lm_head.weight.shape[0] == VOCAB
