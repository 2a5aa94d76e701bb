"""The asynchronous training loop.

    prompts --submit--> engine --groups--> sample_queue --TrainBatch--> learner --weights--> publisher --> engine
       ^                                       |                           |
       '------- admission (staleness bound) ---'         cache.snapshot(version), retain(what is referenced)

| who       | waits for                          | at most                                      |
|-----------|------------------------------------|----------------------------------------------|
| trainer   | the oldest submitted groups        | while the engine gives signs of life         |
| engine    | prompts (admission), new weights   | until the trainer publishes; it may idle     |
| publisher | the engine to copy a bucket        | publisher's timeout, then an error           |

Owns the order of things and nothing else: it speaks protocols and does no arithmetic. A group submitted under version
v is trained on before v + max_staleness + 1 is published, because admission bounds what is outstanding and the oldest
are taken first; `max_staleness=0` with `sync_every=1` is the synchronous loop. See [Note: three factors] in
`factors.py` and [Note: life of a version] in `state_cache.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

from torch import Tensor

from fsdp_async.batching import collate
from fsdp_async.canary import Canary
from fsdp_async.dtensor_io import full_tensors
from fsdp_async.errors import ConfigError, EngineDiedError, InputError, NonFiniteError
from fsdp_async.factors import lag_and_update_factors, mismatch_factor
from fsdp_async.learner import Anchor, Learner, PreparedBatch
from fsdp_async.metrics import Mean
from fsdp_async.rewards import Reward, score_group
from fsdp_async.rollout import RolloutEngine, SamplingParams
from fsdp_async.sample_queue import SampleQueue
from fsdp_async.timeline import Timeline
from fsdp_async.types import Prompt, ResponseGroup, TrainBatch
from fsdp_async.update_report import UpdateReport
from fsdp_async.weight_sync import WeightPublisher

Observer = Callable[[str, int, Mapping[str, Any]], None]
"""`observer(event, step, values)`; events: publication, evaluation, step, end."""

POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The loop. A batch is `groups_per_batch` groups of `group_size` responses; `sync_every` counts batches."""

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

    def __post_init__(self) -> None:
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


@dataclass(frozen=True)
class TrainerParts:
    """What the loop joins. `evaluate()` returns the sampled accuracy of the live weights."""

    learner: Learner
    engine: RolloutEngine
    publisher: WeightPublisher
    queue: SampleQueue
    prompts: Iterator[Prompt]
    reward: Reward
    sampling: SamplingParams
    evaluate: Callable[[], float]
    timeline: Timeline
    observers: tuple[Observer, ...] = ()
    record_batch: Callable[[int, Mapping[str, Tensor]], None] | None = None


class AsyncTrainer:
    """Runs `num_batches` training steps while the engine keeps generating."""

    def __init__(self, parts: TrainerParts, config: TrainerConfig) -> None:
        self.parts = parts
        self.config = config
        self.version = -1
        self.num_skipped_in_a_row = 0
        self._canary = Canary(config.canary_bound_nats)
        self._training_start_s = 0.0
        self._stop_requested = False

    def request_stop(self) -> None:
        """End the run after the step in hand; safe to call from a signal handler."""
        self._stop_requested = True

    def run(self) -> bool:
        """Train; True when all batches were done, False when a stop was requested.

        Whatever happens, the queue is drained (what was outstanding counts as dropped) and an `end` event with the
        balanced ledger is the last thing observers hear.

        Raises:
            CanaryError: an engine disagrees with the weights published to it.
            EngineDiedError, EngineTimeoutError: the engine ended or fell silent.
            InputError: the stream of prompts ended before the run.
            NonFiniteError: more than `max_skipped_steps` optimizer steps in a row were skipped.
        """
        outcome = "failed"
        try:
            outcome = "completed" if self._train() else "interrupted"
        except KeyboardInterrupt:
            outcome = "interrupted"
            raise
        except EngineDiedError:
            # A signal to the whole process group ends the engine, too, and before the step in hand.
            if not self._stop_requested:
                raise
            outcome = "interrupted"
        finally:
            self._end(outcome)
        return outcome == "completed"

    def _train(self) -> bool:
        self._publish(step=0)
        self._submit()
        self._evaluate(step=0)
        self._training_start_s = self.parts.timeline.now_s() - self.parts.timeline.seconds("evaluate")
        for step in range(1, self.config.num_batches + 1):
            groups = self._next_groups()
            if groups is None:
                return False
            self._step(step, groups)
            last = step == self.config.num_batches
            if step % self.config.sync_every == 0 or last:
                self._publish(step)
                self._submit()
            if step % self.config.eval_every == 0 or last:
                self._evaluate(step)
        with self.parts.timeline.phase("wait"):
            self.parts.publisher.flush()
        return True

    def _next_groups(self) -> list[ResponseGroup] | None:
        """The oldest `groups_per_batch` groups, once they are here; None when a stop was requested."""
        parts = self.parts
        with parts.timeline.phase("wait"):
            while not self._stop_requested and not parts.queue.ready(self.config.groups_per_batch):
                for group in parts.engine.poll(POLL_S):
                    parts.queue.put(score_group(group, parts.reward))
        if self._stop_requested:
            return None
        groups = parts.queue.take(self.config.groups_per_batch)
        self._submit()
        return groups

    def _submit(self) -> None:
        """Hand the engine as many prompts as staleness, capacity and the rest of the run admit."""
        queue, num_wanted = self.parts.queue, self._num_wanted()
        prompts = list(islice(self.parts.prompts, num_wanted))
        if len(prompts) < num_wanted:
            raise InputError(
                f"the stream of prompts ended: {len(prompts)} of {num_wanted} that are still wanted were there; "
                "give an endless stream (epochs number its rounds), or fewer trainer.num_batches"
            )
        if prompts:
            queue.submit(prompts, self.config.group_size, self.version)
            self.parts.engine.submit(prompts, self.parts.sampling)

    def _num_wanted(self) -> int:
        queue = self.parts.queue
        batches_left = self.config.num_batches - queue.num_batches_taken
        needed = batches_left * self.config.groups_per_batch - queue.num_outstanding
        return max(0, min(needed, queue.num_admissible(self.version)))

    def _step(self, step: int, groups: list[ResponseGroup]) -> None:
        parts, learner = self.parts, self.parts.learner
        batch = collate(groups, pad_token_id=parts.sampling.pad_token_id)
        with parts.timeline.phase("behaviour"):
            behaviour, checked = self._behaviour(batch)
            canary = self._canary.check(checked, behaviour, engine=parts.engine.name)
            bypass = self.config.anchor == "bypass"
            prepared = learner.prepare(
                batch, published_version=self.version, behaviour_log_prob=None if bypass else behaviour
            )
            # Before the first optimizer step: a version that nobody will read again is dropped before it is copied.
            self._retain()
        with parts.timeline.phase("update"):
            report = learner.update(prepared)
        factors = {**mismatch_factor(checked, behaviour), **lag_and_update_factors(prepared, report)}
        self._observe("step", step, self._step_values(prepared, report, factors, canary))
        if parts.record_batch is not None:
            parts.record_batch(step, _recorded(prepared, report))
        self._count_skips(report)

    def _behaviour(self, batch: TrainBatch) -> tuple[Tensor, TrainBatch]:
        """Behaviour log-probs and the rows they stand for; with `bypass` only what the canary must see."""
        if self.config.anchor == "bypass":
            unseen = self._canary.unseen(batch)
            batch = batch.rows([row for row in range(batch.num_rows) if set(batch.versions[row].tolist()) & {*unseen}])
        return self.parts.learner.behaviour_log_probs(batch), batch

    def _publish(self, step: int) -> None:
        """Name the live weights, keep them (copied only if still needed at the next step), send them."""
        parts, cache = self.parts, self.parts.learner.cache
        self.version += 1
        with parts.timeline.phase("publish"):
            cache.snapshot(self.version, lazy=True)
            parts.publisher.publish(self.version, full_tensors(parts.learner.model))
        parts.queue.drop_stale(self.version)
        self._retain()
        self._observe("publication", step, {"version": self.version, "cache_bytes": cache.nbytes})

    def _retain(self) -> None:
        """Keep the versions that outstanding or admissible groups, or the anchor, may still ask for."""
        cache, oldest = self.parts.learner.cache, self.parts.queue.oldest_referenced_version(self.version)
        wanted = {v for v in cache.versions if oldest is not None and v >= oldest}
        if self.config.anchor == "last_sync" and self.parts.queue.num_batches_taken % self.config.sync_every:
            wanted.add(self.version)
        cache.retain(wanted)

    def _evaluate(self, step: int) -> None:
        clock_s = self._training_clock_s() if step else 0.0
        with self.parts.timeline.phase("evaluate"):
            accuracy = self.parts.evaluate()
        self._observe("evaluation", step, {"accuracy": accuracy, "training_clock_s": clock_s, "version": self.version})

    def _training_clock_s(self) -> float:
        """Seconds since training began, evaluations left out."""
        timeline = self.parts.timeline
        return timeline.now_s() - timeline.seconds("evaluate") - self._training_start_s

    def _count_skips(self, report: UpdateReport) -> None:
        for reason in report.outcomes:
            self.num_skipped_in_a_row = 0 if reason is None else self.num_skipped_in_a_row + 1
            if self.num_skipped_in_a_row > self.config.max_skipped_steps:
                raise NonFiniteError(
                    f"{self.num_skipped_in_a_row} optimizer steps in a row were skipped "
                    f"(trainer.max_skipped_steps={self.config.max_skipped_steps}); the last because {reason}. Weights "
                    "are those of the last good step. Lower optim.lr, or widen the correction's bounds"
                )

    def _step_values(
        self, prepared: PreparedBatch, report: UpdateReport, factors: Mapping[str, Mean], canary: Mapping[int, float]
    ) -> dict[str, Any]:
        batch = prepared.batch
        staleness = self.version - batch.versions[batch.response_mask]
        return {
            "version": self.version,
            "reward_mean": float(batch.rewards.mean()),
            "behaviour_versions": batch.sampled_versions,
            "staleness_total": int(staleness.sum()),
            "staleness_max": int(staleness.max()) if staleness.numel() else 0,
            "num_tokens": staleness.numel(),
            "num_zero_variance_groups": prepared.num_zero_variance_groups,
            "num_optimizer_steps": report.num_steps,
            "num_skipped_steps": len(report.skip_reasons),
            "skip_reasons": list(report.skip_reasons),
            "grad_norm": report.grad_norm,
            "lr": report.lr,
            "canary_gap_nats": {str(version): gap for version, gap in canary.items()},
            "canary_gap_max_nats": max(canary.values(), default=None),
            "factors": {name: [mean.total, mean.count] for name, mean in factors.items()},
            "correction": report.correction.metrics(),
            "update": report.statistics.to_dict(),
        }

    def _end(self, outcome: str) -> None:
        self.parts.queue.close()
        self.parts.queue.drain(outcome)
        self.parts.queue.ledger.check()
        self._observe("end", max(0, self.parts.queue.num_batches_taken), {"outcome": outcome, "version": self.version})

    def _observe(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """Every event carries the time, the ledger and the spans since the last one."""
        timeline, ledger = self.parts.timeline, self.parts.queue.ledger
        engine_spans = [
            [start - timeline.epoch_s, stop - timeline.epoch_s] for start, stop in self.parts.engine.drain_busy_spans()
        ]
        trainer_spans = [[span.phase, span.start_s, span.stop_s] for span in timeline.drain()]
        record = {
            "time_s": timeline.now_s(),
            **values,
            "ledger": ledger.to_dict(),
            "trainer_spans": trainer_spans,
            "engine_spans": engine_spans,
        }
        for observer in self.parts.observers:
            observer(event, step, record)


def _recorded(prepared: PreparedBatch, report: UpdateReport) -> dict[str, Tensor]:
    """Tensors from which every factor of a step can be computed again."""
    tensors = {field.name: getattr(prepared.batch, field.name) for field in fields(prepared.batch)}
    tensors |= {
        "old_log_prob": prepared.old_log_prob,
        "log_prob": report.log_prob,
        "trained_mask": report.trained_mask,
        "kept_mask": report.correction.kept_mask,
        "advantages": prepared.advantages,
    }
    if prepared.behaviour_log_prob is not None:
        tensors["behaviour_log_prob"] = prepared.behaviour_log_prob
    if report.correction.weights is not None:
        tensors["weights"] = report.correction.weights
    return tensors
