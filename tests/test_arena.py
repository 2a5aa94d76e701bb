"""Host memory: exact sizes, storages of their own, reuse, pinning that may fail."""

from __future__ import annotations

import gc

import pytest
import torch

from fsdp_async.arena import MAX_FREE_ARENAS, SLOT_ALIGNMENT_BYTES, Arena, ArenaPool, Slot, choose_pin, plan_arena

MIXED = [
    ((3,), torch.float32),
    ((0, 4), torch.bfloat16),
    ((), torch.int64),
    ((5, 2), torch.bfloat16),
    ((7,), torch.bool),
]
PLAN = plan_arena([((1024,), torch.float32)])
OTHER = plan_arena([((2048,), torch.float32)])


def test_slots_are_aligned_do_not_overlap_and_waste_less_than_one_line_each():
    plan = plan_arena(MIXED)
    assert [slot.offset for slot in plan.slots] == [0, 64, 64, 128, 192]
    assert all(slot.offset % SLOT_ALIGNMENT_BYTES == 0 for slot in plan.slots)
    assert plan.nbytes == 192 + 7
    assert plan_arena([]).nbytes == 0
    assert plan.slots[3] == Slot(128, (5, 2), torch.bfloat16)


def test_an_arena_has_exactly_the_bytes_of_its_plan_and_views_of_the_right_kind():
    arena = Arena(plan_arena(MIXED))
    assert arena.nbytes == arena.plan.nbytes == arena.storage.untyped_storage().nbytes()
    for view, (shape, dtype) in zip(arena.views, MIXED, strict=True):
        assert (tuple(view.shape), view.dtype) == (shape, dtype)
        assert view.untyped_storage().data_ptr() == arena.storage.untyped_storage().data_ptr()
        assert view.data_ptr() % SLOT_ALIGNMENT_BYTES == 0


def test_what_goes_in_comes_out_bit_for_bit_whatever_the_strides():
    tensors = [
        torch.tensor([float("nan"), -0.0, 1e-45]), torch.empty(0, 4, dtype=torch.bfloat16), torch.tensor(7),
        torch.randn(2, 5).to(torch.bfloat16).t(), torch.tensor([True, False] * 3 + [True]),
    ]  # fmt: skip
    arena = Arena(plan_arena(MIXED))
    arena.copy_from(tensors)
    out = [torch.empty(2, 5, dtype=t.dtype).t() if t.shape == (5, 2) else torch.empty_like(t) for t in tensors]
    arena.copy_to(out)
    for before, after in zip(tensors, out, strict=True):
        assert (
            before.contiguous().view(-1).view(torch.uint8).tolist()
            == after.contiguous().view(-1).view(torch.uint8).tolist()
        )
    one = torch.zeros(5, 2, dtype=torch.bfloat16)
    arena.copy_to([one], start=3)
    assert torch.equal(one, tensors[3])


def test_an_arena_shares_no_storage_with_what_is_copied_and_is_writable_after_inference_mode():
    live = torch.ones(1024)
    with torch.inference_mode():
        arena = Arena(PLAN)
    arena.copy_from([live])
    live.zero_()
    assert arena.views[0].sum() == 1024
    assert not arena.views[0].is_inference()


def test_no_two_arenas_share_storage():
    pool = ArenaPool()
    arenas = [pool.take(PLAN) for _ in range(4)]
    assert len({arena.storage.untyped_storage().data_ptr() for arena in arenas}) == 4


def test_the_pool_reuses_equal_plans_counts_every_byte_and_keeps_few():
    pool = ArenaPool()
    first, second = pool.take(PLAN), pool.take(PLAN)
    assert (pool.used_nbytes, pool.free_nbytes) == (2 * 4096, 0)
    pool.give(first)
    assert (pool.used_nbytes, pool.free_nbytes, pool.nbytes) == (4096, 4096, 2 * 4096)
    assert pool.take(OTHER) is not first
    assert pool.take(PLAN) is first
    for arena in [first, second, *(pool.take(PLAN) for _ in range(5))]:
        pool.give(arena)
    assert pool.free_nbytes == MAX_FREE_ARENAS * 4096
    pool.trim()
    assert pool.nbytes == OTHER.nbytes


def test_a_pool_with_a_limit_lets_free_arenas_go_rather_than_pass_it():
    pool = ArenaPool(max_bytes=3 * 4096)
    small = [pool.take(PLAN) for _ in range(2)]
    for arena in small:
        pool.give(arena)
    pool.take(OTHER)
    assert pool.nbytes == 3 * 4096


def test_memory_goes_back_when_an_arena_is_released():
    unlocked = []
    pool = ArenaPool(pin=lambda storage: lambda: unlocked.append(True))
    arena = pool.take(PLAN)
    assert arena.is_pinned
    pool.give(arena)
    pool.trim()
    assert unlocked == []
    del arena
    gc.collect()
    assert unlocked == [True], "pages must be unlocked before the storage goes"


def test_pinning_that_fails_is_told_once_and_costs_nothing_but_speed():
    def refuse(storage):
        raise RuntimeError("CUDA error: invalid argument")

    pool = ArenaPool(pin=refuse)
    with pytest.warns(RuntimeWarning, match=r"invalid argument.*pageable") as caught:
        arenas = [pool.take(PLAN) for _ in range(3)]
    assert len(caught) == 1
    assert not any(arena.is_pinned for arena in arenas)
    assert pool.nbytes == 3 * 4096
    arenas[0].copy_from([torch.ones(1024)])
    assert arenas[0].views[0].sum() == 1024


@pytest.mark.filterwarnings("error")
def test_pinning_is_chosen_only_where_it_helps():
    cpu = [torch.device("cpu")]
    assert choose_pin(False, cpu) is None
    assert choose_pin(None, cpu) is None
    assert choose_pin(None, []) is None
