"""What is read of retained states, on a plain module. Ranks: `distributed/`."""

from __future__ import annotations

import random

import pytest
import torch
from cache_models import bits, data, evaluate, plain, same, train, watched
from torch import nn

from fsdp_async.contents import fingerprint_of
from fsdp_async.errors import StateInUseError, StateMismatchError, UnknownVersionError
from fsdp_async.state_cache import StateCache


def distinct(model):
    """Every parameter and buffer once, under its first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def test_the_fingerprint_is_that_of_parameters_and_buffers_when_the_version_was_taken():
    model = plain()
    cache = StateCache(model)
    expected = fingerprint_of(distinct(model))
    cache.snapshot(1)
    assert cache.fingerprint(1) == cache.fingerprint("live") == expected
    train(model, steps=1)
    assert cache.fingerprint(1) == expected
    assert cache.fingerprint("live") == fingerprint_of(distinct(model)) != expected
    assert len(str(expected)) == 64


def test_the_same_weights_in_another_model_have_the_same_fingerprint():
    first, second = StateCache(plain(seed=5)), StateCache(plain(seed=5))
    first.snapshot(1), second.snapshot("reference")
    assert first.fingerprint(1) == second.fingerprint("reference")
    assert StateCache(plain(seed=6)).fingerprint("live") != first.fingerprint(1)


def test_verify_names_the_tensor_of_which_a_bit_changed():
    model = plain()
    cache = StateCache(model)
    cache.snapshot(1)
    expected = cache.fingerprint(1)
    cache.verify(1, expected)
    cache.verify(1, str(expected))
    cache.tensors()[1]["blocks.0.up.weight"].view(torch.uint8)[3, 2] ^= 4
    with pytest.raises(StateMismatchError, match=r"changed is blocks\.0\.up\.weight\."):
        cache.verify(1, expected)
    with pytest.raises(StateMismatchError, match="some tensor"):
        cache.verify(1, str(expected))


def test_the_difference_of_two_versions_is_that_of_their_weights():
    model = plain()
    cache = StateCache(model)
    cache.snapshot(1)
    with torch.no_grad():
        model.blocks[0].up.weight[2, 3] += 0.25
        model.scale[0, 1] -= 2.0
    cache.snapshot(2)
    for difference in (cache.diff(1, 2), cache.diff(1)):
        found = [(row.name, row.num_different) for row in difference.changed]
        assert found == [("scale", 1), ("blocks.0.up.weight", 1)]
        assert difference.changed[0].max_abs == pytest.approx(2.0)
    assert not cache.diff(2, "live")


def test_a_lazy_version_is_read_as_it_was_and_is_complete_afterwards():
    model, optimizer, cache = watched()
    cache.snapshot(1, lazy=True)
    expected = fingerprint_of(distinct(model))
    assert cache.fingerprint(1) == expected
    assert "pending []" in cache.describe()
    model(data(1)).sum().backward()
    optimizer.step()
    assert cache.fingerprint(1) == expected
    assert cache.diff(1).changed


def test_reading_leaves_weights_flags_and_random_state_alone():
    model = plain()
    model.blocks[1].eval()
    cache = StateCache(model)
    cache.snapshot(1)
    train_flags = [module.training for module in model.modules()]
    before, torch_state, python_state = bits(model), torch.get_rng_state(), random.getstate()
    cache.fingerprint(1), cache.fingerprint("live"), cache.diff(1)
    assert same(bits(model), before)
    assert [module.training for module in model.modules()] == train_flags
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state


def test_reading_between_forward_and_backward_does_not_disturb_the_gradient():
    model, quiet = plain(), plain()
    cache = StateCache(model)
    cache.snapshot(1)
    loss = model(data(2)).square().mean()
    cache.fingerprint("live"), cache.diff(1)
    loss.backward()
    quiet(data(2)).square().mean().backward()
    assert torch.equal(model.scale.grad, quiet.scale.grad)


def test_what_is_not_retained_or_not_readable_now_is_refused():
    model = plain()
    cache = StateCache(model)
    cache.snapshot(1)
    with pytest.raises(UnknownVersionError, match=r"version 7 is not retained; retained are versions \[1\]"):
        cache.fingerprint(7)
    with pytest.raises(UnknownVersionError, match="version 8"):
        cache.diff(1, 8)
    with cache.at(1) as visited:
        evaluate(visited, data(1))
        for read in (lambda: cache.fingerprint(1), lambda: cache.diff(1), cache.tensors):
            with pytest.raises(StateInUseError, match="inside a visit"):
                read()


def test_a_version_of_another_shape_is_refused_by_name():
    model = nn.Linear(2, 3)
    cache = StateCache(model)
    cache.snapshot(1)
    model.weight = nn.Parameter(torch.zeros(4, 2))
    with pytest.raises(StateMismatchError, match="weight"):
        cache.fingerprint(1)


def test_a_notebook_shows_a_table_of_versions_with_escaped_names():
    model, optimizer, cache = watched()
    assert "no version is retained" in cache._repr_html_()
    cache.snapshot(3)
    model(data(1)).sum().backward()
    optimizer.step()
    cache.snapshot("<b>&", lazy=True)
    table = cache._repr_html_()
    assert "<td>3</td><td>copied</td>" in table
    assert "&lt;b&gt;&amp;" in table
    assert "<b>" not in table
    assert "those of the live model, copied before they change" in table
    cache.snapshot(4)
    assert "<td>4</td><td>copied, equal to the live ones</td>" in cache._repr_html_()
    assert repr(cache) == "<StateCache: versions [3, 4], names ['<b>&']>"
