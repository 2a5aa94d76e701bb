"""verl's rollout correction settings, read as ours.

Owns one translation, into keyword arguments of `CorrectionConfig` (which offers it as `from_verl`). Numbers keep the
meaning that verl's documentation gives them; what verl's code does otherwise is said in a warning. verl has one
factor, pi_p/mu, which is `combined` here.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from typing import Any

from fsdp_async.errors import ConfigError

DEFAULT_IS_THRESHOLD = 2.0
KNOWN = (
    "rollout_is",
    "rollout_is_threshold",
    "rollout_is_batch_normalize",
    "rollout_rs",
    "rollout_rs_threshold",
)
ELSEWHERE = {"bypass_mode": "trainer.anchor=bypass", "loss_type": "loss.kind"}
LEVELS = ("token", "sequence")
STATISTICS = {"k1": "ratio", "k2": "k2", "k3": "k3"}
AGGREGATES = {"token": "token", "seq_sum": "sum", "seq_mean": "mean", "seq_max": "max"}
Arguments = dict[str, Any]


def translate_correction(mapping: Mapping[str, Any] | None) -> Arguments:
    """Arguments of `CorrectionConfig`, those of its bounds and rules as mappings; see `CorrectionConfig.from_verl`."""
    mapping = {} if mapping is None else mapping
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"from_verl takes a mapping of verl's keys, not {mapping!r}")
    for key in mapping:
        if key in ELSEWHERE:
            raise ConfigError(f"{key} is no correction: it chooses anchor and loss; set {ELSEWHERE[key]} instead")
        if key not in KNOWN:
            raise ConfigError(f"unknown key {key!r} in verl's rollout correction; known are {KNOWN}")
    return {
        "combined": _weight(mapping),
        "rejections": _rejections(mapping),
        "batch_normalize": _flag(mapping, "rollout_is_batch_normalize"),
    }


def _weight(mapping: Mapping[str, Any]) -> Arguments | None:
    level = mapping.get("rollout_is")
    threshold = mapping.get("rollout_is_threshold")
    threshold = DEFAULT_IS_THRESHOLD if threshold is None else threshold
    numbers = _numbers("rollout_is_threshold", threshold)
    if level is None:
        # verl's own defaults carry a threshold beside rollout_is: null.
        if numbers != [DEFAULT_IS_THRESHOLD]:
            raise ConfigError(
                f"rollout_is_threshold={threshold!r} has no effect without rollout_is; set one or neither"
            )
        return None
    if level not in LEVELS:
        raise ConfigError(f"rollout_is={level!r}: choose one of {LEVELS} or null")
    if len(numbers) == 1:
        return {"level": level, "mode": "truncate", "upper": numbers[0]}
    return {"level": level, "mode": "mask", "lower": numbers[0], "upper": numbers[1]}


def _rejections(mapping: Mapping[str, Any]) -> tuple[Arguments, ...]:
    rules, thresholds = mapping.get("rollout_rs"), mapping.get("rollout_rs_threshold")
    if rules is None:
        if thresholds is not None:
            raise ConfigError(f"rollout_rs_threshold={thresholds!r} has no effect without rollout_rs; set both or none")
        return ()
    if not isinstance(rules, str):
        raise ConfigError(f"rollout_rs={rules!r}: must be names separated by commas, or null")
    names = list(dict.fromkeys(name.strip() for name in rules.split(",")))
    parts = thresholds.split(",") if isinstance(thresholds, str) else [thresholds]
    if len(parts) == 1:
        parts = parts * len(names)
    if len(parts) != len(names):
        raise ConfigError(
            f"rollout_rs_threshold={thresholds!r} has {len(parts)} entries for {len(names)} rules {names}; give one "
            "for all, or one for each"
        )
    return tuple(_rejection(name, part) for name, part in zip(names, parts, strict=True))


def _rejection(name: str, threshold: Any) -> Arguments:
    aggregate, _, kind = name.rpartition("_")
    if aggregate not in AGGREGATES or kind not in STATISTICS:
        allowed = [f"{a}_{k}" for a in AGGREGATES for k in STATISTICS]
        raise ConfigError(f"rollout_rs: {name!r} is unknown; choose from {allowed}")
    numbers = _numbers("rollout_rs_threshold", threshold)
    rule = {"factor": "combined", "statistic": STATISTICS[kind], "aggregate": AGGREGATES[aggregate]}
    if kind == "k1":
        warnings.warn(
            f"rollout_rs {name}: verl's code compares k1 = log(mu/pi), the inverse ratio, with these bounds; here "
            f"{threshold} bounds the ratio pi/mu itself, as verl's documentation says",
            stacklevel=2,
        )
        lower, upper = (1 / numbers[0], numbers[0]) if len(numbers) == 1 else numbers
        if lower > upper:
            raise ConfigError(f"rollout_rs_threshold={threshold!r} for {name}: a single upper bound must be at least 1")
        return {**rule, "lower": lower, "upper": upper}
    if len(numbers) != 1:
        raise ConfigError(f"rollout_rs_threshold={threshold!r}: {name} takes an upper bound only")
    return {**rule, "upper": numbers[0]}


def _numbers(field: str, value: Any) -> list[float]:
    """One or two positive finite numbers out of 2.0, "2.0" or "0.5_2.0"."""
    text = value.strip() if isinstance(value, str) else str(value)
    is_number = isinstance(value, int | float | str) and not isinstance(value, bool)
    # Written out, since float() would take "0_5", "nan" and "inf".
    pattern = r"(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
    if not is_number or not re.fullmatch(rf"{pattern}(_{pattern})?", text):
        raise ConfigError(f"{field}={value!r}: must be a positive number, or two as 'lower_upper'")
    numbers = [float(part) for part in text.split("_")]
    if not all(0 < number < math.inf for number in numbers):
        raise ConfigError(f"{field}={value!r}: bounds must be above 0 and finite")
    if numbers != sorted(numbers):
        raise ConfigError(f"{field}={value!r}: the lower bound is above the upper one; swap them")
    return numbers


def _flag(mapping: Mapping[str, Any], field: str) -> bool:
    value = mapping.get(field)
    if value not in (None, True, False) or (isinstance(value, int | float) and not isinstance(value, bool)):
        raise ConfigError(f"{field}={value!r}: must be true or false")
    return bool(value)
