"""What snapshot, restore and a visit cost, against one raw `copy_` of the same bytes in the same run.

    python benchmarks/state_cache.py [--ranks 2] [--params 200_000_000] [--repeats 7]

Prints lines `ratio <name> <value>` (medians of interleaved repeats; lower is better) and exits with 1 if it could not
measure. The raw copy goes between two buffers that were written before, as every arena is. Bytes are those of one
rank's fp32 shards and buffers; with several ranks, the slowest rank's ratio is printed. One OpenMP thread.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: two threads on busy cores can be 20 times slower

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_async.dtensor_io import capture
from fsdp_async.state_cache import StateCache

HIDDEN = 1024
PARAMETERS_PER_LAYER = 12 * HIDDEN * HIDDEN
TIMEOUT_S = 170


class Layer(nn.Module):
    """The matrices and norms of a transformer layer; never run forward."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4)])
        self.mlp = nn.ModuleList([nn.Linear(HIDDEN, 4 * HIDDEN, bias=False), nn.Linear(4 * HIDDEN, HIDDEN, bias=False)])
        self.norms = nn.ModuleList([nn.LayerNorm(HIDDEN) for _ in range(2)])
        self.register_buffer("inv_freq", torch.ones(64), persistent=False)


def build(num_parameters: int, num_ranks: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (num_ranks,))
    with torch.device("meta"):
        model = nn.Sequential(*(Layer() for _ in range(max(1, round(num_parameters / PARAMETERS_PER_LAYER)))))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(0.5)
    return model


def seconds(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def measure(rank: int, num_ranks: int, num_parameters: int, repeats: int, rendezvous: str) -> dict[str, float]:
    """Median ratios of this rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks)
    try:
        model = build(num_parameters, num_ranks)
        cache = StateCache(model)
        live = capture(model)
        num_bytes = sum(view.nbytes for view in [*live.parameters, *live.buffer_views])
        source = torch.empty(num_bytes, dtype=torch.uint8).fill_(1)
        target = torch.empty(num_bytes, dtype=torch.uint8).fill_(2)

        def visit() -> None:
            with cache.at(0):
                pass

        cache.snapshot(0)
        actions: dict[str, Callable[[], object]] = {
            "copy": lambda: target.copy_(source),
            "snapshot": lambda: cache.snapshot(1, overwrite=True),
            "restore": lambda: cache.restore(0),
            "visit": visit,
        }
        times: dict[str, list[float]] = {name: [] for name in actions}
        for repeat in range(repeats + 1):
            for name, action in actions.items():
                dist.barrier()
                elapsed = seconds(action)
                if repeat:  # the first round allocates
                    times[name].append(elapsed)
        cache.close()
        medians = {name: statistics.median(values) for name, values in times.items()}
    finally:
        dist.destroy_process_group()
    return {
        "num_bytes": num_bytes,
        "copy_s": medians["copy"],
        **{f"{name}_vs_copy": medians[name] / medians["copy"] for name in ("snapshot", "restore", "visit")},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--params", type=int, default=200_000_000)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        arguments = [
            (rank, options.ranks, options.params, options.repeats, f"{directory}/rendezvous")
            for rank in range(options.ranks)
        ]
        with multiprocessing.get_context("spawn").Pool(options.ranks) as pool:
            try:
                results = pool.starmap_async(measure, arguments, chunksize=1).get(TIMEOUT_S)
            except (RuntimeError, MemoryError, multiprocessing.TimeoutError) as error:
                print(f"could not measure: {type(error).__name__}: {error}", file=sys.stderr)
                return 1
    slowest = {name: max(result[name] for result in results) for name in results[0]}
    print(
        f"{options.ranks} ranks, {slowest['num_bytes'] / 1e6:.0f} MB a rank, raw copy {slowest['copy_s'] * 1e3:.1f} ms"
    )
    for name in ("snapshot_vs_copy", "restore_vs_copy", "visit_vs_copy"):
        print(f"ratio {name} {slowest[name]:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
