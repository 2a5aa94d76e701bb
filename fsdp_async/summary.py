"""The numbers a run ends with, computed from its event records and nothing else.

Owns the keys of `summary.json`. Whoever has `metrics.jsonl` can compute them again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fsdp_async.timeline import overlap_fraction, without

Record = Mapping[str, Any]

TARGET_ACCURACY = 0.80
# Evaluation is not work, and waiting (for responses, or inside a publication for the engine) is not either.
TRAINER_WORK = frozenset({"behaviour", "update", "publish"})
WAITING = "wait"


def summarize(records: Iterable[Record]) -> dict[str, Any]:
    """Summary of a whole run, or of what an interrupted one did.

    Args:
        records: events in order, as written to `metrics.jsonl`: each has `event`, `step` and the trainer's values.

    Returns:
        JSON-able values; None where a quantity does not exist (no evaluation, lag with anchor `behaviour`, target
        not reached). Durations in seconds, staleness in versions weighted by tokens, divergences in nats.
    """
    events = list(records)
    steps = [r for r in events if r["event"] == "step"]
    evaluations = [r for r in events if r["event"] == "evaluation"]
    reached = [r["training_clock_s"] for r in evaluations if r["accuracy"] >= TARGET_ACCURACY]
    num_tokens = sum(r["num_tokens"] for r in steps)
    versions = [len(r["behaviour_versions"]) for r in steps]
    return {
        "outcome": next((r["outcome"] for r in reversed(events) if r["event"] == "end"), "unfinished"),
        "accuracy_first": evaluations[0]["accuracy"] if evaluations else None,
        "accuracy_last": evaluations[-1]["accuracy"] if evaluations else None,
        "time_to_0.80_s": reached[0] if reached else None,
        "wall_s": max((r["time_s"] for r in evaluations or events), default=0.0),
        "num_versions": sum(r["event"] == "publication" for r in events),
        "num_batches": len(steps),
        "num_optimizer_steps": sum(r["num_optimizer_steps"] for r in steps),
        "num_skipped_steps": sum(r["num_skipped_steps"] for r in steps),
        **_ledger(events),
        "staleness_mean": sum(r["staleness_total"] for r in steps) / num_tokens if num_tokens else None,
        "staleness_max": max((r["staleness_max"] for r in steps), default=None),
        "overlap_fraction": _overlap(events),
        "behaviour_versions_per_batch_mean": sum(versions) / len(versions) if versions else None,
        "behaviour_versions_per_batch_max": max(versions, default=None),
        "mismatch_kl_k3_mean": _pooled(steps, "mismatch_kl_k3"),
        "lag_kl_k3_mean": _pooled(steps, "lag_kl_k3"),
        "update_kl_k3_mean": _pooled(steps, "update_kl_k3"),
        "canary_gap_max": max(
            (gap for r in steps for gap in r["canary_gap_nats"].values() if gap is not None), default=None
        ),
    }


def _ledger(events: Sequence[Record]) -> dict[str, int]:
    counts = ("submitted", "produced", "consumed", "dropped", "queued", "in_flight")
    ledger = events[-1]["ledger"] if events else dict.fromkeys(counts, 0)
    return {f"samples_{name}": ledger[name] for name in counts}


def _overlap(events: Sequence[Record]) -> float:
    spans = [span for r in events for span in r["trainer_spans"]]
    work = [(start, stop) for phase, start, stop in spans if phase in TRAINER_WORK]
    trainer = without(work, ((start, stop) for phase, start, stop in spans if phase == WAITING))
    engine = [(start, stop) for r in events for start, stop in r["engine_spans"]]
    return overlap_fraction(trainer, engine)


def _pooled(steps: Sequence[Record], name: str) -> float | None:
    """Mean over all tokens of all steps; None without tokens, or where a sum was not finite (null in a file)."""
    pairs = [r["factors"][name] for r in steps if name in r["factors"]]
    count = sum(pair[1] for pair in pairs)
    total = sum(math.nan if pair[0] is None else pair[0] for pair in pairs)
    return total / count if count and math.isfinite(total) else None
