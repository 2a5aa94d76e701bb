"""Settings that are constructed directly, past the parser that reads a run's configuration."""

from __future__ import annotations

import math

import pytest

from fsdp_async.advantages import AdvantageConfig
from fsdp_async.checks import is_whole, only_of, require_choice, require_type, require_whole
from fsdp_async.correction_config import CorrectionConfig
from fsdp_async.errors import ConfigError, InputError
from fsdp_async.learner import Objective
from fsdp_async.losses import LossConfig
from fsdp_async.modeling import ModelConfig, OptimConfig
from fsdp_async.rewards import RewardConfig
from fsdp_async.rollout import RolloutConfig, SamplingParams


def _objective(anchor):
    return Objective(anchor=anchor, correction=CorrectionConfig(), loss=LossConfig(), advantages=AdvantageConfig())


def _sampling(**changes):
    numbers = {"num_samples": 2, "max_response_tokens": 4, "temperature": 1.0, "eos_token_id": 1, "pad_token_id": 0}
    return SamplingParams(**numbers | changes)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: RewardConfig(kind="grade"), r"rewards\.kind='grade' is unknown; choose one of"),
        (lambda: RolloutConfig(engine="proces"), r"rollout\.engine='proces' is unknown"),
        (lambda: RolloutConfig(engine=None), r"rollout\.engine=None is unknown"),
        (lambda: RolloutConfig(interrupt="no"), r"rollout\.interrupt='no' must be true or false"),
        (lambda: RolloutConfig(partial=0), r"rollout\.partial=0 must be true or false"),
        (lambda: ModelConfig(tie_embeddings="no"), r"model\.tie_embeddings='no' must be true or false"),
        (lambda: OptimConfig(schedule="linaer"), r"optim\.schedule='linaer' is unknown"),
        (lambda: _objective("behavior"), r"anchor='behavior' is unknown"),
        (lambda: AdvantageConfig(kind="grpo"), r"advantages\.kind='grpo' is unknown"),
        (lambda: AdvantageConfig(over="keep"), r"advantages\.over='keep' is unknown"),
        (lambda: AdvantageConfig(normalize_std=0.0), r"advantages\.normalize_std=0\.0 must be true, false or null"),
        (lambda: LossConfig(kind="ppo"), r"loss\.kind='ppo' is unknown"),
        (lambda: LossConfig(aggregate=[]), r"loss\.aggregate=\[\] is unknown"),
    ],
)
def test_a_word_or_flag_that_does_not_exist_is_refused_and_takes_no_branch(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_samples": 0}, "num_samples=0 must be an integer of at least 1"),
        ({"num_samples": True}, "num_samples=True must be an integer"),
        ({"max_response_tokens": 0}, "max_response_tokens=0 must be an integer of at least 1"),
        ({"max_response_tokens": 2.5}, r"max_response_tokens=2\.5 must be an integer"),
        ({"eos_token_id": None}, "eos_token_id=None must be an integer of at least 0"),
        ({"pad_token_id": -1}, "pad_token_id=-1 must be an integer of at least 0"),
        ({"temperature": 0}, r"temperature=0 must be at least 0\.001 and finite"),
        ({"temperature": math.nan}, "temperature=nan must be"),
        ({"temperature": math.inf}, "temperature=inf must be"),
    ],
)
def test_responses_that_could_not_be_drawn_are_refused_before_a_model_is_asked(changes, message):
    with pytest.raises(ConfigError, match=message):
        _sampling(**changes)


def test_truth_and_fractions_are_no_whole_numbers():
    assert [is_whole(value, 0) for value in (0, 7, -1, True, 2.0, "3", None)] == [True, True] + [False] * 5
    with pytest.raises(InputError, match="n=True must be an integer of at least 1"):
        require_whole("n", True, 1, InputError)


def test_kinds_are_told_apart_exactly():
    assert only_of((1, 2), int)
    assert only_of((), int)
    assert not only_of((1, True), int)
    with pytest.raises(ConfigError, match="word=3 is unknown"):
        require_choice("word", 3, ("a", "b"))
    with pytest.raises(InputError, match="x is str; need a int"):
        require_type("x", "1", int)
