"""What a policy loss is made of: `LossConfig`, its checks, and its translation from verl.

It promises that every option acts: one that the chosen loss cannot honour is refused. The formulas are in `losses.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from fsdp_async.checks import require_choice, require_number
from fsdp_async.errors import ConfigError

LossKind = Literal["ppo_clip", "reinforce"]
Aggregate = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

# verl's key -> (ours, the value of a missing key).
_VERL_VANILLA = {
    "clip_ratio_low": ("clip_low", 0.2),
    "clip_ratio_high": ("clip_high", 0.2),
    "clip_ratio_c": ("dual_clip", 3.0),
}


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What is maximised for each token, and how tokens become one number.

    Attributes:
        kind: `ppo_clip`: min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (Schulman et al. 2017, arXiv 1707.06347,
            equation 7). `reinforce`: A log pi; importance enters through the weights alone (Williams 1992).
        clip_low: how far below 1 the ratio still counts, in (0, 1]; 1 means no bound. `ppo_clip` only.
        clip_high: how far above 1, > 0; infinity means no bound. Larger than `clip_low` is "clip-higher" (Yu et al.
            2025, arXiv 2503.14476, section 3.1). `ppo_clip` only.
        dual_clip: c > 1: where A < 0 the objective is at least c A (Ye et al. 2020, arXiv 1912.09729, equation 5).
            None leaves it out. `ppo_clip` only.
        norm_length: the L of `seq-mean-token-sum-norm`; None means the padded width T, which is only independent of
            micro-batches where they are all padded to one width.
        aggregate: how tokens become one number; the formulas are in `losses.aggregate`.
    """

    kind: LossKind = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    norm_length: int | None = None
    aggregate: Aggregate = "token-mean"

    def __post_init__(self) -> None:
        require_choice("loss.kind", self.kind, get_args(LossKind))
        require_choice("loss.aggregate", self.aggregate, get_args(Aggregate))
        require_number("loss.clip_low", self.clip_low, lambda x: 0 < x <= 1, "in (0, 1]")
        require_number("loss.clip_high", self.clip_high, lambda x: x > 0, "above 0")
        if self.dual_clip is not None:
            require_number("loss.dual_clip", self.dual_clip, lambda x: 1 < x < math.inf, "finite and above 1")
        if self.norm_length is not None:
            require_number("loss.norm_length", self.norm_length, lambda x: x >= 1 and x % 1 == 0, "a whole number >= 1")
        self._refuse_inert()

    def _refuse_inert(self) -> None:
        if self.kind != "ppo_clip":
            for name in ("clip_low", "clip_high", "dual_clip"):
                if getattr(self, name) != getattr(LossConfig, name):
                    raise ConfigError(
                        f"loss.{name}={getattr(self, name)} has no effect with loss.kind={self.kind!r}, which forms no "
                        "ratio; leave it out, or use loss.kind='ppo_clip'"
                    )
        if self.norm_length is not None and self.aggregate != "seq-mean-token-sum-norm":
            raise ConfigError(
                f"loss.norm_length={self.norm_length} has no effect with loss.aggregate={self.aggregate!r}; leave it "
                "out, or use loss.aggregate='seq-mean-token-sum-norm'"
            )

    @classmethod
    def from_verl(cls, mapping: Mapping[str, Any] | None) -> Self:
        """Translate verl's actor settings; None or {} is verl's default loss.

        Args:
            mapping: any of `loss_mode`, `loss_agg_mode`, `clip_ratio_low`, `clip_ratio_high`, `clip_ratio_c`. A missing
                key takes the value verl gives it, so a `vanilla` loss has dual clip 3.

        Raises:
            ConfigError: an unknown key or loss, or a value that `LossConfig` refuses.
        """
        mapping = {} if mapping is None else mapping
        if not isinstance(mapping, Mapping):
            raise ConfigError(f"from_verl takes a mapping of verl's keys, not {mapping!r}")
        known = ("loss_mode", "loss_agg_mode", *_VERL_VANILLA)
        unknown = sorted(set(mapping) - set(known), key=str)
        if unknown:
            raise ConfigError(f"from_verl does not know {unknown}; it translates {known}: remove what is not a loss")
        require_choice("loss_mode", mapping.get("loss_mode", "vanilla"), ("vanilla",))
        aggregate_mode = mapping.get("loss_agg_mode", "token-mean")
        require_choice("loss_agg_mode", aggregate_mode, get_args(Aggregate))
        numbers = {}
        for theirs, (ours, default) in _VERL_VANILLA.items():
            numbers[ours] = mapping.get(theirs, default)
            require_number(theirs, numbers[ours], lambda x: not math.isnan(x), "a number")
        return cls(kind="ppo_clip", aggregate=aggregate_mode, **numbers)
