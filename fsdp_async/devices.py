"""Where a rank and an engine compute, and in which dtype.

Owns the words `auto`, `cpu`, `cuda` and `float32`, `bfloat16`, and what they mean on this machine: one GPU a rank, the
engine on a GPU without a rank where there is one. Batches, weights on their way and statistics live on the host
everywhere; only forwards, backwards and optimizer steps are on the device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from fsdp_async.errors import ConfigError

DeviceKind = Literal["auto", "cpu", "cuda"]
DtypeKind = Literal["auto", "float32", "bfloat16"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Placement:
    """A device and the dtype that forwards compute in; weights are kept in float32 by a trainer."""

    device: torch.device
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.device}, {str(self.dtype).removeprefix('torch.')}"

    @property
    def backend(self) -> str:
        """Of the process group: gloo for what lives on the host, NCCL for what lives on GPUs."""
        return "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"


ON_HOST = Placement(torch.device("cpu"), torch.float32)


def trainer_placement(device: DeviceKind, dtype: DtypeKind) -> Placement:
    """Of this rank, which is torchrun's LOCAL_RANK or 0: one GPU a rank. `auto` takes GPUs, and bfloat16 on them.

    Raises:
        ConfigError: `cuda` where there is none, or fewer GPUs than ranks.
    """
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return Placement(torch.device("cpu"), DTYPES.get(dtype, torch.float32))
    _require_gpus("trainer.device", device, _local("LOCAL_WORLD_SIZE", 1))
    return Placement(torch.device("cuda", _local("LOCAL_RANK", 0)), DTYPES.get(dtype, torch.bfloat16))


def engine_placement(device: DeviceKind, dtype: DtypeKind, trainer: Placement) -> Placement:
    """Of the engine that rank 0 feeds; `auto` means as the trainer. On GPUs: the first without a rank, else the first.

    Raises:
        ConfigError: `cuda` where there is none.
    """
    chosen = DTYPES.get(dtype, trainer.dtype)
    if device == "cpu" or (device == "auto" and trainer.device.type == "cpu"):
        return Placement(torch.device("cpu"), chosen)
    _require_gpus("rollout.device", device, 1)
    num_ranks = _local("LOCAL_WORLD_SIZE", 1) if trainer.device.type == "cuda" else 0
    return Placement(torch.device("cuda", num_ranks if num_ranks < torch.cuda.device_count() else 0), chosen)


@dataclass(frozen=True)
class PlacedBuilder:
    """Builds an engine's model where it will compute, its parameters in the dtype that it computes in. Picklable."""

    build: Callable[[], nn.Module]
    placement: Placement

    def __call__(self) -> nn.Module:
        """The model. Buffers keep their dtype: rounded rotary frequencies would be another model."""
        model = self.build().to(self.placement.device)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(self.placement.dtype)
        return model


def device_of(model: nn.Module) -> torch.device:
    """Where `model` computes."""
    return next(model.parameters()).device


def _require_gpus(name: str, device: str, num: int) -> None:
    if not torch.cuda.is_available():
        raise ConfigError(f"{name}={device}: PyTorch {torch.__version__} sees no GPU here; set {name}=cpu, or auto")
    if torch.cuda.device_count() < num:
        raise ConfigError(
            f"{name}={device}: {num} ranks on this machine and {torch.cuda.device_count()} GPU(s), and each rank needs "
            f"one; start fewer ranks, or set {name}=cpu"
        )


def _local(name: str, default: int) -> int:
    return int(os.environ.get(name, default))
