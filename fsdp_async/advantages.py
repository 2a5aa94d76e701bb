"""Advantages from outcome rewards.

Owns the baselines: group-relative, leave-one-out and the batch-normalised one of REINFORCE++. It promises that a
rejected response neither trains nor shifts the baseline of its siblings (unless asked to), that a group which holds
no comparison gives exactly 0, and that statistics are float64. It does not decide what is rejected, nor does it shape
rewards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_async.checks import require_choice, require_type
from fsdp_async.errors import ConfigError, InputError, NonFiniteError
from fsdp_async.metrics import Moments, Statistics

AdvantageKind = Literal["group_relative", "leave_one_out", "reinforce_pp"]
Baseline = Literal["kept", "all"]

# Keeps a group of nearly equal rewards from being blown up; groups of equal rewards never reach the division.
_STD_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """Which baseline rewards are compared with.

    Attributes:
        kind: `group_relative`: mean of the group (GRPO; Shao et al. 2024, arXiv 2402.03300, section 4.1.2).
            `leave_one_out`: mean of the *other* responses of the group (RLOO; Ahmadian et al. 2024, arXiv 2402.14740,
            equation 9). `reinforce_pp`: mean of the whole batch on all ranks (REINFORCE++; Hu et al. 2025,
            arXiv 2501.03262).
        normalize_std: divide by the sample standard deviation (n - 1) of what the baseline is taken over. None is
            what the kind's paper does: yes for `group_relative` and `reinforce_pp`, no for `leave_one_out`. False for
            `group_relative` is Dr. GRPO's (Liu et al. 2025, arXiv 2503.20783).
        over: statistics over the `kept` responses, or over `all`. Rejected responses get advantage 0 either way.
    """

    kind: AdvantageKind = "group_relative"
    normalize_std: bool | None = None
    over: Baseline = "kept"

    def __post_init__(self) -> None:
        require_choice("advantages.kind", self.kind, get_args(AdvantageKind))
        require_choice("advantages.over", self.over, get_args(Baseline))
        if not (self.normalize_std is None or isinstance(self.normalize_std, bool)):
            raise ConfigError(f"advantages.normalize_std={self.normalize_std!r} must be true, false or null")
        if self.kind == "leave_one_out" and self.normalize_std:
            raise ConfigError(
                "advantages.normalize_std=True with kind='leave_one_out': a group's deviation depends on the response "
                "itself, which is what leaving it out avoids; leave normalize_std out, or use kind='group_relative'"
            )

    @property
    def divides_by_std(self) -> bool:
        """`normalize_std` with the kind's usual in place of None."""
        return self.kind != "leave_one_out" if self.normalize_std is None else self.normalize_std


def compute_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    config: AdvantageConfig,
    *,
    row_kept: Tensor | None = None,
    process_group: ProcessGroup | None = None,
) -> Tensor:
    """One advantage for each response.

    A group (for `reinforce_pp`: the batch) with one counted response, or whose counted rewards are all equal, gives 0.

    Args:
        rewards: [B] of any real dtype.
        group_ids: [B] int64; rows with one id are responses to one prompt, in any order. A group lies whole on a rank.
        config: the baseline.
        row_kept: [B] bool, False where the whole response was rejected; None keeps all. What a rejected row's reward
            is, NaN included, changes nothing with `over="kept"`.
        process_group: ranks whose rewards make one batch; used by `reinforce_pp` only, and then collective.

    Returns:
        [B] float32; 0 on rejected rows.

    Raises:
        InputError: types, shapes or dtypes do not fit.
        NonFiniteError: a counted reward is NaN or infinite.
    """
    for name, value, needed in (
        ("config", config, AdvantageConfig), ("rewards", rewards, Tensor), ("group_ids", group_ids, Tensor)
    ):  # fmt: skip
        require_type(name, value, needed)
    kept = torch.ones_like(group_ids, dtype=torch.bool) if row_kept is None else row_kept
    _check(rewards, group_ids, kept)
    counted = kept if config.over == "kept" else torch.ones_like(kept)
    values = torch.where(counted, rewards.detach(), 0).double()
    if config.kind == "reinforce_pp":
        advantages = _against_batch(values, counted, config, process_group)
    else:
        advantages = _against_group(values, counted, group_ids, config)
    return torch.where(kept, advantages, 0.0).float()


def _against_group(values: Tensor, counted: Tensor, group_ids: Tensor, config: AdvantageConfig) -> Tensor:
    if not bool(values.isfinite().all()):
        rows = (~values.isfinite()).nonzero().squeeze(1).tolist()
        raise NonFiniteError(f"rewards of rows {rows[:8]} are not finite; mend the reward function, or reject the rows")
    groups, index = torch.unique(group_ids, return_inverse=True)
    per_group = values.new_zeros(len(groups))
    count = per_group.index_add(0, index, counted.double())
    mean = per_group.index_add(0, index, values) / count.clamp(min=1)
    centred = torch.where(counted, values - mean[index], 0.0)
    others = (count - 1).clamp(min=1)
    if config.kind == "leave_one_out":
        # r - mean of the others = n / (n - 1) * (r - mean of all)
        advantages = centred * (count / others)[index]
    elif config.divides_by_std:
        std = (per_group.index_add(0, index, centred.square()) / others).sqrt()
        advantages = centred / (std + _STD_EPSILON)[index]
    else:
        advantages = centred
    return torch.where(_all_equal(values, counted, index, len(groups))[index], 0.0, advantages)


def _all_equal(values: Tensor, counted: Tensor, index: Tensor, num_groups: int) -> Tensor:
    """[G] bool: at most one distinct counted value.

    From the extremes and not from the deviation: the mean of three times 0.1 is not 0.1, and a deviation of 1e-17
    would count as a comparison.
    """
    inf = values.new_full((num_groups,), float("inf"))
    low = inf.scatter_reduce(0, index, torch.where(counted, values, float("inf")), "amin")
    high = (-inf).scatter_reduce(0, index, torch.where(counted, values, -float("inf")), "amax")
    return high <= low


def _against_batch(
    values: Tensor, counted: Tensor, config: AdvantageConfig, process_group: ProcessGroup | None
) -> Tensor:
    # Every rank must take part and see the same verdict, so a bad reward raises after the exchange, everywhere.
    local = Moments.of(values, counted)
    reduced = Statistics({"reward": local}).all_reduce(process_group).entries["reward"]
    assert isinstance(reduced, Moments)
    if not (math.isfinite(reduced.mean) and math.isfinite(reduced.m2)):
        raise NonFiniteError("a reward on some rank is not finite; mend the reward function, or reject its row")
    if reduced.maximum <= reduced.minimum:
        return torch.zeros_like(values)
    centred = values - reduced.mean
    std = (reduced.m2 / max(1.0, reduced.count - 1)) ** 0.5
    return centred / (std + _STD_EPSILON) if config.divides_by_std else centred


def _check(rewards: Tensor, group_ids: Tensor, kept: Tensor) -> None:
    shapes = {"rewards": rewards.shape, "group_ids": group_ids.shape, "row_kept": kept.shape}
    if rewards.dim() != 1 or len(set(shapes.values())) != 1:
        raise InputError(f"{ {name: list(shape) for name, shape in shapes.items()} }: all must be [B], one entry a row")
    if group_ids.dtype != torch.int64 or kept.dtype != torch.bool:
        raise InputError(f"group_ids is {group_ids.dtype}, row_kept is {kept.dtype}; need int64 and bool")
