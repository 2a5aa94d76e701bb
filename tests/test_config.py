from __future__ import annotations

import dataclasses
import math

import pytest

from fsdp_async.config import Config, parse_config
from fsdp_async.errors import ConfigError

TOKEN_TIS = {"level": "token", "mode": "truncate", "upper": 2.0}


def test_the_empty_mapping_gives_the_defaults():
    assert parse_config({}) == Config()


def test_a_config_survives_the_way_through_a_plain_mapping():
    config = parse_config(
        {
            "optim": {"lr": 3e-4, "schedule": "cosine"},
            "correction": {
                "mismatch": TOKEN_TIS,
                "rejections": [{"statistic": "k3", "aggregate": "mean", "upper": 0.01}],
            },
        }
    )
    assert parse_config(dataclasses.asdict(config)) == config


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().optim.lr = 1.0


@pytest.mark.parametrize(
    ("mapping", "path", "suggestion"),
    [
        ({"optim": {"learning_rate": 1e-4}}, "optim.learning_rate", "Known here: .*lr"),
        ({"optim": {"max_grad_nrm": 1}}, "optim.max_grad_nrm", "did you mean 'max_grad_norm'"),
        ({"trainr": {}}, "trainr", "did you mean 'trainer'"),
        (
            {"correction": {"mismatch": {"level": "token", "uper": 2}}},
            "correction.mismatch.uper",
            "did you mean 'upper'",
        ),
        ({"correction": {"rejections": [{"statistc": "k3"}]}}, r"correction.rejections\[0\].statistc", "'statistic'"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_right_one(mapping, path, suggestion):
    with pytest.raises(ConfigError, match=f"unknown key '{path}'.*{suggestion}"):
        parse_config(mapping)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"optim": {"lr": "fast"}}, r"optim\.lr='fast'"),
        ({"optim": {"lr": math.nan}}, r"optim\.lr=nan"),
        ({"optim": {"lr": math.inf}}, r"optim\.lr=inf"),
        ({"optim": {"lr": 0.0}}, r"optim\.lr=0\.0: must be above 0"),
        ({"trainer": {"anchor": "newest"}}, r"trainer\.anchor='newest'"),
        ({"run": {"num_threads": 0}}, r"run\.num_threads=0"),
        ({"run": {"num_threads": 100_000}}, r"run\.num_threads=100000: must be in 1\.\.512"),
        ({"run": {"seed": 1 << 63}}, r"run\.seed=9223372036854775808"),
        ({"run": {"seed": -1}}, r"run\.seed=-1"),
        ({"run": {"output_dir": ""}}, r"run\.output_dir is empty"),
        ({"run": {"output_dir": "a\udcff"}}, r"cannot be printed"),
        ({"model": {"hidden_size": 10**12}}, r"model\.hidden_size=1000000000000: must be in"),
        ({"model": {"num_layers": 10**6}}, r"model\.num_layers=1000000: must be at most 10,000"),
        ({"trainer": {"num_batches": 10**25}}, r"trainer\.num_batches=1.*: beyond every machine"),
        ({"optim": {"weight_decay": math.inf}}, r"optim\.weight_decay=inf"),
        ({"warm_start": {"lr": math.inf}}, r"warm_start\..*lr=inf"),
        ({"rollout": {"temperature": 1e-300}}, r"rollout\.temperature=1e-300: must be at least 0\.001"),
        ({"rollout": {"bucket_bytes": 64}}, r"rollout\.bucket_bytes=64: must be at least 65536"),
        ({"rollout": {"max_restarts": -1}}, r"rollout\.max_restarts=-1"),
        ({"trainer": {"num_batches": 0}}, r"trainer\.num_batches=0"),
        ({"trainer": {"max_staleness": -1}}, r"trainer\.max_staleness=-1"),
        ({"trainer": {"group_size": 1}}, r"trainer\.group_size=1 .*reinforce_pp"),
        ({"trainer": {"mini_batches": 3}}, r"groups_per_batch=32 is not divisible by trainer\.mini_batches=3"),
        ({"trainer": {"micro_batch_tokens": 2}}, r"micro_batch_tokens=2 is below one sequence"),
        ({"queue": {"capacity_groups": 8}}, r"capacity_groups=8 is below trainer\.groups_per_batch=32"),
        ({"model": {"max_position_embeddings": 8}}, r"exceed model\.max_position_embeddings=8"),
        ({"model": {"dropout": 0.1}}, r"model\.dropout=0\.1"),
        ({"model": {"num_heads": 3}}, r"num_heads=3 is not divisible"),
        ({"optim": {"warmup_steps": 400}, "trainer": {"num_batches": 100}}, r"warmup_steps=400 is not below the 200"),
        ({"cache": {"max_versions": 2}}, r"cache\.max_versions=2: trainer\.max_staleness=2 keeps up to 3"),
        ({"rollout": {"temperature": math.inf}}, r"rollout\.temperature=inf"),
        ({"rollout": {"load_timeout_s": 0}}, r"rollout\.load_timeout_s=0"),
        ({"rollout": {"top_p": 0.8}}, r"rollout\.top_p=0\.8"),
    ],
)
def test_an_impossible_value_is_refused_by_name(mapping, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(mapping)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"trainer": {"anchor": "behaviour"}, "correction": {"lag": TOKEN_TIS}}, "lag is exactly 1"),
        (
            {"trainer": {"anchor": "bypass"}, "correction": {"mismatch": TOKEN_TIS}},
            "no behaviour log-probs to split by",
        ),
        (
            {"trainer": {"anchor": "bypass"}, "correction": {"combined": TOKEN_TIS}},
            "clipped ratio is the only correction",
        ),
        (
            {
                "trainer": {"anchor": "bypass"},
                "correction": {"combined": TOKEN_TIS, "batch_normalize": True},
                "loss": {"kind": "reinforce"},
            },
            "one micro-batch at a time",
        ),
        (
            {"trainer": {"anchor": "current", "max_staleness": 0}, "correction": {"lag": TOKEN_TIS}},
            "max_staleness=0",
        ),
        (
            {
                "trainer": {"anchor": "last_sync", "max_staleness": 0, "sync_every": 3},
                "correction": {"rejections": [{"factor": "lag", "upper": 2.0}]},
            },
            "max_staleness=0",
        ),
        ({"trainer": {"anchor": "bypass"}, "correction": {"nonfinite": "unit"}}, "nonfinite=unit"),
        ({"warm_start": {"path": "x", "num_steps": 5}}, r"warm_start\.num_steps=5 has no effect"),
        ({"trainer": {"anchor": "current"}, "loss": {"kind": "reinforce"}}, "anchor has no effect"),
        (
            {"warm_start": {"num_steps": 0, "lr": 0.1}},
            r"warm_start\.lr=0\.1 has no effect with warm_start\.num_s",
        ),
        ({"advantages": {"over": "all"}}, r"advantages\.over=all has no effect"),
        ({"rollout": {"engine": "thread", "start_timeout_s": 3}}, r"rollout\.start_timeout_s=3.* has no effect"),
        ({"rollout": {"interrupt": False, "partial": False}}, r"rollout\.partial=False has no effect"),
        ({"rollout": {"partial": True}, "trainer": {"max_staleness": 0}}, r"rollout\.partial=True has no effect"),
    ],
)
def test_an_option_that_could_not_act_is_refused(mapping, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(mapping)


def test_bypass_with_reinforce_may_be_weighted_inside_the_loss():
    config = parse_config(
        {"trainer": {"anchor": "bypass"}, "correction": {"combined": TOKEN_TIS}, "loss": {"kind": "reinforce"}}
    )
    assert config.correction.combined.upper == 2.0


def test_lag_may_be_bounded_where_the_anchor_moves_on_between_publications():
    trainer = {"anchor": "current", "max_staleness": 0, "sync_every": 4}
    assert parse_config({"trainer": trainer, "correction": {"lag": TOKEN_TIS}}).correction.lag.upper == 2.0


def test_only_the_dataset_that_asked_can_score():
    with pytest.raises(ConfigError, match=r"rewards\.kind=reasoning_gym with task\.kind=sort_digits"):
        parse_config({"rewards": {"kind": "reasoning_gym"}})
    task = {"kind": "reasoning_gym", "name": "chain_sum", "dataset": {"size": 600, "min_terms": 2}}
    config = parse_config({"rewards": {"kind": "reasoning_gym"}, "task": task})
    assert config.task.dataset == {"size": 600, "min_terms": 2}
