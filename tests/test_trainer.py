"""The loop with fakes for everything around it: order, bounds, conservation, endings."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch
from builders import response

from fsdp_async.errors import CanaryError, EngineDiedError, InputError, NonFiniteError
from fsdp_async.feed import RolloutFeed
from fsdp_async.lead import Lead
from fsdp_async.learner import PreparedBatch
from fsdp_async.metrics import Statistics
from fsdp_async.plan import reachable_staleness
from fsdp_async.rollout import SamplingParams
from fsdp_async.sample_queue import SampleQueue
from fsdp_async.timeline import Timeline
from fsdp_async.trainer import AsyncTrainer, TrainerParts
from fsdp_async.trainer_config import TrainerConfig
from fsdp_async.types import PartialResponse, Prompt, ResponseGroup, VersionSpan
from fsdp_async.update_report import UpdateReport

CONFIG = TrainerConfig(num_batches=6, groups_per_batch=2, group_size=2, mini_batches=1, max_staleness=1, eval_every=100)
STEP, SKIP = None, "the gradient norm is nan"
SAMPLING = SamplingParams(num_samples=2, max_response_tokens=4, temperature=1.0, eos_token_id=1, pad_token_id=0)


class FakeEngine:
    """Answers `per_poll` prompts a poll under the version loaded last; may be told to fail or to lie."""

    name = "fake-engine"

    def __init__(self, *, per_poll=100, gap=0.0, fail_after=None):
        self.version = None
        self.submitted_version = None
        self.waiting = []
        self.per_poll = per_poll
        self.gap = gap
        self.polls_left = fail_after

    def submit(self, prompts, params, partials=None):
        self.waiting += [(prompt, self.version) for prompt in prompts]

    def poll(self, timeout_s):
        if self.polls_left is not None:
            self.polls_left -= 1
            if self.polls_left < 0:
                raise EngineDiedError("fake-engine died")
        batch, self.waiting = self.waiting[: self.per_poll], self.waiting[self.per_poll :]
        return [self._answer(prompt, submitted) for prompt, submitted in batch]

    def _answer(self, prompt, submitted):
        answers = tuple(
            dataclasses.replace(response(prompt.prompt_id, i, [5, 6, 1], spans=((self.version, None),)), reward=None)
            for i in range(2)
        )
        return ResponseGroup(prompt, answers, submitted)

    def drain_busy_spans(self):
        return []


class FakeLearner:
    """Keeps the books that the trainer asks for, without a model."""

    def __init__(self, engine, *, outcome=None):
        self.engine = engine
        self.model = torch.nn.Linear(1, 1)
        self.cache = FakeCache()
        self.batches = []
        self.outcome = outcome or (lambda step: (STEP,))

    def behaviour_log_probs(self, batch):
        missing = set(batch.versions[batch.response_mask].tolist()) - self.cache.kept
        assert not missing, f"versions {missing} were dropped while still referenced"
        return batch.rollout_log_prob + self.engine.gap

    def prepare(self, batch, *, published_version, behaviour_log_prob):
        self.batches.append((published_version, batch))
        old = batch.rollout_log_prob if behaviour_log_prob is None else behaviour_log_prob
        correction = SimpleNamespace(kept_mask=batch.response_mask, weights=None, metrics=dict)
        rows = torch.arange(batch.num_rows)
        return PreparedBatch(batch, behaviour_log_prob, old, correction, batch.rewards, rows, 0)

    def update(self, prepared):
        outcomes = self.outcome(len(self.batches))
        self.cache.on_optimizer_step(outcomes.count(STEP))
        mask = prepared.batch.response_mask
        return UpdateReport(prepared.old_log_prob, mask, prepared.correction, Statistics(), outcomes, 1.0, 1e-4)


class FakeCache:
    """Which versions are kept, and how many copies a lazy cache would have made."""

    nbytes = 0

    def __init__(self):
        self.kept = set()
        self.lazy = set()
        self.num_copies = 0
        self.most_kept = 0

    @property
    def versions(self):
        return sorted(self.kept)

    def snapshot(self, version, *, lazy):
        self.kept.add(version)
        self.most_kept = max(self.most_kept, len(self.kept))
        self.lazy.add(version)

    def retain(self, versions):
        self.kept &= set(versions)
        self.lazy &= self.kept

    def on_optimizer_step(self, num_steps):
        if num_steps:
            self.num_copies += len(self.lazy)
            self.lazy.clear()


class FakePublisher:
    def __init__(self, engine):
        self.engine = engine

    def publish(self, version, tensors, *, only=None):
        list(tensors)
        self.engine.version = version

    def forget(self, engine):
        pass

    def flush(self):
        self.engine.flushed_version = self.engine.version


def _trainer(config=CONFIG, *, capacity=4, outcome=None, max_restarts=0, **engine_options):
    engine = FakeEngine(**engine_options)
    learner = FakeLearner(engine, outcome=outcome)
    events = []
    feed = RolloutFeed(
        engine=engine,
        publisher=FakePublisher(engine),
        queue=SampleQueue(
            capacity_groups=capacity,
            groups_per_batch=config.groups_per_batch,
            sync_every=config.sync_every,
            max_staleness=config.max_staleness,
        ),
        prompts=(Prompt(f"p{i}", (5,), "test") for i in itertools.count()),
        reward=SimpleNamespace(score=lambda prompt, answer: 1.0),
        sampling=SAMPLING,
        max_restarts=max_restarts,
    )
    parts = TrainerParts(
        learner=learner,
        feed=feed,
        pad_token_id=0,
        lead=Lead(),
        evaluate=lambda: 0.5,
        timeline=Timeline(),
        observers=(lambda event, step, values: events.append({"event": event, "step": step, **values}),),
    )
    return AsyncTrainer(parts, config), learner, events


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("sync_every", [1, 2])
@pytest.mark.parametrize("per_poll", [1, 3, 100])
def test_no_token_is_ever_staler_than_the_bound(max_staleness, sync_every, per_poll):
    config = dataclasses.replace(CONFIG, max_staleness=max_staleness, sync_every=sync_every)
    trainer, learner, events = _trainer(config, capacity=5, per_poll=per_poll)
    assert trainer.run()
    staleness = [published - int(batch.versions.max()) for published, batch in learner.batches]
    oldest = [published - int(batch.versions[batch.response_mask].min()) for published, batch in learner.batches]
    assert min(staleness) >= 0
    assert max(oldest) <= min(max_staleness, reachable_staleness(5, config.groups_per_batch, sync_every))
    assert [e["staleness_max"] for e in events if e["event"] == "step"] == oldest


def test_a_slow_engine_and_room_in_the_queue_do_reach_staleness():
    _, _, events = (built := _trainer(capacity=3, per_poll=3))
    built[0].run()
    assert max(e["staleness_max"] for e in events if e["event"] == "step") == 1
    assert any(len(e["behaviour_versions"]) == 2 for e in events if e["event"] == "step")


def test_staleness_is_that_of_each_token_not_of_its_response():
    trainer, _, events = _trainer(dataclasses.replace(CONFIG, num_batches=3, max_staleness=2), capacity=6, per_poll=2)
    engine = trainer.parts.feed.engine

    def answer(prompt, submitted):
        spans = ((max(0, engine.version - 1), 2), (engine.version, None))
        answers = tuple(
            dataclasses.replace(response(prompt.prompt_id, i, [5, 6, 1], spans=spans), reward=None) for i in range(2)
        )
        return ResponseGroup(prompt, answers, submitted)

    engine._answer = answer
    trainer.run()
    # Four responses a batch; each has two tokens of the version before and one of its own (both 0 in the first batch).
    totals = [(e["staleness_total"], e["staleness_max"], e["num_tokens"]) for e in events if e["event"] == "step"]
    assert totals[0] == (0, 0, 12)
    for (total, most, _), event in zip(totals[1:], [e for e in events if e["event"] == "step"][1:], strict=True):
        newest = max(event["behaviour_versions"])
        assert most == event["version"] - min(event["behaviour_versions"])
        assert total == 8 * (event["version"] - newest + 1) + 4 * (event["version"] - newest)


def test_the_ledger_balances_at_every_event_and_all_samples_are_consumed():
    trainer, _, events = _trainer()
    assert trainer.run()
    for event in events:
        ledger = event["ledger"]
        assert ledger["submitted"] == ledger["produced"] + ledger["in_flight"]
        assert ledger["produced"] == ledger["consumed"] + ledger["dropped"] + ledger["queued"]
    assert events[-1]["event"] == "end"
    assert events[-1]["ledger"]["consumed"] == 6 * 2 * 2 == events[-1]["ledger"]["submitted"]


def test_every_sample_is_trained_on_once_in_the_order_of_submission():
    trainer, learner, _ = _trainer(per_poll=1)
    trainer.run()
    assert sum(batch.num_rows for _, batch in learner.batches) == 6 * 2 * 2


def test_version_zero_is_published_before_the_first_prompt_and_then_one_every_sync():
    trainer, _, events = _trainer(dataclasses.replace(CONFIG, num_batches=5, sync_every=2))
    trainer.run()
    publications = [(e["step"], e["version"]) for e in events if e["event"] == "publication"]
    assert publications == [(0, 0), (2, 1), (4, 2), (5, 3)]


def test_the_synchronous_loop_copies_no_version():
    config = dataclasses.replace(CONFIG, max_staleness=0)
    trainer, learner, _ = _trainer(config)
    trainer.run()
    assert learner.cache.num_copies == 0


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("sync_every", [1, 2])
@pytest.mark.parametrize("anchor", ["behaviour", "last_sync"])
def test_at_most_one_version_more_than_the_staleness_is_kept_at_any_time(max_staleness, sync_every, anchor):
    config = dataclasses.replace(
        CONFIG, num_batches=12, max_staleness=max_staleness, sync_every=sync_every, anchor=anchor
    )
    trainer, learner, _ = _trainer(config, capacity=9, per_poll=2)
    trainer.run()
    assert learner.cache.most_kept <= max_staleness + 1


def test_a_run_ends_only_after_its_last_version_has_reached_the_engine():
    trainer, _, _ = _trainer()
    assert trainer.run()
    assert trainer.parts.feed.engine.flushed_version == trainer.version == 6


def test_a_stream_of_prompts_that_ends_is_an_error_and_no_endless_wait():
    trainer, _, events = _trainer()
    trainer.parts.feed.prompts = itertools.islice(trainer.parts.feed.prompts, 5)
    with pytest.raises(InputError, match=r"the stream of prompts ended: 1 of 2 .* were there"):
        trainer.run()
    assert events[-1]["outcome"] == "failed"


def test_an_engine_that_dies_of_the_signal_that_stops_the_run_is_no_failure():
    trainer, _, events = _trainer(fail_after=2)
    poll = trainer.parts.feed.engine.poll

    def poll_after_signal(timeout_s):
        if trainer.parts.feed.engine.polls_left == 0:
            trainer.request_stop()
        return poll(timeout_s)

    trainer.parts.feed.engine.poll = poll_after_signal
    assert trainer.run() is False
    assert events[-1]["outcome"] == "interrupted"


def test_a_request_to_stop_ends_between_steps_with_everything_accounted_for():
    trainer, learner, events = _trainer(dataclasses.replace(CONFIG, num_batches=100))
    learner.outcome = lambda step: (trainer.request_stop() if step == 3 else None, (STEP,))[1]
    assert trainer.run() is False
    end = events[-1]
    assert (end["event"], end["outcome"]) == ("end", "interrupted")
    assert len(learner.batches) == 3
    assert end["ledger"]["queued"] == end["ledger"]["in_flight"] == 0
    assert end["ledger"]["submitted"] == end["ledger"]["consumed"] + end["ledger"]["dropped"]


def test_wrong_engine_weights_stop_the_run_before_anything_is_trained_on():
    trainer, learner, events = _trainer(gap=66.0)
    with pytest.raises(CanaryError, match="version 0, fake-engine"):
        trainer.run()
    assert learner.batches == []
    assert events[-1]["outcome"] == "failed"


def test_bypass_shows_the_canary_only_the_rows_of_new_versions():
    trainer, learner, events = _trainer(dataclasses.replace(CONFIG, anchor="bypass"))
    shown = []
    forward = learner.behaviour_log_probs
    learner.behaviour_log_probs = lambda batch: (shown.append(batch.num_rows), forward(batch))[1]
    trainer.run()
    gaps = [version for e in events if e["event"] == "step" for version in e["canary_gap_nats"]]
    assert len(gaps) == len(set(gaps))
    assert sum(shown) < sum(batch.num_rows for _, batch in learner.batches) or len(gaps) == len(shown)


def test_a_dead_engine_ends_the_run_with_its_error_and_a_balanced_ledger():
    trainer, _, events = _trainer(fail_after=2)
    with pytest.raises(EngineDiedError, match="fake-engine died"):
        trainer.run()
    assert events[-1]["outcome"] == "failed"
    assert events[-1]["ledger"]["in_flight"] == 0


def test_skipped_steps_are_counted_and_too_many_in_a_row_end_the_run():
    trainer, _, events = _trainer(outcome=lambda step: (SKIP,) if step > 1 else (STEP,))
    with pytest.raises(NonFiniteError, match=r"4 optimizer steps in a row .*max_skipped_steps=3.*norm is nan"):
        trainer.run()
    assert [e["num_skipped_steps"] for e in events if e["event"] == "step"] == [0, 1, 1, 1, 1]


def test_skips_in_a_row_are_counted_over_batches_and_batches_without_a_step_do_not_end_the_row():
    outcomes = {1: (STEP, SKIP), 2: (SKIP, SKIP), 3: (), 4: (SKIP, STEP)}
    trainer, _, events = _trainer(outcome=outcomes.get)
    with pytest.raises(NonFiniteError, match="4 optimizer steps in a row"):
        trainer.run()
    assert [e["num_skipped_steps"] for e in events if e["event"] == "step"] == [1, 2, 0, 1]


def test_batches_without_anything_to_learn_from_are_no_fault():
    trainer, _, events = _trainer(outcome=lambda step: ())
    assert trainer.run()
    assert sum(e["num_skipped_steps"] + e["num_optimizer_steps"] for e in events if e["event"] == "step") == 0


def test_a_good_step_forgives_earlier_skips():
    trainer, _, events = _trainer(outcome=lambda step: (STEP,) if step % 3 == 0 else (SKIP,))
    assert trainer.run()
    assert sum(e["num_skipped_steps"] for e in events if e["event"] == "step") == 4


def test_a_recorded_batch_holds_what_every_factor_is_computed_from():
    recorded = {}
    trainer, _, _ = _trainer()
    trainer.parts = dataclasses.replace(
        trainer.parts, record_batch=lambda step, tensors: recorded.update({step: tensors})
    )
    trainer.run()
    assert sorted(recorded) == [1, 2, 3, 4, 5, 6]
    names = {"rollout_log_prob", "behaviour_log_prob", "old_log_prob", "log_prob", "trained_mask", "versions"}
    assert names <= recorded[1].keys()


class MortalEngine(FakeEngine):
    """Dies at given polls; restarted, it has neither weights nor work."""

    def __init__(self, dies_at=(), **options):
        super().__init__(**options)
        self.dies_at = set(dies_at)
        self.num_polls = 0
        self.is_dead = False
        self.restarts = []
        self.given = []

    def poll(self, timeout_s):
        self.num_polls += 1
        if self.num_polls in self.dies_at:
            self.is_dead = True
        if self.is_dead:
            raise EngineDiedError("mortal died")
        return super().poll(timeout_s)

    def submit(self, prompts, params, partials=None):
        if self.is_dead:
            raise EngineDiedError("mortal is dead")
        self.given.append((len(prompts), dict(partials or {})))
        super().submit(prompts, params, partials)

    def restart(self):
        self.is_dead = False
        self.restarts.append(self.num_polls)
        self.waiting, self.version = [], None
        return {}


def _mortal_trainer(config=CONFIG, *, max_restarts=3, dies_at=(), **options):
    trainer, learner, events = _trainer(config, max_restarts=max_restarts, **options)
    engine = MortalEngine(dies_at, per_poll=1)
    trainer.parts.feed.engine = learner.engine = engine
    trainer.parts.feed.publisher.engine = engine
    return trainer, engine, events


def test_an_engine_that_dies_is_started_again_with_the_newest_weights_and_its_prompts():
    trainer, engine, events = _mortal_trainer(dies_at=(4, 9))
    assert trainer.run()
    restarts = [e for e in events if e["event"] == "restart"]
    assert [e["num_restarts"] for e in restarts] == [1, 2]
    assert all("mortal died" in e["cause"] for e in restarts)
    assert engine.version == trainer.version == 6
    ledger = events[-1]["ledger"]
    assert ledger["consumed"] == ledger["submitted"] == 6 * 2 * 2
    assert ledger["dropped"] == ledger["num_late"] == 0
    assert ledger["num_reissued"] == 2 * sum(e["num_reissued_groups"] for e in restarts) > 0


def test_a_new_engine_must_show_again_that_it_holds_what_was_published():
    trainer, _, events = _mortal_trainer(dataclasses.replace(CONFIG, max_staleness=0, num_batches=2), dies_at=(2,))
    trainer.run()
    steps = [e for e in events if e["event"] == "step"]
    assert [sorted(e["canary_gap_nats"]) for e in steps] == [["0"], ["1"]]
    trainer, engine, _ = _mortal_trainer(dies_at=(2,))
    honest = engine.restart
    engine.restart = lambda: (setattr(engine, "gap", 66.0), honest())[1]
    with pytest.raises(CanaryError):
        trainer.run()


def test_an_engine_that_dies_again_without_a_batch_in_between_ends_the_run():
    trainer, engine, events = _mortal_trainer(max_restarts=2, dies_at=range(3, 100))
    with pytest.raises(EngineDiedError, match="mortal died"):
        trainer.run()
    assert len(engine.restarts) == 2
    assert events[-1]["outcome"] == "failed"


def test_restarts_are_forgiven_by_every_batch():
    trainer, engine, _ = _mortal_trainer(max_restarts=1, dies_at=(3, 7, 11))
    assert trainer.run()
    assert len(engine.restarts) == 3


def test_an_engine_that_dies_while_it_is_given_weights_or_prompts_is_started_again_too():
    trainer, engine, events = _mortal_trainer()
    publish = trainer.parts.feed.publisher.publish

    def die_once(version, tensors, *, only=None):
        if version == 2 and not engine.restarts:
            engine.is_dead = True
            raise EngineDiedError("died in the publication")
        publish(version, tensors)

    trainer.parts.feed.publisher.publish = die_once
    assert trainer.run()
    (restart,) = [e for e in events if e["event"] == "restart"]
    assert "died" in restart["cause"]
    assert events[-1]["ledger"]["consumed"] == 24


def test_only_tokens_of_retained_versions_are_gone_on_with():
    trainer, engine, events = _mortal_trainer(dies_at=(7,))
    honest, told = engine.restart, {}

    def restart():
        honest()
        for number in range(12):
            version = max(trainer.parts.learner.cache.kept) if number % 2 else 77
            part = PartialResponse((5,), (-1.0,), (VersionSpan(version, 0, 1),))
            told[f"p{number}", 0] = (part, part)
        return told

    engine.restart = restart
    trainer.run()
    (restarted,) = [e for e in events if e["event"] == "restart"]
    (given,) = [partials for _, partials in engine.given if partials]
    assert given
    assert all(int(prompt_id[1:]) % 2 for prompt_id, _ in given)
    assert given.items() <= told.items()
    assert restarted["num_kept_tokens"] == 2 * len(given)


def test_a_loop_goes_on_where_its_state_stood():
    first, _, _ = _trainer(dataclasses.replace(CONFIG, num_batches=10))
    first.parts.feed.queue.take, take = (
        lambda n: (first.request_stop() if first.step == 3 else None, take(n))[1],
        first.parts.feed.queue.take,
    )
    first.run()
    state = first.state_dict()
    assert (state["step"], state["version"]) == (4, 4)
    second, _, _ = _trainer()
    second.load_state_dict(state)
    assert {k: v for k, v in second.state_dict().items() if k != "training_clock_s"} == {
        k: v for k, v in state.items() if k != "training_clock_s"
    }
