"""Lives of versions: lazy, live, stepped, restored, dropped; and what is refused while one is visited."""

from __future__ import annotations

import threading

import pytest
import torch
from cache_models import (
    adamw,
    bits,
    counted_copies,
    data,
    evaluate,
    frozen_copy,
    output_at,
    plain,
    same,
    sharded,
    train,
    watched,
)

from fsdp_async.errors import (
    InputError,
    StateInUseError,
)
from fsdp_async.state_cache import StateCache

X = data(77)


# --- lives of versions ------------------------------------------------------------------------------------------


def test_the_life_of_a_version_from_snapshot_to_step():
    model, optimizer, cache = watched()
    assert cache.live_version is None
    cache.snapshot(0)
    assert cache.live_version == 0
    cache.snapshot("reference")
    assert cache.live_version == 0
    train(model, steps=1, optimizer=optimizer)
    assert cache.live_version is None
    cache.snapshot(1)
    cache.restore(0)
    assert cache.live_version == 0
    cache.restore("reference")
    assert cache.live_version is None
    cache.restore(1)
    cache.mark_live_changed()
    assert cache.live_version is None
    cache.snapshot(2)
    cache.drop(2)
    assert cache.live_version is None


def test_without_a_watched_optimizer_nothing_is_known_to_be_live():
    model = plain()
    cache = StateCache(model)
    cache.snapshot(0)
    assert cache.live_version is None
    with torch.no_grad():
        model.scale.mul_(2)
    assert not torch.equal(output_at(cache, 0), evaluate(model, X))


def test_a_second_optimizer_that_is_not_watched_makes_live_unknown_and_lazy_refused():
    model = plain()
    first = torch.optim.AdamW(model.blocks[0].parameters(), lr=1e-2)
    cache = StateCache(model)
    cache.watch(first)
    cache.snapshot(0)
    assert cache.live_version is None
    with pytest.raises(StateInUseError, match=r"watched optimizer.*'scale' has none"):
        cache.snapshot(1, lazy=True)
    rest = [p for n, p in model.named_parameters() if p.requires_grad and not n.startswith("blocks.0")]
    cache.watch(torch.optim.SGD(rest, lr=0.1))
    cache.snapshot(1, lazy=True)
    assert cache.live_version == 1


def test_after_the_first_step_a_published_version_is_read_from_its_copy():
    model, optimizer, cache = watched()
    cache.snapshot(0, lazy=True)
    published = evaluate(frozen_copy(model), X)
    assert torch.equal(output_at(cache, 0), published)
    train(model, steps=1, optimizer=optimizer)
    assert not torch.equal(evaluate(model, X), published)
    assert torch.equal(output_at(cache, 0), published)


def test_a_lazy_snapshot_copies_once_before_the_step_and_not_at_all_if_dropped(monkeypatch):
    copies = counted_copies(monkeypatch)
    model, optimizer, cache = watched()
    cache.snapshot(0, lazy=True)
    assert copies == []
    train(model, steps=1, optimizer=optimizer)
    assert len(copies) == 1
    train(model, steps=1, optimizer=optimizer)
    assert len(copies) == 1
    for version in range(1, 6):
        cache.snapshot(version, lazy=True)
        cache.retain([])
        train(model, steps=1, optimizer=optimizer)
    assert len(copies) == 1


def test_buffers_of_a_lazy_snapshot_are_copied_at_once():
    model, optimizer, cache = watched()
    cache.snapshot(0, lazy=True)
    before = bits(model)
    train(model, steps=2, optimizer=optimizer)
    with cache.at(0):
        assert same(bits(model), before)


def test_restoring_another_version_completes_lazy_ones_first():
    model, optimizer, cache = watched()
    cache.snapshot(0)
    train(model, steps=1, optimizer=optimizer)
    cache.snapshot(1, lazy=True)
    cache.snapshot(2, lazy=True)
    output = evaluate(frozen_copy(model), X)
    cache.restore(1)
    assert cache.live_version == 1
    cache.restore(0)
    assert torch.equal(output_at(cache, 1), output)
    assert torch.equal(output_at(cache, 2), output)


def test_editing_by_hand_while_a_lazy_snapshot_waits_is_an_error_that_drops_it():
    model, _, cache = watched()
    cache.snapshot(0)
    cache.snapshot(1, lazy=True)
    with torch.no_grad():
        model.scale.mul_(2)
    with pytest.raises(StateInUseError, match=r"\[1\].*materialize"):
        cache.mark_live_changed()
    assert cache.versions == [0]
    cache.mark_live_changed()


def test_materialize_makes_editing_by_hand_safe(monkeypatch):
    copies = counted_copies(monkeypatch)
    model, _, cache = watched()
    cache.snapshot(1, lazy=True)
    output = evaluate(frozen_copy(model), X)
    cache.materialize(1)
    cache.materialize()
    assert len(copies) == 1
    with torch.no_grad():
        model.scale.mul_(2)
    cache.mark_live_changed()
    assert torch.equal(output_at(cache, 1), output)


def test_a_step_that_raises_half_way_counts_as_a_change():
    model, optimizer, cache = watched()
    cache.snapshot(0, lazy=True)
    output = evaluate(frozen_copy(model), X)

    def closure():
        with torch.no_grad():
            model.scale.mul_(2)
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        optimizer.step(closure)
    assert cache.live_version is None
    assert torch.equal(output_at(cache, 0), output)


def test_a_snapshot_in_the_closure_of_a_step_is_a_copy_of_that_moment():
    model, optimizer, cache = watched()
    train(model, steps=1, optimizer=optimizer)
    seen = {}

    def closure():
        cache.snapshot(5, lazy=True)
        seen["bits"] = bits(model)
        seen["live"] = cache.live_version
        optimizer.zero_grad()
        loss = model(X).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert seen["live"] is None
    assert cache.live_version is None
    with cache.at(5):
        assert same(bits(model), seen["bits"])


def test_an_optimizer_of_other_parameters_is_refused():
    model = plain()
    cache = StateCache(model)
    with pytest.raises(InputError, match="not the model's"):
        cache.watch(adamw(plain()))
    with pytest.raises(InputError, match=r"torch\.optim\.Optimizer"):
        cache.watch(object())
    optimizer = adamw(model)
    cache.watch(optimizer)
    cache.watch(optimizer)
    assert "watched optimizers 1" in cache.describe()


def test_an_optimizer_made_before_sharding_is_refused(single_rank):
    model = sharded(1)
    early = torch.optim.SGD(plain().parameters(), lr=1.0)
    with pytest.raises(InputError, match="after fully_shard"):
        StateCache(model).watch(early)


class _Wrapper(torch.optim.Optimizer):
    """Passes steps on to the optimizer inside it, as Accelerate's does: an Optimizer by type, and without hooks."""

    def __init__(self, optimizer):
        self.param_groups = optimizer.param_groups


def test_a_wrapper_without_step_hooks_is_refused_and_not_counted_as_watched():
    model = plain()
    cache = StateCache(model)
    with pytest.raises(InputError, match=r"watch that one .*optimizer\.optimizer"):
        cache.watch(_Wrapper(adamw(model)))
    cache.snapshot(0)
    assert cache.live_version is None, "nobody would tell the cache when weights change"
    assert "watched optimizers 0" in cache.describe()


def test_retain_drops_other_versions_and_no_names():
    cache = StateCache(plain())
    for version in (0, 1, 2, 3, "reference", "ewma"):
        cache.snapshot(version)
    cache.retain({1, 3, 99})
    assert cache.versions == [1, 3]
    assert cache.names == ["ewma", "reference"]
    cache.drop("ewma")
    assert cache.names == ["reference"]
    with pytest.raises(InputError, match="names are kept"):
        cache.retain(["reference"])
    cache.retain([])
    assert cache.versions == []
    assert "reference" in cache


# --- refused, never wrong -----------------------------------------------------------------------------------------


def test_inside_a_visit_everything_that_moves_weights_is_refused():
    model, optimizer, cache = watched()
    cache.snapshot(0), cache.snapshot(1)
    train(model, steps=1, optimizer=optimizer)
    model(X).sum().backward()
    before = bits(model)
    with cache.at(0):
        shown = bits(model)
        for refused in (
            lambda: cache.at(1).__enter__(), lambda: cache.at(0).__enter__(), lambda: cache.snapshot(9),
            lambda: cache.snapshot(0, overwrite=True), lambda: cache.restore(1), lambda: cache.drop(0),
            lambda: cache.retain([1]), optimizer.step, cache.mark_live_changed, cache.materialize, cache.close,
            lambda: cache.watch(optimizer),
        ):  # fmt: skip
            with pytest.raises(StateInUseError, match="version 0"):
                refused()
        assert same(bits(model), shown)
        cache.drop(1)
        cache.retain([0])
    assert cache.versions == [0]
    assert same(bits(model), before)
    optimizer.step()
    assert not same(bits(model), before)


def test_a_second_thread_is_refused_during_a_visit():
    _, _, cache = watched()
    cache.snapshot(0)
    errors = []

    def visit():
        try:
            output_at(cache, 0)
        except StateInUseError as error:
            errors.append(str(error))

    with cache.at(0):
        thread = threading.Thread(target=visit, name="intruder")
        thread.start()
        thread.join()
    assert len(errors) == 1
    assert "intruder" in errors[0]
    assert "MainThread" in errors[0]
    thread = threading.Thread(target=visit)
    thread.start()
    thread.join()
    assert len(errors) == 1, "another thread may visit when nobody else does"


def test_a_closed_cache_refuses_gives_memory_back_and_stops_watching():
    model, optimizer, _ = watched()
    with StateCache(model) as cache:
        cache.watch(optimizer)
        cache.snapshot(0, lazy=True)
        output_at(cache, 0)
    assert cache.nbytes == 0
    assert cache.versions == []
    cache.close()
    train(model, steps=1, optimizer=optimizer)
    for use in (lambda: cache.snapshot(0), lambda: cache.restore(0), lambda: cache.at(0).__enter__()):
        with pytest.raises(StateInUseError, match="closed"):
            use()


def test_a_cache_that_is_forgotten_is_not_kept_by_the_optimizer():
    model, optimizer, cache = watched()
    cache.snapshot(0)
    del cache
    train(model, steps=1, optimizer=optimizer)  # hooks of the lost cache must be harmless


def test_describe_says_what_is_retained_what_it_costs_and_why_this_swap():
    _, _, cache = watched()
    cache.snapshot(0), cache.snapshot("reference"), cache.snapshot(1, lazy=True)
    output_at(cache, 0)
    cache.drop(0)
    text = cache.describe()
    for part in ("versions [1]", "names ['reference']", "pending [1]", "live_version 1", "swap copy: works for every",
                 "this process alone", f"bytes: {cache.nbytes} ="):  # fmt: skip
        assert part in text
