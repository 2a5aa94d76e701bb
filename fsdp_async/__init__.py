"""Asynchronous RL post-training on FSDP2 with a versioned weight-state cache.

The public names in one place. Importing this loads neither ray, vllm, hydra, megatron, an optional package nor
a plotting library.
"""

from fsdp_async.advantages import AdvantageConfig, compute_advantages
from fsdp_async.batching import collate
from fsdp_async.behaviour import behaviour_log_probs
from fsdp_async.config import Config, parse_config
from fsdp_async.errors import (
    CacheBudgetError,
    CanaryError,
    ConfigError,
    EngineDiedError,
    EngineError,
    EngineTimeoutError,
    FsdpAsyncError,
    InputError,
    NonFiniteError,
    OutputError,
    QueueClosedError,
    RankDisagreementError,
    RewardError,
    RunDirectoryError,
    StateInUseError,
    StateMismatchError,
    UnknownVersionError,
    UnsupportedModelError,
    VersionExistsError,
)
from fsdp_async.is_correction import Bounds, Correction, CorrectionConfig, Rejection, compute_correction
from fsdp_async.learner import Learner, Objective
from fsdp_async.ledger import Ledger
from fsdp_async.logprobs import token_log_probs
from fsdp_async.losses import GlobalCounts, LossConfig, PolicyLoss, aggregate, kl_penalty, policy_loss
from fsdp_async.metrics import Statistics
from fsdp_async.report import write_report
from fsdp_async.rollout import RolloutConfig, RolloutEngine, SamplingParams
from fsdp_async.rollout_hf import ProcessEngine, ThreadEngine
from fsdp_async.run import run_training
from fsdp_async.sample_queue import SampleQueue
from fsdp_async.state_cache import CacheConfig, StateCache
from fsdp_async.trainer import AsyncTrainer, TrainerParts
from fsdp_async.trainer_config import TrainerConfig
from fsdp_async.types import Prompt, Response, ResponseGroup, TrainBatch, VersionSpan
from fsdp_async.weight_sync import InProcessPublisher, SharedMemoryPublisher, WeightPublisher

__all__ = [
    "AdvantageConfig",
    "AsyncTrainer",
    "Bounds",
    "CacheBudgetError",
    "CacheConfig",
    "CanaryError",
    "Config",
    "ConfigError",
    "Correction",
    "CorrectionConfig",
    "EngineDiedError",
    "EngineError",
    "EngineTimeoutError",
    "FsdpAsyncError",
    "GlobalCounts",
    "InProcessPublisher",
    "InputError",
    "Learner",
    "Ledger",
    "LossConfig",
    "NonFiniteError",
    "Objective",
    "OutputError",
    "PolicyLoss",
    "ProcessEngine",
    "Prompt",
    "QueueClosedError",
    "RankDisagreementError",
    "Rejection",
    "Response",
    "ResponseGroup",
    "RewardError",
    "RolloutConfig",
    "RolloutEngine",
    "RunDirectoryError",
    "SampleQueue",
    "SamplingParams",
    "SharedMemoryPublisher",
    "StateCache",
    "StateInUseError",
    "StateMismatchError",
    "Statistics",
    "ThreadEngine",
    "TrainBatch",
    "TrainerConfig",
    "TrainerParts",
    "UnknownVersionError",
    "UnsupportedModelError",
    "VersionExistsError",
    "VersionSpan",
    "WeightPublisher",
    "aggregate",
    "behaviour_log_probs",
    "collate",
    "compute_advantages",
    "compute_correction",
    "kl_penalty",
    "parse_config",
    "policy_loss",
    "run_training",
    "token_log_probs",
    "write_report",
]
