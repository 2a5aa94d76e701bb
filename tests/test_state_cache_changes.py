"""What changes behind a cache's back, and states that come from elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD

from fsdp_async.errors import StateInUseError, VersionExistsError
from fsdp_async.state_cache import StateCache


def test_a_parameter_that_was_replaced_is_not_taken_for_the_live_version():
    model = nn.Linear(2, 2)
    with StateCache(model) as cache:
        cache.watch(SGD(model.parameters(), lr=0.1))
        cache.snapshot(0)
        expected = model.weight.detach().clone()
        model.weight = nn.Parameter(torch.zeros(2, 2))
        with cache.at(0):
            assert torch.equal(model.weight, expected)
        assert torch.equal(model.weight, torch.zeros(2, 2))


def test_a_lazy_version_whose_parameters_were_replaced_is_given_up_by_name():
    model = nn.Linear(2, 2)
    with StateCache(model) as cache:
        cache.watch(SGD(model.parameters(), lr=0.1))
        cache.snapshot(0, lazy=True)
        model.weight = nn.Parameter(torch.zeros(2, 2))
        with pytest.raises(StateInUseError, match=r"'weight' was replaced .* \[0\] .* they were dropped"):
            cache.materialize()
        assert cache.versions == []


def test_two_caches_of_one_model_see_each_others_visits_and_restores():
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    with StateCache(model) as first, StateCache(model) as second:
        first.watch(optimizer)
        second.watch(optimizer)
        second.snapshot("ref")
        reference = model.weight.detach().clone()
        with torch.no_grad():
            model.weight.add_(1.0)
        first.mark_live_changed()
        second.mark_live_changed()
        first.snapshot(1, lazy=True)
        newer = model.weight.detach().clone()
        with second.at("ref"):
            for refused in (lambda: first.snapshot(2), lambda: first.restore(1), lambda: _visit_to(first, 1)):
                with pytest.raises(StateInUseError, match="inside a visit to state 'ref'"):
                    refused()
        second.restore("ref")
        assert torch.equal(model.weight, reference)
        assert first.live_version is None
        with first.at(1):
            assert torch.equal(model.weight, newer)


def _visit_to(cache, version):
    with cache.at(version):
        raise AssertionError("entered")


def _receive_half(cache):
    with cache.receive([3, "ref"]) as tensors:
        tensors[3]["weight"].zero_()
        raise KeyError("half way")


def test_states_are_received_whole_or_not_at_all():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with StateCache(model) as cache, StateCache(other) as source:
        source.snapshot(3)
        source.snapshot("ref")
        with pytest.raises(KeyError, match="half way"):
            _receive_half(cache)
        assert (cache.versions, cache.names) == ([], [])
        with cache.receive([3, "ref"]) as tensors:
            for key, states in source.tensors().items():
                for name, tensor in states.items():
                    tensors[key][name].copy_(tensor)
        assert (cache.versions, cache.names) == ([3], ["ref"])
        with cache.at(3):
            assert torch.equal(model.weight, other.weight)
        with pytest.raises(VersionExistsError), cache.receive([4, 3]):
            raise AssertionError("entered")
        assert cache.versions == [3]
