"""Policy losses, their aggregation, and per-token KL penalties. Pure functions.

Owns the step from log-probs, advantages and weights to one scalar. It promises that

- what lies off the mask changes neither value nor gradient, be it NaN: inputs are sanitised before any arithmetic;
- with `GlobalCounts` the gradient does not depend on how a mini-batch is cut into micro-batches or spread over ranks;
- every input acts: one that the chosen loss does not use is refused;
- a non-finite number *under* the mask is never clamped into a harmless one: it reaches the loss and, where a ratio is
  formed, the gradient.

It builds no weights (`is_correction.py`), rejects nothing, and does not look at the loss it returns.

Notation: pi is `log_prob`, pi_p is `old_log_prob` (the anchor of the clip), r = pi / pi_p, A is the advantage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fsdp_async.checks import is_whole, require_type
from fsdp_async.errors import InputError
from fsdp_async.loss_config import Aggregate, LossConfig, LossKind
from fsdp_async.metrics import Mean, Moments, Statistics, kl_k3

__all__ = [
    "LOG_RATIO_BOUND",
    "Aggregate",
    "GlobalCounts",
    "KlEstimator",
    "LossConfig",
    "LossKind",
    "PolicyLoss",
    "aggregate",
    "kl_penalty",
    "policy_loss",
]

KlEstimator = Literal["k1", "k2", "k3"]

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +-20 before they are exponentiated: e^20 is 5e8, and its square still fits float32."""


@dataclass(frozen=True)
class GlobalCounts:
    """Denominators of one optimizer step: sums over its whole mini-batch and all ranks.

    Attributes:
        num_tokens: tokens under the denominator mask.
        num_rows: rows with at least one such token.
        data_parallel_size: ranks whose gradients FSDP or DDP will *average*. The loss is multiplied by it, so that the
            average becomes the sum which the global counts divide. 1 where gradients are added up by hand.
    """

    num_tokens: int
    num_rows: int
    data_parallel_size: int = 1

    def __post_init__(self) -> None:
        whole = is_whole(self.num_tokens, 0) and is_whole(self.num_rows, 0) and is_whole(self.data_parallel_size, 1)
        if not whole or self.num_rows > self.num_tokens:
            raise InputError(f"{self}: need integers, 0 <= num_rows <= num_tokens and data_parallel_size >= 1")

    def check_hold(self, num_tokens: int, num_rows: int) -> None:
        """Refuse to be the counts of a step of which one part has `num_tokens` in `num_rows`.

        Raises:
            InputError: the part is larger than the whole, which would make its loss too large.
        """
        if num_tokens > self.num_tokens or num_rows > self.num_rows:
            raise InputError(
                f"{self} are below the {num_tokens} tokens in {num_rows} rows under the denominator mask of these rows "
                "alone; sum them over the whole mini-batch and all ranks"
            )


@dataclass(frozen=True)
class PolicyLoss:
    """Scalar `loss` to minimise (float32, carries the graph) and mergeable `statistics` (detached).

    Statistics are over tokens under the mask, from unclamped ratios: `kl_k1`, `kl_k3` (of pi_p against pi), `ratio`
    moments, and for `ppo_clip` the fractions of tokens whose gradient a bound has cut off: `clip_fraction_high`
    (A > 0), `clip_fraction_low` and, where configured, `dual_clip_fraction` (both A < 0).
    """

    loss: Tensor
    statistics: Statistics


@dataclass(frozen=True)
class _Tokens:
    """Inputs of an objective, [B,T], in float32 or wider, 0 off `mask`. `log_ratio` = log r is not yet bounded."""

    log_prob: Tensor
    log_ratio: Tensor
    advantages: Tensor
    weights: Tensor | None
    mask: Tensor


def policy_loss(  # noqa: PLR0913 - what a loss is made of; each input comes from another module
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: LossConfig,
    *,
    weights: Tensor | None = None,
    rollout_log_prob: Tensor | None = None,
    denominator_mask: Tensor | None = None,
    global_counts: GlobalCounts | None = None,
) -> PolicyLoss:
    """Loss of one micro-batch: minus the aggregate of weight x objective.

    Without a token under the mask the loss is 0 with a graph, and its gradient exactly 0.

    Args:
        log_prob: [B,T] pi of the sampled tokens; carries the gradient. Half precision is upcast to float32.
        old_log_prob: [B,T] pi_p. `reinforce` uses it for statistics only.
        advantages: [B], or [B,T].
        mask: [B,T] bool: tokens that train (`kept_mask`).
        config: the loss.
        weights: [B,T] factors of the per-token objective; None is 1 everywhere.
        rollout_log_prob: [B,T] mu, for losses that are defined on it; refused by those that are not.
        denominator_mask: [B,T] bool, what means divide by: `response_mask` counts rejected tokens as zeros. None is
            `mask`. Must hold `mask`.
        global_counts: counts of `denominator_mask` over the mini-batch and all ranks; None counts these rows alone.

    Returns:
        The loss and its statistics. Reading the statistics synchronises with the device once.

    Raises:
        InputError: types, shapes or dtypes do not fit, an input other than `log_prob` requires grad, `mask` is not
            inside `denominator_mask`, `global_counts` below these rows' own, or an input that the loss does not use.
    """
    require_type("config", config, LossConfig)
    if global_counts is not None:
        require_type("global_counts", global_counts, GlobalCounts)
    if rollout_log_prob is not None:
        _refuse_rollout_log_prob(config)
    tokens = _prepare(log_prob, old_log_prob, advantages, mask, weights)
    objective = _OBJECTIVES[config.kind](tokens, config)
    if tokens.weights is not None:
        objective = objective * tokens.weights
    loss = -aggregate(
        objective,
        mask,
        config.aggregate,
        denominator_mask=denominator_mask,
        norm_length=config.norm_length,
        global_counts=global_counts,
    )
    counted = mask if denominator_mask is None else denominator_mask
    statistics, num_tokens, num_rows = _statistics(tokens, config, counted)
    if global_counts is not None:
        global_counts.check_hold(num_tokens, num_rows)
    return PolicyLoss(loss, statistics)


def aggregate(
    values: Tensor,
    mask: Tensor,
    mode: Aggregate,
    *,
    denominator_mask: Tensor | None = None,
    norm_length: int | None = None,
    global_counts: GlobalCounts | None = None,
) -> Tensor:
    """Sum or mean of per-token values.

    With v the values under `mask`, and tokens, rows (those with a token) and T_b (tokens of row b) counted under
    `denominator_mask`:

        token-mean               sum v / tokens
        token-sum                sum v
        seq-mean-token-sum       sum_b (sum_t v) / rows
        seq-mean-token-mean      sum_b (sum_t v / T_b) / rows
        seq-mean-token-sum-norm  sum_b (sum_t v) / (rows * L)

    Args:
        values: [B,T]. Off the mask their *value* does not matter; their gradient is safe only if whatever computed
            them sanitised its inputs, as `policy_loss` and `kl_penalty` do.
        mask: [B,T] bool.
        mode: one of the above.
        denominator_mask: [B,T] bool that holds `mask`; None is `mask`.
        norm_length: L; None is the padded width T.
        global_counts: tokens and rows of the whole step, at least those of these rows (not looked at here, which
            would wait for the device; `policy_loss` looks). None counts these rows alone. Rows must not be cut.

    Returns:
        Scalar of the values' dtype; 0 (with a graph) where there is nothing to count.

    Raises:
        InputError: shapes or dtypes do not fit, `mask` is not inside `denominator_mask`, an unknown mode, or
            an inert `norm_length`.
    """
    if mode not in get_args(Aggregate):
        raise InputError(f"mode {mode!r} is unknown; choose one of {get_args(Aggregate)}")
    counted = mask if denominator_mask is None else denominator_mask
    _check_masks(values, mask, counted)
    if norm_length is not None and mode != "seq-mean-token-sum-norm":
        raise InputError(f"norm_length={norm_length} has no effect with mode {mode!r}; leave it out")
    row_tokens = counted.sum(dim=1)
    num_tokens: Tensor | int = row_tokens.sum() if global_counts is None else global_counts.num_tokens
    num_rows: Tensor | int = (row_tokens > 0).sum() if global_counts is None else global_counts.num_rows
    row_sums = torch.where(mask, values, 0.0).sum(dim=1)
    if mode == "seq-mean-token-mean":
        row_sums = row_sums / row_tokens.clamp(min=1)
    denominators = {
        "token-mean": num_tokens,
        "token-sum": 1,
        "seq-mean-token-sum": num_rows,
        "seq-mean-token-mean": num_rows,
        "seq-mean-token-sum-norm": num_rows * (norm_length or max(1, values.shape[1])),
    }
    denominator = torch.as_tensor(denominators[mode], device=values.device).clamp(min=1)
    scale = 1 if global_counts is None else global_counts.data_parallel_size
    return row_sums.sum() * scale / denominator


def kl_penalty(
    log_prob: Tensor, ref_log_prob: Tensor, estimator: KlEstimator = "k3", *, mask: Tensor | None = None
) -> Tensor:
    """Per-token estimate of KL(pi || reference) from a token sampled by pi.

    Schulman 2020, "Approximating KL divergence". With d = log pi - log ref: k1 = d, k2 = d^2 / 2,
    k3 = exp(-d) - 1 + d. The *values* of k1 and k3 are unbiased. The *gradients*, for tokens sampled by pi, are in
    expectation: k1 zero, k2 that of the reverse KL(pi || ref), k3 that of the forward KL(ref || pi). Tokens sampled by
    another policy need the same weights as the policy loss.

    Args:
        log_prob: [B,T] (or any shape); carries the gradient.
        ref_log_prob: same shape; must not require grad.
        estimator: `k1`, `k2` or `k3`. k3 is bounded at -d = 20, beyond which it has no gradient.
        mask: same shape, bool; off it the result and its gradient are 0 whatever the inputs are. None is all tokens.

    Returns:
        Same shape, float32 (float64 for float64).

    Raises:
        InputError: shapes or dtypes do not fit, or an unknown estimator.
    """
    if estimator not in get_args(KlEstimator):
        raise InputError(f"estimator {estimator!r} is unknown; choose one of {get_args(KlEstimator)}")
    where = torch.ones_like(log_prob, dtype=torch.bool) if mask is None else mask
    _check_tokens(log_prob, where, {"ref_log_prob": ref_log_prob})
    pi = _sanitised(log_prob, where, log_prob.dtype)
    difference = pi - _sanitised(ref_log_prob, where, log_prob.dtype)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return kl_k3(_bounded(-difference, low=-math.inf))


def _prepare(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor | None
) -> _Tokens:
    require_type("log_prob", log_prob, Tensor)
    require_type("advantages", advantages, Tensor)
    if log_prob.dim() == 2 and advantages.shape == log_prob.shape[:1]:
        advantages = advantages.unsqueeze(1).expand(log_prob.shape)
    fixed = {"old_log_prob": old_log_prob, "advantages": advantages}
    if weights is not None:
        fixed["weights"] = weights
    _check_tokens(log_prob, mask, fixed)
    clean = {name: _sanitised(tensor, mask, log_prob.dtype) for name, tensor in fixed.items()}
    pi = _sanitised(log_prob, mask, log_prob.dtype)
    return _Tokens(pi, pi - clean["old_log_prob"], clean["advantages"], clean.get("weights"), mask)


def _ppo_clip(tokens: _Tokens, config: LossConfig) -> Tensor:
    ratio = _bounded(tokens.log_ratio).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    # The textbook minimum, not a clamp by the sign of A: a clamp has gradient 0 at NaN and would hide it.
    objective = torch.minimum(ratio * tokens.advantages, clipped * tokens.advantages)
    if config.dual_clip is None:
        return objective
    floor = torch.maximum(objective, config.dual_clip * tokens.advantages)
    return torch.where(tokens.advantages < 0, floor, objective)


def _reinforce(tokens: _Tokens, config: LossConfig) -> Tensor:
    return tokens.log_prob * tokens.advantages


_OBJECTIVES: dict[LossKind, Callable[[_Tokens, LossConfig], Tensor]] = {
    "ppo_clip": _ppo_clip,
    "reinforce": _reinforce,
}


def _bounded(log_ratio: Tensor, low: float = -LOG_RATIO_BOUND) -> Tensor:
    # 0 x inf and 0 x NaN are NaN: an infinite log-ratio must not become e^20.
    return log_ratio.clamp(low, LOG_RATIO_BOUND) + 0.0 * log_ratio


def _sanitised(tensor: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(mask, tensor, 0.0).to(torch.promote_types(dtype, torch.float32))


def _statistics(tokens: _Tokens, config: LossConfig, counted: Tensor) -> tuple[Statistics, int, int]:
    """Statistics, and the numbers of tokens and of rows under `counted`."""
    mask, advantages = tokens.mask, tokens.advantages
    log_ratio = tokens.log_ratio.detach().double()
    ratio = log_ratio.exp()
    count = mask.sum()
    mean = torch.where(mask, ratio, 0.0).sum() / count.clamp(min=1)
    sums = {"kl_k1": -log_ratio, "kl_k3": kl_k3(log_ratio)}
    if config.kind == "ppo_clip":
        sums["clip_fraction_high"] = (advantages > 0) & (ratio > 1 + config.clip_high)
        sums["clip_fraction_low"] = (advantages < 0) & (ratio < 1 - config.clip_low)
        if config.dual_clip is not None:
            sums["dual_clip_fraction"] = (advantages < 0) & (ratio > config.dual_clip)
    moments = [
        mean,
        torch.where(mask, (ratio - mean).square(), 0.0).sum(),
        torch.where(mask, ratio, math.inf).amin() if mask.numel() else mean,
        torch.where(mask, ratio, -math.inf).amax() if mask.numel() else mean,
    ]
    # All numbers leave the device in one transfer; every one of them fetched alone would be a stall.
    sizes = [counted.sum().double(), counted.any(dim=1).sum().double()]
    values = [*sizes, count.double(), *moments, *(value.double().sum() for value in sums.values())]
    num_tokens, num_rows, total, *packed = torch.stack(values).tolist()
    means = {name: Mean(value, total) for name, value in zip(sums, packed[4:], strict=True)}
    return Statistics({**means, "ratio": Moments(total, *packed[:4])}), int(num_tokens), int(num_rows)


def _refuse_rollout_log_prob(config: LossConfig) -> None:
    raise InputError(
        f"rollout_log_prob was given, but loss kind {config.kind!r} is not defined on it; it enters through `weights` "
        "(compute_correction), or as old_log_prob where the rollout policy is the anchor"
    )


def _check_tokens(log_prob: Tensor, mask: Tensor, fixed: Mapping[str, Tensor]) -> None:
    require_type("log_prob", log_prob, Tensor)
    for name, tensor in {"mask": mask, **fixed}.items():
        require_type(name, tensor, Tensor)
        if tensor.shape != log_prob.shape:
            raise InputError(
                f"{name} has shape {list(tensor.shape)}, log_prob has {list(log_prob.shape)}; they must agree"
            )
        if tensor.requires_grad:
            raise InputError(f"{name} requires grad, but only log_prob may carry a gradient; pass {name}.detach()")
    if mask.dtype != torch.bool:
        raise InputError(f"mask is {mask.dtype}; need bool: pass mask.bool()")


def _check_masks(values: Tensor, mask: Tensor, counted: Tensor) -> None:
    for name, tensor in (("mask", mask), ("denominator_mask", counted)):
        if values.dim() != 2 or tensor.shape != values.shape or tensor.dtype != torch.bool:
            raise InputError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}; values {list(values.shape)} must be [B,T] and masks "
                "bool of the same shape"
            )
    if counted is not mask and bool((mask & ~counted).any()):
        raise InputError("mask has tokens outside denominator_mask; a mean would leave out tokens that it sums")
