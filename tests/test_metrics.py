from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_async.errors import InputError
from fsdp_async.metrics import (
    Correlation,
    EffectiveSampleSize,
    Mean,
    Moments,
    Statistics,
    Total,
    kl_k3,
    merge_all,
)

SAMPLES = st.lists(st.floats(-50, 50, allow_subnormal=False), min_size=1, max_size=12)
CLOSE = {"rel": 1e-9, "abs": 1e-9}  # float64 sums of a dozen terms up to 50 squared, in another order


def _entries(values):
    x = torch.tensor(values, dtype=torch.float64)
    mask = torch.ones_like(x, dtype=torch.bool)
    y = x.square() - x
    return Statistics(
        {
            "total": Total(float(x.sum())),
            "mean": Mean.of(x, mask),
            "moments": Moments.of(x, mask),
            "ess": EffectiveSampleSize.of_log(x, mask),
            "correlation": Correlation.of(x, y, mask),
        }
    )


@settings(max_examples=80, deadline=None)
@given(values=SAMPLES, cuts=st.tuples(st.integers(0, 12), st.integers(0, 12)))
def test_any_partition_merges_to_the_numbers_of_the_whole_sample(values, cuts):
    low, high = sorted(min(cut, len(values)) for cut in cuts)
    parts = [_entries(part) for part in (values[:low], values[low:high], values[high:])]
    merged = merge_all(parts).to_dict()
    x = np.array(values)
    assert merged["total"] == pytest.approx(x.sum(), **CLOSE)
    assert merged["mean"] == pytest.approx(x.mean(), **CLOSE)
    assert merged["moments/mean"] == pytest.approx(x.mean(), **CLOSE)
    assert merged["moments/std"] == pytest.approx(x.std(), rel=1e-6, abs=1e-6)  # the root of a rounded sum of squares
    assert (merged["moments/min"], merged["moments/max"]) == (x.min(), x.max())
    w = np.exp(x - x.max())
    assert merged["ess"] == pytest.approx(w.sum() ** 2 / (len(w) * (w**2).sum()), **CLOSE)
    right_to_left = parts[0].merge(parts[1].merge(parts[2])).to_dict()
    assert right_to_left == pytest.approx(merged, rel=1e-6, abs=1e-6)


def test_correlation_has_its_hand_values():
    x, mask = torch.tensor([1.0, 2.0, 3.0, 9.0]), torch.tensor([True, True, True, False])
    assert Correlation.of(x, 2 * x + 1, mask).to_dict("r")["r"] == pytest.approx(1.0)
    assert Correlation.of(x, -x, mask).to_dict("r")["r"] == pytest.approx(-1.0)
    # deviations -1, 0, 1 and -4/3, 5/3, -1/3: 1 / sqrt(2 * 42/9)
    assert Correlation.of(x, torch.tensor([0.0, 3.0, 1.0, 7.0]), mask).to_dict("r")["r"] == pytest.approx(
        1 / math.sqrt(2 * 42 / 9)
    )
    assert Correlation.of(x, torch.ones(4), mask).to_dict("r") == {}


def test_an_empty_sample_reports_nothing_and_changes_nothing():
    nothing, something = _entries([]), _entries([1.0, 2.0])
    assert nothing.to_dict() == {"total": 0.0}
    assert nothing.merge(something).to_dict() == something.to_dict() == something.merge(nothing).to_dict()
    assert math.isnan(Mean(0.0, 0.0).value)


@pytest.mark.parametrize("log_weight", [-700.0, -3000.0, 0.0, 700.0])
def test_the_effective_share_of_equal_weights_is_one_however_small_or_large(log_weight):
    logs = torch.full((5,), log_weight)
    assert EffectiveSampleSize.of_log(logs, logs < 1e9).value == pytest.approx(1.0, rel=1e-9)


def test_the_effective_share_of_zero_weights_is_zero():
    logs = torch.full((3,), -math.inf)
    entry = EffectiveSampleSize.of_log(logs, torch.ones(3, dtype=torch.bool))
    assert entry.value == 0.0
    assert entry.merge(entry).value == 0.0


def test_a_name_that_stands_for_two_kinds_is_refused():
    with pytest.raises(InputError, match="statistic 'x' is Mean here and Total there"):
        Statistics({"x": Mean(1.0, 1.0)}).merge(Statistics({"x": Total(1.0)}))


def test_a_prefix_is_put_before_every_name():
    assert Statistics({"x": Mean(1.0, 2.0)}).prefixed("lag").to_dict() == {"lag/x": 0.5}


def test_k3_has_its_hand_values():
    log_ratio = torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64)
    expected = torch.tensor([0.0, math.e - 2, 1 / math.e], dtype=torch.float64)
    torch.testing.assert_close(kl_k3(log_ratio), expected, rtol=1e-14, atol=0)
    # Near 0 the value is L^2 / 2; exp(L) - 1 - L would be lost in rounding.
    assert kl_k3(torch.tensor(1e-7, dtype=torch.float64)).item() == pytest.approx(5e-15, rel=1e-2)
