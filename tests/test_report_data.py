"""What a report says of a run, against hand values."""

from __future__ import annotations

import json

import pytest
import torch

from fsdp_async.errors import InputError
from fsdp_async.metrics import Histogram
from fsdp_async.report_data import RunData, smooth
from fsdp_async.report_figures import panels
from fsdp_async.report_time import time_shares
from fsdp_async.report_timeline import timeline_panel


def _step(step, time_s, spans, engine=(), **values):
    return {"event": "step", "step": step, "time_s": time_s, "trainer_spans": spans, "engine_spans": engine, **values}


# 1 s of waiting for the first batch, then: 1 behaviour, 4 update, 2 of 3 publish (1 is a wait inside), 2 evaluate,
# 1 wait, 2 update, and 2 of nothing.
EVENTS = [
    _step(1, 6.0, [["wait", 0.0, 1.0], ["behaviour", 1.0, 2.0], ["update", 2.0, 6.0]], [[0.0, 4.0]]),
    {"event": "publication", "step": 1, "time_s": 9.0, "engine_spans": []}
    | {"trainer_spans": [["wait", 7.0, 8.0], ["publish", 6.0, 9.0]]},
    {"event": "evaluation", "step": 1, "time_s": 11.0, "accuracy": 0.5, "engine_spans": [[10.0, 12.0]]}
    | {"trainer_spans": [["evaluate", 9.0, 11.0]]},
    _step(2, 16.0, [["wait", 11.0, 12.0], ["update", 12.0, 14.0]]),
]


def _run(events, record=None):
    return RunData("run", events, record or {})


def test_the_trainers_time_is_divided_without_counting_anything_twice():
    shares = time_shares(_run(EVENTS))
    assert shares.total_s == 13.0
    seconds = {name: share * 13.0 for name, share in shares.trainer.items()}
    expected = {"behaviour": 1.0, "update": 6.0, "wait": 2.0, "publish": 2.0, "checkpoint": 0.0, "other": 2.0}
    assert seconds == pytest.approx(expected)
    assert shares.lost == pytest.approx(6.0 / 13.0)
    # 1 to 4, and 11 to 12: what falls into the evaluation does not count.
    assert shares.engine_busy == pytest.approx(4.0 / 13.0)
    assert "computed 53.8% of the time (46.2% updates, 7.7% behaviour" in shares.sentence()


def test_a_run_without_a_step_has_lost_nothing():
    assert time_shares(_run(EVENTS[1:3])).lost == 0.0
    assert "no time was lost" in time_shares(_run(EVENTS[1:3])).sentence()
    assert timeline_panel(_run(EVENTS[1:3])).figure["data"]


def test_the_timeline_has_a_bar_for_each_span_without_the_waits_inside():
    lanes = {bars["name"]: bars for bars in timeline_panel(_run(EVENTS)).figure["data"]}
    publish = lanes["trainer: publish"]
    assert (publish["base"], publish["x"]) == ([6.0, 8.0], [1.0, 1.0])
    assert lanes["engine: generate"]["base"] == [0.0, 10.0]
    assert "trainer: checkpoint" not in lanes


def test_numbers_that_were_not_finite_or_not_logged_leave_gaps():
    run = _run(
        [
            {"event": "step", "step": 1, "factors": {"mismatch_kl_k3": [3.0, 6.0]}},
            {"event": "step", "step": 2, "factors": {"mismatch_kl_k3": [None, 6.0]}},
            {"event": "step", "step": 3, "factors": {"mismatch_kl_k3": [0.0, 0.0]}, "ledger": {"queued": 4}},
        ]
    )
    assert run.factor("mismatch_kl_k3") == [0.5, None, None]
    assert run.factor("lag_kl_k3") == [None, None, None]
    assert run.column("ledger", "queued") == [None, None, 4.0]
    assert smooth([None, 2.0, 4.0, None, 9.0], 2) == [None, 2.0, 3.0, 4.0, 9.0]


def test_a_histogram_counts_each_weight_once_and_merges():
    weights = torch.tensor([[1.0, 0.0, 2.0], [1e-9, 5e4, 7.0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    whole = Histogram.of(weights, mask)
    edges = Histogram.edges_log10()
    low = [-torch.inf, *edges]
    assert sum(whole.counts) == 5
    # Below all edges (0 and 1e-9), around 1, around log10(2) = .301, above all edges.
    counted = {index: count for index, count in enumerate(whole.counts) if count}
    assert counted[0] == 2
    assert counted[len(edges)] == 1
    inner = [index for index in counted if 0 < index < len(edges)]
    assert [low[index] for index in inner] == pytest.approx([-0.025, 0.275])
    parts = [Histogram.of(weights[row : row + 1], mask[row : row + 1]) for row in range(2)]
    assert parts[0].merge(parts[1]) == whole
    assert sum(Histogram.of(weights, torch.zeros_like(mask)).counts) == 0


def test_the_weights_of_all_steps_are_drawn_as_shares():
    counts = Histogram.of(torch.tensor([1.0, 1.0, 1.0, 2.0]), torch.ones(4, dtype=torch.bool)).counts
    events = [{"event": "step", "step": step, "weight_histogram": list(counts)} for step in (1, 2)]
    bars = next(panel for panel in panels(_run(events)) if panel.name == "weights").figure["data"][0]
    shown = {round(x, 3): y for x, y in zip(bars["x"], bars["y"], strict=True) if y}
    assert shown == {1.0: 0.75, 1.995: 0.25}


def test_a_torn_last_line_is_left_out_and_a_damaged_one_is_refused(tmp_path):
    lines = [json.dumps(event) for event in EVENTS]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("\n".join(lines) + '\n{"event": "st')
    assert len(RunData.read(tmp_path).events) == len(EVENTS)
    metrics.write_text("\n".join([lines[0], lines[1][:-9] + "}", lines[2]]) + "\n")
    with pytest.raises(InputError, match="is no JSON"):
        RunData.read(tmp_path)
    metrics.write_text("")
    with pytest.raises(InputError, match="nothing was logged yet"):
        RunData.read(tmp_path)
    with pytest.raises(InputError, match=r"no run here .*give the run.output_dir"):
        RunData.read(tmp_path / "elsewhere")
