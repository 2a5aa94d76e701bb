import math

import pytest
import torch
from distributed.harness import run_distributed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fsdp_async.advantages import AdvantageConfig, compute_advantages
from fsdp_async.errors import ConfigError, InputError, NonFiniteError

GROUP_RELATIVE = AdvantageConfig()
CENTRED_ONLY = AdvantageConfig(normalize_std=False)
LEAVE_ONE_OUT = AdvantageConfig(kind="leave_one_out")
REINFORCE_PP = AdvantageConfig(kind="reinforce_pp")
ALL_KINDS = [GROUP_RELATIVE, CENTRED_ONLY, LEAVE_ONE_OUT, REINFORCE_PP]


def advantages(rewards, groups, config, kept=None, process_group=None) -> Tensor:
    return compute_advantages(
        torch.as_tensor(rewards),
        torch.tensor(groups),
        config,
        row_kept=None if kept is None else torch.tensor(kept),
        process_group=process_group,
    )


def test_group_relative_is_the_z_score_within_the_group():
    # group 7: mean 2, sample deviation sqrt(((1)^2 + 0 + 1) / 2) = 1; group -3: mean 5, deviation sqrt(2)
    values = advantages([1.0, 4.0, 2.0, 6.0, 3.0], [7, -3, 7, -3, 7], GROUP_RELATIVE)
    half = 1 / math.sqrt(2)
    assert values.dtype == torch.float32
    # the epsilon of 1e-6 added to the deviation
    torch.testing.assert_close(values, torch.tensor([-1.0, -half, 0.0, half, 1.0]), rtol=2e-6, atol=0)


def test_without_the_deviation_group_relative_is_the_distance_from_the_mean():
    values = advantages([1.0, 4.0, 2.0, 6.0, 3.0], [7, -3, 7, -3, 7], CENTRED_ONLY)
    assert values.tolist() == [-1.0, -1.0, 0.0, 1.0, 1.0]


def test_leave_one_out_compares_with_the_mean_of_the_others():
    values = advantages([1.0, 2.0, 6.0, 10.0, 20.0], [0, 0, 0, 1, 1], LEAVE_ONE_OUT)
    assert values.tolist() == [1.0 - 4.0, 2.0 - 3.5, 6.0 - 1.5, -10.0, 10.0]


def test_reinforce_pp_normalises_over_the_batch_whatever_the_groups():
    # mean 3, sample deviation sqrt((4 + 1 + 1 + 4) / 3)
    scale = 1 / math.sqrt(10 / 3)
    for groups in ([0, 0, 1, 1], [0, 1, 2, 3]):
        values = advantages([1.0, 2.0, 4.0, 5.0], groups, REINFORCE_PP)
        torch.testing.assert_close(values, scale * torch.tensor([-2.0, -1.0, 1.0, 2.0]), rtol=2e-6, atol=0)
    centred = advantages([1.0, 2.0, 4.0, 5.0], [0, 0, 1, 1], AdvantageConfig(kind="reinforce_pp", normalize_std=False))
    assert centred.tolist() == [-2.0, -1.0, 1.0, 2.0]


@pytest.mark.parametrize("config", ALL_KINDS)
def test_a_rejected_response_does_not_shift_its_siblings_baseline(config):
    # A group of two with rewards 100 and 1 of which the first is rejected: a baseline of 50.5 would give -49.5.
    assert advantages([100.0, 1.0], [0, 0], config, [False, True]).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("config", ALL_KINDS)
def test_rejecting_rows_equals_leaving_them_out(config):
    rewards, groups = [1.0, 9.0, 2.0, 5.0, math.nan, 7.0], [0, 0, 0, 1, 1, 1]
    kept = [True, False, True, True, False, True]
    values = advantages(rewards, groups, config, kept)
    rest = [i for i, k in enumerate(kept) if k]
    alone = advantages([rewards[i] for i in rest], [groups[i] for i in rest], config)
    assert torch.equal(values[rest], alone)
    assert values[1].item() == values[4].item() == 0.0


def test_statistics_over_all_rows_are_an_option_and_rejected_rows_still_get_zero():
    config = AdvantageConfig(normalize_std=False, over="all")
    assert advantages([100.0, 1.0], [0, 0], config, [False, True]).tolist() == [0.0, -49.5]
    one_out = AdvantageConfig(kind="leave_one_out", over="all")
    assert advantages([100.0, 1.0], [0, 0], one_out, [False, True]).tolist() == [0.0, -99.0]
    batch = AdvantageConfig(kind="reinforce_pp", normalize_std=False, over="all")
    assert advantages([100.0, 1.0], [0, 1], batch, [False, True]).tolist() == [0.0, -49.5]


@pytest.mark.parametrize("config", ALL_KINDS)
@pytest.mark.parametrize("over", ["kept", "all"])
def test_groups_without_a_comparison_give_exactly_zero(config, over):
    config = AdvantageConfig(kind=config.kind, normalize_std=config.normalize_std, over=over)
    # three times 0.1 has mean 0.10000000000000002 in float64: a deviation-based rule would see a comparison
    equal = torch.tensor([0.1, 0.1, 0.1], dtype=torch.float64)
    assert advantages(equal, [5, 5, 5], config).tolist() == [0.0, 0.0, 0.0]
    assert advantages([3.0], [0], config).tolist() == [0.0]
    assert advantages([3.0, 4.0], [0, 0], config, [False, False]).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("config", ALL_KINDS)
def test_an_empty_batch_gives_an_empty_result(config):
    assert compute_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64), config).shape == (0,)


def test_a_large_common_offset_leaves_small_differences_alone():
    # float32 sums of 1e6 would lose the differences; they are exact in float64
    values = advantages([1e6, 1e6 + 1, 1e6 + 2, 1e6 + 3], [0, 0, 0, 0], CENTRED_ONLY)
    assert values.tolist() == [-1.5, -0.5, 0.5, 1.5]


@pytest.mark.parametrize("config", ALL_KINDS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_row_order_and_group_names_do_not_matter(config, data):
    size = data.draw(st.integers(1, 12))
    rewards = torch.tensor(data.draw(st.lists(st.integers(-4, 4), min_size=size, max_size=size))).float()
    groups = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)))
    kept = torch.tensor(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    order = torch.tensor(data.draw(st.permutations(range(size))))
    values = compute_advantages(rewards, groups, config, row_kept=kept)
    renamed = compute_advantages(rewards[order], 1000 - 7 * groups[order], config, row_kept=kept[order])
    # float64 sums in another order, rounded to float32
    torch.testing.assert_close(renamed, values[order], rtol=2e-7, atol=1e-9)


def test_advantages_carry_no_gradient():
    rewards = torch.tensor([1.0, 2.0], requires_grad=True)
    assert not compute_advantages(rewards, torch.zeros(2, dtype=torch.int64), GROUP_RELATIVE).requires_grad


def _advantages_of_rank(rank, world_size):
    rewards, groups = ([1.0, 2.0], [0, 0]) if rank == 0 else ([4.0, 5.0, 99.0], [0, 0, 1])
    kept = [True] * 2 if rank == 0 else [True, True, False]
    group = torch.distributed.group.WORLD
    alone = advantages(rewards, groups, GROUP_RELATIVE, kept, group)
    together = advantages(rewards, groups, REINFORCE_PP, kept, group)
    with pytest.raises(NonFiniteError):  # on both ranks, though only one holds the bad reward
        advantages([math.inf if rank else 1.0, 0.0], [0, 0], REINFORCE_PP, None, group)
    return alone, together


def test_reinforce_pp_spans_the_ranks_and_groups_stay_on_theirs():
    (alone_0, together_0), (alone_1, together_1) = run_distributed(_advantages_of_rank, 2)
    half = 1 / math.sqrt(2)
    expected = torch.tensor([-half, half])
    torch.testing.assert_close(alone_0, expected, rtol=3e-6, atol=0)  # the epsilon of 1e-6
    torch.testing.assert_close(alone_1, torch.cat([expected, torch.zeros(1)]), rtol=3e-6, atol=0)
    whole = advantages([1.0, 2.0, 4.0, 5.0], [0, 0, 1, 1], REINFORCE_PP)
    assert torch.equal(torch.cat([together_0, together_1]), torch.cat([whole, torch.zeros(1)]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "gae"}, "advantages.kind='gae'"),
        ({"over": "some"}, "advantages.over='some'"),
        ({"normalize_std": "yes"}, "advantages.normalize_std='yes'"),
        ({"kind": "leave_one_out", "normalize_std": True}, "use kind='group_relative'"),
    ],
)
def test_optionsthat_mean_nothing_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        AdvantageConfig(**options)


@pytest.mark.parametrize("config", ALL_KINDS)
def test_a_counted_reward_that_is_no_number_is_refused(config):
    with pytest.raises(NonFiniteError, match="not finite"):
        advantages([1.0, math.nan], [0, 0], config)


@pytest.mark.parametrize(
    ("rewards", "groups", "kept", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), None, r"'rewards': \[2, 3\]"),
        (torch.zeros(2), torch.zeros(3, dtype=torch.int64), None, r"'group_ids': \[3\]"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.ones(3, dtype=torch.bool), r"'row_kept': \[3\]"),
        (torch.zeros(2), torch.zeros(2), None, "float32.*int64"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.ones(2), "bool"),
    ],
)
def test_shapes_and_dtypes_that_do_not_fit_are_refused(rewards, groups, kept, message):
    with pytest.raises(InputError, match=message):
        compute_advantages(rewards, groups, GROUP_RELATIVE, row_kept=kept)


@pytest.mark.parametrize(
    ("rewards", "groups", "config", "message"),
    [
        ([1.0, 2.0], torch.zeros(2, dtype=torch.int64), GROUP_RELATIVE, "rewards is list; need a Tensor"),
        (torch.zeros(2), None, GROUP_RELATIVE, "group_ids is NoneType; need a Tensor"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64), None, "config is NoneType; need a AdvantageConfig"),
    ],
)
def test_what_is_no_tensor_or_no_config_is_named(rewards, groups, config, message):
    with pytest.raises(InputError, match=message):
        compute_advantages(rewards, groups, config)
