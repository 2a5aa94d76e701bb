from __future__ import annotations

import pytest

from fsdp_async.timeline import Timeline, busy_s, overlap_fraction, overlap_s, without


def test_overlapping_and_touching_spans_are_counted_once():
    assert busy_s([(0.0, 2.0), (1.0, 3.0), (3.0, 4.0), (6.0, 7.0)]) == 5.0


def test_overlap_is_the_time_in_which_both_worked():
    assert overlap_s([(0.0, 4.0), (6.0, 8.0)], [(1.0, 2.0), (3.0, 7.0)]) == pytest.approx(3.0, abs=1e-12)


def test_overlap_fraction_divides_by_the_smaller_busy_time():
    assert overlap_fraction([(0.0, 10.0)], [(8.0, 12.0)]) == pytest.approx(0.5)


def test_overlap_fraction_is_zero_when_one_side_never_worked():
    assert overlap_fraction([(0.0, 10.0)], []) == 0.0


def test_a_phase_is_recorded_once_also_when_its_body_raises():
    timeline = Timeline()
    with pytest.raises(KeyError), timeline.phase("update"):
        raise KeyError("x")
    (span,) = timeline.drain()
    assert span.phase == "update"
    assert span.stop_s >= span.start_s >= 0
    assert timeline.seconds("update") == span.stop_s - span.start_s
    assert timeline.drain() == []


def test_holes_are_taken_out_of_spans():
    spans = [(0.0, 4.0), (3.0, 6.0), (8.0, 9.0)]
    assert without(spans, []) == [(0.0, 6.0), (8.0, 9.0)]
    assert without(spans, [(1.0, 2.0), (5.0, 8.5)]) == [(0.0, 1.0), (2.0, 5.0), (8.5, 9.0)]
    assert without(spans, [(-1.0, 10.0)]) == []


def test_a_long_run_is_summed_up_in_the_time_of_one_sweep():
    # Every operation below would be 4e10 of them if each span were compared with each hole.
    num = 200_000
    spans = [(float(i), i + 0.5) for i in range(num)]
    holes = [(i + 0.25, i + 0.75) for i in range(num)]
    pieces = without(spans, holes)
    assert len(pieces) == num
    assert busy_s(pieces) == pytest.approx(num / 4)
