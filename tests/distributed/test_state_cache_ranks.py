"""The state cache on 1, 2 and 4 ranks: one spawn per world size serves all scenarios, also `cache_scenarios`."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from cache_models import bits, output_at, plain, same, sharded
from cache_scenarios import SHARDING_SCENARIOS
from harness import run_distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_async.errors import RankDisagreementError, UnknownVersionError, VersionExistsError
from fsdp_async.state_cache import CacheConfig, StateCache


def ranks_that_ask_for_different_versions_all_get_an_error(rank, world_size):
    model = sharded(world_size)
    cache = StateCache(model, CacheConfig(agreement_timeout_s=30))
    for version in (1, 2):
        cache.snapshot(version)
    before = bits(model)
    asked = 1 + rank % 2
    if world_size == 1:
        output_at(cache, asked)
        return
    with pytest.raises(RankDisagreementError, match=r"rank 0: at\(1\); rank 1: at\(2\)"):
        output_at(cache, asked)
    assert same(bits(model), before)
    with pytest.raises(RankDisagreementError, match="rank 1: restore"):
        cache.restore(1) if rank == 1 else output_at(cache, 1)
    first = output_at(cache, 1)  # nothing was changed, so the ranks may go on together
    assert torch.equal(first, output_at(cache, 2))
    cache.close()


def a_failure_of_one_rank_is_an_error_on_all(rank, world_size):
    model = sharded(world_size)
    cache = StateCache(model)
    last = world_size - 1
    cache.snapshot(1)
    if rank == last:
        cache.drop(1)
    if rank == last:
        with pytest.raises(UnknownVersionError, match=r"1.*retained are versions \[\]"):
            output_at(cache, 1)
    else:
        with pytest.raises(RankDisagreementError, match=f"rank {last}: UnknownVersionError"):
            output_at(cache, 1)
    if world_size == 1:
        return
    # The other way round: only the last rank could take it.
    allocated = cache.nbytes
    with pytest.raises(RankDisagreementError if rank == last else VersionExistsError):
        cache.snapshot(1)
    assert cache.nbytes == allocated
    assert (1 in cache) == (rank != last), "a snapshot that failed on one rank must not exist on another"
    cache.close()
    assert cache.nbytes == 0, "what was taken for the snapshot must have been given back"


def _raise_on_rank_0(rank):
    if rank == 0:
        raise LookupError("only here")


def a_rank_whose_body_raised_alone_is_noticed_by_the_others(rank, world_size):
    if world_size == 1:
        return
    model = sharded(world_size)
    cache = StateCache(model, CacheConfig(agreement_timeout_s=30))
    cache.snapshot(1)
    before = bits(model)
    with pytest.raises(LookupError if rank == 0 else RankDisagreementError) as caught, cache.at(1):
        _raise_on_rank_0(rank)
    if rank == 0:  # what it does next meets the others, who are leaving the visit
        with pytest.raises(RankDisagreementError) as caught:
            output_at(cache, 1)
    assert "rank 0: at(1); rank 1: leave at(1)" in str(caught.value)
    assert same(bits(model), before)
    cache.close()


def the_cache_shares_a_cpu_group_of_its_ranks(rank, world_size):
    cache = StateCache(sharded(world_size), process_group=dist.group.WORLD)
    assert (cache.process_group is None) == (world_size == 1)
    if cache.process_group is not None:
        assert dist.get_process_group_ranks(cache.process_group) == list(range(world_size))
        assert cache.process_group is not dist.group.WORLD
    assert str(list(range(world_size))) in cache.describe() or world_size == 1
    cache.close()


def ranks_that_visit_different_caches_all_get_an_error(rank, world_size):
    if world_size == 1:
        return
    models = [sharded(world_size), sharded(world_size)]
    caches = [StateCache(model, CacheConfig(agreement_timeout_s=30)) for model in models]
    for cache in caches:
        cache.snapshot(1)
    before = [bits(model) for model in models]
    with pytest.raises(RankDisagreementError, match=r"rank 0: at\(1\) of cache \d+; rank 1: at\(1\) of cache \d+"):
        output_at(caches[min(rank, 1)], 1)
    assert all(same(bits(model), bits_before) for model, bits_before in zip(models, before, strict=True))
    for cache in caches:
        output_at(cache, 1)
        cache.close()


def a_part_of_the_ranks_may_have_a_cache_of_its_own(rank, world_size):
    """Ranks that hold no part of the model construct nothing and are not waited for."""
    mesh = init_device_mesh("cpu", (world_size // 2 or 1, min(world_size, 2)), mesh_dim_names=("pair", "shard"))
    model = plain()
    fully_shard(model, mesh=mesh["shard"])
    if rank < 2:
        for _ in range(2):  # names of closed groups are used again
            cache = StateCache(model, CacheConfig(agreement_timeout_s=20))
            cache.snapshot(0)
            output_at(cache, 0)
            cache.close()


def a_rank_that_visits_alone_gives_up_after_the_timeout(rank, world_size):
    """Last, because the cache's group is broken afterwards."""
    if world_size == 1:
        return
    model = sharded(world_size)
    cache = StateCache(model, CacheConfig(agreement_timeout_s=1))
    cache.snapshot(1)
    dist.barrier()
    if rank == 0:
        before, begun = bits(model), time.monotonic()
        with pytest.raises(RankDisagreementError, match=r"rank 0 asked for at\(1\).*ranks \[1.*1 s"):
            output_at(cache, 1)
        assert time.monotonic() - begun < 20
        assert same(bits(model), before)
        with pytest.raises(RankDisagreementError, match="earlier operation"):
            cache.restore(1)
    dist.barrier()


SCENARIOS = [
    *SHARDING_SCENARIOS,
    ranks_that_ask_for_different_versions_all_get_an_error,
    a_failure_of_one_rank_is_an_error_on_all,
    a_rank_whose_body_raised_alone_is_noticed_by_the_others,
    the_cache_shares_a_cpu_group_of_its_ranks,
    ranks_that_visit_different_caches_all_get_an_error,
    a_part_of_the_ranks_may_have_a_cache_of_its_own,
    a_rank_that_visits_alone_gives_up_after_the_timeout,
]


def _run_all(rank, world_size):
    """The names of the scenarios, as they pass; the first failure ends the ranks, since peers would only hang."""
    passed = []
    for scenario in SCENARIOS:
        try:
            scenario(rank, world_size)
        except BaseException as error:
            raise AssertionError(f"scenario {scenario.__name__} failed; passed: {passed}") from error
        passed.append(scenario.__name__)
    return passed


@pytest.fixture(scope="module", params=[1, 2, 4], ids=lambda n: f"ranks_{n}")
def passed(request):
    return run_distributed(_run_all, request.param, timeout_s=240)


@pytest.mark.parametrize("scenario", [scenario.__name__ for scenario in SCENARIOS])
def test_on_every_rank(passed, scenario):
    assert all(scenario in names for names in passed)
