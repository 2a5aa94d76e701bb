"""Correction over ranks that hold disjoint rows: weights, masks and numbers are those of the whole batch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import run_distributed

from fsdp_async.correction_config import Bounds, CorrectionConfig, Rejection
from fsdp_async.errors import FsdpAsyncError
from fsdp_async.is_correction import compute_correction

CONFIGS = {
    "token": CorrectionConfig(mismatch=Bounds(upper=1.5), lag=Bounds(), batch_normalize=True),
    "sequence": CorrectionConfig(
        combined=Bounds(level="sequence", mode="mask", lower=0.1, upper=5.0),
        rejections=(Rejection(factor="lag", statistic="k3", aggregate="mean", upper=0.5),),
        batch_normalize=True,
    ),
    "combined": CorrectionConfig(combined=Bounds(), batch_normalize=True),
}


def _inputs():
    generator = torch.Generator().manual_seed(3)
    old, mu, behaviour = (-2 * torch.rand(7, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(7, 5, generator=generator) > 0.3
    mask[2] = False
    return old, mu, behaviour, mask


def _correct(rows, name, group=None):
    old, mu, behaviour, mask = (tensor[rows] for tensor in _inputs())
    return compute_correction(old, mu, mask, CONFIGS[name], behaviour_log_prob=behaviour, process_group=group)


def _shares(world_size):
    """Uneven on purpose; the last of four ranks has no row."""
    return {2: [[0, 1, 2, 3, 4], [5, 6]], 4: [[0], [1, 2, 3], [4, 5, 6], []]}[world_size]


def _on_rank(rank, world_size):
    rows = torch.tensor(_shares(world_size)[rank], dtype=torch.int64)
    found = {}
    for name in CONFIGS:
        result = _correct(rows, name, dist.group.WORLD)
        statistics = result.statistics.all_reduce(dist.group.WORLD)
        found[name] = result.weights.numpy(), result.kept_mask.numpy(), statistics.to_dict()
    return rows.numpy(), found


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_rank_gets_the_weights_and_numbers_of_the_whole_batch(world_size):
    results = run_distributed(_on_rank, world_size)
    assert sorted(row for rows, _ in results for row in rows) == list(range(7))
    for name in CONFIGS:
        whole = _correct(torch.arange(7), name)
        for rows, found in results:
            weights, kept, metrics = found[name]
            # The normaliser is a float64 sum in another order.
            torch.testing.assert_close(torch.from_numpy(weights), whole.weights[rows], rtol=1e-12, atol=0)
            assert torch.equal(torch.from_numpy(kept), whole.kept_mask[rows])
            assert metrics == pytest.approx(whole.metrics(), rel=1e-9, abs=1e-12)


def _refused_on_rank(rank, world_size, bad):
    """What each rank sees when the first one alone is given `bad`, and whether the next collective is in step."""
    old = torch.full((1, 2), -1.0)
    mu = torch.tensor([[bad if rank == 0 else -1.5, -1.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    try:
        compute_correction(old, mu, mask, CONFIGS["combined"], process_group=dist.group.WORLD)
    except FsdpAsyncError as error:
        caught = type(error).__name__, str(error)
    mine = torch.tensor([float(rank + 1)])
    dist.all_reduce(mine)
    return caught, mine.item()


@pytest.mark.parametrize(
    ("bad", "kind", "there", "elsewhere"),
    [
        (float("nan"), "NonFiniteError", "the first at row 0, position 0", "not finite on 1 other ranks"),
        (0.5, "InputError", "rollout_log_prob is up to 0.5", "1 other ranks refused their inputs"),
    ],
)
def test_what_one_rank_refuses_is_an_error_on_all_and_leaves_no_rank_in_a_collective(bad, kind, there, elsewhere):
    results = run_distributed(_refused_on_rank, 2, bad)
    assert [caught[0] for caught, _ in results] == [kind, kind]
    assert there in results[0][0][1]
    assert elsewhere in results[1][0][1]
    assert [total for _, total in results] == [3.0, 3.0]
