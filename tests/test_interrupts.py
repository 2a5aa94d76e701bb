"""Ctrl-C at every line of a visit, a snapshot and a restore."""

from __future__ import annotations

import random
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from builders import tiny_model

import fsdp_async
from fsdp_async.interrupts import HeldSignals
from fsdp_async.state_cache import StateCache

PACKAGE = str(Path(fsdp_async.__file__).parent)


class SignalAtLine:
    """Raises SIGINT in the handler's own way before the `number`-th line of the package that runs in the block."""

    def __init__(self, number):
        self.number = number
        self.num_lines = 0

    def _trace(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self.number:
                signal.raise_signal(signal.SIGINT)
        return self._trace

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exc_info):
        sys.settrace(None)


def _cached_model():
    model = tiny_model(seed=1)
    model.model.layers[0].eval()
    cache = StateCache(model)
    cache.snapshot(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    return model, cache


def _values(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _check(model, cache, expected, flags):
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == flags
    assert torch.is_grad_enabled()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    cache.drop(0)  # would be refused within a visit


def _visit(cache):
    with cache.at(0) as model:
        model.eval()
        torch.rand(1), random.random()


def _lines_of(action):
    _, cache = _cached_model()
    with SignalAtLine(0) as tracer:
        action(cache)
    return tracer.num_lines


@pytest.mark.timeout(600)
def test_ctrl_c_at_any_line_of_a_visit_leaves_weights_flags_generators_and_the_cache_whole():
    num_lines = _lines_of(_visit)
    assert num_lines > 100
    num_raised = 0
    for number in range(1, num_lines + 1):
        model, cache = _cached_model()
        expected, flags = _values(model), [module.training for module in model.modules()]
        torch.manual_seed(5)
        state = torch.get_rng_state()
        try:
            with SignalAtLine(number):
                _visit(cache)
        except KeyboardInterrupt:
            num_raised += 1
        _check(model, cache, expected, flags)
        assert torch.equal(torch.get_rng_state(), state)
    assert num_raised == num_lines, "every Ctrl-C is heard in the end"


def test_ctrl_c_at_any_line_of_a_restore_leaves_the_old_weights_or_the_new_ones():
    for number in range(1, _lines_of(lambda cache: cache.restore(0)) + 1):
        model, cache = _cached_model()
        before, flags = _values(model), [module.training for module in model.modules()]
        after = _values(tiny_model(seed=1))
        with pytest.raises(KeyboardInterrupt), SignalAtLine(number):
            cache.restore(0)
        is_new = torch.equal(model.model.norm.weight, after["model.norm.weight"])
        _check(model, cache, after if is_new else before, flags)


def test_ctrl_c_at_any_line_of_a_snapshot_leaves_a_whole_version_or_none():
    for number in range(1, _lines_of(lambda cache: cache.snapshot(1)) + 1):
        model, cache = _cached_model()
        expected, flags = _values(model), [module.training for module in model.modules()]
        with pytest.raises(KeyboardInterrupt), SignalAtLine(number):
            cache.snapshot(1)
        if 1 in cache:
            with cache.at(1):
                assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
        _check(model, cache, expected, flags)


def test_a_handler_runs_at_once_where_it_may_and_otherwise_at_the_end():
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        with HeldSignals() as held:
            signal.raise_signal(signal.SIGUSR1)
            assert heard == []
            held.is_open = True
            signal.raise_signal(signal.SIGUSR1)
            assert len(heard) == 1
            held.is_open = False
            signal.raise_signal(signal.SIGUSR1)
        assert len(heard) == 2
        signal.raise_signal(signal.SIGUSR1)
        assert len(heard) == 3
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_other_threads_hold_nothing():
    found = []

    def enter():
        with HeldSignals():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]
