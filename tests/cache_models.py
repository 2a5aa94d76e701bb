"""Small models, one per layout the state cache promises, and a training loop that visits may interrupt."""

from __future__ import annotations

import copy
import itertools

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from fsdp_async.arena import Arena
from fsdp_async.state_cache import StateCache

WIDTH = 6
"""Does not divide by 4: shards are uneven at 4 ranks."""


class Block(nn.Module):
    """A linear layer of uneven output, a norm, a persistent and a non-persistent buffer that training changes."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 5)
        self.down = nn.Linear(5, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)
        self.register_buffer("router_bias", torch.zeros(WIDTH))
        self.register_buffer("frequency", torch.linspace(0.5, 1.0, WIDTH), persistent=False)
        self.register_buffer("expanded", torch.ones(1).expand(WIDTH), persistent=False)

    def forward(self, x):
        hidden = self.down(torch.tanh(self.up((x * self.frequency * self.expanded).to(x.dtype))))
        if self.training:
            self.router_bias += hidden.detach().float().mean(0)  # in place, as running statistics are
            self.frequency = self.frequency * 0.99  # as a new object
        return self.norm((x + hidden).float() + self.router_bias).to(x.dtype)


class Net(nn.Module):
    """Two blocks, a head tied to the first layer, a frozen matrix, and a parameter with one row (empty shards)."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.ones(1, WIDTH))
        self.frozen = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight
        self.fail_in = None

    def forward(self, x):
        x = self.embed(x) @ self.frozen
        for index, block in enumerate(self.blocks):
            if self.fail_in == index:
                raise ArithmeticError("a forward that fails half way")
            x = block(x)
        return self.head(x * self.scale)


def plain(seed=0):
    """An unsharded model."""
    torch.manual_seed(seed)
    return Net()


def sharded(
    world_size, *, seed=0, mixed=False, offload=False, reshard_root=None, shard_dim_1=False, ignore=False, hybrid=False
):
    """The same model under FSDP2: each block, then the root."""
    model = plain(seed)
    shape = (2, world_size // 2) if hybrid else (world_size,)
    options = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])}
    if mixed:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for block in model.blocks:
        fully_shard(block, **options)
    if shard_dim_1:
        # Only an evenly divided dimension may be sharded by columns.
        options["shard_placement_fn"] = lambda p: Shard(1) if p is model.frozen and world_size in (1, 2) else None
    if ignore:
        options["ignored_params"] = {model.scale}
    fully_shard(model, reshard_after_forward=reshard_root, **options)
    return model


def data(step, rank=0, rows=8):
    """A batch of this step and rank; float32 [rows, WIDTH]."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1000 * rank + step))


def local(tensor):
    """This rank's part."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def bits(model):
    """Copies of every local parameter and buffer, non-persistent ones too; FSDP modules must be at rest."""
    named = itertools.chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    with torch.no_grad():
        return {name: local(tensor).clone() for name, tensor in named}


def same(left, right):
    """Bit equality of two `bits`."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def evaluate(model, x):
    """The model's output in eval mode, under no_grad."""
    model.eval()
    with torch.no_grad():
        return model(x).clone()


def train(model, *, steps, rank=0, between=None, optimizer=None, micro_batches=1, **only_last):
    """Train with AdamW and call `between(moment, step)` at every point a visit may fall on.

    `sync_last_only` and `reduce_last_only` leave gradients unreduced until the last micro-batch.

    Returns:
        The losses, as exact float32 tensors.
    """
    optimizer = optimizer or torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    notify = between or (lambda moment, step: None)
    losses = []
    for step in range(steps):
        model.train()
        for micro in range(micro_batches):
            if "sync_last_only" in only_last:
                model.set_requires_gradient_sync(micro == micro_batches - 1)
            if "reduce_last_only" in only_last:
                model.set_requires_all_reduce(micro == micro_batches - 1)
            notify("before forward", step)
            loss = model(data(step * micro_batches + micro, rank)).square().mean()
            notify("before backward", step)
            loss.backward()
            losses.append(loss.detach().clone())
        notify("before step", step)
        optimizer.step()
        optimizer.zero_grad()
        notify("after step", step)
    return losses


def frozen_copy(model):
    """A plain model's twin at this moment, to compute what a version must compute."""
    return copy.deepcopy(model)


def adamw(model):
    """An optimizer of what is trained."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def watched():
    """(plain model, optimizer, cache that watches it)."""
    model = plain()
    optimizer, cache = adamw(model), StateCache(model)
    cache.watch(optimizer)
    return model, optimizer, cache


def output_at(cache, version, x=None):
    """What the model computes with `version`, in eval mode."""
    with cache.at(version) as visited:
        return evaluate(visited, data(77) if x is None else x)


def counted_copies(monkeypatch):
    """Bytes of parameters that go into arenas from here on, one entry per call."""
    seen = []
    original = Arena.copy_from

    def spy(self, tensors, start=0):
        if start == 0 and tensors:
            seen.append(sum(t.nbytes for t in tensors))
        original(self, tensors, start)

    monkeypatch.setattr(Arena, "copy_from", spy)
    return seen
