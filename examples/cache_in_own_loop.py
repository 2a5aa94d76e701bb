"""The state cache in a training loop of your own: keep old weights, evaluate under them, lose nothing.

python examples/cache_in_own_loop.py            # one process, on a laptop's CPU, in seconds
torchrun --nproc-per-node 2 examples/cache_in_own_loop.py
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_async.state_cache import CacheConfig, StateCache


def build() -> nn.Module:
    """A small network, sharded over all ranks by FSDP2."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def log_prob(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(x).log_softmax(-1).gather(-1, y[:, None]).squeeze(-1)


def run() -> dict[str, float]:
    """Train ten steps; every step is also judged under the weights of three steps ago."""
    x, y = torch.randn(256, 16), torch.randint(16, (256,))
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    # --- the ten lines -------------------------------------------------------------------------------------
    cache = StateCache(model, CacheConfig(max_versions=5))
    cache.watch(optimizer)
    for step in range(10):
        cache.snapshot(step, lazy=True)  # copied just before optimizer.step(), not at all if dropped by then
        loss = -log_prob(model, x, y).mean()
        with cache.at(max(0, step - 3)) as old:  # also between a forward and its backward
            lag = log_prob(old, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        cache.retain(range(max(0, step - 3), step + 1))
    # -------------------------------------------------------------------------------------------------------

    with torch.no_grad():
        now = log_prob(model, x, y)
    cache.restore(step - 2)
    if dist.get_rank() == 0:  # each rank has data of its own
        print(cache.describe())
        print(f"loss of the last step {loss.item():.4f}")
        print(f"mean log-prob: {lag.mean():.4f} under version {step - 3}, {now.mean():.4f} under the live weights")
        print(f"after restore: live_version {cache.live_version}")
    result = {"old": lag.mean().item(), "live": now.mean().item(), "versions": float(len(cache.versions))}
    cache.close()
    return result


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        run()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
