"""The asynchronous training loop.

    prompts --submit--> engine --groups--> sample_queue --TrainBatch--> learner --weights--> publisher --> engine
       ^          (feed.py, on rank 0)         |          (its share        |
       '------- admission (staleness bound) ---'           on each rank)    cache.snapshot(version), retain(referenced)

| who       | waits for                          | at most                                      |
|-----------|------------------------------------|----------------------------------------------|
| trainer   | the oldest submitted groups        | while the engine gives signs of life         |
| ranks     | rank 0, for what comes next        | until it ends; its error is theirs           |
| engine    | prompts (admission), new weights   | until the trainer publishes; it may idle     |
| publisher | the engine to copy a bucket        | publisher's timeout, then an error           |

Owns the order of things and nothing else: it speaks protocols and does no arithmetic. A group submitted under version
v is trained on before v + max_staleness + 1 is published, because admission bounds what is outstanding and the oldest
are taken first; `max_staleness=0` with `sync_every=1` is the synchronous loop. See [Note: three factors] in
`factors.py` and [Note: life of a version] in `version_store.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from fsdp_async.batching import collate, shard_rows
from fsdp_async.canary import Canary
from fsdp_async.dtensor_io import full_tensors
from fsdp_async.errors import EngineDiedError, NonFiniteError
from fsdp_async.factors import lag_and_update_factors, mismatch_factor
from fsdp_async.feed import EngineLost, RolloutFeed
from fsdp_async.lead import Lead
from fsdp_async.learner import Learner
from fsdp_async.metrics import Statistics
from fsdp_async.step_report import all_rows, recorded_tensors, step_values, usage
from fsdp_async.timeline import Timeline
from fsdp_async.trainer_config import TrainerConfig
from fsdp_async.types import ResponseGroup, TrainBatch
from fsdp_async.update_report import UpdateReport

Observer = Callable[[str, int, Mapping[str, Any]], None]
"""`observer(event, step, values)`; events: publication, evaluation, step, restart, checkpoint, end."""


class Checkpoints(Protocol):
    """Where the run is kept. All methods are collective."""

    def is_due(self, step: int) -> bool:
        """Whether to save after `step` batches."""
        ...

    def save(self, step: int, loop: Mapping[str, Any]) -> None:
        """Copy everything and return; it is written while training goes on."""
        ...

    def finished(self) -> list[tuple[int, Mapping[str, Any]]]:
        """(step, values) of what was committed since the last call."""
        ...

    def wait(self) -> None:
        """Until everything is committed."""
        ...


@dataclass(frozen=True)
class TrainerParts:
    """What the loop joins, on one rank.

    `feed` is there on rank 0 alone, and so are observers. `evaluate()` returns the sampled accuracy of the live
    weights. `record_batch` gets the rows of all ranks, on rank 0.
    """

    learner: Learner
    feed: RolloutFeed | None
    evaluate: Callable[[], float]
    timeline: Timeline
    pad_token_id: int
    lead: Lead
    observers: tuple[Observer, ...] = ()
    record_batch: Callable[[int, Mapping[str, Tensor]], None] | None = None
    record_groups: Callable[[int, list[ResponseGroup]], None] | None = None
    checkpoints: Checkpoints | None = None


class AsyncTrainer:
    """Runs `num_batches` training steps while the engine keeps generating."""

    def __init__(self, parts: TrainerParts, config: TrainerConfig) -> None:
        self.parts = parts
        self.config = config
        self.step = 0
        self.version = -1
        self.num_skipped_in_a_row = 0
        self._canary = Canary(config.canary_bound_nats)
        self._training_start_s = 0.0
        self._trained_before_s = 0.0
        self._live_is_published = False
        self._stop_requested = False

    def request_stop(self) -> None:
        """End the run after the step in hand; safe to call from a signal handler. On several ranks, of rank 0."""
        self._stop_requested = True

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands between two steps; plain numbers."""
        return {
            "step": self.step,
            "version": self.version,
            "num_skipped_in_a_row": self.num_skipped_in_a_row,
            "live_is_published": self._live_is_published,
            "training_clock_s": self._training_clock_s(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; model, optimizer, cache, queue and stream must be those of the same moment."""
        self.step = int(state["step"])
        self.version = int(state["version"])
        self.num_skipped_in_a_row = int(state["num_skipped_in_a_row"])
        self._live_is_published = bool(state["live_is_published"])
        self._trained_before_s = float(state["training_clock_s"])

    def run(self) -> bool:
        """Train; True when all batches were done, False when a stop was requested.

        Whatever happens, the queue is drained (what was outstanding counts as dropped) and an `end` event with the
        balanced ledger is the last thing observers hear.

        Raises:
            CanaryError: an engine disagrees with the weights published to it.
            EngineDiedError, EngineTimeoutError: the engine failed once more than it may be started again.
            InputError: the stream of prompts ended before the run.
            NonFiniteError: more than `max_skipped_steps` optimizer steps in a row were skipped.
            RankFailedError: rank 0 failed.
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
        self._begin()
        while self.step < self.config.num_batches:
            groups = self._next_groups()
            if groups is None:
                self._save()
                return False
            self.step += 1
            self._step(self.step, groups)
            if self.parts.record_groups is not None:
                self.parts.record_groups(self.step, groups)
            last = self.step == self.config.num_batches
            if self.step % self.config.sync_every == 0 or last:
                self._publish()
                self._submit()
            if self.step % self.config.eval_every == 0 or last:
                self._evaluate()
            if self.parts.checkpoints is not None:
                if self.parts.checkpoints.is_due(self.step) and not last:
                    self._save()
                self._tell_saved()
        with self.parts.timeline.phase("wait"):
            self._ask(lambda feed: feed.flush())
        self._save()
        return True

    def _begin(self) -> None:
        """The first publication and evaluation; in a run that goes on, its weights and prompts to a new engine."""
        if self.version < 0:
            self._publish()
            self._submit()
            self._evaluate()
        else:
            self._send_published()
            self._ask(lambda feed: feed.reissue({}, ()))
            self._submit()
        timeline = self.parts.timeline
        self._training_start_s = timeline.now_s() - timeline.seconds("evaluate") - self._trained_before_s

    def _ask(self, question: Callable[[RolloutFeed], Any]) -> Any:
        """What the feed answers on rank 0, on every rank."""
        feed = self.parts.feed
        return self.parts.lead.ask(lambda: None if feed is None else question(feed))

    def _next_groups(self) -> list[ResponseGroup] | None:
        """The oldest `groups_per_batch` groups, once they are here; None when a stop was requested."""
        with self.parts.timeline.phase("wait"):
            while True:
                stop, news = self._ask(self._news)
                if stop:
                    return None
                if isinstance(news, EngineLost):
                    self._restart_engine()
                elif news is not None:
                    break
        self._submit()
        groups: list[ResponseGroup] = news
        return groups

    def _news(self, feed: RolloutFeed) -> tuple[bool, list[ResponseGroup] | EngineLost | None]:
        news = None if self._stop_requested else feed.poll(self.config.groups_per_batch)
        # A signal to the whole process group may have ended the engine; what was taken is trained on.
        return self._stop_requested and not isinstance(news, list), news

    def _restart_engine(self) -> None:
        partials = self._ask(lambda feed: feed.restart())
        self._send_published()
        restarted = self._ask(lambda feed: feed.reissue(partials, self.parts.learner.cache.versions))
        # The new engine has still to show that it holds what was published.
        self._canary.forget()
        self._observe("restart", self.step, vars(restarted))

    def _send_published(self) -> None:
        """Publish the newest version once more, to an engine that has just started."""
        with self._published_model() as model:
            if model is not None:
                self._send(model)

    @contextmanager
    def _published_model(self) -> Iterator[nn.Module | None]:
        """The model under the version published last; None if nobody can ask for that version any more."""
        cache = self.parts.learner.cache
        if self._live_is_published:
            yield self.parts.learner.model
        elif self.version in cache.versions:
            with cache.at(self.version) as model:
                yield model
        else:
            yield None

    def _send(self, model: nn.Module) -> None:
        tensors = full_tensors(model)
        if self.parts.feed is not None:
            self.parts.feed.publish(self.version, tensors)
        else:
            for _ in tensors:
                pass

    def _submit(self) -> None:
        self._ask(lambda feed: feed.submit(self.version, self.config.num_batches - feed.queue.num_batches_taken))

    def _step(self, step: int, groups: list[ResponseGroup]) -> None:
        parts, learner = self.parts, self.parts.learner
        whole = collate(groups, pad_token_id=parts.pad_token_id)
        batch = whole.rows(shard_rows(whole, parts.lead.num_ranks)[parts.lead.rank])
        with parts.timeline.phase("behaviour"):
            behaviour, checked = self._behaviour(batch)
            canary = self._check_canary(checked, behaviour)
            bypass = self.config.anchor == "bypass"
            prepared = learner.prepare(
                batch, published_version=self.version, behaviour_log_prob=None if bypass else behaviour
            )
            # Before the first optimizer step: a version that nobody will read again is dropped before it is copied.
            self._retain()
        with parts.timeline.phase("update"):
            report = learner.update(prepared)
        self._live_is_published = self._live_is_published and not report.num_steps
        factors = mismatch_factor(checked, behaviour) | lag_and_update_factors(prepared, report)
        measured = Statistics({**factors, **usage(batch, report)}).all_reduce(parts.lead.group)
        self._observe("step", step, step_values(self.version, whole, prepared, report, measured) | canary)
        if parts.record_batch is not None:
            parts.record_batch(step, all_rows(parts.lead, recorded_tensors(prepared, report)))
        self._count_skips(report)

    def _behaviour(self, batch: TrainBatch) -> tuple[Tensor, TrainBatch]:
        """Behaviour log-probs and the rows they stand for; with `bypass` only what the canary must see."""
        if self.config.anchor == "bypass":
            batch = batch.rows(self._canary.first_rows(batch))
        return self.parts.learner.behaviour_log_probs(batch), batch

    def _check_canary(self, checked: TrainBatch, behaviour: Tensor) -> dict[str, Any]:
        engine = "the engine" if self.parts.feed is None else self.parts.feed.engine.name
        gaps = self._canary.check(checked, behaviour, engine=engine, process_group=self.parts.lead.group)
        return {
            "canary_gap_nats": {str(version): gap for version, gap in gaps.items()},
            "canary_gap_max_nats": max(gaps.values(), default=None),
        }

    def _publish(self) -> None:
        """Name the live weights, keep them (copied only if still needed at the next step), send them."""
        cache = self.parts.learner.cache
        self.version += 1
        self._live_is_published = True
        with self.parts.timeline.phase("publish"):
            cache.snapshot(self.version, lazy=True)
            self._send(self.parts.learner.model)
        self._ask(lambda feed: feed.queue.drop_stale(self.version))
        self._retain()
        self._observe("publication", self.step, {"version": self.version, "cache_bytes": cache.nbytes})

    def _retain(self) -> None:
        """Keep the versions that outstanding or admissible groups, or the anchor, may still ask for."""
        cache = self.parts.learner.cache
        oldest = self._ask(lambda feed: feed.queue.oldest_referenced_version(self.version))
        wanted = {v for v in cache.versions if oldest is not None and v >= oldest}
        if self.config.anchor == "last_sync" and self.step % self.config.sync_every:
            wanted.add(self.version)
        cache.retain(wanted)

    def _save(self) -> None:
        """Keep the whole run as it stands between two steps, unless nothing has been trained or it is kept already."""
        checkpoints = self.parts.checkpoints
        if checkpoints is None or not self.step:
            return
        with self.parts.timeline.phase("checkpoint"):
            checkpoints.save(self.step, self.state_dict())
            if self._stop_requested or self.config.debug or self.step == self.config.num_batches:
                checkpoints.wait()
        self._tell_saved()

    def _tell_saved(self) -> None:
        for step, values in self.parts.checkpoints.finished() if self.parts.checkpoints else ():
            self._observe("checkpoint", step, values)

    def _evaluate(self) -> None:
        clock_s = self._training_clock_s() if self.step else 0.0
        with self.parts.timeline.phase("evaluate"):
            accuracy = self.parts.evaluate()
        self._observe(
            "evaluation", self.step, {"accuracy": accuracy, "training_clock_s": clock_s, "version": self.version}
        )

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

    def _end(self, outcome: str) -> None:
        feed = self.parts.feed
        if feed is not None:
            feed.queue.close()
            feed.queue.drain(outcome)
            feed.queue.ledger.check()
        self._observe("end", self.step, {"outcome": outcome, "version": self.version})

    def _observe(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """Every event carries the time, the ledger and the spans since the last one."""
        feed, timeline = self.parts.feed, self.parts.timeline
        trainer_spans = [[span.phase, span.start_s, span.stop_s] for span in timeline.drain()]
        if feed is None:
            return
        record = {
            "time_s": timeline.now_s(),
            **values,
            "ledger": feed.queue.ledger.to_dict(),
            "reward_failures": feed.reward_failures,
            "trainer_spans": trainer_spans,
            "engine_spans": [
                [start - timeline.epoch_s, stop - timeline.epoch_s] for start, stop in feed.engine.drain_busy_spans()
            ],
        }
        for observer in self.parts.observers:
            observer(event, step, record)
