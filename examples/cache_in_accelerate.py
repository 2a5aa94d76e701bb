"""The state cache in a loop of Accelerate: its model, its optimizer, its accumulation of gradients.

python examples/cache_in_accelerate.py          # one process, on a laptop's CPU, in seconds (pip install accelerate)
torchrun --nproc-per-node 2 examples/cache_in_accelerate.py     # two ranks under DDP

On CPUs this is the plain Accelerator (DDP, if there are ranks): Accelerate applies its FSDP plugin on accelerators
only, and leaves it out on CPUs without a word. With several GPUs FSDP2 is the launcher's business, which this example
has not been tried with: `accelerate launch --use_fsdp --fsdp_version 2`. The loop would stay as it is: the cache
is made of what `prepare` returns. FSDP2 on CPUs, without Accelerate, is in cache_in_own_loop.py.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fsdp_async import CacheConfig, StateCache, token_log_probs

NUM_STEPS, MICRO_BATCHES, OLD = 6, 2, 2
"""Optimizer steps, micro-batches that are accumulated for each, and how many steps back old weights are asked for."""


def build() -> tuple[nn.Module, TensorDataset]:
    """A policy over 16 tokens, and the tokens that it learns to predict."""
    torch.manual_seed(0)
    ids = torch.randint(16, (NUM_STEPS * MICRO_BATCHES * 32,))
    return nn.Sequential(nn.Embedding(16, 32), nn.Tanh(), nn.Linear(32, 16)), TensorDataset(ids, (ids + 3) % 16)


def train(accelerator: Accelerator, *, with_visits: bool) -> list[torch.Tensor]:
    """Train one epoch and return the weights; `with_visits` judges every batch under the weights of two steps ago."""
    model, data = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data, batch_size=32 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    # What `prepare` returns passes steps on; the optimizer inside it takes them, and has the step hooks.
    cache = StateCache(model, CacheConfig(max_versions=OLD + 1))
    cache.watch(optimizer.optimizer)
    version = 0
    cache.snapshot(version, lazy=True)
    for x, y in loader:
        with accelerator.accumulate(model):
            log_prob = token_log_probs(model(x), y)
            if with_visits:  # also between a forward and its backward
                with cache.at(max(0, version - OLD)) as old:
                    gap = log_prob.detach() - token_log_probs(old(x), y)
            accelerator.backward(-log_prob.mean())
            optimizer.step()  # acts once every MICRO_BATCHES calls; the cache hears of real steps only
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            version += 1
            cache.retain(range(max(0, version - OLD), version))
            cache.snapshot(version, lazy=True)
    if with_visits:
        accelerator.print(f"versions {cache.versions}, live_version {cache.live_version}")
        seen = accelerator.reduce(gap.mean(), "mean").item()
        accelerator.print(f"mean log-prob now minus {OLD} steps ago: {seen:.4f}")
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    cache.close()
    return weights


def main() -> None:
    # cpu=True, because without it Accelerate starts no process group under torchrun on a machine without accelerators.
    accelerator = Accelerator(cpu=not torch.accelerator.is_available(), gradient_accumulation_steps=MICRO_BATCHES)
    accelerator.print(f"distributed type: {accelerator.distributed_type.value}, ranks {accelerator.num_processes}")
    shown = train(accelerator, with_visits=True)
    plain = train(accelerator, with_visits=False)
    is_same = all(torch.equal(a, b) for a, b in zip(shown, plain, strict=True))
    accelerator.print(f"the same weights without any visit, bit for bit: {is_same}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
