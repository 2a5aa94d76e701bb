"""Fingerprints know every bit and nothing else; differences are counted by bits and measured by value."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_async.contents import LazyTensors, bits_of, difference_of, fingerprint_of
from fsdp_async.errors import InputError

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool, torch.complex64]


def tensors():
    generator = torch.Generator().manual_seed(3)
    return {
        "b": torch.randn(3, 5, generator=generator),
        "a.weight": torch.randn(4, generator=generator).bfloat16(),
        "empty": torch.empty(0, 7),
        "scalar": torch.tensor(2.0, dtype=torch.float64),
    }


def clone(state):
    return {name: value.clone() for name, value in state.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
def test_a_single_flipped_bit_changes_the_fingerprint_and_is_named_and_counted(dtype, data):
    size = 6
    state = {"x": torch.zeros(size, dtype=dtype), "y": torch.ones(2)}
    changed = clone(state)
    byte = data.draw(st.integers(0, size * dtype.itemsize - 1))
    bit = 0 if dtype is torch.bool else data.draw(st.integers(0, 7))
    changed["x"].view(torch.uint8)[byte] ^= 1 << bit
    first, second = fingerprint_of(state), fingerprint_of(changed)
    assert str(first) != str(second)
    assert first.differing(second) == ["x"]
    difference = difference_of(state, changed)
    assert [(row.name, row.num_different, row.num_elements) for row in difference.changed] == [("x", 1, size)]
    assert difference.num_equal == 1


def test_the_order_of_names_memory_layout_and_aliasing_do_not_count():
    state = tensors()
    shuffled = {name: state[name] for name in reversed(state)}
    shuffled["b"] = state["b"].t().contiguous().t()
    assert fingerprint_of(shuffled) == fingerprint_of(state)
    assert not difference_of(state, shuffled)
    assert str(difference_of(state, shuffled)) == "no tensor differs"


def test_dtype_shape_and_name_count_even_where_the_bytes_are_equal():
    zeros = torch.zeros(4)
    prints = {
        str(fingerprint_of({name: value}))
        for name, value in [("x", zeros), ("y", zeros), ("x", zeros.reshape(2, 2)), ("x", zeros.view(torch.int32))]
    }
    assert len(prints) == 4


def test_names_cannot_run_into_each_other():
    one = torch.ones(1)
    assert str(fingerprint_of({"ab": one, "c": one})) != str(fingerprint_of({"a": one, "bc": one}))


def test_values_are_measured_where_bits_differ():
    a = {"x": torch.tensor([0.0, 1.0, math.nan, math.inf, 5.0]), "same": torch.ones(2)}
    b = clone(a)
    b["x"][0] = -0.0  # other bits, no distance
    b["x"][4] = 5.5
    difference = difference_of(a, b)
    row = difference.changed[0]
    assert (row.num_different, row.num_elements, row.max_abs) == (2, 5, 0.5)
    assert "1 of 2 tensors differ" in str(difference)
    assert "2 of 5 elements, by at most 0.5" in str(difference)


def test_a_nan_against_a_number_is_said_and_comes_first():
    a = {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor([0.0])}
    b = {"x": torch.tensor([1.0, math.nan]), "y": torch.tensor([9.0])}
    difference = difference_of(a, b)
    assert [row.name for row in difference.changed] == ["x", "y"]
    assert "NaN on one side" in str(difference).splitlines()[1]


def test_names_and_forms_of_one_side_only_are_listed():
    a = {"x": torch.ones(2), "shape": torch.ones(2), "dtype": torch.ones(2), "a": torch.ones(1)}
    b = {"x": torch.ones(2), "shape": torch.ones(3), "dtype": torch.ones(2).double(), "b": torch.ones(1)}
    difference = difference_of(a, b)
    assert (difference.only_in_a, difference.only_in_b, difference.other_form) == (("a",), ("b",), ("dtype", "shape"))
    assert difference
    assert difference.lines() == [
        "no tensor differs", "1 only in a: a", "1 only in b: b", "2 of another shape or dtype: dtype, shape",
    ]  # fmt: skip


def test_the_largest_changes_are_shown_and_the_others_counted():
    a = {f"t{i:02}": torch.zeros(1) for i in range(25)}
    b = {f"t{i:02}": torch.full((1,), float(i)) for i in range(25)}
    lines = difference_of(a, b).lines()
    assert lines[0] == "24 of 25 tensors differ"
    assert "t24" in lines[1]
    assert lines[-1] == "  and 4 more, by less"
    assert len(difference_of(a, b).lines(None)) == 25


def test_tensors_are_made_one_at_a_time_in_order_of_names():
    made = []
    state = LazyTensors({name: (lambda name=name: made.append(name) or torch.ones(1)) for name in "cab"})
    assert list(state) == ["a", "b", "c"]
    assert made == []
    fingerprint_of(state)
    assert made == ["a", "b", "c"]


def test_bytes_of_a_tensor_elsewhere_are_refused():
    with pytest.raises(InputError, match="meta"):
        bits_of(torch.empty(2, device="meta"))
