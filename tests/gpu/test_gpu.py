"""What only a GPU can show: pinned copies, their order against the optimizer, NCCL and bfloat16 in the real loop."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import torch.distributed as dist
from cache_models import WIDTH, plain
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_async.cli import compose_config
from fsdp_async.run import run_training
from fsdp_async.state_cache import StateCache

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")

BUSY_SIZE = 4096


@pytest.fixture
def nccl():
    """A group of this process alone."""
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _sharded():
    model = plain().cuda()
    mesh = init_device_mesh("cuda", (1,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _bits(model):
    state = model.state_dict()
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).cpu().clone() for name, t in state.items()}


def _same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def _keep_busy():
    """Work of many milliseconds on the current stream, so that what is queued behind it has not run on return."""
    x = torch.ones(BUSY_SIZE, BUSY_SIZE, device="cuda")
    for _ in range(20):
        x = (x @ x).clamp(max=1.0)
    return x


@pytest.mark.parametrize("sharded", [False, True])
def test_a_version_is_kept_visited_and_restored_bit_for_bit_through_pinned_memory(nccl, sharded):
    model = _sharded() if sharded else plain().cuda()
    inputs = torch.randn(8, WIDTH, device="cuda")
    model.eval()
    with StateCache(model) as cache, torch.no_grad():
        before, expected = _bits(model), model(inputs)
        cache.snapshot(0)
        for parameter in model.parameters():
            parameter.add_(1.0)
        cache.mark_live_changed()
        after = _bits(model)
        with cache.at(0) as old:
            assert torch.equal(old(inputs), expected)
        assert _same(_bits(model), after)
        cache.restore(0)
        assert _same(_bits(model), before)
        assert "pinned" in cache.describe()


def test_a_snapshot_sees_the_step_that_is_still_queued_on_the_device(nccl):
    model = _sharded()
    with StateCache(model) as cache, torch.no_grad():
        busy = _keep_busy()
        for parameter in model.parameters():
            parameter.add_(busy[0, 0].to(parameter.dtype))
        cache.snapshot(0)  # queued behind it, not beside it
        moved = _bits(model)
        for parameter in model.parameters():
            parameter.zero_()
        cache.mark_live_changed()
        cache.restore(0)
        assert _same(_bits(model), moved)


def test_a_lazy_snapshot_is_complete_before_the_optimizer_overwrites_the_weights(nccl):
    model = _sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with StateCache(model) as cache:
        cache.watch(optimizer)
        before = _bits(model)
        cache.snapshot(0, lazy=True)
        _keep_busy()
        model(torch.randn(8, WIDTH, device="cuda")).square().sum().backward()
        optimizer.step()
        assert not _same(_bits(model), before)
        cache.restore(0)
        assert _same(_bits(model), before)


def test_training_is_the_same_with_and_without_visits(nccl):
    inputs = torch.randn(8, WIDTH, device="cuda")

    def train(visits):
        model = _sharded()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with StateCache(model) as cache:
            cache.watch(optimizer)
            cache.snapshot(0)
            for _ in range(4):
                loss = model(inputs).square().sum()
                if visits:
                    with cache.at(0) as old:
                        old(inputs)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return copy.deepcopy(_bits(model))

    assert _same(train(visits=False), train(visits=True))


def test_twenty_steps_of_the_demo_on_the_gpu(tmp_path):
    class Quiet:
        def __getattr__(self, name):
            return lambda *args: None

    config = compose_config(
        [
            "experiment=demo",
            f"run.output_dir={tmp_path}/run",
            f"warm_start.directory={tmp_path}",
            "trainer.device=cuda",
            "trainer.num_batches=20",
            "trainer.eval_every=20",
        ]
    )
    summary = run_training(config, Quiet())
    assert summary["num_batches"] == 20
    assert summary["num_skipped_steps"] == 0
    assert summary["samples_consumed"] == 20 * 256
    # Both sides compute in bfloat16 on the same weights, in batches of other shapes.
    assert 0 < summary["canary_gap_max"] < 0.1
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert any("cuda:0, bfloat16" in line for line in record["plan"])
