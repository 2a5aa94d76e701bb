from __future__ import annotations

import pytest
import torch
from builders import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_async.buckets import WeightBucket, WeightReceiver, pack
from fsdp_async.dtensor_io import full_tensors
from fsdp_async.errors import StateMismatchError


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
