from __future__ import annotations

import math

import pytest

from fsdp_async.correction_config import Bounds, CorrectionConfig, Rejection
from fsdp_async.errors import ConfigError
from fsdp_async.loss_config import LossConfig

TIS = Bounds(upper=2.0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Bounds(lower=3.0, upper=2.0), r"lower=3\.0 is above upper=2\.0"),
        (lambda: Bounds(upper=math.nan), "upper=nan must be a number >= 0"),
        (lambda: Bounds(lower=-0.5), r"lower=-0\.5 must be a number >= 0"),
        (lambda: Bounds(upper=0.0), "upper=0 leaves nothing"),
        (lambda: Bounds(mode="mask"), "mask nothing"),
        (lambda: Bounds(lower=0.0), r"lower=0\.0, upper=None exclude nothing"),
        (lambda: Bounds(upper=math.inf), "lower=None, upper=inf exclude nothing"),
        (lambda: Bounds(lower=0.0, upper=math.inf), "exclude nothing"),
        (lambda: Bounds(mode="mask", lower=0), "lower=0, upper=None exclude nothing"),
        (lambda: Bounds(mode="mask", upper=math.inf), "lower=None, upper=inf exclude nothing"),
        # Log weights are clamped to +-20 before they meet a bound.
        (lambda: Bounds(upper=5e8), r"exclude nothing, since every value lies in 2\.06e-09 to 4\.85e\+08"),
        (lambda: Bounds(mode="mask", lower=1e9), "no weight is inside"),
        (lambda: Bounds(mode="mask", upper=1e-9), "no weight is inside"),
        (lambda: Bounds(lower=math.inf), "lower=inf must be a number >= 0"),
        (lambda: Bounds(upper=True), "upper=True must be a number >= 0"),
        (lambda: Bounds(upper="2"), "upper='2' must be a number >= 0"),
        (lambda: Rejection(lower=0), "lower=0, upper=None exclude nothing"),
        (lambda: Rejection(upper=math.inf), "lower=None, upper=inf exclude nothing"),
        (lambda: Rejection(statistic="k3", upper=math.inf), "upper=inf exclude nothing"),
        (lambda: Rejection(statistic="tv", upper=1), "upper=1 exclude nothing, since every value lies in 0 to 1"),
        (lambda: Rejection(statistic="k3", upper="1"), "upper='1' must be a number >= 0"),
        (lambda: Rejection(), "mismatch_token_ratio has neither lower nor upper"),
        (lambda: Rejection(statistic="k3", aggregate="mean", lower=0.1), "only statistic='ratio' takes a lower bound"),
        (lambda: CorrectionConfig(combined=TIS, mismatch=TIS), "choose one"),
        (lambda: CorrectionConfig(combined=TIS, lag=TIS), "choose one"),
        (lambda: CorrectionConfig(batch_normalize=True), "no effect without weights"),
        (lambda: CorrectionConfig(mismatch=TIS, denominator="kept"), "nothing can be rejected"),
        (lambda: CorrectionConfig(rejections=(Rejection(upper=2.0), Rejection(upper=3.0))), "the same rule twice"),
    ],
)
def test_what_could_not_act_is_refused_by_name(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


@pytest.mark.parametrize("build", [
    lambda: Bounds(lower=0.0, upper=2.0),
    lambda: Bounds(lower=0.5, upper=math.inf),
    lambda: Rejection(statistic="tv", aggregate="sum", upper=1.0),
    lambda: Rejection(lower=0.5, upper=math.inf),
])  # fmt: skip
def test_a_range_that_excludes_something_is_taken_however_it_is_written(build):
    build()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: Bounds(mode="clip", upper=2.0),
            r"bounds\.mode='clip' is unknown; choose one of \('truncate', 'mask'\)",
        ),
        (lambda: Bounds(level="seq"), r"bounds\.level='seq' is unknown"),
        (lambda: Bounds(level=None), r"bounds\.level=None is unknown"),
        (lambda: Rejection(factor="x", upper=2.0), r"rejection\.factor='x' is unknown"),
        (lambda: Rejection(statistic="k1", upper=2.0), r"rejection\.statistic='k1' is unknown"),
        (lambda: Rejection(aggregate="avg", upper=2.0), r"rejection\.aggregate='avg' is unknown"),
        (lambda: CorrectionConfig(nonfinite="Raise"), r"correction\.nonfinite='Raise' is unknown"),
        (lambda: CorrectionConfig(denominator="kep"), r"correction\.denominator='kep' is unknown"),
        (
            lambda: CorrectionConfig(combined=TIS, batch_normalize="yes"),
            r"correction\.batch_normalize='yes' must be true or false",
        ),
        (lambda: CorrectionConfig(combined={"upper": 2.0}), r"correction\.combined=\{'upper': 2\.0\} must be a Bounds"),
        (lambda: CorrectionConfig(rejections=Rejection(upper=2.0)), "must be a tuple of Rejection"),
        (lambda: CorrectionConfig(rejections=({"upper": 2.0},)), "must be a tuple of Rejection"),
    ],
)
def test_a_word_or_part_that_does_not_exist_is_refused_and_takes_no_branch(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


@pytest.mark.parametrize("mapping", [[], "rollout_is: token", [("rollout_is", "token")]])
def test_verl_settings_are_a_mapping(mapping):
    for read in (CorrectionConfig.from_verl, LossConfig.from_verl):
        with pytest.raises(ConfigError, match="from_verl takes a mapping of verl's keys, not"):
            read(mapping)


def test_a_config_knows_the_factors_that_it_asks_for():
    config = CorrectionConfig(mismatch=TIS, rejections=(Rejection(factor="lag", upper=2.0),))
    assert config.weights == {"mismatch": TIS}
    assert config.factors == {"mismatch", "lag"}
    assert CorrectionConfig().factors == set()


@pytest.mark.parametrize("nothing", [None, {}, {"rollout_is": None}, {"rollout_is": None, "rollout_is_threshold": 2.0}])
def test_verl_settings_without_a_correction_are_no_correction(nothing):
    assert CorrectionConfig.from_verl(nothing) == CorrectionConfig()


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        ({"rollout_is": "token"}, Bounds(upper=2.0)),
        ({"rollout_is": "token", "rollout_is_threshold": 3}, Bounds(upper=3.0)),
        ({"rollout_is": "sequence", "rollout_is_threshold": "5.0"}, Bounds(level="sequence", upper=5.0)),
        ({"rollout_is": "token", "rollout_is_threshold": "0.5_5"}, Bounds(mode="mask", lower=0.5, upper=5.0)),
        ({"rollout_is": "token", "rollout_is_threshold": "1e-1_2"}, Bounds(mode="mask", lower=0.1, upper=2.0)),
    ],
)
def test_one_threshold_truncates_and_two_mask(mapping, expected):
    assert CorrectionConfig.from_verl(mapping) == CorrectionConfig(combined=expected)


def test_batch_normalisation_is_taken_over():
    config = CorrectionConfig.from_verl({"rollout_is": "token", "rollout_is_batch_normalize": True})
    assert config.batch_normalize


def test_k1_bounds_keep_the_numbers_as_bounds_on_the_ratio_and_say_so():
    with pytest.warns(UserWarning, match=r"rollout_rs seq_mean_k1: .* 0\.5_2 bounds the ratio pi/mu itself"):
        config = CorrectionConfig.from_verl({"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_2"})
    expected = Rejection(factor="combined", statistic="ratio", aggregate="mean", lower=0.5, upper=2.0)
    assert config == CorrectionConfig(rejections=(expected,))


def test_a_single_k1_bound_is_symmetric_in_the_log():
    with pytest.warns(UserWarning, match="token_k1"):
        (rule,) = CorrectionConfig.from_verl({"rollout_rs": "token_k1", "rollout_rs_threshold": 4}).rejections
    assert (rule.lower, rule.upper, rule.aggregate) == (0.25, 4.0, "token")


def test_a_rule_that_is_listed_twice_counts_once_before_thresholds_are_matched():
    config = CorrectionConfig.from_verl(
        {"rollout_rs": "seq_mean_k3, token_k2,seq_mean_k3", "rollout_rs_threshold": "0.01,0.5"}
    )
    assert config.rejections == (
        Rejection(factor="combined", statistic="k3", aggregate="mean", upper=0.01),
        Rejection(factor="combined", statistic="k2", aggregate="token", upper=0.5),
    )


def test_one_threshold_serves_all_rules():
    config = CorrectionConfig.from_verl({"rollout_rs": "seq_max_k2,seq_sum_k3", "rollout_rs_threshold": 0.3})
    assert [(r.aggregate, r.statistic, r.upper) for r in config.rejections] == [("max", "k2", 0.3), ("sum", "k3", 0.3)]


MALFORMED = ["0.5_5_6", "nan", "-1", "", True, 0, "0", "inf", "5_0.5", "1,5", "0_5", "_", "1_", " ", [2.0], {}, -2.0]


@pytest.mark.parametrize("value", [*MALFORMED, float("nan"), float("inf"), "1__2", "0x10", "1_nan"], ids=repr)
def test_a_malformed_weight_threshold_is_refused_and_names_its_field(value):
    with pytest.raises(ValueError, match="rollout_is_threshold="):
        CorrectionConfig.from_verl({"rollout_is": "token", "rollout_is_threshold": value})


@pytest.mark.parametrize("rule", ["token_k1", "seq_mean_k3"])
@pytest.mark.parametrize("value", [v for v in MALFORMED if v != "1,5"] + [None, "1,5,7"], ids=repr)
@pytest.mark.filterwarnings("ignore:rollout_rs")
def test_a_malformed_rejection_threshold_is_refused_and_names_its_field(rule, value):
    with pytest.raises(ValueError, match="rollout_rs_threshold="):
        CorrectionConfig.from_verl({"rollout_rs": rule, "rollout_rs_threshold": value})


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"rollout_is": "geometric"}, "rollout_is='geometric': choose one of"),
        ({"rollout_is": True}, "rollout_is=True"),
        ({"rollout_rs": "seq_mean_k9", "rollout_rs_threshold": 1}, "'seq_mean_k9' is unknown"),
        ({"rollout_rs": "token_k2,token_k3", "rollout_rs_threshold": "1,2,3"}, "3 entries for 2 rules"),
        ({"rollout_rs": ["token_k2"], "rollout_rs_threshold": 1}, r"rollout_rs=\['token_k2'\]: must be names"),
        ({"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.1_0.2"}, "takes an upper bound only"),
        ({"rollout_is_batch_normalize": "yes", "rollout_is": "token"}, "rollout_is_batch_normalize='yes'"),
        ({"rollout_is_batch_normalize": 1, "rollout_is": "token"}, "rollout_is_batch_normalize=1"),
        ({"rollout_is_threshold": 3.0}, "no effect without rollout_is"),
        ({"rollout_rs_threshold": 3.0}, "no effect without rollout_rs"),
        ({"bypass_mode": True}, r"bypass_mode is no correction.*trainer\.anchor=bypass"),
        ({"loss_type": "ppo_clip"}, r"loss_type is no correction.*loss\.kind"),
        ({"rollout_iss": "token"}, "unknown key 'rollout_iss'"),
    ],
)
@pytest.mark.filterwarnings("ignore:rollout_rs")
def test_what_cannot_be_translated_is_refused_by_name(mapping, message):
    with pytest.raises(ConfigError, match=message):
        CorrectionConfig.from_verl(mapping)
