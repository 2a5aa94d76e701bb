"""Importance-sampling correction: from log-probs of two or three policies to weights, a kept mask and statistics.

    old (pi_p), rollout (mu), behaviour (pi_b)
      -> sanitise -> log ratios L of each factor -> bounded weights, multiplied -> batch normalisation
                                                 -> rejection rules, ANDed      -> kept mask
                                                 -> statistics of raw values

Owns `compute_correction`, a pure function. It promises weights without gradient, 0 off the kept mask, finite for any
finite input; nothing under padding can reach a result. pi/mu = mismatch x lag x update always (see `factors.py`):
leaving a factor out of the weight biases the gradient, and the settings say which are in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_async.checks import require_type, unknown_choice
from fsdp_async.correction_config import LOG_CLAMP, Bounds, CorrectionConfig, Factor, Mode, NonFinite, Rejection
from fsdp_async.correction_statistics import FactorView, factor_statistics, first_valid, rejection_statistics
from fsdp_async.errors import FsdpAsyncError, InputError, NonFiniteError
from fsdp_async.metrics import Statistics, Total, merge_all

__all__ = ["Bounds", "Correction", "CorrectionConfig", "Rejection", "compute_correction"]

LARGEST_LOG_PROB = 1e-3
"""A log-prob above 0 by more than rounding is no log-prob: its sign was turned, or it is a probability."""


@dataclass(frozen=True)
class Correction:
    """Result of `compute_correction`.

    Attributes:
        weights: [B,T] float, detached, 0 off `kept_mask`; None when no factor is weighted.
        kept_mask: [B,T] bool, `response_mask` after rejection.
        statistics: of this rank's rows; merge them over ranks by `Statistics.all_reduce`.
    """

    weights: Tensor | None
    kept_mask: Tensor
    statistics: Statistics

    def metrics(self) -> dict[str, float]:
        """Reported numbers of this rank's rows."""
        return self.statistics.to_dict()


def compute_correction(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    config: CorrectionConfig,
    *,
    behaviour_log_prob: Tensor | None = None,
    process_group: ProcessGroup | None = None,
) -> Correction:
    """Weights, kept mask and statistics of a batch.

    Args:
        old_log_prob: [B,T] anchor pi_p.
        rollout_log_prob: [B,T] engine mu.
        response_mask: [B,T] bool; values off it may be anything, NaN included.
        config: what to weigh and reject.
        behaviour_log_prob: [B,T] pi_b; needed for mismatch and lag.
        process_group: ranks that hold the rest of the batch; only batch normalisation is collective.

    Returns:
        A `Correction`; arithmetic in float32 (float64 for float64 inputs). A factor that is 1 only because both
        its policies are one tensor object is not reported.

    Raises:
        InputError: types, shapes or dtypes that do not fit, a log-prob above 0 under the mask, or a split asked for
            without `behaviour_log_prob`.
        NonFiniteError: a non-finite log-prob under the mask, with `nonfinite="raise"`. Where the call is collective,
            an error of one rank is raised on all.
    """
    require_type("config", config, CorrectionConfig)
    policies = {"old": old_log_prob, "rollout": rollout_log_prob}
    if behaviour_log_prob is not None:
        policies["behaviour"] = behaviour_log_prob
    group = process_group if config.batch_normalize else None
    with _refusal_reaches_all(response_mask, group):
        _check_inputs(policies, response_mask, config)
        views, valid, num_nonfinite = _factor_views(policies, response_mask, config)
        weighted = {factor: _weight(views[factor], bounds) for factor, bounds in config.weights.items()}
    weights = _product(weighted, config, valid, group)
    kept, verdicts = _reject(views, config, valid)
    parts = [
        factor_statistics(factor, view, config.weights.get(factor), weighted.get(factor))
        for factor, view in _reported(views, policies).items()
    ]
    parts += [rejection_statistics(rule.name, passed, valid) for rule, passed in verdicts]
    parts.append(Statistics({"nonfinite_tokens": Total(float(num_nonfinite))}))
    return Correction(None if weights is None else torch.where(kept, weights, 0.0), kept, merge_all(parts))


@contextmanager
def _refusal_reaches_all(mask: Tensor, group: ProcessGroup | None) -> Iterator[None]:
    """A rank that refuses its inputs takes part in the one reduction first; its peers would wait for it for ever."""
    try:
        yield
    except FsdpAsyncError as error:
        if group is not None:
            is_nonfinite = isinstance(error, NonFiniteError)
            sums = torch.tensor([0, 0, is_nonfinite, not is_nonfinite], dtype=torch.float64)
            dist.all_reduce(sums.to(mask.device) if isinstance(mask, Tensor) else sums, group=group)
        raise


def _refuse_for_others(num_nonfinite: float, num_refused: float) -> None:
    if num_nonfinite:
        raise NonFiniteError(
            f"log-probs under the mask are not finite on {num_nonfinite:.0f} other ranks, whose errors say where; find "
            "out why, or set correction.nonfinite to 'mask' or 'unit'"
        )
    if num_refused:
        raise InputError(f"{num_refused:.0f} other ranks refused their inputs to compute_correction; see their errors")


def _check_inputs(policies: Mapping[str, Tensor], mask: Tensor, config: CorrectionConfig) -> None:
    for name, value in {
        "response_mask": mask,
        **{f"{name}_log_prob": value for name, value in policies.items()},
    }.items():
        require_type(name, value, Tensor)
    shapes = {f"{name}_log_prob": tuple(value.shape) for name, value in policies.items()}
    if mask.dim() != 2 or any(shape != tuple(mask.shape) for shape in shapes.values()):
        raise InputError(f"all inputs must be [B,T] alike; response_mask is {tuple(mask.shape)}, others are {shapes}")
    if mask.dtype != torch.bool or not all(value.is_floating_point() for value in policies.values()):
        dtypes = {name: value.dtype for name, value in policies.items()}
        raise InputError(f"response_mask must be bool, log-probs floating point; got {mask.dtype} and {dtypes}")
    if config.factors - {"combined"} and "behaviour" not in policies:
        raise InputError(
            f"the correction asks for {sorted(config.factors - {'combined'})}, which need behaviour_log_prob; "
            "pass it or bound `combined` instead"
        )


def _factor_views(
    policies: Mapping[str, Tensor], mask: Tensor, config: CorrectionConfig
) -> tuple[dict[Factor, FactorView], Tensor, int]:
    """Sanitised views of all factors, the mask of valid tokens, and how many were not finite."""
    values = {name: _upcast(value.detach()) for name, value in policies.items()}
    finite = torch.stack([value.isfinite() for value in values.values()]).all(dim=0)
    # `where` before any arithmetic: a difference of infinities would be NaN, and NaN survives every later mask.
    clean = {name: torch.where(mask & finite, value, 0.0) for name, value in values.items()}
    num_nonfinite = _check_values(values, clean, mask & ~finite, config)
    pairs: dict[Factor, tuple[str, str]] = {
        "combined": ("old", "rollout"),
        "mismatch": ("behaviour", "rollout"),
        "lag": ("old", "behaviour"),
    }
    valid = _valid(mask, finite, config.nonfinite)
    views: dict[Factor, FactorView] = {
        factor: FactorView(clean[top], clean[bottom], valid)
        for factor, (top, bottom) in pairs.items()
        if top in clean and bottom in clean
    }
    return views, valid, num_nonfinite


def _valid(mask: Tensor, finite: Tensor, nonfinite: NonFinite) -> Tensor:
    if nonfinite == "mask":
        return mask & finite
    if nonfinite in ("raise", "unit"):
        return mask
    raise unknown_choice("correction.nonfinite", nonfinite, get_args(NonFinite))


def _check_values(
    values: Mapping[str, Tensor], clean: Mapping[str, Tensor], bad: Tensor, config: CorrectionConfig
) -> int:
    """Refuse what cannot be a log-prob; the number of tokens under the mask that are not finite."""
    if not bad.numel():
        return 0
    # One transfer for all numbers.
    tops = [value.amax().double() for value in clean.values()]
    packed = torch.stack([bad.sum().double(), *tops]).tolist()
    num_nonfinite = int(packed[0])
    if num_nonfinite and config.nonfinite == "raise":
        row, position = bad.nonzero()[0].tolist()
        found = {name: float(value[row, position]) for name, value in values.items()}
        raise NonFiniteError(
            f"{num_nonfinite} log-probs under the mask are not finite, the first at row {row}, position {position}: "
            f"{found}; find out why, or set correction.nonfinite to 'mask' or 'unit'"
        )
    for name, top in zip(clean, packed[1:], strict=True):
        if top > LARGEST_LOG_PROB:
            raise InputError(
                f"{name}_log_prob is up to {top:g} under the mask, and no log-prob is above 0; were probabilities or "
                "negative log-likelihoods passed?"
            )
    return num_nonfinite


def _weight(view: FactorView, bounds: Bounds) -> Tensor:
    """Bounded weight [B,T] of one factor; row-level weights stand at every position of their row."""
    raw = view.log_weight(bounds.level).clamp(-LOG_CLAMP, LOG_CLAMP).exp()
    if bounds.mode == "truncate":
        return raw.clamp(min=bounds.lower, max=bounds.upper) if bounds.lower or bounds.upper else raw
    if bounds.mode == "mask":
        return torch.where(inside(raw, bounds.lower, bounds.upper), raw, 0.0)
    raise unknown_choice("bounds.mode", bounds.mode, get_args(Mode))


def inside(values: Tensor, lower: float | None, upper: float | None) -> Tensor:
    """Where lower <= values <= upper; None bounds nothing."""
    passed = torch.ones_like(values, dtype=torch.bool)
    if lower is not None:
        passed &= values >= lower
    if upper is not None:
        passed &= values <= upper
    return passed


def _product(
    weighted: Mapping[Factor, Tensor], config: CorrectionConfig, valid: Tensor, group: ProcessGroup | None
) -> Tensor | None:
    if not weighted:
        return None
    product = torch.stack(list(weighted.values())).prod(dim=0)
    if not config.batch_normalize:
        return product
    by_token = any(bounds.level == "token" for bounds in config.weights.values())
    counted = valid if by_token else first_valid(valid)
    sums = product.new_zeros(4, dtype=torch.float64)
    sums[0], sums[1] = product[counted].double().sum(), counted.sum()
    if group is not None:
        dist.all_reduce(sums, group=group)
        _refuse_for_others(*sums[2:].tolist())
    mean = sums[0] / sums[1].clamp(min=1)
    return product / mean.to(product.dtype) if mean > 0 else product


def _reject(
    views: Mapping[Factor, FactorView], config: CorrectionConfig, valid: Tensor
) -> tuple[Tensor, list[tuple[Rejection, Tensor]]]:
    """The kept mask and what each rule by itself would keep [B,T]."""
    verdicts = [
        (rule, valid & inside(views[rule.factor].statistic(rule.statistic, rule.aggregate), rule.lower, rule.upper))
        for rule in config.rejections
    ]
    kept = valid
    for _, passed in verdicts:
        kept = kept & passed
    return kept, verdicts


def _reported(views: Mapping[Factor, FactorView], policies: Mapping[str, Tensor]) -> dict[Factor, FactorView]:
    """Leave out a factor whose two policies are one tensor, and a combined one that equals mismatch for that reason."""
    old, rollout, behaviour = policies["old"], policies["rollout"], policies.get("behaviour")
    hidden: dict[Factor, bool] = {
        "combined": old is rollout or old is behaviour,
        "mismatch": behaviour is rollout,
        "lag": old is behaviour,
    }
    return {factor: view for factor, view in views.items() if not hidden[factor]}


def _upcast(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
