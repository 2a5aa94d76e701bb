from __future__ import annotations

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
from shared_memory import left, segments_of

from fsdp_async.dtensor_io import full_tensors
from fsdp_async.errors import EngineDiedError, EngineTimeoutError, InputError
from fsdp_async.generation import generate
from fsdp_async.modeling import build_model
from fsdp_async.rollout import RolloutConfig, SamplingParams
from fsdp_async.rollout_hf import ProcessEngine, ThreadEngine
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
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as trainer:
        child = int(trainer.stdout.readline())
        segments = segments_of(trainer.pid)
        assert segments
        trainer.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    waiting = True
    while waiting:
        waiting = os.path.exists(f"/proc/{child}") or left(segments) != []
        assert time.monotonic() < deadline, f"child {child} or its memory outlived the trainer by 30 s"
