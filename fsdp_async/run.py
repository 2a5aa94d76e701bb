"""One run, from a `Config` to a summary.

Owns the assembly: it builds every part the config asks for, joins them in an `AsyncTrainer`, and takes them down in
reverse order whatever happened. Decisions are the config's, arithmetic is the learner's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fsdp_async.config import Config
from fsdp_async.errors import ConfigError
from fsdp_async.evaluation import sampled_accuracy
from fsdp_async.files import write_json
from fsdp_async.learner import Learner, Objective
from fsdp_async.loggers import Loggers
from fsdp_async.modeling import apply_fsdp2, build_model, build_optimizer, build_schedule, ensure_process_group
from fsdp_async.plan import cache_bytes, effective_plan
from fsdp_async.recorder import Recorder
from fsdp_async.rewards import RewardConfig, build_reward
from fsdp_async.rollout import RolloutEngine, SamplingParams
from fsdp_async.rollout_hf import ProcessEngine, ThreadEngine
from fsdp_async.run_dir import RECORD, RunDirectory, run_record
from fsdp_async.sample_queue import SampleQueue
from fsdp_async.state_cache import StateCache
from fsdp_async.tasks import Task, build_task
from fsdp_async.timeline import Timeline
from fsdp_async.trainer import AsyncTrainer, TrainerParts
from fsdp_async.warm_start import find_warm_start, load_or_make
from fsdp_async.weight_sync import InProcessPublisher, SharedMemoryPublisher, WeightPublisher

EVALUATION_SEED = 20_240


class View(Protocol):
    """Who watches a run."""

    def plan(self, lines: Sequence[str]) -> None:
        """The effective plan, before anything starts."""
        ...

    def warm_start(self, step: int, loss: float) -> None:
        """A supervised step was taken."""
        ...

    def observe(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """The trainer did something."""
        ...

    def trainer_ready(self, trainer: AsyncTrainer) -> None:
        """The loop is about to start; `trainer.request_stop` ends it from now on."""
        ...

    def finished(self, summary: Mapping[str, Any], directory: Path | None) -> None:
        """The run ended; None where nothing was kept, because it was stopped before it took the old one's place."""
        ...


def plan_lines(config: Config) -> list[str]:
    """The effective plan of `config`; parameters are counted on a model without memory.

    Raises:
        ConfigError, InputError: the task or the cache's budget do not fit.
    """
    task = _task(config)
    with torch.device("meta"):
        net = build_model(config.model, vocab_size=task.vocab_size, seed=config.run.seed)
    num_parameters = sum(p.numel() for p in net.parameters())
    limit, needed = config.cache.max_bytes, cache_bytes(config, num_parameters)
    if limit is not None and limit < needed:
        raise ConfigError(
            f"cache.max_bytes={limit:,}: {config.trainer.max_versions} versions and a parking place of "
            f"{num_parameters:,} float32 parameters take {needed:,} bytes; raise it, or lower trainer.max_staleness"
        )
    return effective_plan(config, num_parameters=num_parameters)


def run_training(config: Config, view: View) -> dict[str, Any]:
    """Train as configured and return the summary, which also lies in `config.run.output_dir`.

    Raises:
        RunDirectoryError: the directory is in use, or not empty and `run.overwrite` is false.
        FsdpAsyncError: whatever ended the run; what was done until then is on disk.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            f"this process is one of {dist.get_world_size()} ranks: the training loop runs on one rank only so far; "
            "start it without torchrun"
        )
    task = _task(config)
    warm_start = find_warm_start(config.warm_start, config.model, config.task, seed=config.run.seed)
    lines = plan_lines(config)
    with RunDirectory(Path(config.run.output_dir), overwrite=config.run.overwrite) as directory:
        view.plan(lines)
        record = run_record(dataclasses.asdict(config), seeds={"run": config.run.seed}, plan_lines=lines)
        write_json(directory.path / RECORD, record)
        with ExitStack() as stack:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(config.run.num_threads)
            loggers = stack.enter_context(Loggers(config.logging, directory.path))
            recorder = Recorder(directory, loggers)
            # Whatever ends the run from here on leaves a summary.
            try:
                trainer = _trainer(config, task, warm_start, recorder, view, stack)
                view.trainer_ready(trainer)
                trainer.run()
            finally:
                summary = recorder.finish()
        view.finished(summary, Path(config.run.output_dir) if directory.is_kept else None)
        return summary


def _trainer(
    config: Config, task: Task, warm_start: Path | None, recorder: Recorder, view: View, stack: ExitStack
) -> AsyncTrainer:
    timeline = Timeline()
    engine = stack.enter_context(closing(_engine(config, task, recorder.directory)))
    learner = _learner(config, task, warm_start, view, stack)
    parts = dataclasses.replace(
        _parts(config, task, learner, engine, timeline, stack),
        observers=(recorder.observe, view.observe),
        record_batch=recorder.record_batch if config.run.record_batches else None,
    )
    return AsyncTrainer(parts, config.trainer)


def _task(config: Config) -> Task:
    task = build_task(config.task, seed=config.run.seed)
    task.check_answers_fit(config.rollout.max_response_tokens)
    return task


def _engine(config: Config, task: Task, directory: Path) -> ProcessEngine | ThreadEngine:
    """Started first: a child process imports its libraries while the trainer makes the warm start."""
    builder = partial(build_model, config.model, vocab_size=task.vocab_size, seed=config.run.seed)
    kind: type[ProcessEngine] | type[ThreadEngine] = (
        ProcessEngine if config.rollout.engine == "process" else ThreadEngine
    )
    record_dir = directory / "engine_weights" if config.rollout.record_weights else None
    return kind(builder, config.rollout, seed=config.run.seed, record_dir=record_dir)


def _publisher(config: Config, engine: RolloutEngine, timeline: Timeline) -> WeightPublisher:
    kind = {"process": SharedMemoryPublisher, "thread": InProcessPublisher}[config.rollout.engine]
    rollout, waiting = config.rollout, partial(timeline.phase, "wait")
    return kind([engine], bucket_bytes=rollout.bucket_bytes, timeout_s=rollout.load_timeout_s, waiting=waiting)


def _learner(config: Config, task: Task, warm_start: Path | None, view: View, stack: ExitStack) -> Learner:
    net = build_model(config.model, vocab_size=task.vocab_size, seed=config.run.seed)
    load_or_make(net, task, config.warm_start, warm_start, seed=config.run.seed, on_step=view.warm_start)
    if ensure_process_group():
        stack.callback(dist.destroy_process_group)
    apply_fsdp2(net)
    optimizer = build_optimizer(net, config.optim)
    schedule = build_schedule(optimizer, config.optim, total_steps=config.total_steps)
    cache = stack.enter_context(StateCache(net, config.cache))
    cache.watch(optimizer)
    return Learner(net, optimizer, schedule, cache, objective(config))


def objective(config: Config) -> Objective:
    """What the learner optimises, gathered from the sections of the config."""
    return Objective(
        anchor=config.trainer.anchor,
        correction=config.correction,
        loss=config.loss,
        advantages=config.advantages,
        mini_batches=config.trainer.mini_batches,
        micro_batch_tokens=config.trainer.micro_batch_tokens,
        max_grad_norm=config.optim.max_grad_norm,
        skip_zero_variance=config.trainer.skip_zero_variance,
    )


def _parts(
    config: Config, task: Task, learner: Learner, engine: RolloutEngine, timeline: Timeline, stack: ExitStack
) -> TrainerParts:
    # Accuracy is the share of right responses, whatever training rewards.
    right = build_reward(RewardConfig(kind="exact"))
    sampling = SamplingParams(
        num_samples=config.trainer.group_size,
        max_response_tokens=config.rollout.max_response_tokens,
        temperature=config.rollout.temperature,
        eos_token_id=task.eos_token_id,
        pad_token_id=task.pad_token_id,
    )
    queue = SampleQueue(
        capacity_groups=config.queue.capacity_groups,
        groups_per_batch=config.trainer.groups_per_batch,
        sync_every=config.trainer.sync_every,
        max_staleness=config.trainer.max_staleness,
    )
    return TrainerParts(
        learner=learner,
        engine=engine,
        publisher=stack.enter_context(closing(_publisher(config, engine, timeline))),
        queue=queue,
        prompts=task.prompts(),
        reward=build_reward(config.rewards),
        sampling=sampling,
        evaluate=partial(sampled_accuracy, learner.model, task.eval_prompts(), right, sampling, seed=EVALUATION_SEED),
        timeline=timeline,
    )
