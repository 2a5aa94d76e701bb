"""What the cache may cost: budgets, true byte counts, flat memory over hundreds of snapshots."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from cache_models import bits, evaluate, plain, same, train
from torch import nn

from fsdp_async.arena import MAX_FREE_ARENAS, Arena
from fsdp_async.errors import CacheBudgetError, ConfigError
from fsdp_async.state_cache import CacheConfig, StateCache

NUMBERS = 1 << 16


class Big(nn.Module):
    """One parameter of 256 KiB: sizes are round numbers."""

    def __init__(self, numbers=NUMBERS):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numbers))


ONE = 4 * NUMBERS


@pytest.fixture
def allocations(monkeypatch):
    """Sizes of the arenas allocated so far."""
    seen = []
    original = Arena.__init__

    def spy(self, plan, pin=None):
        seen.append(plan.nbytes)
        original(self, plan, pin)

    monkeypatch.setattr(Arena, "__init__", spy)
    return seen


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_versions", 0), ("max_versions", True), ("max_versions", 1.5), ("max_bytes", -1), ("max_bytes", "1"),
     ("pin_memory", "yes"), ("agreement_timeout_s", 0), ("agreement_timeout_s", float("inf")),
     ("agreement_timeout_s", float("nan"))],
)  # fmt: skip
def test_impossible_limits_are_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=f"{field}={value!r}"):
        CacheConfig(**{field: value})


def test_a_version_beyond_the_limit_is_refused_before_a_byte_moves(allocations):
    cache = StateCache(Big(), CacheConfig(max_versions=2))
    cache.snapshot(0), cache.snapshot(1), cache.snapshot("reference")
    before = len(allocations)
    with pytest.raises(CacheBudgetError, match=rf"max_versions=2.*\[0, 1\].*reference.*{3 * ONE} bytes"):
        cache.snapshot(2)
    assert len(allocations) == before
    assert cache.versions == [0, 1]
    cache.snapshot(1, overwrite=True)
    cache.drop(0)
    cache.snapshot(2)
    assert cache.versions == [1, 2]


def test_bytes_beyond_the_limit_are_refused_and_the_limit_bounds_all_that_is_allocated():
    """Room for two versions and what a visit parks."""
    cache = StateCache(Big(), CacheConfig(max_bytes=3 * ONE))
    cache.snapshot(0), cache.snapshot(1)
    with pytest.raises(CacheBudgetError, match=rf"max_bytes={3 * ONE}.*\[0, 1\]"):
        cache.snapshot(2)
    with cache.at(0):
        assert cache.nbytes == 3 * ONE
    cache.snapshot(1, overwrite=True)
    for version in range(2, 20):
        cache.retain([version - 1])
        cache.snapshot(version)
        with cache.at(version):
            assert cache.nbytes <= 3 * ONE
    assert cache.versions == [18, 19]
    with pytest.raises(CacheBudgetError):
        StateCache(Big(), CacheConfig(max_bytes=2 * ONE - 1)).snapshot(0)


def test_a_lazy_snapshot_counts_at_once():
    model = Big()
    cache = StateCache(model, CacheConfig(max_bytes=3 * ONE))
    cache.watch(torch.optim.SGD(model.parameters(), lr=1.0))
    cache.snapshot(0, lazy=True), cache.snapshot(1, lazy=True)
    with pytest.raises(CacheBudgetError):
        cache.snapshot(2, lazy=True)
    cache.drop(0)
    cache.snapshot(2, lazy=True)


def test_replacing_a_version_allocates_nothing_and_a_refused_one_leaves_the_old(allocations):
    model = plain()
    cache = StateCache(model, CacheConfig(max_versions=1))
    cache.snapshot(0)
    before, count = bits(model), len(allocations)
    train(model, steps=1)
    with pytest.raises(CacheBudgetError):
        cache.snapshot(1)
    with cache.at(0):
        assert same(bits(model), before)
    cache.snapshot(0, overwrite=True)
    assert len(allocations) == count + 1, "one for the parking arena of the visit, none for the replacement"


def test_bytes_are_those_of_distinct_tensors_tied_ones_once_buffers_included():
    model = plain()
    distinct = {id(t): t.nbytes for t in [*model.parameters(), *model.buffers()]}
    cache = StateCache(model)
    cache.snapshot(0)
    assert sum(distinct.values()) <= cache.nbytes < sum(distinct.values()) + 64 * len(distinct)
    assert StateCache(Big()).nbytes == 0
    big = StateCache(Big())
    big.snapshot(0)
    assert big.nbytes == ONE


def test_hundreds_of_snapshots_under_retention_keep_memory_flat(allocations):
    """Counted exactly by the allocator; the process is looked at coarsely, since other code allocates too."""
    model = Big(1 << 20)  # 4 MiB: 400 snapshots that leaked would be 1.6 GB
    cache = StateCache(model)
    size, keep = 4 << 20, 3
    peak, resident = 0, []
    for version in range(400):
        cache.snapshot(version)
        cache.retain(range(max(0, version - keep + 1), version + 1))
        if version % 40 == 0:
            with cache.at(max(0, version - 1)):
                pass
            gc.collect()
            resident.append(_resident_bytes())
        peak = max(peak, cache.nbytes)
    assert cache.versions == [397, 398, 399]
    assert peak <= (keep + 1 + 1 + MAX_FREE_ARENAS) * size, "kept, arriving, parked, pool"
    assert len(allocations) <= keep + 1 + 1 + MAX_FREE_ARENAS
    assert resident[-1] - resident[2] < 64 << 20


def _resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_hundreds_of_visits_allocate_one_parking_arena(allocations):
    model = plain()
    cache = StateCache(model)
    cache.snapshot(0), cache.snapshot(1)
    for version in range(300):
        with cache.at(version % 2) as visited:
            if version % 100 == 0:
                evaluate(visited, torch.ones(2, 6))
    assert len(allocations) == 3


def test_pinning_that_fails_gives_pageable_memory_one_warning_and_the_same_results():
    model = plain()
    with pytest.warns(RuntimeWarning, match=r"pin_memory=True.*pageable") as caught:
        pinned = StateCache(model, CacheConfig(pin_memory=True))
    assert len(caught) == 1
    pinned.snapshot(0), pinned.snapshot(1)
    before = bits(model)
    train(model, steps=1)
    with pinned.at(0):
        assert same(bits(model), before)
    assert "pageable" in pinned.describe()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("pin_memory", [None, False])
def test_no_warning_where_nobody_asked_for_pinning(pin_memory):
    StateCache(Big(), CacheConfig(pin_memory=pin_memory)).snapshot(0)
