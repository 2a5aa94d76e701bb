"""The settings of the loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from fsdp_async.checks import require_choice, require_flag
from fsdp_async.devices import DeviceKind, DtypeKind
from fsdp_async.errors import ConfigError
from fsdp_async.learner import Anchor


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The loop. A batch is `groups_per_batch` groups of `group_size` responses; `sync_every` counts batches.

    Each rank computes on `device`, one GPU a rank (`auto`: GPUs where there are any), in `dtype` (`auto`: bfloat16 on
    GPUs, float32 on CPUs); weights, gradients' reduction and optimizer state are float32 always.

    `debug` runs everything in one process and thread, the same each time: responses are generated where their prompts
    are submitted, in place of `rollout.engine`, rewards are computed where they are needed, nothing is interrupted,
    timed out or started again, and errors show their whole traceback.
    """

    num_batches: int = 100
    groups_per_batch: int = 32
    group_size: int = 8
    mini_batches: int = 2
    micro_batch_tokens: int | None = None
    anchor: Anchor = "behaviour"
    sync_every: int = 1
    max_staleness: int = 2
    skip_zero_variance: bool = True
    canary_bound_nats: float = 0.1
    max_skipped_steps: int = 3
    eval_every: int = 10
    device: DeviceKind = "auto"
    dtype: DtypeKind = "auto"
    debug: bool = False

    def __post_init__(self) -> None:
        require_choice("trainer.anchor", self.anchor, get_args(Anchor))
        require_choice("trainer.device", self.device, get_args(DeviceKind))
        require_choice("trainer.dtype", self.dtype, get_args(DtypeKind))
        for name in ("skip_zero_variance", "debug"):
            require_flag(f"trainer.{name}", getattr(self, name))
        for name in ("num_batches", "groups_per_batch", "group_size", "mini_batches", "sync_every", "eval_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"trainer.{name}={getattr(self, name)}: must be at least 1")
        for name in ("max_staleness", "max_skipped_steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"trainer.{name}={getattr(self, name)}: must not be negative")
        if self.canary_bound_nats <= 0:
            raise ConfigError(f"trainer.canary_bound_nats={self.canary_bound_nats}: must be above 0")
        if self.groups_per_batch % self.mini_batches:
            raise ConfigError(
                f"trainer.groups_per_batch={self.groups_per_batch} is not divisible by "
                f"trainer.mini_batches={self.mini_batches}; a group never spans two mini-batches"
            )

    @property
    def max_versions(self) -> int:
        """Most versions that are retained at one time: those that may still be read, the newest included."""
        return self.max_staleness + 1

    @property
    def anchor_is_live(self) -> bool:
        """The anchor is the live policy of the moment when the batch is taken: its first mini-batch has ratio 1."""
        if self.anchor == "behaviour":
            return self.max_staleness == 0 and self.sync_every == 1
        return self.anchor == "current" or (self.anchor == "last_sync" and self.sync_every == 1)
