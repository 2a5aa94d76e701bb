from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from builders import TINY, VOCAB, tiny_model
from safetensors.torch import load_model
from shared_memory import blocks_of, named_segments

from fsdp_async import engine_worker
from fsdp_async.dtensor_io import full_tensors
from fsdp_async.errors import EngineDiedError, EngineError, EngineTimeoutError, InputError
from fsdp_async.generation import Generation, generate
from fsdp_async.modeling import build_model
from fsdp_async.rollout import RolloutConfig, SamplingParams
from fsdp_async.rollout_hf import ProcessEngine, ThreadEngine
from fsdp_async.rollout_inline import InlineEngine
from fsdp_async.types import Prompt
from fsdp_async.weight_sync import InProcessPublisher, SharedMemoryPublisher

BUILDER = functools.partial(build_model, TINY, vocab_size=VOCAB, seed=9)
PARAMS = SamplingParams(num_samples=2, max_response_tokens=5, temperature=1.0, eos_token_id=1, pad_token_id=0)
CONFIG = RolloutConfig(prompts_per_chunk=2, answer_timeout_s=6)
DEADLINE_S = 60.0
KINDS = {"process": (ProcessEngine, SharedMemoryPublisher), "thread": (ThreadEngine, InProcessPublisher)}


def _prompts(*numbers, epoch=0):
    return [Prompt(f"p{n}", (2 + n % 5, 3), "test", epoch=epoch) for n in numbers]


def _publish(publisher, version, *, seed):
    publisher.publish(version, full_tensors(tiny_model(seed=seed)))


def _collect(engine, num):
    """`num` groups in order of prompt, or fail at the deadline."""
    groups, deadline = [], time.monotonic() + DEADLINE_S
    while len(groups) < num:
        assert time.monotonic() < deadline, f"only {len(groups)} of {num} groups came"
        groups += engine.poll(0.5)
    return sorted(groups, key=lambda g: (g.prompt.epoch, g.prompt.prompt_id))


def _expected(prompts, *, seed, version):
    return generate(tiny_model(seed=seed).eval(), prompts, PARAMS, version=version, seed=4)


def _answers(groups):
    return [[(r.token_ids, [s.version for s in r.version_spans]) for r in g.responses] for g in groups]


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_an_engine_answers_with_the_weights_it_was_given_last(kind, tmp_path):
    engine_type, publisher_type = KINDS[kind]
    engine = engine_type(BUILDER, CONFIG, seed=4, record_dir=tmp_path / "weights")
    publisher = publisher_type([engine], bucket_bytes=5000, timeout_s=DEADLINE_S)
    try:
        with pytest.raises(InputError, match="submit before the first load"):
            engine.submit(_prompts(0), PARAMS)
        _publish(publisher, 0, seed=1)
        first = _prompts(0, 1, 2, 3, 4)
        engine.submit(first, PARAMS)
        groups = _collect(engine, 5)
        assert _answers(groups) == _answers(_expected(first, seed=1, version=0))
        assert {g.submitted_version for g in groups} == {0}
        assert engine.version == 0

        _publish(publisher, 1, seed=2)
        second = _prompts(0, 1, 2, epoch=1)
        engine.submit(second, PARAMS)
        groups = _collect(engine, 3)
        # The same question again, under new weights: nothing of the old ones is left in a cache.
        assert _answers(groups) == _answers(_expected(second, seed=2, version=1))
        assert {g.submitted_version for g in groups} == {1}
        assert engine.version == 1

        spans = engine.drain_busy_spans()
        assert len(spans) >= 3 + 2
        assert all(start < stop for start, stop in spans)
        assert engine.drain_busy_spans() == []
        received = tiny_model(seed=9)
        load_model(received, tmp_path / "weights" / "v000001.safetensors")
        assert all(
            torch.equal(a, b)
            for a, b in zip(received.state_dict().values(), tiny_model(seed=2).state_dict().values(), strict=True)
        )
        assert sorted(os.listdir(tmp_path / "weights")) == ["v000000.safetensors", "v000001.safetensors"]
    finally:
        engine.close()
        engine.close()
        publisher.close()
    with pytest.raises(EngineDiedError, match="was closed"):
        engine.poll(0.0)


def test_a_paused_engine_takes_weights_but_generates_nothing_until_resumed():
    engine = ThreadEngine(BUILDER, CONFIG, seed=4)
    publisher = InProcessPublisher([engine], bucket_bytes=1 << 20, timeout_s=DEADLINE_S)
    try:
        engine.pause()
        _publish(publisher, 0, seed=1)
        engine.submit(_prompts(0), PARAMS)
        _publish(publisher, 1, seed=2)
        engine.wait_loaded(1, 0, DEADLINE_S)
        assert engine.poll(0.0) == []
        engine.resume()
        (group,) = _collect(engine, 1)
        assert group.submitted_version == 0
        assert {s.version for r in group.responses for s in r.version_spans} == {1}
    finally:
        engine.close()
        publisher.close()


SLOW = dataclasses.replace(PARAMS, max_response_tokens=60, eos_token_id=VOCAB + 5)
"""Never ends before its budget does."""


def _slow_down(monkeypatch, until):
    """Let a thread engine draw a token only when `until()` is above the tokens that it has drawn."""
    drawn, step = [0], Generation.step

    def slow(self, version):
        while drawn[0] >= until():
            time.sleep(0.001)
        drawn[0] += 1
        step(self, version)

    monkeypatch.setattr(Generation, "step", slow)
    return drawn


@pytest.mark.parametrize(
    ("options", "versions"),
    [({}, [0, 1]), ({"partial": False}, [1]), ({"interrupt": False}, [0])],
    ids=["goes on", "begins anew", "finishes first"],
)
def test_a_publication_meets_a_response_under_way(options, versions, monkeypatch):
    allowed = [5]
    drawn = _slow_down(monkeypatch, lambda: allowed[0])
    engine = ThreadEngine(BUILDER, dataclasses.replace(CONFIG, engine="thread", **options), seed=4)

    @contextlib.contextmanager
    def release():
        allowed[0] = 10**9
        yield

    # More buckets than there are slots: the publisher waits for the engine, which takes them in between.
    publisher = InProcessPublisher([engine], bucket_bytes=5000, timeout_s=DEADLINE_S, waiting=release)
    try:
        _publish(publisher, 0, seed=1)
        allowed[0] = 5
        engine.submit(_prompts(0), SLOW)
        while drawn[0] < 5:
            assert engine.poll(0.01) == []
        _publish(publisher, 1, seed=2)
        (group,) = _collect(engine, 1)
    finally:
        allowed[0] = 10**9
        engine.close()
        publisher.close()
    for answer in group.responses:
        assert [s.version for s in answer.version_spans] == versions
        assert len(answer.token_ids) == SLOW.max_response_tokens


def _kill(engine):
    os.kill(engine.pid, signal.SIGKILL)


def _stop(engine):
    os.kill(engine.pid, signal.SIGSTOP)


@pytest.mark.parametrize("harm", [_kill, _stop])
def test_a_dead_or_silent_child_is_started_again_and_answers_the_same(started, harm):
    engine, publisher = started
    pid, prompts = engine.pid, _prompts(0, 1)
    harm(engine)
    with pytest.raises(EngineError):
        _collect(engine, 1)
    assert engine.restart() == {}
    publisher.forget(engine)
    assert engine.pid != pid
    assert not os.path.exists(f"/proc/{pid}")
    with pytest.raises(InputError, match="submit before the first load"):
        engine.submit(prompts, PARAMS)
    publisher.publish(0, full_tensors(tiny_model(seed=1)), only=engine)
    engine.submit(prompts, PARAMS)
    assert _answers(_collect(engine, 2)) == _answers(_expected(prompts, seed=1, version=0))


def test_a_thread_that_raised_is_started_again(monkeypatch):
    engine = ThreadEngine(BUILDER, dataclasses.replace(CONFIG, engine="thread"), seed=4)
    publisher = InProcessPublisher([engine], bucket_bytes=1 << 20, timeout_s=DEADLINE_S)
    step, failures = Generation.step, [1]

    def fail_once(self, version):
        if failures:
            raise KeyError(f"failure {failures.pop()}")
        step(self, version)

    monkeypatch.setattr(Generation, "step", fail_once)
    try:
        _publish(publisher, 0, seed=1)
        engine.submit(_prompts(0), PARAMS)
        with pytest.raises(EngineDiedError, match="failure 1"):
            _collect(engine, 1)
        engine.restart()
        publisher.forget(engine)
        publisher.publish(0, full_tensors(tiny_model(seed=1)), only=engine)
        engine.submit(_prompts(0), PARAMS)
        assert _answers(_collect(engine, 1)) == _answers(_expected(_prompts(0), seed=1, version=0))
    finally:
        engine.close()
        publisher.close()


def test_what_an_engine_told_of_its_progress_survives_it(monkeypatch):
    monkeypatch.setattr(engine_worker, "PROGRESS_S", 0.0)
    allowed = [7]
    drawn = _slow_down(monkeypatch, lambda: allowed[0])
    engine = ThreadEngine(BUILDER, dataclasses.replace(CONFIG, engine="thread"), seed=4)
    publisher = InProcessPublisher([engine], bucket_bytes=1 << 20, timeout_s=DEADLINE_S)
    try:
        _publish(publisher, 0, seed=1)
        engine.submit(_prompts(0), SLOW)
        while drawn[0] < 7:
            assert engine.poll(0.01) == []
        engine.poll(0.1)
        monkeypatch.setattr(engine_worker, "PROGRESS_S", 1e9)
        monkeypatch.setattr("fsdp_async.rollout_hf.CLOSE_TIMEOUT_S", 0.01)
        partials = engine.restart()
        (parts,) = partials.values()
        assert {len(p.token_ids) for p in parts} <= {6, 7}
        allowed[0] = 10**9
        publisher.forget(engine)
        publisher.publish(3, full_tensors(tiny_model(seed=1)), only=engine)
        engine.submit(_prompts(0), SLOW, partials)
        (group,) = _collect(engine, 1)
    finally:
        allowed[0] = 10**9
        engine.close()
        publisher.close()
    for part, answer in zip(parts, group.responses, strict=True):
        assert answer.token_ids[: len(part.token_ids)] == part.token_ids
        assert [(s.version, s.start) for s in answer.version_spans] == [(0, 0), (3, len(part.token_ids))]
        assert len(answer.token_ids) == SLOW.max_response_tokens


def _explode():
    raise RuntimeError("no such model here")


def test_a_thread_engine_raises_what_its_builder_raises():
    with pytest.raises(RuntimeError, match="no such model here"):
        ThreadEngine(_explode, CONFIG, seed=4)


def test_a_model_can_be_built_while_a_thread_engine_starts():
    expected = tiny_model(seed=3).state_dict()
    for _ in range(5):
        engine = ThreadEngine(BUILDER, CONFIG, seed=4)
        built = tiny_model(seed=3).state_dict()
        engine.close()
        assert all(torch.equal(built[name], expected[name]) for name in expected)


def test_an_error_in_a_child_arrives_with_its_traceback():
    engine = ProcessEngine(_explode, CONFIG, seed=4)
    try:
        with pytest.raises(EngineDiedError, match=r"(?s)engine-0 ended: .*_explode.*no such model here"):
            engine.wait_loaded(0, 0, DEADLINE_S)
    finally:
        engine.close()


def test_wrong_names_are_refused_by_the_engine_and_named_to_the_trainer():
    engine = ThreadEngine(BUILDER, CONFIG, seed=4)
    publisher = InProcessPublisher([engine], bucket_bytes=1 << 20, timeout_s=DEADLINE_S)
    try:
        publisher.publish(0, [("model.nowhere", torch.zeros(3))])
        with pytest.raises(EngineDiedError, match=r"version 0: published 'model\.nowhere'"):
            engine.wait_loaded(0, 0, DEADLINE_S)
    finally:
        engine.close()
        publisher.close()


@pytest.fixture
def started():
    """A child that has loaded version 0."""
    engine = ProcessEngine(BUILDER, CONFIG, seed=4)
    publisher = SharedMemoryPublisher([engine], bucket_bytes=1 << 20, timeout_s=DEADLINE_S)
    _publish(publisher, 0, seed=1)
    engine.wait_loaded(0, 0, DEADLINE_S)
    yield engine, publisher
    engine.close()
    publisher.close()


def test_a_killed_child_is_named_with_its_signal_at_the_next_call(started):
    engine, _ = started
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineDiedError, match=r"exited with code -9 \(signal SIGKILL\)"):
        engine.wait_loaded(1, 0, DEADLINE_S)
    with pytest.raises(EngineDiedError, match="SIGKILL"):
        engine.submit(_prompts(0), PARAMS)


def test_a_stopped_child_is_named_within_its_timeout_and_can_be_closed(started):
    engine, _ = started
    os.kill(engine.pid, signal.SIGSTOP)
    engine.submit(_prompts(0, 1), PARAMS)
    start = time.monotonic()
    with pytest.raises(EngineTimeoutError, match=r"no sign of life .*while the trainer waits for 2 groups"):
        _collect(engine, 2)
    assert time.monotonic() - start < CONFIG.answer_timeout_s + 5


def test_an_idle_child_is_not_taken_for_dead(started):
    engine, _ = started
    deadline = time.monotonic() + CONFIG.answer_timeout_s + 1
    while time.monotonic() < deadline:
        assert engine.poll(0.5) == []


ORPHAN = """
import functools, sys
sys.path.insert(0, sys.argv[1])
from builders import TINY, VOCAB, tiny_model
from fsdp_async.dtensor_io import full_tensors
from fsdp_async.modeling import build_model
from fsdp_async.rollout import RolloutConfig
from fsdp_async.rollout_hf import ProcessEngine
from fsdp_async.weight_sync import SharedMemoryPublisher
if __name__ == "__main__":
    engine = ProcessEngine(functools.partial(build_model, TINY, vocab_size=VOCAB, seed=9), RolloutConfig(), seed=4)
    publisher = SharedMemoryPublisher([engine], bucket_bytes=1 << 20, timeout_s=60)
    publisher.publish(0, full_tensors(tiny_model()))
    engine.wait_loaded(0, 0, 60)
    print(engine.pid, flush=True)
    sys.stdin.read()
"""


def test_a_child_ends_by_itself_when_its_trainer_is_killed_and_shared_memory_is_freed(tmp_path):
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    tests = os.path.dirname(os.path.abspath(__file__))
    command = [sys.executable, str(script), tests]
    before = named_segments()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as trainer:
        child = int(trainer.stdout.readline())
        assert blocks_of(trainer.pid)
        assert named_segments() == before, "memory with a name would outlive a group that is killed"
        trainer.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    waiting = True
    while waiting:
        waiting = os.path.exists(f"/proc/{child}")
        assert time.monotonic() < deadline, f"child {child} or its memory outlived the trainer by 30 s"


def test_an_engine_that_failed_before_its_first_weights_says_so_and_not_that_they_are_missing():
    impossible = functools.partial(build_model, TINY, vocab_size=-1, seed=9)
    with contextlib.closing(ProcessEngine(impossible, CONFIG, seed=4)) as engine:
        with pytest.raises(EngineDiedError, match="negative dimension"):
            _collect(engine, 1)
        # Whoever starts failed engines again must hear of one.
        with pytest.raises(EngineDiedError, match="negative dimension"):
            engine.submit(_prompts(0), PARAMS)


def test_an_engine_in_the_trainers_own_thread_is_never_taken_for_silent():
    """What lies unread since it was built is older than the limit, as after a long warm start."""
    config = dataclasses.replace(CONFIG, answer_timeout_s=1e-9, start_timeout_s=1e-9)
    with contextlib.closing(InlineEngine(BUILDER, config, seed=4)) as engine:
        publisher = InProcessPublisher([engine], bucket_bytes=1 << 20, timeout_s=DEADLINE_S)
        _publish(publisher, 0, seed=1)
        engine.submit(_prompts(0), PARAMS)
        assert _answers(_collect(engine, 1)) == _answers(_expected(_prompts(0), seed=1, version=0))
        publisher.close()
