"""Facts about live tensors: layouts, views, full tensors. Several ranks are in `distributed/`."""

from __future__ import annotations

import pytest
import torch
from cache_models import WIDTH, data, plain, sharded
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_async.dtensor_io import capture, check_sharded, full_tensors, local_view, ranks_of, settle
from fsdp_async.errors import StateMismatchError, UnsupportedModelError


def test_a_layout_lists_distinct_tensors_parameters_first_and_who_shares_them():
    live = capture(plain())
    names = [spec.fqn for spec in live.layout.tensors]
    assert len(set(names)) == len(names)
    assert [spec.kind for spec in live.layout.tensors] == sorted((s.kind for s in live.layout.tensors), reverse=True)
    assert live.layout.aliases == (("head.weight", "embed.weight"),)
    assert {"frozen", "blocks.0.frequency", "blocks.1.norm.running_mean"} <= set(names)
    assert len(live.parameters) == live.layout.num_parameters == len(list(plain().parameters()))
    assert len(live.buffers) == len(list(plain().buffers()))


def test_equal_models_have_equal_layouts_and_the_check_is_silent():
    first, second = capture(plain(1)).layout, capture(plain(2)).layout
    assert first == second
    first.check(second, "version 1")


def test_a_view_aliases_its_parameter_and_does_not_count_as_a_write_for_autograd():
    layer = nn.Linear(3, 3)
    x = torch.ones(2, 3, requires_grad=True)
    loss = layer(x).square().sum()
    view, before = local_view(layer.weight), layer.weight.detach().clone()
    view.zero_()
    assert layer.weight.abs().sum() == 0
    view.copy_(before)
    loss.backward()
    assert torch.equal(x.grad, 2 * (torch.ones(2, 3) @ before.T + layer.bias).detach() @ before)


def test_a_view_of_a_shard_is_what_the_next_forward_gathers(single_rank):
    model = sharded(1)
    before = model(data(0)).detach()
    settle(model)
    for view in capture(model).parameters:
        view.mul_(2)
    assert not torch.equal(model(data(0)).detach(), before)


def test_settling_shows_shards_again_after_a_forward_and_is_a_no_op_for_plain_modules(single_rank):
    model = sharded(1, reshard_root=False)
    model(data(0))
    assert not isinstance(model.embed.weight, DTensor)
    unsharded = capture(model)
    with pytest.raises(StateMismatchError, match=r"'scale' should be sharded and is not.*reset_iter_state"):
        check_sharded(unsharded, {"scale"})
    settle(model)
    settled = capture(model)
    assert isinstance(model.embed.weight, DTensor)
    check_sharded(settled, {"scale"})
    with pytest.raises(StateMismatchError, match=r"version 1.*'scale' should be sharded"):
        settled.layout.check(unsharded.layout, "version 1")
    settle(plain())


def test_settling_ends_an_unshard_that_came_before_any_forward(single_rank):
    model = sharded(1)
    model.unshard()
    assert not isinstance(model.scale, DTensor)
    settle(model)
    assert isinstance(model.scale, DTensor)


def test_a_mesh_and_its_placements_belong_to_the_layout(single_rank):
    flat, columns = capture(sharded(1)).layout, capture(sharded(1, shard_dim_1=True)).layout
    with pytest.raises(StateMismatchError, match=r"'frozen': expected placements.*dim=0.*found.*dim=1"):
        flat.check(columns, "version 1")
    with pytest.raises(StateMismatchError, match="expected mesh None, found cpu"):
        capture(plain()).layout.check(flat, "version 1")


def test_sparse_and_wrapped_tensors_are_refused_by_name():
    model = nn.Linear(2, 2)
    model.register_buffer("adjacency", torch.eye(2).to_sparse())
    with pytest.raises(UnsupportedModelError, match=r"buffer 'adjacency'.*sparse"):
        capture(model)


def test_full_tensors_of_a_plain_module_are_its_state_dict_with_tied_names_once():
    model = plain()
    got = dict(full_tensors(model))
    expected = model.state_dict()
    del expected["head.weight"]
    assert list(got) == list(expected)
    assert all(torch.equal(got[name], expected[name]) for name in got)
    assert not any(tensor.requires_grad for tensor in got.values())
    assert got["scale"].shape == (1, WIDTH)


def test_full_tensors_leave_grad_mode_alone_between_items():
    for _ in full_tensors(plain()):
        assert torch.is_grad_enabled()


def test_a_model_of_one_process_has_no_ranks_to_agree_with(single_rank):
    assert ranks_of(plain()) == []
    assert ranks_of(sharded(1)) == []
