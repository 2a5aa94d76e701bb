from __future__ import annotations

import pytest

from fsdp_async.summary import summarize

LEDGER = {"submitted": 8, "produced": 6, "consumed": 4, "dropped": 1, "queued": 1, "in_flight": 2}


def _event(event, step, **values):
    return {
        "event": event,
        "step": step,
        "time_s": 0.0,
        "ledger": LEDGER,
        "trainer_spans": [],
        "engine_spans": [],
        **values,
    }


def _step(step, **values):
    defaults = {
        "num_tokens": 10,
        "staleness_total": 0,
        "staleness_max": 0,
        "behaviour_versions": [0],
        "num_optimizer_steps": 2,
        "num_skipped_steps": 0,
        "canary_gap_nats": {},
        "factors": {},
    }
    return _event("step", step, **(defaults | values))


def test_staleness_is_weighted_by_tokens_over_the_whole_run():
    summary = summarize(
        [
            _step(1, num_tokens=30, staleness_total=30, staleness_max=1),
            _step(2, num_tokens=10, staleness_total=30, staleness_max=3),
        ]
    )
    assert summary["staleness_mean"] == 1.5
    assert summary["staleness_max"] == 3


def test_a_divergence_is_the_mean_over_tokens_not_over_batches():
    summary = summarize(
        [_step(1, factors={"mismatch_kl_k3": [3.0, 3]}), _step(2, factors={"mismatch_kl_k3": [0.0, 1]})]
    )
    assert summary["mismatch_kl_k3_mean"] == 0.75
    assert summary["lag_kl_k3_mean"] is None


@pytest.mark.parametrize("not_finite", [None, float("inf")], ids=["read from a file", "as it was measured"])
def test_a_sum_that_was_not_finite_gives_no_mean_and_no_error(not_finite):
    gaps = {"0": None, "1": 0.5}
    factors = {"update_kl_k3": [not_finite, 3], "mismatch_kl_k3": [3.0, 3]}
    summary = summarize([_step(1, factors=factors, canary_gap_nats=gaps), _step(2, factors={"update_kl_k3": [1.0, 1]})])
    assert summary["update_kl_k3_mean"] is None
    assert summary["mismatch_kl_k3_mean"] == 1.0
    assert summary["canary_gap_max"] == 0.5


def test_the_target_is_reached_at_the_first_evaluation_that_shows_it():
    evaluations = [
        _event("evaluation", s, accuracy=a, training_clock_s=c, time_s=t)
        for s, a, c, t in [(0, 0.4, 0.0, 5.0), (10, 0.8, 12.5, 20.0), (20, 0.7, 30.0, 40.0)]
    ]
    summary = summarize(evaluations)
    assert (summary["accuracy_first"], summary["accuracy_last"]) == (0.4, 0.7)
    assert summary["time_to_0.80_s"] == 12.5
    assert summary["wall_s"] == 40.0
    assert summarize(evaluations[:1])["time_to_0.80_s"] is None


def test_overlap_leaves_waiting_and_evaluation_out():
    spans = [["update", 0.0, 4.0], ["wait", 4.0, 6.0], ["evaluate", 6.0, 10.0]]
    summary = summarize([_event("end", 1, trainer_spans=spans, engine_spans=[[2.0, 10.0]], outcome="completed")])
    assert summary["overlap_fraction"] == pytest.approx(0.5)


def test_the_ledger_is_the_last_one_seen_and_balances():
    summary = summarize([_step(1), _event("end", 1, outcome="completed")])
    assert summary["samples_submitted"] == summary["samples_produced"] + summary["samples_in_flight"]
    assert summary["samples_produced"] == (
        summary["samples_consumed"] + summary["samples_dropped"] + summary["samples_queued"]
    )


def test_publications_count_version_zero():
    assert summarize([_event("publication", 0, version=0), _event("publication", 1, version=1)])["num_versions"] == 2


def test_a_run_that_ended_before_anything_happened_has_a_summary():
    summary = summarize([])
    assert summary["outcome"] == "unfinished"
    assert summary["accuracy_first"] is None
