"""One frozen `Config`, and the door it comes through.

Owns the composition of each module's own config dataclass, the parsing of plain mappings into it, and the list of
combinations that are refused because an option in them could not act. After `parse_config` nothing is optional,
nothing has a second default and nothing changes. How the plan reads in words is `plan.py`'s business.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fsdp_async.advantages import AdvantageConfig
from fsdp_async.batching import check_token_budget
from fsdp_async.checkpoint import CheckpointConfig
from fsdp_async.errors import ConfigError
from fsdp_async.is_correction import CorrectionConfig
from fsdp_async.loggers import LoggingConfig
from fsdp_async.losses import LossConfig
from fsdp_async.modeling import ModelConfig, OptimConfig
from fsdp_async.rewards import RewardConfig
from fsdp_async.rollout import RolloutConfig
from fsdp_async.sample_queue import QueueConfig
from fsdp_async.state_cache import CacheConfig
from fsdp_async.tasks import TaskConfig
from fsdp_async.trainer_config import TrainerConfig
from fsdp_async.warm_start import WarmStartConfig

MAX_THREADS = 512
MAX_INTEGER = 1 << 62


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run writes, its seed, and the trainer's CPU threads (the engine's child process has one).

    `resume` goes on from a checkpoint: `auto` takes the newest whole one of `output_dir` and starts anew where there is
    none; a path names a checkpoint, or a run whose newest one is taken. After a stop signal the step in hand and
    the last checkpoint may take `stop_timeout_s` before they are abandoned. `export` writes the policy of a run that
    has done all its batches to `policy/` of the run, a Hugging Face directory in float32 that model.path can take; on
    a complete run that is resumed it does only that. `record_batches` keeps every
    batch's tensors for later analysis; `audit` keeps lists of the samples that engine and trainer saw, and the phase in
    hand. Another number of threads sums in another order: results of one seed are
    repeated with one number of threads only.
    """

    output_dir: str = "outputs/run"
    overwrite: bool = False
    resume: str | None = None
    stop_timeout_s: float = 30.0
    export: bool = False
    seed: int = 0
    num_threads: int = 1
    record_batches: bool = False
    audit: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.num_threads <= MAX_THREADS:
            raise ConfigError(f"run.num_threads={self.num_threads}: must be in 1..{MAX_THREADS}")
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"run.seed={self.seed}: must be in 0..2**63 - 1")
        if not 0 < self.stop_timeout_s < math.inf:
            raise ConfigError(f"run.stop_timeout_s={self.stop_timeout_s}: must be above 0 and finite")
        if self.resume is not None and self.overwrite:
            raise ConfigError(
                "run.overwrite=true with run.resume: nothing is moved aside, since the run goes on; choose one"
            )
        if self.resume == "":
            raise ConfigError("run.resume is empty; give auto, a checkpoint or a run's directory, or leave it out")
        if not self.output_dir:
            raise ConfigError("run.output_dir is empty; name a directory")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run needs to know."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    rewards: RewardConfig = field(default_factory=RewardConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    advantages: AdvantageConfig = field(default_factory=AdvantageConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def weights_inside_loss(self) -> bool:
        """With anchor `bypass`, REINFORCE weights by pi/mu, which is known only in the training forward."""
        return self.trainer.anchor == "bypass" and self.loss.kind == "reinforce"

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run, if none is skipped."""
        return self.trainer.num_batches * self.trainer.mini_batches

    def __post_init__(self) -> None:
        for refuse in (
            _refuse_inert_correction,
            _refuse_inert_anchor,
            _refuse_inert_staleness,
            _refuse_foreign_reward,
            _refuse_two_starts,
            _refuse_impossible_sizes,
            _refuse_debugged_libraries,
        ):
            refuse(self)


def parse_config(mapping: Mapping[str, Any]) -> Config:
    """Turn a plain mapping (of mappings) into a `Config`.

    Raises:
        ConfigError: an unknown key (the nearest right name is given), a value of the wrong type or out of range, or
            a combination in which an option could not act.
    """
    for path, known in _unknown_keys(Config, mapping):
        raise ConfigError(unknown_key_message(path, known))
    try:
        config = TypeAdapter(Config).validate_python(mapping)
    except ValidationError as error:
        raise ConfigError(_first_error(error)) from error
    for path, value in _leaves(dataclasses.asdict(config)):
        _refuse_unusable(path, value)
    return config


def _refuse_unusable(path: str, value: Any) -> None:
    """What no setting can be, whatever it is for."""
    if isinstance(value, float) and math.isnan(value):
        raise ConfigError(f"{path}=nan: not a number; leave a bound out (null) for no bound")
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise ConfigError(f"{path}={value}: beyond every machine; the largest is 2**62")
    if isinstance(value, str) and not value.isprintable():
        raise ConfigError(f"{path}={value!r}: has characters that cannot be printed; was it typed in another encoding?")


def unknown_key_message(path: str, known: typing.Collection[str]) -> str:
    """Say which key is unknown and which name was probably meant."""
    name = path.rpartition(".")[2]
    close = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown key {path!r}: {meant}Known here: {', '.join(sorted(known))}"


def _unknown_keys(annotation: Any, value: Any, path: str = "") -> Iterator[tuple[str, list[str]]]:
    """Walk mappings beside the dataclasses that they stand for."""
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            for argument in typing.get_args(annotation):
                yield from _unknown_keys(argument, item, f"{path}[{index}]")
    if not isinstance(value, Mapping):
        return
    for candidate in (annotation, *typing.get_args(annotation)):
        if not dataclasses.is_dataclass(candidate) or not isinstance(candidate, type):
            continue
        hints = typing.get_type_hints(candidate)
        names = [f.name for f in dataclasses.fields(candidate)]
        for key, item in value.items():
            here = f"{path}.{key}" if path else str(key)
            if key not in names:
                yield here, names
            else:
                yield from _unknown_keys(hints[key], item, here)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def _first_error(error: ValidationError) -> str:
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return str(cause)
    path = ".".join(str(part) for part in first["loc"])
    return f"{path}={first['input']!r}: {first['msg']}"


def _refuse_inert_correction(config: Config) -> None:
    anchor, correction, loss = config.trainer.anchor, config.correction, config.loss
    if anchor == "behaviour" and "lag" in correction.factors:
        raise ConfigError(
            "correction.lag with trainer.anchor=behaviour: the anchor is the behaviour policy, so lag is exactly 1 and "
            "its bounds cannot act; remove them, or choose trainer.anchor=last_sync or current"
        )
    if anchor == "bypass" and correction.factors & {"mismatch", "lag"}:
        raise ConfigError(
            "correction.mismatch or .lag with trainer.anchor=bypass: there are no behaviour log-probs to split by; use "
            "correction.combined with loss.kind=reinforce, or another anchor"
        )
    if anchor == "bypass" and loss.kind == "ppo_clip" and correction.factors:
        raise ConfigError(
            "correction with trainer.anchor=bypass and loss.kind=ppo_clip: old_log_prob is rollout_log_prob, so the "
            "weight is 1 and the clipped ratio is the only correction; use correction=disabled, or another anchor"
        )
    if anchor == "bypass" and loss.kind == "ppo_clip" and correction.nonfinite == "unit":
        raise ConfigError(
            "correction.nonfinite=unit with trainer.anchor=bypass and loss.kind=ppo_clip: the anchor itself is the "
            "engine's log-prob, and one that is not finite is no anchor; use correction.nonfinite=mask"
        )
    if config.weights_inside_loss:
        _refuse_inside_loss(correction)
    if config.advantages.over == "all" and not correction.can_reject:
        raise ConfigError(
            "advantages.over=all has no effect where nothing can be rejected: all responses are kept; leave it out, or "
            "add a rejection"
        )


def _refuse_inside_loss(correction: CorrectionConfig) -> None:
    if correction.batch_normalize or correction.denominator == "kept":
        raise ConfigError(
            f"correction.batch_normalize={correction.batch_normalize}, denominator={correction.denominator!r} with "
            "trainer.anchor=bypass and loss.kind=reinforce: the weights live inside the loss and are known one "
            "micro-batch at a time, so nothing over the whole batch can be formed from them; choose another anchor"
        )


def _refuse_debugged_libraries(config: Config) -> None:
    if config.trainer.debug and config.logging.libraries:
        raise ConfigError(
            "trainer.debug=true with logging.wandb or logging.trackio: debugging starts no process, and these run in "
            "processes of their own; leave one out"
        )


def _refuse_inert_anchor(config: Config) -> None:
    anchor, correction = config.trainer.anchor, config.correction
    acts = correction.factors & {"combined", "lag"}
    if config.loss.kind == "reinforce" and anchor in ("last_sync", "current") and not acts:
        raise ConfigError(
            f"trainer.anchor={anchor} with loss.kind=reinforce and no combined or lag correction: the anchor has no "
            "effect, since REINFORCE clips nothing; use trainer.anchor=behaviour or bypass"
        )


def _refuse_inert_staleness(config: Config) -> None:
    trainer = config.trainer
    # With rarer publications the anchor `current` moves on between them, and lag with it.
    always_newest = trainer.max_staleness == 0 and (trainer.sync_every == 1 or trainer.anchor == "last_sync")
    if trainer.max_staleness == 0 and config.rollout.partial is not None:
        raise ConfigError(
            f"rollout.partial={config.rollout.partial} has no effect with trainer.max_staleness=0: nothing is being "
            "generated when weights are published; leave it out, or raise trainer.max_staleness"
        )
    if always_newest and "lag" in config.correction.factors:
        raise ConfigError(
            f"a lag bound or rule with trainer.max_staleness=0, sync_every={trainer.sync_every} and anchor="
            f"{trainer.anchor}: every token is sampled by the policy that is the anchor, so lag is exactly 1; remove "
            "it or raise trainer.max_staleness"
        )


def _refuse_foreign_reward(config: Config) -> None:
    if config.rewards.kind == "reasoning_gym" and config.task.kind != "reasoning_gym":
        raise ConfigError(
            f"rewards.kind=reasoning_gym with task.kind={config.task.kind}: only a dataset of reasoning-gym can say "
            "how right a response to it is; set task.kind=reasoning_gym, or choose another reward"
        )


def _refuse_two_starts(config: Config) -> None:
    if config.model.path is not None and config.warm_start.path is not None:
        raise ConfigError(
            f"warm_start.path={config.warm_start.path} with model.path={config.model.path}: each holds all the weights "
            "that the run is to start from; leave one out"
        )
    config.warm_start.of(config.model)


def _refuse_impossible_sizes(config: Config) -> None:
    trainer = config.trainer
    if trainer.group_size == 1 and config.advantages.kind in ("group_relative", "leave_one_out"):
        raise ConfigError(
            f"trainer.group_size=1 with advantages.kind={config.advantages.kind}: a response compared with itself has "
            "advantage 0; use at least 2, or advantages.kind=reinforce_pp"
        )
    if config.queue.capacity_groups < trainer.groups_per_batch:
        raise ConfigError(
            f"queue.capacity_groups={config.queue.capacity_groups} is below trainer.groups_per_batch="
            f"{trainer.groups_per_batch}; a batch could never be full"
        )
    sequence_len = config.task.max_prompt_tokens + config.rollout.max_response_tokens
    # What a directory can take is known when it is opened.
    if config.model.path is None and sequence_len > config.model.max_position_embeddings:
        raise ConfigError(
            f"task.max_prompt_tokens={config.task.max_prompt_tokens} + rollout.max_response_tokens="
            f"{config.rollout.max_response_tokens} exceed model.max_position_embeddings="
            f"{config.model.max_position_embeddings}"
        )
    check_token_budget(sequence_len, trainer.micro_batch_tokens)
    config.optim.check_length(config.total_steps)
    kept = config.cache.max_versions
    if kept is not None and kept < trainer.max_versions:
        raise ConfigError(
            f"cache.max_versions={kept}: trainer.max_staleness={trainer.max_staleness} keeps up to "
            f"{trainer.max_versions} versions at once; raise it, or lower trainer.max_staleness"
        )
