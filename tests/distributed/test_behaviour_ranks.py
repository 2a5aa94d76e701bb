"""Behaviour log-probs on several ranks: disjoint rows, different versions, a rank with nothing, uneven shards."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from builders import VOCAB, random_batch, tiny_model
from harness import run_distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_async.behaviour import behaviour_log_probs
from fsdp_async.errors import UnknownVersionError
from fsdp_async.modeling import response_log_prob
from fsdp_async.state_cache import CacheConfig, StateCache

# float32 sums in another order: a sharded model gathers the same numbers, but a batch of other rows may be split
# differently by the matrix library.
TOLERANCE = 2e-6
VERSIONS = (1, 2, 3)


def _rows_of(rank, world_size):
    """Rank 0 holds versions 1 and 2, rank 1 only 2, rank 2 nothing, rank 3 only 3."""
    batch = random_batch(num_groups=8, group_size=1, versions=(1, 2, 2, 3), seed=5)
    wanted = {1: [[1, 2, 3]], 2: [[1, 2], [2, 3]], 4: [[1, 2], [2], [], [3]]}[world_size][rank]
    mine = [r for r in range(8) if int(batch.versions[r].max()) in wanted and (r % 2 == rank % 2 or world_size == 1)]
    return batch, mine


def _weights(version):
    return tiny_model(seed=version).state_dict()


def _oracle(batch):
    """Each row under a fresh unsharded model of its version."""
    result = torch.zeros_like(batch.rollout_log_prob)
    for version in VERSIONS:
        model = tiny_model()
        model.load_state_dict(_weights(version))
        model.eval()
        with torch.no_grad():
            values = response_log_prob(model, batch)
        result = torch.where(batch.versions == version, values, result)
    return result


def _sharded():
    """19 vocabulary rows and 48 features do not divide by 4: shards are uneven."""
    model = tiny_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _set_weights(model, version):
    full = _weights(version)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = torch.distributed.tensor.distribute_tensor(
                full[name], parameter.device_mesh, parameter.placements, src_data_rank=None
            )
            parameter.to_local().copy_(local.to_local())


def _scenarios(rank, world_size):
    model = _sharded()
    cache = StateCache(model, CacheConfig(agreement_timeout_s=30))
    for version in VERSIONS:
        _set_weights(model, version)
        cache.snapshot(version)
    _set_weights(model, 9)
    live = {name: parameter.to_local().clone() for name, parameter in model.named_parameters()}
    batch, mine = _rows_of(rank, world_size)
    width = batch.input_ids.shape[1]
    outcome = {
        "rows": mine,
        "versions": sorted(set(batch.rows(mine).versions[batch.rows(mine).response_mask].tolist())),
    }
    for budget in (None, 2 * width, width):
        outcome[f"log_prob {budget and budget // width}"] = behaviour_log_probs(
            cache, batch.rows(mine), response_log_prob, micro_batch_tokens=budget
        ).numpy()  # a tensor would travel as a file handle that dies with its rank
    outcome["live untouched"] = all(torch.equal(live[n], p.to_local()) for n, p in model.named_parameters())
    cache.drop(3)
    try:
        behaviour_log_probs(cache, batch.rows(mine), response_log_prob)
        outcome["error"] = None
    except UnknownVersionError as error:
        outcome["error"] = str(error)
    cache.close()
    return outcome


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_rank_gets_each_token_under_its_own_version(world_size):
    outcomes = run_distributed(_scenarios, world_size)
    rows = [row for outcome in outcomes for row in outcome["rows"]]
    assert len(rows) == len(set(rows)) > 0, "ranks must hold disjoint rows"
    assert len({tuple(outcome["versions"]) for outcome in outcomes}) > 1, "ranks must hold different versions"
    if world_size == 4:
        assert outcomes[2]["rows"] == []
    batch, _ = _rows_of(0, world_size)
    expected = _oracle(batch)
    for outcome in outcomes:
        for key in ("log_prob None", "log_prob 2", "log_prob 1"):
            torch.testing.assert_close(
                torch.from_numpy(outcome[key]), expected[outcome["rows"]], rtol=0, atol=TOLERANCE
            )
        assert outcome["live untouched"]
        assert "3" in outcome["error"], "a missing version is an error on every rank, also where no row asks for it"


def test_the_oracle_tells_the_versions_apart():
    """Guards the test above: the three models must disagree by far more than its tolerance."""
    batch, _ = _rows_of(0, 1)
    one, two = (
        response_log_prob(tiny_model(seed=version), batch).detach()[batch.response_mask] for version in VERSIONS[:2]
    )
    assert (one - two).abs().max() > 1000 * TOLERANCE
    assert VOCAB % 4 != 0
