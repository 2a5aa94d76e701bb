"""What is measured of a factor.

Owns the quantities that rules and reports are made of: log weights by level, rejection statistics by row, and the
mergeable numbers of a factor. All reports come from raw, unclamped values: numbers of bounded weights would look best
in the worst batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from fsdp_async.checks import unknown_choice
from fsdp_async.correction_config import LOG_CLAMP, Bounds, Factor, Level, RowAggregate, Statistic
from fsdp_async.metrics import Correlation, EffectiveSampleSize, Entry, Mean, Moments, Statistics, kl_k3

# Squares of ratios stay inside float64 up to here.
REPORT_CLAMP = 300.0


@dataclass(frozen=True)
class ChiSquared(Mean):
    """Mean of squared ratios minus 1: the chi-square divergence; a sample value, which may be negative."""

    def to_dict(self, name: str) -> dict[str, float]:
        """`{name: mean - 1}`, or nothing."""
        return {name: self.value - 1} if self.count else {}


@dataclass(frozen=True)
class Perplexity(Mean):
    """Mean over rows of the row's mean negative log-prob; reported as it is and as exp of it."""

    def to_dict(self, name: str) -> dict[str, float]:
        """`log_name` and `name`, or nothing."""
        if not self.count:
            return {}
        path, _, last = name.rpartition("/")
        return {f"{path}/log_{last}": self.value, name: math.exp(min(self.value, REPORT_CLAMP))}


@dataclass(frozen=True)
class FactorView:
    """Numerator and denominator log-probs [B,T] of one factor, finite everywhere; `valid` [B,T] bool."""

    numerator: Tensor
    denominator: Tensor
    valid: Tensor

    @property
    def log_ratio(self) -> Tensor:
        """L [B,T], 0 off the mask."""
        return torch.where(self.valid, self.numerator - self.denominator, 0.0)

    @property
    def num_valid(self) -> Tensor:
        """Valid tokens of each row [B,1], at least 1."""
        return self.valid.sum(dim=1, keepdim=True).clamp(min=1)

    def log_weight(self, level: Level) -> Tensor:
        """Unclamped log weight [B,T]; sequence and geometric ones stand at every position of their row."""
        if level == "token":
            return self.log_ratio
        total = self.log_ratio.sum(dim=1, keepdim=True)
        if level == "sequence":
            return total.expand_as(self.log_ratio)
        if level == "geometric":
            return (total / self.num_valid).expand_as(self.log_ratio)
        raise unknown_choice("level", level, get_args(Level))

    def statistic(self, statistic: Statistic, aggregate: RowAggregate) -> Tensor:
        """Value [B,T] that a rejection compares with its bounds; a row's value stands at every position of it."""
        if statistic == "ratio" and aggregate in ("sum", "mean"):
            return self.log_weight("sequence" if aggregate == "sum" else "geometric").exp()
        return self._over_row(self._per_token(statistic), aggregate)

    def _per_token(self, statistic: Statistic) -> Tensor:
        log_ratio = self.log_ratio
        if statistic == "ratio":
            return log_ratio.exp()
        if statistic == "k2":
            return log_ratio.square() / 2
        if statistic == "k3":
            return kl_k3(log_ratio)
        if statistic == "tv":
            return (self.numerator.exp() - self.denominator.exp()).abs()
        if statistic == "binary_kl":
            return binary_kl(self.numerator, self.denominator)
        raise unknown_choice("statistic", statistic, get_args(Statistic))

    def _over_row(self, values: Tensor, aggregate: RowAggregate) -> Tensor:
        if aggregate == "token":
            return values
        if aggregate in ("max", "min"):
            sign = 1.0 if aggregate == "max" else -1.0
            rows = torch.where(self.valid, sign * values, -torch.inf).amax(dim=1, keepdim=True)
            return (sign * rows).expand_as(values)
        total = torch.where(self.valid, values, 0.0).sum(dim=1, keepdim=True)
        if aggregate == "sum":
            return total.expand_as(values)
        if aggregate == "mean":
            return (total / self.num_valid).expand_as(values)
        raise unknown_choice("aggregate", aggregate, get_args(RowAggregate))


def binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(Bernoulli(p) || Bernoulli(q)) = p log(p/q) + (1-p) log((1-p)/(1-q)), elementwise, finite for log_q < 0."""
    p = log_p.exp().clamp(max=1.0)
    # 1 - p without cancellation; a certain token (log-prob 0) keeps the smallest positive remainder.
    tiny = torch.finfo(log_p.dtype).tiny
    rest_p, rest_q = (-torch.expm1(value).clamp(max=0.0) for value in (log_p, log_q))
    return p * (log_p - log_q) + rest_p * (rest_p.clamp(min=tiny).log() - rest_q.clamp(min=tiny).log())


def factor_statistics(factor: Factor, view: FactorView, bounds: Bounds | None, applied: Tensor | None) -> Statistics:
    """Mergeable numbers of one factor under `factor/...`; `applied` [B,T] are its bounded weights, if any."""
    level: Level = "token" if bounds is None else bounds.level
    # A row-level quantity is counted once a row, at its first valid token.
    rows = first_valid(view.valid)
    counted = view.valid if level == "token" else rows
    log_weight = view.log_weight(level).double()
    entries: dict[str, Entry] = {
        "weight": Moments.of(_report_exp(log_weight), counted),
        "ess_raw": EffectiveSampleSize.of_log(log_weight, counted),
        "fraction_clamped": Mean.of(log_weight.abs() > LOG_CLAMP, counted),
        **_divergences(view, rows),
        **_perplexities(view, rows),
    }
    if bounds is not None and applied is not None:
        entries["ess_applied"] = EffectiveSampleSize.of_log(applied.double().log(), counted)
        weight = _report_exp(log_weight)
        if bounds.upper is not None:
            entries["fraction_above"] = Mean.of(weight > bounds.upper, counted)
        if bounds.lower is not None:
            entries["fraction_below"] = Mean.of(weight < bounds.lower, counted)
    return Statistics(entries).prefixed(factor)


def first_valid(valid: Tensor) -> Tensor:
    """[B,T] bool with one True in every non-empty row: where a row-level quantity is counted once."""
    return valid & (valid.cumsum(dim=1) == 1)


def rejection_statistics(name: str, passed: Tensor, valid: Tensor) -> Statistics:
    """Shares of tokens that this rule alone takes out (`rejected/`), and of rows it leaves nothing of."""
    has_tokens = valid.any(dim=1)
    return Statistics(
        {
            f"rejected/{name}": Mean.of(~passed, valid),
            f"rejected_rows/{name}": Mean.of(~passed.any(dim=1), has_tokens),
        }
    )


def _divergences(view: FactorView, rows: Tensor) -> dict[str, Entry]:
    log_ratio = view.log_ratio.double()
    p, q = view.numerator.double().exp(), view.denominator.double().exp()
    return {
        "kl_k1": Mean.of(-log_ratio, view.valid),
        "kl_k3": Mean.of(kl_k3(log_ratio.clamp(-REPORT_CLAMP, REPORT_CLAMP)), view.valid),
        "chi2_token": ChiSquared.of(_report_exp(2 * log_ratio), view.valid),
        "chi2_seq": ChiSquared.of(_report_exp(2 * view.log_weight("sequence").double()), rows),
        "abs_prob_difference": Mean.of((p - q).abs(), view.valid),
        "exp_abs_log_ratio": Mean.of(_report_exp(log_ratio.abs()), view.valid),
        "correlation": Correlation.of(p, q, view.valid),
    }


def _perplexities(view: FactorView, rows: Tensor) -> dict[str, Entry]:
    def row_nll(log_prob: Tensor) -> Tensor:
        total = torch.where(view.valid, log_prob.double(), 0.0).sum(dim=1, keepdim=True)
        return (-total / view.num_valid).expand_as(log_prob)

    top, bottom = row_nll(view.numerator), row_nll(view.denominator)
    return {
        "numerator_ppl": Perplexity.of(top, rows),
        "denominator_ppl": Perplexity.of(bottom, rows),
        "log_ppl_difference": Mean.of(bottom - top, rows),
        "log_ppl_abs_difference": Mean.of((bottom - top).abs(), rows),
    }


def _report_exp(log_values: Tensor) -> Tensor:
    return log_values.clamp(-REPORT_CLAMP, REPORT_CLAMP).exp()
