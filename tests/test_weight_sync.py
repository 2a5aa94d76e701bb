from __future__ import annotations

import contextlib

import pytest
import torch
from builders import tiny_model
from shared_memory import blocks_of

from fsdp_async.buckets import WeightReceiver
from fsdp_async.dtensor_io import full_tensors
from fsdp_async.engine_worker import take_bucket
from fsdp_async.errors import EngineTimeoutError, InputError, OutputError
from fsdp_async.shared_block import SharedBlock
from fsdp_async.weight_sync import InProcessPublisher, SharedMemoryPublisher


class FakeEngine:
    """Copies buckets at once, or never."""

    name = "fake-engine"

    def __init__(self, *, answers=True):
        self.model = tiny_model(seed=9)
        self.receiver = WeightReceiver(self.model)
        self.answers = answers
        self.buckets = []
        self.waited = []

    def load(self, version, source):
        self.buckets.append((version, source.index, source.is_last))
        if self.answers:
            take_bucket(self.receiver, source)

    def wait_loaded(self, version, bucket, timeout_s):
        self.waited.append((version, bucket))
        if not self.answers:
            raise EngineTimeoutError(f"{self.name} confirmed nothing")


PUBLISHERS = [SharedMemoryPublisher, InProcessPublisher]


def _equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize("publisher_type", PUBLISHERS)
@pytest.mark.parametrize("bucket_bytes", [1 << 20, 5000])
def test_every_engine_holds_what_was_published_and_no_memory_is_left(publisher_type, bucket_bytes):
    engines = [FakeEngine(), FakeEngine()]
    publisher = publisher_type(engines, bucket_bytes=bucket_bytes, timeout_s=1)
    for version in range(3):
        source = tiny_model(seed=version)
        publisher.publish(version, full_tensors(source))
        assert all(_equal(engine.model, source) for engine in engines)
    for engine in engines:
        assert [is_last for v, _, is_last in engine.buckets if v == 2][-1]
        assert sum(is_last for v, _, is_last in engine.buckets if v == 2) == 1
    assert bool(blocks_of()) == (publisher_type is SharedMemoryPublisher)
    publisher.close()
    publisher.close()
    assert blocks_of() == []


def test_a_model_that_fits_is_handed_over_without_waiting_for_any_engine():
    engine = FakeEngine(answers=False)
    publisher = SharedMemoryPublisher([engine], bucket_bytes=1 << 20, timeout_s=1)
    publisher.publish(0, full_tensors(tiny_model()))
    publisher.publish(1, full_tensors(tiny_model()))
    assert engine.waited == []
    publisher.close()


def test_memory_is_reused_only_after_the_engine_has_copied_it():
    engine = FakeEngine()
    publisher = SharedMemoryPublisher([engine], bucket_bytes=5000, timeout_s=1)
    publisher.publish(0, full_tensors(tiny_model()))
    num = len(engine.buckets)
    assert num > 2
    assert engine.waited == [(0, index) for index in range(num - 2)]
    publisher.close()


def test_an_engine_that_never_copies_is_named_with_who_waited_for_what():
    engine = FakeEngine(answers=False)
    publisher = SharedMemoryPublisher([engine], bucket_bytes=5000, timeout_s=0.5)
    with pytest.raises(
        EngineTimeoutError,
        match=r"bucket 2 of version 0: the trainer waited 0\.5 s for fake-engine to copy bucket 0 of version 0",
    ):
        publisher.publish(0, full_tensors(tiny_model()))
    publisher.close()


@pytest.mark.parametrize("publisher_type", PUBLISHERS)
def test_the_trainer_may_step_as_soon_as_publish_returns(publisher_type):
    source, engine = tiny_model(seed=1), FakeEngine(answers=False)
    publisher = publisher_type([engine], bucket_bytes=1 << 20, timeout_s=1)
    handed = []
    engine.load = lambda version, bucket: handed.append(bucket)
    publisher.publish(0, full_tensors(source))
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.fill_(7)
    take_bucket(engine.receiver, handed[0])
    assert _equal(engine.model, tiny_model(seed=1))
    publisher.close()


def test_flushing_waits_for_what_no_engine_is_known_to_have_copied_and_for_nothing_twice():
    engine, waits = FakeEngine(), []
    publisher = SharedMemoryPublisher(
        [engine], bucket_bytes=1 << 20, timeout_s=1, waiting=lambda: (waits.append(1), contextlib.nullcontext())[1]
    )
    publisher.publish(0, full_tensors(tiny_model()))
    publisher.publish(1, full_tensors(tiny_model()))
    publisher.flush()
    publisher.flush()
    assert engine.waited == [(0, 0), (1, 0)]
    assert len(waits) == 2
    publisher.close()


def test_memory_that_cannot_grow_leaves_nothing_behind_and_the_error_its_own():
    publisher = SharedMemoryPublisher([FakeEngine()], bucket_bytes=1 << 62, timeout_s=1)
    publisher.publish(0, full_tensors(tiny_model()))
    publisher.publish(1, full_tensors(tiny_model()))
    assert blocks_of()
    huge = torch.empty(1).expand(1 << 50)
    with pytest.raises(OutputError, match=r"lower rollout\.bucket_bytes"):
        publisher.publish(2, [("model.norm.weight", huge)])
    publisher.close()
    assert blocks_of() == []


def test_a_publication_of_nothing_is_refused():
    with pytest.raises(InputError, match="without a single tensor"):
        InProcessPublisher([], bucket_bytes=100, timeout_s=1).publish(0, [])


def test_shared_memory_that_is_not_there_is_refused_before_it_is_touched():
    with pytest.raises(OutputError, match=r"lower rollout\.bucket_bytes"):
        SharedBlock(1 << 60)


@pytest.mark.parametrize("publisher_type", PUBLISHERS)
def test_what_is_no_publication_is_refused_before_an_engine_hears_of_it(publisher_type):
    engine = FakeEngine()
    for size in (0, -1, 64.5, None):
        with pytest.raises(InputError, match="bucket_bytes="):
            publisher_type([engine], bucket_bytes=size, timeout_s=1)
    publisher = publisher_type([engine], bucket_bytes=5000, timeout_s=1)
    for version in (-1, None, "a", 1.0):
        with pytest.raises(InputError, match=r"version=.* must be an integer of at least 0"):
            publisher.publish(version, full_tensors(tiny_model()))
    publisher.close()
    with pytest.raises(InputError, match=r"version 3 published after close\(\)"):
        publisher.publish(3, full_tensors(tiny_model()))
    publisher.close()
    assert engine.buckets == []
    assert not blocks_of()
