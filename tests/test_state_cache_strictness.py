"""What the state cache refuses: unknown versions, other layouts, models it cannot hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cache_models import (
    WIDTH,
    bits,
    data,
    evaluate,
    output_at,
    plain,
    same,
    train,
)
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_async.errors import (
    InputError,
    StateInUseError,
    StateMismatchError,
    UnknownVersionError,
    UnsupportedModelError,
    VersionExistsError,
)
from fsdp_async.state_cache import StateCache

X = data(77)


# --- strictness -------------------------------------------------------------------------------------------------


def test_an_unknown_version_names_itself_and_what_is_retained():
    model = plain()
    cache = StateCache(model)
    cache.snapshot(1), cache.snapshot(2), cache.snapshot("reference")
    before = bits(model)
    for use in (
        lambda: cache.restore(7),
        lambda: output_at(cache, 7),
        lambda: cache.drop(7),
        lambda: cache.materialize(7),
    ):
        with pytest.raises(UnknownVersionError, match=r"7 is not retained.*\[1, 2\].*reference"):
            use()
    assert same(bits(model), before)


@pytest.mark.parametrize("key", [True, False, -1, 1.0, "", "live", None, (1,), torch.tensor([1, 2])])
def test_what_is_neither_a_version_nor_a_name_is_refused(key):
    cache = StateCache(plain())
    for use in (cache.snapshot, cache.restore, cache.drop, lambda key: cache.at(key).__enter__()):
        with pytest.raises(InputError, match=r"integer >= 0"):
            use(key)
    assert key is None or not isinstance(key, bool | str) or key not in cache


def test_numpy_integers_are_versions():
    cache = StateCache(plain())
    cache.snapshot(np.int64(3))
    assert cache.versions == [3]
    assert 3 in cache
    assert True not in cache


def test_an_existing_version_is_replaced_only_on_request():
    model = plain()
    cache = StateCache(model)
    cache.snapshot(4)
    train(model, steps=1)
    with pytest.raises(VersionExistsError, match=r"version 4.*overwrite=True"):
        cache.snapshot(4)
    assert not torch.equal(output_at(cache, 4), evaluate(model, X))
    allocated = cache.nbytes
    cache.snapshot(4, overwrite=True)
    assert torch.equal(output_at(cache, 4), evaluate(model, X))
    assert cache.nbytes == allocated


def _reshaped(model):
    model.scale = nn.Parameter(torch.ones(1, 1))  # would broadcast in silence


def _retyped(model):
    model.scale = nn.Parameter(torch.ones(1, WIDTH, dtype=torch.float64))


def _removed(model):
    del model.scale


def _added(model):
    model.extra = nn.Parameter(torch.ones(2))


def _untied(model):
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())


def _retied(model):
    model.frozen = model.embed.weight


def _other_buffer(model):
    model.blocks[0].router_bias = torch.zeros(WIDTH + 1)


@pytest.mark.parametrize(
    ("change", "fqn", "message"),
    [
        (_reshaped, "scale", r"expected shape \(1, 6\), found \(1, 1\)"),
        (_retyped, "scale", "expected dtype torch.float32, found torch.float64"),
        (_removed, "scale", "missing"),
        (_added, "extra", "has no parameter 'extra'"),
        (_untied, "head.weight", "expected shared with 'embed.weight', found of its own"),
        (_retied, "embed.weight", "expected of its own, found shared with 'frozen'"),
        (_other_buffer, "blocks.0.router_bias", r"buffer 'blocks.0.router_bias'.*\(6,\), found \(7,\)"),
    ],
)
def test_a_model_of_another_layout_is_refused_before_a_byte_is_written(change, fqn, message):
    model = plain()
    cache = StateCache(model)
    cache.snapshot(3)
    train(model, steps=1)
    change(model)
    before = bits(model)
    for use in (lambda: cache.restore(3), lambda: cache.at(3).__enter__()):
        with pytest.raises(StateMismatchError, match=message) as caught:
            use()
        assert "version 3" in str(caught.value)
        assert fqn in str(caught.value)
        assert same(bits(model), before)


def test_fsdp1_is_refused_with_advice(single_rank):
    model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    with pytest.raises(UnsupportedModelError, match=r"FSDP1.*fully_shard"):
        StateCache(nn.Sequential(model))


def test_models_without_storage_or_made_under_inference_mode_are_refused():
    with pytest.raises(UnsupportedModelError, match=r"'weight'.*meta"):
        StateCache(nn.Linear(2, 2, device="meta"))
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    with pytest.raises(UnsupportedModelError, match="inference"):
        StateCache(model)


def test_nothing_works_under_inference_mode_and_arenas_stay_writable():
    model = plain()
    cache = StateCache(model)
    cache.snapshot(0)
    with torch.inference_mode():
        for use in (lambda: cache.snapshot(1), lambda: cache.restore(0), lambda: cache.at(0).__enter__()):
            with pytest.raises(StateInUseError, match=r"use no_grad"):
                use()
    train(model, steps=1)
    cache.snapshot(0, overwrite=True)
    assert cache.versions == [0]
