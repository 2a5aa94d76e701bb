"""What is weighted and what is rejected.

Owns the settings of the correction and their checks: a setting that could not act is refused. The arithmetic is
`is_correction.py`'s, the reading of verl's keys `correction_verl.py`'s. Factors are those of [Note: three factors] in
`factors.py`: mismatch pi_b/mu, lag pi_p/pi_b, combined pi_p/mu; rho is a factor of one token and L = log rho.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from fsdp_async.checks import require_choice, require_flag, require_number
from fsdp_async.correction_verl import translate_correction
from fsdp_async.errors import ConfigError

Factor = Literal["mismatch", "lag", "combined"]
Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "mask"]
Statistic = Literal["ratio", "k2", "k3", "binary_kl", "tv"]
RowAggregate = Literal["token", "sum", "mean", "max", "min"]
Denominator = Literal["original", "kept"]
NonFinite = Literal["raise", "mask", "unit"]

LOG_CLAMP = 20.0
"""Log weights are clamped to +-20 before they are exponentiated; how many were is reported."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How the weight of one factor is formed and bounded.

    Attributes:
        level: `token`: rho_t. `sequence`: W = prod_t rho_t on the whole row. `geometric`: exp(mean_t L_t) on the row.
        mode: `truncate` moves a weight to the nearest bound (Ionides 2008, truncated importance sampling); `mask`
            makes a weight outside the bounds 0.
        lower, upper: ratios, 0 <= lower <= upper; None for no bound. Without any the weight is unbounded; given ones
            must exclude a weight, all of which lie in e^-20 to e^20.
    """

    level: Level = "token"
    mode: Mode = "truncate"
    lower: float | None = None
    upper: float | None = None

    def __post_init__(self) -> None:
        require_choice("bounds.level", self.level, get_args(Level))
        require_choice("bounds.mode", self.mode, get_args(Mode))
        _check_range("bounds", self.lower, self.upper)
        if self.mode == "mask" and self.lower is None and self.upper is None:
            raise ConfigError("bounds with mode='mask' and neither lower nor upper mask nothing; give a bound")
        least, most = math.exp(-LOG_CLAMP), math.exp(LOG_CLAMP)
        _refuse_idle_range("bounds", self.lower, self.upper, least, most)
        if (self.lower is not None and self.lower > most) or (self.upper is not None and self.upper < least):
            raise ConfigError(
                f"bounds lower={self.lower}, upper={self.upper}: no weight is inside, since all lie in {least:.3g} to "
                f"{most:.3g}; give bounds around 1"
            )


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A rule that takes tokens or whole rows out of the loss; all rules must be passed.

    Attributes:
        factor: whose ratio is looked at.
        statistic: `ratio`: rho. `k2`: L^2 / 2. `k3`: exp(L) - 1 - L. `binary_kl`: KL of Bernoulli(p) from Bernoulli(q)
            with p, q the numerator's and denominator's probability of the sampled token. `tv`: |p - q|.
        aggregate: `token` judges each token, the others the row. For `ratio`, `sum` means W and `mean` the geometric
            mean, so that all bounds are bounds on a ratio.
        lower, upper: kept is lower <= x <= upper; only `ratio` has a lower bound, since the others are >= 0 and 0
            where both policies agree.
    """

    factor: Factor = "mismatch"
    statistic: Statistic = "ratio"
    aggregate: RowAggregate = "token"
    lower: float | None = None
    upper: float | None = None

    def __post_init__(self) -> None:
        require_choice("rejection.factor", self.factor, get_args(Factor))
        require_choice("rejection.statistic", self.statistic, get_args(Statistic))
        require_choice("rejection.aggregate", self.aggregate, get_args(RowAggregate))
        _check_range(f"rejection {self.name}", self.lower, self.upper)
        if self.lower is None and self.upper is None:
            raise ConfigError(f"rejection {self.name} has neither lower nor upper and rejects nothing; give a bound")
        if self.statistic != "ratio" and self.lower is not None:
            raise ConfigError(
                f"rejection {self.name}: lower={self.lower} would reject the tokens on which both policies agree best; "
                "only statistic='ratio' takes a lower bound"
            )
        most = 1.0 if self.statistic == "tv" and self.aggregate != "sum" else math.inf
        _refuse_idle_range(f"rejection {self.name}", self.lower, self.upper, 0.0, most)

    @property
    def name(self) -> str:
        """Key of its numbers."""
        return f"{self.factor}_{self.aggregate}_{self.statistic}"


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """Weights of the loss, and rules of rejection. The default is no correction: only statistics.

    Attributes:
        combined: bounds of pi_p/mu as one factor; excludes `mismatch` and `lag`.
        mismatch, lag: bounds of pi_b/mu and pi_p/pi_b, each by itself; the weight is the product.
        rejections: rules, ANDed, all judged on the mask as it was given.
        batch_normalize: divide the weights by their mean over the batch and all ranks.
        denominator: whether the loss is divided by all sampled tokens (`original`) or by those kept.
        nonfinite: what a NaN or infinite log-prob under the mask does: `raise` an error, take its token out (`mask`),
            or give it ratio 1 (`unit`); the latter two are counted.
    """

    combined: Bounds | None = None
    mismatch: Bounds | None = None
    lag: Bounds | None = None
    rejections: tuple[Rejection, ...] = ()
    batch_normalize: bool = False
    denominator: Denominator = "original"
    nonfinite: NonFinite = "raise"

    def __post_init__(self) -> None:
        require_choice("correction.denominator", self.denominator, get_args(Denominator))
        require_choice("correction.nonfinite", self.nonfinite, get_args(NonFinite))
        require_flag("correction.batch_normalize", self.batch_normalize)
        self._check_parts()
        if self.combined is not None and (self.mismatch is not None or self.lag is not None):
            raise ConfigError(
                "correction.combined with correction.mismatch or .lag: the combined ratio is their product and would "
                "count twice; choose one"
            )
        if self.batch_normalize and not self.weights:
            raise ConfigError("correction.batch_normalize=True has no effect without weights; set combined or mismatch")
        if self.denominator == "kept" and not self.can_reject:
            raise ConfigError(
                "correction.denominator='kept' has no effect where nothing can be rejected; add a rejection or leave it"
            )
        names = [rejection.name for rejection in self.rejections]
        if len(set(names)) != len(names):
            raise ConfigError(f"correction.rejections name the same rule twice: {names}; give each one pair of bounds")

    def _check_parts(self) -> None:
        for name in ("combined", "mismatch", "lag"):
            bounds = getattr(self, name)
            if bounds is not None and not isinstance(bounds, Bounds):
                raise ConfigError(f"correction.{name}={bounds!r} must be a Bounds, or None for no weight")
        rules: object = self.rejections
        if not isinstance(rules, list | tuple) or not all(isinstance(rule, Rejection) for rule in rules):
            raise ConfigError(f"correction.rejections={rules!r} must be a tuple of Rejection")

    @property
    def can_reject(self) -> bool:
        """Whether a token that was sampled may be left out."""
        return bool(self.rejections) or self.nonfinite == "mask"

    @classmethod
    def from_verl(cls, mapping: Mapping[str, Any] | None) -> Self:
        """Translate verl's `algorithm.rollout_correction` section; None or {} is no correction.

        Thresholds: `rollout_is_threshold` "u" truncates, "lo_hi" masks. `rollout_rs` lists rules by comma, a rule
        named twice counts once; `rollout_rs_threshold` has one entry for all or one for each: "lo_hi" or "u" (which
        is 1/u_u) for k1, "u" for k2 and k3.

        Raises:
            ConfigError: an unknown key, a malformed threshold, or counts that do not match; names the field.
        """
        arguments = translate_correction(mapping)
        combined = arguments["combined"]
        return cls(
            combined=None if combined is None else Bounds(**combined),
            rejections=tuple(Rejection(**rule) for rule in arguments["rejections"]),
            batch_normalize=arguments["batch_normalize"],
        )

    @property
    def weights(self) -> dict[Factor, Bounds]:
        """The bounded factors."""
        every: dict[Factor, Bounds | None] = {"combined": self.combined, "mismatch": self.mismatch, "lag": self.lag}
        return {factor: bounds for factor, bounds in every.items() if bounds is not None}

    @property
    def factors(self) -> set[Factor]:
        """Factors that a weight or a rule asks for."""
        return {*self.weights, *(rejection.factor for rejection in self.rejections)}


def _check_range(what: str, lower: float | None, upper: float | None) -> None:
    if lower is not None:
        require_number(f"{what}: lower", lower, lambda x: 0 <= x < math.inf, "a number >= 0, or None for no bound")
    if upper is not None:
        require_number(f"{what}: upper", upper, lambda x: x >= 0, "a number >= 0, or None for no bound")
    if lower is not None and upper is not None and lower > upper:
        raise ConfigError(f"{what}: lower={lower} is above upper={upper}; swap them")
    if upper == 0:
        raise ConfigError(f"{what}: upper=0 leaves nothing; give a positive bound")


def _refuse_idle_range(what: str, lower: float | None, upper: float | None, least: float, most: float) -> None:
    """Refuse bounds of which none excludes a value, where all values lie in `least` to `most`."""
    given = lower is not None or upper is not None
    if given and not (lower is not None and lower > least) and not (upper is not None and upper < most):
        raise ConfigError(
            f"{what}: lower={lower}, upper={upper} exclude nothing, since every value lies in {least:.3g} to "
            f"{most:.3g}; give a bound inside, or leave both out"
        )
