"""The state cache on a plain module: versions are exact, and nothing a visit does stays. Ranks: `distributed/`."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from cache_models import (
    WIDTH,
    bits,
    counted_copies,
    data,
    evaluate,
    frozen_copy,
    output_at,
    plain,
    same,
    train,
    watched,
)
from torch import nn

from fsdp_async.arena import Arena
from fsdp_async.errors import (
    StateMismatchError,
)
from fsdp_async.state_cache import StateCache

X = data(77)


# --- a version is a copy, and exactly the weights it was taken from ------------------------------------------


def test_a_version_computes_what_the_model_computed_when_it_was_taken():
    model = plain()
    cache = StateCache(model)
    oracles = {}
    for version in range(3):
        cache.snapshot(version)
        oracles[version] = frozen_copy(model)
        train(model, steps=1)
    live = frozen_copy(model)
    for version in (1, 0, 2, 1):
        assert torch.equal(output_at(cache, version), evaluate(oracles[version], X))
        assert same(bits(model), bits(live))


def test_a_snapshot_does_not_follow_the_live_weights_and_restore_brings_them_back():
    model = plain()
    cache = StateCache(model)
    before = bits(model)
    cache.snapshot(1)
    train(model, steps=1)
    assert not same(bits(model), before)
    cache.restore(1)
    assert same(bits(model), before)
    train(model, steps=1)
    cache.restore(1)
    assert same(bits(model), before), "restoring must copy, too: the version stays what it was"


def test_visits_at_every_point_of_training_change_no_bit_of_it():
    quiet, model = plain(), plain()
    expected = train(quiet, steps=8)
    cache = StateCache(model)
    cache.snapshot(1)
    output = evaluate(frozen_copy(model), X)
    moments = []

    def between(moment, step):
        moments.append(moment)
        assert torch.equal(output_at(cache, 1), output)

    losses = train(model, steps=8, between=between)
    assert set(moments) == {"before forward", "before backward", "before step", "after step"}
    assert [loss.item() for loss in losses] == [loss.item() for loss in expected]
    assert same(bits(model), bits(quiet))


def test_the_optimizer_still_steps_the_model_after_visits_and_restores():
    """Giving back values in other Parameter objects would orphan the optimizer: the model would stop moving."""
    model, optimizer, cache = watched()
    objects = [id(p) for p in model.parameters()]
    cache.snapshot(0)
    train(model, steps=1, optimizer=optimizer)
    output_at(cache, 0)
    cache.restore(0)
    at_rest = bits(model)
    train(model, steps=1, optimizer=optimizer)
    assert [id(p) for p in model.parameters()] == objects
    assert not torch.equal(at_rest["embed.weight"], model.embed.weight)


def test_a_backward_through_weights_that_restore_replaced_is_refused_by_autograd():
    model = plain()
    cache = StateCache(model)
    cache.snapshot(0)
    train(model, steps=1)
    loss = model(X).sum()
    cache.restore(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_weights_cast_by_autocast_do_not_survive_a_visit():
    """Autocast caches casts of the weights for the length of its context, also under no_grad."""
    model = nn.Linear(4, 4)
    x = torch.ones(2, 4)
    cache = StateCache(model)
    cache.snapshot(0)
    with torch.autocast("cpu", torch.bfloat16):
        old = model(x).detach().clone()
    with torch.no_grad():
        model.weight.mul_(3)
    with torch.autocast("cpu", torch.bfloat16):
        new = model(x).detach().clone()
        with cache.at(0):
            assert torch.equal(model(x), old)
        assert torch.equal(model(x).detach(), new)
        cache.restore(0)
        assert torch.equal(model(x).detach(), old)


def test_a_body_runs_without_grad_and_grad_mode_comes_back():
    model = plain()
    cache = StateCache(model)
    cache.snapshot(0)
    with cache.at(0):
        assert not torch.is_grad_enabled()
        assert not model(X).requires_grad
    assert torch.is_grad_enabled()


# --- buffers, flags, random state -----------------------------------------------------------------------------


def test_a_visit_shows_the_buffers_of_its_version_and_gives_the_live_ones_back():
    model = plain()
    cache = StateCache(model)
    cache.snapshot(0)
    stored = bits(model)
    train(model, steps=2)
    live, objects = bits(model), dict(model.named_buffers())
    for name in ("blocks.0.router_bias", "blocks.0.frequency", "blocks.1.norm.running_mean"):
        assert not torch.equal(stored[name], live[name]), "the scenario needs buffers that training changes"
    with cache.at(0):
        assert same(bits(model), stored)
        model.train()
        model(X)  # changes buffers in place and by assignment
        assert not same(bits(model), stored)
    assert same(bits(model), live)
    assert all(buffer is objects[name] for name, buffer in model.named_buffers())
    with cache.at(0):
        assert same(bits(model), stored), "a train-mode forward inside a visit must not write to the version"


def test_a_visit_to_the_live_version_shows_its_buffers_too(monkeypatch):
    copies = counted_copies(monkeypatch)
    model, _, cache = watched()
    cache.snapshot(0)
    stored = bits(model)
    del copies[:]
    model(X)  # running statistics move without an optimizer step
    live = bits(model)
    assert cache.live_version == 0
    with cache.at(0):
        assert same(bits(model), stored)
    assert same(bits(model), live)
    assert copies == [], "weights that are live already are not copied"
    with pytest.raises(ZeroDivisionError), cache.at(0):
        raise ZeroDivisionError
    assert same(bits(model), live)


def test_restore_brings_buffers_back_also_those_that_cannot_be_written_in_place():
    model = plain()
    cache = StateCache(model)
    cache.snapshot(0)
    before = bits(model)
    train(model, steps=2)
    model.blocks[0].expanded = torch.full((1,), 2.0).expand(WIDTH)
    with cache.at(0):
        assert same(bits(model), before)
    assert model.blocks[0].expanded.tolist() == [2.0] * WIDTH
    cache.restore(0)
    assert same(bits(model), before)


def test_a_buffer_under_two_names_stays_shared():
    model = plain()
    model.blocks[1].router_bias = model.blocks[0].router_bias
    cache = StateCache(model)
    cache.snapshot(0)
    model.blocks[0].router_bias += 1
    with cache.at(0):
        assert model.blocks[1].router_bias is model.blocks[0].router_bias
        assert model.blocks[1].router_bias.sum() == 0
    assert model.blocks[1].router_bias is model.blocks[0].router_bias
    assert model.blocks[1].router_bias.tolist() == [1.0] * WIDTH


@pytest.mark.parametrize("raises", [False, True])
def test_a_visit_leaves_train_and_eval_flags_and_random_state(raises):
    model = plain()
    cache = StateCache(model)
    cache.snapshot(0)
    model.blocks[1].eval()
    flags = [module.training for module in model.modules()]

    def draws():
        states = torch.get_rng_state(), np.random.get_state(), random.getstate()
        values = torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()
        torch.set_rng_state(states[0]), np.random.set_state(states[1]), random.setstate(states[2])
        return values

    expected = draws()
    try:
        with cache.at(0):
            model.eval()
            torch.rand(100), np.random.rand(7), random.random(), torch.manual_seed(5)
            if raises:
                raise LookupError
    except LookupError:
        assert raises
    assert draws() == expected
    assert [module.training for module in model.modules()] == flags


# --- whatever is raised ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_exception_in_the_body_passes_and_leaves_the_live_weights(error):
    model = plain()
    cache = StateCache(model)
    cache.snapshot(0)
    train(model, steps=1)
    before = bits(model)
    with pytest.raises(error), cache.at(0):
        raise error
    assert same(bits(model), before)
    assert not torch.equal(output_at(cache, 0), evaluate(model, X)), "the cache is usable afterwards"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("call", ["park", "show", "first write of many", "put back"])
def test_an_exception_while_entering_or_leaving_leaves_the_live_weights(monkeypatch, error, call):
    """One failing copy at each stage: into the parking arena, out of the version, half way, on the way back."""
    model = plain()
    cache = StateCache(model)
    cache.snapshot(0)
    train(model, steps=1)
    output_at(cache, 0)
    before = bits(model)
    original, armed = {"from": Arena.copy_from, "to": Arena.copy_to}, [True]

    def fail_once(method, when):
        def patched(self, tensors, start=0):
            if armed[0] and tensors and start == 0 and when():
                armed[0] = False
                if call == "first write of many":
                    original[method](self, tensors[:1], start)
                raise error("in the middle")
            original[method](self, tensors, start)

        return patched

    inside = []
    monkeypatch.setattr(Arena, "copy_from", fail_once("from", lambda: call == "park"))
    monkeypatch.setattr(Arena, "copy_to", fail_once("to", lambda: (call == "put back") == bool(inside)))
    with pytest.raises(error, match="middle"), cache.at(0):
        inside.append(True)
    assert not armed[0]
    assert same(bits(model), before)
    assert bool(inside) == (call == "put back")
    assert not torch.equal(output_at(cache, 0), evaluate(model, X))


def test_an_interrupted_restore_or_overwrite_is_finished_before_it_is_raised(monkeypatch):
    model = plain()
    cache = StateCache(model)
    cache.snapshot(0)
    stored = bits(model)
    train(model, steps=1)
    live = bits(model)
    for method, use, expected in (
        ("copy_to", lambda: cache.restore(0), stored),
        ("copy_from", lambda: cache.snapshot(0, overwrite=True), live),
    ):
        original, armed = getattr(Arena, method), [True]

        def patched(self, tensors, start=0, original=original, armed=armed):
            if armed[0] and start == 0:
                armed[0] = False
                original(self, tensors[:1], start)
                raise KeyboardInterrupt
            original(self, tensors, start)

        with monkeypatch.context() as patch:
            patch.setattr(Arena, method, patched)
            with pytest.raises(KeyboardInterrupt):
                use()
        if method == "copy_to":
            assert same(bits(model), expected)
            train(model, steps=1)
            live.clear()
            live.update(bits(model))
    with cache.at(0):
        assert same(bits(model), live)


def test_a_body_that_replaces_parameters_is_told_and_the_original_objects_hold_the_live_values():
    model = nn.Linear(3, 2)
    cache = StateCache(model)
    cache.snapshot(0)
    with torch.no_grad():
        model.weight.mul_(2)
    original, before = model.weight, model.weight.detach().clone()
    with pytest.raises(StateMismatchError, match="replaced parameter 'weight'"), cache.at(0):
        model.weight = nn.Parameter(torch.zeros(2, 3))
    assert torch.equal(original, before)


@pytest.mark.parametrize("convert", [lambda m: m.double(), lambda m: m.double().float()])
def test_a_body_that_converts_the_model_gets_its_own_storage_back(convert):
    """Conversion gives the same Parameter objects other storage, which the optimizer would then step."""
    model = plain()
    cache = StateCache(model)
    cache.snapshot(0)
    train(model, steps=1)
    before, addresses = bits(model), [p.data_ptr() for p in model.parameters()]
    with cache.at(0):
        convert(model)
    assert same(bits(model), before)
    assert [p.data_ptr() for p in model.parameters()] == addresses
