from __future__ import annotations

import json
import random
import threading

import pytest
from builders import group, response
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_async.errors import ConfigError, FsdpAsyncError, InputError, QueueClosedError
from fsdp_async.ledger import Ledger
from fsdp_async.sample_queue import QueueConfig, SampleQueue
from fsdp_async.types import Prompt


def _queue(*, capacity=4, per_batch=2, sync_every=1, max_staleness=1):
    return SampleQueue(
        capacity_groups=capacity, groups_per_batch=per_batch, sync_every=sync_every, max_staleness=max_staleness
    )


def _prompts(*names, epoch=0):
    return [Prompt(name, (5,), "test", epoch=epoch) for name in names]


def _answered(name, *, version=0, epoch=0, size=2, length=3):
    return group(name, [5], [response(name, i, [7] * length) for i in range(size)], version=version, epoch=epoch)


def _ids(groups):
    return [g.prompt.prompt_id for g in groups]


def test_groups_are_taken_in_the_order_of_submission_not_of_arrival():
    queue = _queue()
    queue.submit(_prompts("a", "b", "c"), 2, 0)
    queue.put(_answered("c"))
    queue.put(_answered("b"))
    assert not queue.ready(2)
    queue.put(_answered("a"))
    assert queue.ready(2)
    assert _ids(queue.take(2)) == ["a", "b"]


def test_the_ledger_follows_every_sample():
    queue = _queue()
    queue.submit(_prompts("a", "b", "c"), 2, 0)
    assert queue.ledger == Ledger(submitted=6, in_flight=6)
    queue.put(_answered("a"))
    queue.put(_answered("b"))
    assert queue.ledger == Ledger(submitted=6, produced=4, queued=4, in_flight=2)
    queue.take(2)
    assert queue.ledger == Ledger(submitted=6, produced=4, consumed=4, in_flight=2)
    assert queue.drain("end") == 1
    assert queue.ledger == Ledger(
        submitted=6,
        produced=6,
        consumed=4,
        dropped=2,
        num_dropped_by_length={0: 2},
        num_dropped_by_reason={"end": 2},
    )


def test_an_unbalanced_ledger_is_an_error():
    with pytest.raises(FsdpAsyncError, match="submitted != produced"):
        Ledger(submitted=3, produced=1, in_flight=1).check()
    with pytest.raises(FsdpAsyncError, match="produced != consumed"):
        Ledger(submitted=1, produced=1).check()


def test_a_remainder_at_the_end_is_dropped_and_counted_by_length():
    queue = _queue()
    queue.submit(_prompts("a", "b"), 2, 0)
    queue.put(_answered("a", length=4))
    queue.drain("run ended")
    assert queue.ledger.num_dropped_by_length == {0: 2, 4: 2}
    queue.ledger.check()


@pytest.mark.parametrize(
    ("max_staleness", "sync_every", "version", "taken", "admissible"),
    [
        (0, 1, 0, 0, 2),
        (0, 1, 0, 1, 0),
        (0, 1, 1, 1, 2),
        (1, 1, 0, 0, 4),
        (1, 1, 0, 1, 2),
        (0, 2, 0, 1, 2),
        (2, 2, 1, 2, 12),
    ],
)
def test_admission_leaves_room_for_what_fits_before_the_bound(max_staleness, sync_every, version, taken, admissible):
    queue = _queue(capacity=100, max_staleness=max_staleness, sync_every=sync_every)
    for batch in range(taken):
        names = [f"{batch}-{i}" for i in range(2)]
        queue.submit(_prompts(*names), 1, batch // sync_every)
        for name in names:
            queue.put(_answered(name, size=1))
        queue.take(2)
    assert queue.num_admissible(version) == admissible


def test_capacity_bounds_admission_too():
    queue = _queue(capacity=3, max_staleness=9)
    assert queue.num_admissible(0) == 3
    queue.submit(_prompts("a", "b"), 2, 0)
    assert queue.num_admissible(0) == 1


def test_submitting_more_than_admissible_registers_nothing():
    queue = _queue(capacity=2)
    with pytest.raises(InputError, match="3 groups submitted under version 0, but only 2 are admissible"):
        queue.submit(_prompts("a", "b", "c"), 2, 0)
    assert queue.ledger == Ledger()


def test_an_identity_can_be_outstanding_once_but_come_back_in_a_later_epoch():
    queue = _queue()
    queue.submit(_prompts("a"), 2, 0)
    with pytest.raises(InputError, match=r"\('a', 0\).*outstanding already"):
        queue.submit(_prompts("a"), 2, 0)
    queue.submit(_prompts("a", epoch=1), 2, 0)
    assert queue.num_outstanding == 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (_answered("z"), "never submitted"),
        (_answered("a"), "put already"),
        (_answered("b", size=3), "3 samples, submitted were 2"),
    ],
)
def test_a_group_that_was_not_ordered_like_that_is_refused(bad, message):
    queue = _queue()
    queue.submit(_prompts("a", "b"), 2, 0)
    queue.put(_answered("a"))
    before = queue.ledger
    with pytest.raises(InputError, match=message):
        queue.put(bad)
    assert queue.ledger == before


def test_a_stale_group_is_given_up_and_its_late_arrival_counts_nothing_twice():
    queue = _queue(capacity=4, max_staleness=1)
    queue.submit(_prompts("old", "older"), 2, 0)
    queue.put(_answered("old", length=5))
    assert queue.drop_stale(1) == 0
    assert queue.drop_stale(2) == 2
    ledger = queue.ledger
    assert (ledger.produced, ledger.dropped, ledger.in_flight) == (4, 4, 0)
    assert ledger.num_dropped_by_length == {0: 2, 5: 2}
    assert ledger.num_dropped_by_reason == {"stale": 4}
    queue.put(_answered("older"))
    assert queue.ledger.num_late == 2
    assert queue.ledger.produced == 4
    queue.ledger.check()
    # It was awaited once; a second answer to it is a fault of the engine.
    with pytest.raises(InputError, match="never submitted"):
        queue.put(_answered("older"))
    assert queue.ledger.num_late == 2


def test_a_given_up_group_cannot_be_ordered_again_while_its_answer_may_still_come():
    queue = _queue(max_staleness=1)
    queue.submit(_prompts("a"), 2, 0)
    queue.drop_stale(2)
    with pytest.raises(InputError, match=r"\('a', 0\).*given up.*raise the epoch"):
        queue.submit(_prompts("a"), 2, 2)
    queue.submit(_prompts("a", epoch=1), 2, 2)
    queue.put(_answered("a"))
    assert (queue.ledger.num_late, queue.ledger.queued) == (2, 0)
    queue.put(_answered("a", version=2, epoch=1))
    assert (queue.ledger.num_late, queue.ledger.queued) == (2, 2)


@pytest.mark.parametrize("size", [-1, 0, 3, 1.5, True])
def test_asking_for_no_batch_is_refused_and_counts_none(size):
    queue = _queue()
    for ask in (queue.ready, queue.take):
        with pytest.raises(InputError, match=f"{size} groups are no batch: ask for 1 to 2"):
            ask(size)
    assert queue.num_batches_taken == 0


def test_closing_evicts_nothing_that_is_queued():
    queue = _queue()
    queue.submit(_prompts("a", "b", "c"), 2, 0)
    queue.put(_answered("a"))
    queue.put(_answered("b"))
    queue.close()
    assert _ids(queue.take(2)) == ["a", "b"]
    with pytest.raises(QueueClosedError, match=r"take\(2\), which still awaits group \('c', 0\)"):
        queue.take(2)
    with pytest.raises(QueueClosedError):
        queue.submit(_prompts("d"), 2, 0)
    with pytest.raises(QueueClosedError):
        queue.put(_answered("c"))


def test_waiting_too_long_names_the_group_that_is_awaited_and_consumes_nothing():
    queue = _queue()
    queue.submit(_prompts("a", "b"), 2, 0)
    queue.put(_answered("b"))
    with pytest.raises(TimeoutError, match=r"group \('a', 0\), which is in flight"):
        queue.take(2, timeout_s=0.0)
    assert queue.ledger.consumed == 0
    assert queue.num_batches_taken == 0


def test_a_taker_waits_until_the_last_group_of_its_batch_has_come():
    queue, taken, started = _queue(), [], threading.Event()

    def consume():
        started.set()
        taken.extend(queue.take(2, timeout_s=30))

    queue.submit(_prompts("a", "b"), 2, 0)
    thread = threading.Thread(target=consume)
    thread.start()
    started.wait(30)
    queue.put(_answered("b"))
    assert taken == []
    queue.put(_answered("a"))
    thread.join(30)
    assert _ids(taken) == ["a", "b"]


def test_a_closed_queue_wakes_its_taker():
    queue, errors, started = _queue(), [], threading.Event()

    def consume():
        started.set()
        with pytest.raises(QueueClosedError):
            queue.take(2)
        errors.append("closed")

    thread = threading.Thread(target=consume)
    thread.start()
    started.wait(30)
    queue.close()
    thread.join(30)
    assert errors == ["closed"]


def test_a_resumed_queue_goes_on_as_the_first_one_would():
    first = _queue(max_staleness=3)
    first.submit(_prompts("a", "b", "c"), 2, 0)
    first.put(_answered("a"))
    first.put(_answered("b"))
    first.take(2)
    second = _queue(max_staleness=3)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.ledger == first.ledger
    assert second.num_batches_taken == 1
    assert second.num_admissible(0) == first.num_admissible(0)
    second.submit(_prompts("d"), 2, 0)
    second.put(_answered("d"))
    second.put(_answered("c"))
    assert _ids(second.take(2)) == ["c", "d"]


def test_saved_state_is_plain_and_brings_every_group_and_count_back():
    first = _queue(max_staleness=1)
    first.submit(_prompts("given up", "dropped"), 2, 0)
    first.put(_answered("dropped", length=7))
    first.drop_stale(2)
    first.submit(_prompts("x", "y"), 2, 2)
    mixed = response("x", 1, [7, 8, 9], spans=((2, 1), (3, None)), mask=[True, False, True])
    groups = [group("x", [5], [response("x", 0, [7]), mixed], version=2), _answered("y", version=2)]
    for item in groups:
        first.put(item)
    second = _queue(max_staleness=1)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.ledger == first.ledger
    assert second.ledger.num_dropped_by_length == {0: 2, 7: 2}
    assert second.take(2) == groups
    second.put(_answered("given up"))
    assert second.ledger.num_late == 2


def test_state_whose_counts_do_not_fit_its_groups_is_refused_and_changes_nothing():
    first, second = _queue(), _queue()
    first.submit(_prompts("a", "b"), 2, 0)
    state = first.state_dict()
    state["outstanding"].pop()
    with pytest.raises(InputError, match="submitted != produced"):
        second.load_state_dict(state)
    assert second.ledger == Ledger()


def _saved():
    """The plain state of a queue with every part filled: in flight, queued, given up, dropped, consumed."""
    queue = _queue(capacity=6, max_staleness=2)
    queue.submit(_prompts("taken", "also taken", "given up", "dropped"), 2, 0)
    for name in ("taken", "also taken", "dropped"):
        queue.put(_answered(name))
    queue.take(2)
    queue.drop_stale(3)
    queue.submit(_prompts("queued", "in flight"), 2, 3)
    queue.put(_answered("queued", version=3))
    return json.loads(json.dumps(queue.state_dict()))


def _outstanding(state, name):
    (found,) = (item for item in state["outstanding"] if item[0]["prompt_id"] == name)
    return found


def _responses(state):
    return _outstanding(state, "queued")[3]["responses"]


def _cut_a_count(state):
    state["counts"] |= {"consumed": -2, "submitted": state["counts"]["submitted"] - 6}


SPOILT = {
    "nothing": (lambda s: s.clear(), r"found \[\], need a mapping of exactly \['outstanding'"),
    "a missing part": (lambda s: s.pop("given_up"), "need a mapping of exactly"),
    "an unknown part": (lambda s: s.update(zz=1), "'zz'"),
    "a part of another kind": (lambda s: s.update(counts=3), "malformed"),
    "a group of too few parts": (lambda s: s["outstanding"][0].pop(), "malformed"),
    "a prompt without tokens": (lambda s: s["outstanding"][0][0].pop("token_ids"), "malformed"),
    "a prompt of no text": (lambda s: s["outstanding"][0][0].update(prompt_id=3), "need a text"),
    "a version of None": (lambda s: s["outstanding"][0].__setitem__(1, None), "version=None must be an integer"),
    "no samples": (lambda s: _outstanding(s, "in flight").__setitem__(2, 0), "num_samples=0 must be an integer"),
    "batches below 0": (lambda s: s.update(num_batches_taken=-5), "num_batches_taken=-5 must be an integer"),
    "batches of None": (lambda s: s.update(num_batches_taken=None), "num_batches_taken=None"),
    "a malformed key": (lambda s: s.update(given_up=[[1]]), "malformed"),
    "a key of no text": (lambda s: s.update(given_up=[[1, 0]]), r"need pairs \(prompt_id, epoch\)"),
    "a key given up twice": (lambda s: s["given_up"].append(s["given_up"][0]), "names a group twice"),
    "a key given up and outstanding": (lambda s: s["given_up"].append(["queued", 0]), "given up and outstanding"),
    "a group twice": (lambda s: s["outstanding"].append(s["outstanding"][0]), "is outstanding twice"),
    "a group of another prompt": (lambda s: [r.update(prompt_id="b") for r in _responses(s)], "responses to other"),
    "a group of too few": (lambda s: _responses(s).pop(), "1 samples, submitted were 2"),
    "a sample twice": (lambda s: _responses(s)[1].update(sample_index=0), "holds a sample twice"),
    "a reward of NaN": (lambda s: _responses(s)[1].update(reward=float("nan")), "reward=nan must be a finite"),
    "a negative count": (_cut_a_count, "counts of 'consumed'=-2 must be an integer"),
    "an unknown count": (lambda s: s["counts"].update(eaten=1), r"unknown counts \['eaten'\]"),
    "another sum of lengths": (lambda s: s["dropped_by_length"][0].__setitem__(1, 77), "dropped_by_length counts 79"),
    "a length twice": (lambda s: s.update(dropped_by_length=[[0, 2], [0, 2]]), "counts 0 twice"),
    "no length": (lambda s: s.update(dropped_by_length=[["a", 4]]), r"lengths \['a'\]"),
    "another sum of reasons": (lambda s: s["dropped_by_reason"].update(odd=1), "dropped_by_reason counts 5 samples"),
}


def test_the_state_that_is_spoilt_below_is_whole():
    queue = _queue(max_staleness=2)
    queue.load_state_dict(_saved())
    assert json.loads(json.dumps(queue.state_dict())) == _saved()
    assert queue.ledger.num_dropped_by_length == {0: 2, 3: 2}


@pytest.mark.parametrize("name", SPOILT)
def test_a_state_that_no_queue_saved_is_refused_whole_and_changes_nothing(name):
    spoil, message = SPOILT[name]
    state, queue = _saved(), _queue(max_staleness=2)
    queue.submit(_prompts("mine"), 2, 0)
    before = queue.state_dict()
    spoil(state)
    with pytest.raises(InputError, match=message):
        queue.load_state_dict(state)
    assert queue.state_dict() == before


def test_a_state_of_more_groups_than_the_capacity_is_refused():
    first, second = _queue(capacity=6, max_staleness=2), _queue(capacity=4)
    first.submit(_prompts(*"abcde"), 2, 0)
    with pytest.raises(InputError, match=r"5 groups are outstanding, and queue\.capacity_groups is 4; raise it"):
        second.load_state_dict(first.state_dict())


@pytest.mark.parametrize("state", [None, [], "state"])
def test_what_is_no_mapping_is_no_state(state):
    with pytest.raises(InputError, match="need a mapping of exactly"):
        _queue().load_state_dict(state)


@pytest.mark.parametrize(
    ("samples", "version", "message"),
    [
        (0, 0, "num_samples=0 must be an integer of at least 1"),
        (-1, 0, "num_samples=-1"),
        (1.5, 0, r"num_samples=1\.5"),
        (True, 0, "num_samples=True"),
        (2, -1, "version=-1 must be an integer of at least 0"),
        (2, 1.5, r"version=1\.5"),
        (2, None, "version=None"),
    ],
)
def test_an_order_of_no_samples_or_no_version_is_refused(samples, version, message):
    queue = _queue()
    with pytest.raises(InputError, match=message):
        queue.submit(_prompts("a"), samples, version)
    assert queue.ledger == Ledger()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (group("a", [5], [response("a", 0, [7]), response("a", 0, [7])]), r"a sample twice: sample_index \[0, 0\]"),
        (group("a", [5], [response("a", 0, [7]), response("b", 1, [7])]), r"responses to other prompts: \['b'\]"),
        (group("a", [6], [response("a", 0, [7]), response("a", 1, [7])]), r"answers Prompt.*submitted was"),
    ],
)
def test_a_group_that_answers_something_else_is_refused_and_stays_in_flight(bad, message):
    queue = _queue()
    queue.submit(_prompts("a"), 2, 0)
    with pytest.raises(InputError, match=message):
        queue.put(bad)
    assert queue.ledger == Ledger(submitted=2, in_flight=2)
    queue.put(_answered("a"))


@pytest.mark.parametrize("timeout_s", [float("nan"), "1"])
def test_a_time_that_is_no_number_is_refused(timeout_s):
    queue = _queue()
    queue.submit(_prompts("a", "b"), 2, 0)
    with pytest.raises(InputError, match=r"timeout_s=.* must be a number of seconds"):
        queue.take(2, timeout_s=timeout_s)


def test_an_infinite_time_waits_until_the_batch_is_there():
    queue, started = _queue(), threading.Event()
    queue.submit(_prompts("a", "b"), 2, 0)
    queue.put(_answered("a"))

    def produce():
        started.wait(30)
        queue.put(_answered("b"))

    thread = threading.Thread(target=produce)
    thread.start()
    started.set()
    assert _ids(queue.take(2, timeout_s=float("inf"))) == ["a", "b"]
    thread.join(30)


@pytest.mark.parametrize(
    "bad", [{"capacity": 2.5}, {"capacity": "6"}, {"per_batch": 1.5}, {"sync_every": True}, {"max_staleness": 0.5}]
)
def test_a_queue_is_made_of_integers(bad):
    with pytest.raises(ConfigError, match="integer"):
        _queue(**bad)


def test_many_producers_at_once_lose_and_double_nothing():
    names = [f"p{i}" for i in range(80)]
    queue = _queue(capacity=80, per_batch=4, max_staleness=19)
    queue.submit(_prompts(*names), 2, 0)
    arrivals = random.Random(0).sample(names, len(names))
    start = threading.Barrier(5)
    failures = []

    def produce(mine):
        try:
            start.wait(30)
            for name in mine:
                queue.put(_answered(name))
                queue.ledger.check()
        except Exception as error:  # noqa: BLE001 - reported by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=produce, args=(arrivals[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    start.wait(30)
    taken = [name for _ in range(20) for name in _ids(queue.take(4, timeout_s=30))]
    for thread in threads:
        thread.join(30)
    assert failures == []
    assert taken == names
    assert queue.ledger == Ledger(submitted=160, produced=160, consumed=160)


def test_the_oldest_referenced_version_covers_what_may_still_be_sampled():
    queue = _queue(capacity=100, max_staleness=1)
    assert queue.oldest_referenced_version(0) == 0
    queue.submit(_prompts("a", "b", "c", "d"), 1, 0)
    assert queue.oldest_referenced_version(0) == 0
    for name in "abcd":
        queue.put(_answered(name, size=1))
    queue.take(2)
    assert queue.oldest_referenced_version(1) == 0
    queue.take(2)
    # Both batches of version 0 are gone; version 1 may still be ordered under.
    assert queue.oldest_referenced_version(1) == 1


def test_a_synchronous_queue_refers_to_nothing_once_its_batch_was_taken():
    queue = _queue(capacity=100, max_staleness=0)
    queue.submit(_prompts("a", "b"), 1, 0)
    for name in "ab":
        queue.put(_answered(name, size=1))
    queue.take(2)
    assert queue.oldest_referenced_version(0) is None


def test_a_capacity_below_one_batch_is_refused():
    with pytest.raises(ConfigError, match="could never be full"):
        _queue(capacity=1)
    with pytest.raises(ConfigError, match="capacity_groups=0"):
        QueueConfig(capacity_groups=0)


@pytest.mark.parametrize("bad", [{"per_batch": 0}, {"sync_every": 0}, {"max_staleness": -1}])
def test_numbers_under_which_nothing_could_be_submitted_are_refused(bad):
    with pytest.raises(ConfigError, match="nothing could ever be submitted"):
        _queue(**bad)


@settings(max_examples=60, deadline=None)
@given(
    max_staleness=st.integers(0, 3),
    sync_every=st.integers(1, 3),
    extra_capacity=st.integers(0, 5),
    choices=st.lists(st.integers(0, 99), min_size=60, max_size=160),
)
def test_under_any_schedule_nothing_is_lost_doubled_reordered_or_too_stale(
    max_staleness, sync_every, extra_capacity, choices
):
    queue = _queue(capacity=2 + extra_capacity, sync_every=sync_every, max_staleness=max_staleness)
    published, batches, submitted, in_flight, consumed = 0, 0, [], [], []
    for choice in choices:
        action = choice % 3
        if action == 0 and (room := queue.num_admissible(published)):
            names = [f"p{len(submitted) + i}" for i in range(1 + choice % room)]
            queue.submit(_prompts(*names), 2, published)
            submitted += names
            in_flight += [(name, published) for name in names]
        elif action == 1 and in_flight:
            name, version = in_flight.pop(choice % len(in_flight))
            queue.put(_answered(name, version=version))
        elif queue.ready(2):
            groups = queue.take(2)
            assert all(published - g.submitted_version <= max_staleness for g in groups)
            consumed += _ids(groups)
            batches += 1
            published = batches // sync_every
            assert queue.drop_stale(published) == 0, "admission alone must keep the bound"
        queue.ledger.check()
    assert consumed == submitted[: len(consumed)]
    assert queue.ledger.submitted == 2 * len(submitted)
    assert queue.ledger.consumed == 2 * len(consumed)
    # And no schedule ends in a standstill: once what is in flight has arrived, a batch is ready or can be ordered.
    for name, version in in_flight:
        queue.put(_answered(name, version=version))
    assert queue.ready(2) or queue.num_admissible(published) + queue.num_outstanding >= 2
