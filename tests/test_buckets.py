from __future__ import annotations

import pytest
import torch
from builders import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fsdp_async.buckets import WeightBucket, WeightReceiver, pack
from fsdp_async.dtensor_io import full_tensors
from fsdp_async.errors import InputError, StateMismatchError, UnsupportedModelError


def _send(receiver, tensors, *, bucket_bytes=1 << 20, version=3):
    pieces = list(pack(tensors, bucket_bytes))
    for index, piece in enumerate(pieces):
        memory = torch.zeros(bucket_bytes, dtype=torch.uint8)
        piece.copy_to(memory)
        entries = tuple(entry for entry, _ in piece.entries)
        receiver.take(WeightBucket(version, index, index == len(pieces) - 1, entries, memory), memory)
    return len(pieces)


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 4096, 100])
def test_a_model_arrives_bit_for_bit_in_buckets_of_any_size(bucket_bytes):
    source, target = tiny_model(seed=1), tiny_model(seed=2)
    num = _send(WeightReceiver(target), full_tensors(source), bucket_bytes=bucket_bytes)
    assert all(
        torch.equal(a, b) for a, b in zip(source.state_dict().values(), target.state_dict().values(), strict=True)
    )
    assert (num > 1) == (bucket_bytes < 1 << 20)


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    bucket_bytes=st.integers(8, 300),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
)
def test_no_byte_is_lost_or_doubled_and_no_bucket_overflows(sizes, bucket_bytes, dtype):
    tensors = [(f"t{i}", torch.randint(0, 2, (size,)).to(dtype)) for i, size in enumerate(sizes)]
    covered = {name: 0 for name, _ in tensors}
    for piece in pack(tensors, bucket_bytes):
        assert piece.num_bytes <= bucket_bytes
        ends = 0
        for entry, _ in piece.entries:
            assert entry.offset >= ends
            assert entry.start == covered[entry.name]
            ends = entry.offset + entry.stop - entry.start
            covered[entry.name] = entry.stop
    assert covered == {name: tensor.numel() * tensor.element_size() for name, tensor in tensors}


def test_a_name_that_the_engine_does_not_know_is_refused_before_anything_is_copied():
    target = tiny_model(seed=2)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    tensors = [*full_tensors(tiny_model(seed=1)), ("lm_head.extra", torch.zeros(1))]
    with pytest.raises(
        StateMismatchError, match=r"version 3: published 'lm_head\.extra', which this model does not have"
    ):
        _send(WeightReceiver(target), tensors)
    assert all(torch.equal(before[name], tensor) for name, tensor in target.state_dict().items())


def test_a_local_shard_in_place_of_a_full_tensor_is_refused():
    tensors = [(name, tensor[: len(tensor) // 2]) for name, tensor in full_tensors(tiny_model())]
    with pytest.raises(StateMismatchError, match=r"were local shards published instead of full tensors\?"):
        _send(WeightReceiver(tiny_model()), tensors)


def test_a_publication_that_lacks_a_tensor_names_it():
    tensors = [(name, tensor) for name, tensor in full_tensors(tiny_model()) if name != "model.norm.weight"]
    with pytest.raises(StateMismatchError, match=r"version 3 was published without all of \['model.norm.weight'\]"):
        _send(WeightReceiver(tiny_model()), tensors)


def test_a_tied_tensor_comes_once_and_counts_for_both_its_names():
    names = [name for name, _ in full_tensors(tiny_model())]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert "lm_head.weight" in tiny_model().state_dict()


def test_the_next_version_must_be_complete_by_itself():
    receiver = WeightReceiver(tiny_model())
    _send(receiver, full_tensors(tiny_model()))
    with pytest.raises(StateMismatchError, match="version 4 was published without"):
        _send(receiver, list(full_tensors(tiny_model()))[:1], version=4)


class _Holder(nn.Module):
    def __init__(self, tensor):
        super().__init__()
        self.register_buffer("odd", tensor)
        self.register_buffer("plain", torch.zeros(2))


LAYOUTS = {
    "transposed": lambda: torch.zeros(4, 3).t(),
    "sliced": lambda: torch.zeros(3, 8)[:, ::2],
    "channels last": lambda: torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "conjugated": lambda: torch.zeros(3, dtype=torch.complex64).conj(),
    "negated": lambda: torch.zeros(3, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("bucket_bytes", [7, 1 << 20])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_arrives_whatever_its_layout_here_or_there(layout, bucket_bytes):
    odd = LAYOUTS[layout]()
    values = torch.randn(odd.shape, generator=torch.Generator().manual_seed(0), dtype=odd.dtype)
    target = _Holder(LAYOUTS[layout]())
    _send(WeightReceiver(target), [("odd", values), ("plain", torch.ones(2))], bucket_bytes=bucket_bytes)
    assert torch.equal(target.odd, values)
    assert torch.equal(target.plain, torch.ones(2))
    with torch.no_grad():
        odd.copy_(values)
    target = _Holder(torch.zeros(odd.shape, dtype=odd.dtype))
    _send(WeightReceiver(target), [("odd", odd), ("plain", torch.ones(2))], bucket_bytes=bucket_bytes)
    assert torch.equal(target.odd, values)


@pytest.mark.parametrize("overlapping", [torch.zeros(1, 4).expand(3, 4), torch.zeros(3).as_strided((2, 2), (1, 1))])
def test_a_tensor_whose_elements_share_memory_is_refused_at_the_start(overlapping):
    with pytest.raises(UnsupportedModelError, match=r"'odd' of shape .* share memory.*clone it"):
        WeightReceiver(_Holder(overlapping))


def _buckets(tensors, version):
    for index, (name, tensor) in enumerate(tensors):
        (piece,) = pack([(name, tensor)], 1 << 20)
        memory = torch.zeros(piece.num_bytes, dtype=torch.uint8)
        piece.copy_to(memory)
        entries = tuple(entry for entry, _ in piece.entries)
        yield WeightBucket(version, index, index == len(tensors) - 1, entries, memory)


def test_what_a_broken_publication_left_does_not_complete_the_next_one():
    receiver = WeightReceiver(_Holder(torch.zeros(2)))
    first, _ = _buckets([("odd", torch.ones(2)), ("plain", torch.ones(2))], version=1)
    receiver.take(first, first.memory)
    (only,) = _buckets([("plain", torch.ones(2))], version=2)
    with pytest.raises(StateMismatchError, match=r"version 2 was published without all of \['odd'\]"):
        receiver.take(only, only.memory)
    receiver.take(first, first.memory)
    for bucket in _buckets([("odd", torch.full((2,), 3.0)), ("plain", torch.ones(2))], version=1):
        receiver.take(bucket, bucket.memory)


@pytest.mark.parametrize("taken", [[1], [0, 2], [0, 1, 1]])
def test_a_bucket_out_of_order_is_refused_and_copies_nothing(taken):
    target = _Holder(torch.zeros(2))
    receiver = WeightReceiver(target)
    names = [("plain", torch.ones(2)), ("plain", torch.ones(2)), ("odd", torch.ones(2)), ("odd", torch.ones(2))]
    buckets = list(_buckets(names, version=4))
    for index in taken[:-1]:
        receiver.take(buckets[index], buckets[index].memory)
    with pytest.raises(StateMismatchError, match=rf"bucket {taken[-1]} of version 4 came where .* was to follow"):
        receiver.take(buckets[taken[-1]], buckets[taken[-1]].memory)
    assert torch.equal(target.odd, torch.zeros(2))


def test_a_bucket_of_another_version_does_not_go_on_with_this_one():
    receiver = WeightReceiver(_Holder(torch.zeros(2)))
    first, _ = _buckets([("odd", torch.ones(2)), ("plain", torch.ones(2))], version=1)
    receiver.take(first, first.memory)
    _, second = _buckets([("odd", torch.ones(2)), ("plain", torch.ones(2))], version=2)
    with pytest.raises(StateMismatchError, match=r"bucket 1 of version 2 came where \(version, bucket\) \(1, 1\)"):
        receiver.take(second, second.memory)


@pytest.mark.parametrize("size", [0, -1, 64.5, True, "64", None])
def test_a_bucket_size_that_cannot_hold_a_byte_is_refused(size):
    with pytest.raises(InputError, match=r"bucket_bytes=.* must be an integer of at least 1"):
        list(pack([("t", torch.ones(3))], size))
