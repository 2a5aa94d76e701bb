"""From a `Config` to a loop that can run.

Owns the building of every part on this rank, in an order in which slow things start first, and what a checkpoint holds
of them. Decisions are the config's, arithmetic is the learner's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from fsdp_async.audit import CONSUMED, PHASE, PRODUCED, GroupLog, phase_announcer, rewind_log
from fsdp_async.checkpoint import CheckpointWriter, load_tensors
from fsdp_async.config import Config
from fsdp_async.devices import PlacedBuilder, engine_placement, trainer_placement
from fsdp_async.evaluation import sampled_accuracy
from fsdp_async.feed import RolloutFeed
from fsdp_async.lead import Lead
from fsdp_async.learner import Learner, Objective
from fsdp_async.modeling import apply_fsdp2, build_model, build_optimizer, build_schedule
from fsdp_async.policy_export import POLICY, export_policy
from fsdp_async.policy_files import open_policy
from fsdp_async.resume import Resumption, generators, policy_identity, set_generators, task_digest
from fsdp_async.rewards import OwnedReward, build_reward, build_right
from fsdp_async.rollout import RolloutEngine, SamplingParams
from fsdp_async.rollout_hf import ProcessEngine, ThreadEngine
from fsdp_async.rollout_inline import InlineEngine
from fsdp_async.run_dir import strict
from fsdp_async.run_files import RunFiles
from fsdp_async.sample_queue import SampleQueue
from fsdp_async.state_cache import StateCache
from fsdp_async.tasks import Task, build_task
from fsdp_async.timeline import Timeline
from fsdp_async.trainer import AsyncTrainer, Observer, TrainerParts
from fsdp_async.types import ResponseGroup
from fsdp_async.version_store import Key
from fsdp_async.warm_start import find_warm_start, load_or_make
from fsdp_async.weight_sync import InProcessPublisher, SharedMemoryPublisher, WeightPublisher

EVALUATION_SEED = 20_240


class Watcher(Protocol):
    """Who hears of slow things and of events."""

    def warm_start(self, step: int, loss: float) -> None:
        """A supervised step was taken."""
        ...

    def observe(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """The trainer did something."""
        ...


def assemble(
    config: Config, lead: Lead, stack: ExitStack, resumption: Resumption | None, files: RunFiles | None, view: Watcher
) -> AsyncTrainer:
    """Build the loop of this rank, at the start or where `resumption` stands. Collective.

    Args:
        config: what to build.
        lead: this rank among all.
        stack: takes down what was built, in reverse order.
        resumption: None for a run that starts anew.
        files: of the run; on rank 0.
        view: who watches; on rank 0.
    """
    task = checked_task(config)
    state = {} if resumption is None else resumption.state
    timeline = Timeline(elapsed_s=state.get("elapsed_s", 0.0), announce=_announcer(config, lead))
    if state:
        task.load_state_dict(state["task"])
    # On every rank, since evaluation is shared out; the training reward of rank 0 alone is asked.
    reward = stack.enter_context(closing(build_reward(config.rewards, task, inline=config.trainer.debug)))
    feed = None if files is None else _feed(config, task, reward, files.directory, timeline, stack)
    learner = _learner(config, task, lead, resumption, view, stack)
    observers: tuple[Observer, ...] = ()
    if feed is not None and files is not None and files.recorder is not None:
        observers = (files.recorder.observe, view.observe)
        if state:
            feed.queue.load_state_dict(state["queue"])
    trainer = AsyncTrainer(
        TrainerParts(
            learner=learner,
            feed=feed,
            evaluate=partial(_evaluate, config, task, reward, learner.model, lead),
            timeline=timeline,
            pad_token_id=task.pad_token_id,
            lead=lead,
            observers=observers,
            record_batch=_batch_recorder(config, files),
            record_groups=_group_recorder(config, files, resumption, stack),
            checkpoints=_checkpoints(config, task, lead, learner, feed, files, timeline),
        ),
        config.trainer,
    )
    if state:
        trainer.load_state_dict(state["loop"])
        set_generators(state["generators"])
    return trainer


def checked_task(config: Config) -> Task:
    """The configured task, in the vocabulary of the policy.

    Raises:
        ConfigError, InputError, UnsupportedModelError: a directory that cannot be used as the policy, or is too short.
        InputError: an answer that no response could hold.
    """
    vocabulary = None
    if config.model.path is not None:
        policy = open_policy(config.model.path)
        policy.check_length(config.task.max_prompt_tokens + config.rollout.max_response_tokens)
        vocabulary = policy.vocabulary
    task = build_task(config.task, seed=config.run.seed, vocabulary=vocabulary)
    task.check_answers_fit(config.rollout.max_response_tokens)
    return task


def export_live(config: Config, trainer: AsyncTrainer, lead: Lead, files: RunFiles | None) -> None:
    """Write the live weights of a run to its `policy/`. Collective.

    Raises:
        OutputError: they could not be written.
    """
    learner = trainer.parts.learner
    _export(config, learner, checked_task(config), lead, files)


def export_checkpoint(
    config: Config, lead: Lead, resumption: Resumption, files: RunFiles | None, view: Watcher, stack: ExitStack
) -> None:
    """Write the weights of a checkpoint to `policy/` of the run, without training. Collective.

    Raises:
        OutputError: they could not be written.
    """
    task = checked_task(config)
    _export(config, _learner(config, task, lead, resumption, view, stack), task, lead, files)


def _export(config: Config, learner: Learner, task: Task, lead: Lead, files: RunFiles | None) -> None:
    directory = Path(POLICY) if files is None else files.directory / POLICY
    export_policy(learner.model, config.model, task.vocabulary, directory, lead)


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


def _feed(
    config: Config, task: Task, reward: OwnedReward, directory: Path, timeline: Timeline, stack: ExitStack
) -> RolloutFeed:
    # Started first: a child process imports its libraries while the trainer makes the warm start.
    engine = stack.enter_context(closing(_engine(config, task, directory)))
    trainer = config.trainer
    return RolloutFeed(
        engine=engine,
        publisher=stack.enter_context(closing(_publisher(config, engine, timeline))),
        queue=SampleQueue(
            capacity_groups=config.queue.capacity_groups,
            groups_per_batch=trainer.groups_per_batch,
            sync_every=trainer.sync_every,
            max_staleness=trainer.max_staleness,
        ),
        prompts=task.prompts(),
        reward=reward,
        sampling=_sampling(config, task),
        max_restarts=config.rollout.max_restarts,
    )


def _engine(config: Config, task: Task, directory: Path) -> ProcessEngine | ThreadEngine | InlineEngine:
    trainer, rollout = config.trainer, config.rollout
    placement = engine_placement(rollout.device, rollout.dtype, trainer_placement(trainer.device, trainer.dtype))
    build = partial(build_model, config.model, vocab_size=task.vocab_size, seed=config.run.seed)
    builder = PlacedBuilder(build, placement)
    kind: type[ProcessEngine] | type[ThreadEngine] | type[InlineEngine] = (
        ProcessEngine if config.rollout.engine == "process" else ThreadEngine
    )
    if config.trainer.debug:
        kind = InlineEngine
    record_dir = directory / "engine_weights" if config.rollout.record_weights else None
    log = directory / PRODUCED if config.run.audit else None
    return kind(builder, config.rollout, seed=config.run.seed, record_dir=record_dir, log=log)


def _publisher(config: Config, engine: RolloutEngine, timeline: Timeline) -> WeightPublisher:
    is_elsewhere = config.rollout.engine == "process" and not config.trainer.debug
    kind = SharedMemoryPublisher if is_elsewhere else InProcessPublisher
    rollout, waiting = config.rollout, partial(timeline.phase, "wait")
    return kind([engine], bucket_bytes=rollout.bucket_bytes, timeout_s=rollout.load_timeout_s, waiting=waiting)


def _sampling(config: Config, task: Task) -> SamplingParams:
    return SamplingParams(
        num_samples=config.trainer.group_size,
        max_response_tokens=config.rollout.max_response_tokens,
        temperature=config.rollout.temperature,
        eos_token_id=task.eos_token_id,
        pad_token_id=task.pad_token_id,
        stop_token_ids=task.stop_token_ids,
    )


def _learner(
    config: Config, task: Task, lead: Lead, resumption: Resumption | None, view: Watcher, stack: ExitStack
) -> Learner:
    placement = trainer_placement(config.trainer.device, config.trainer.dtype)
    net = build_model(config.model, vocab_size=task.vocab_size, seed=config.run.seed).to(placement.device)
    if resumption is None:
        _warm_start(config, task, lead, net, view)
    apply_fsdp2(net, placement)
    optimizer = build_optimizer(net, config.optim)
    cache = stack.enter_context(StateCache(net, config.cache))
    cache.watch(optimizer)
    steps_taken = 0
    if resumption is not None:
        _load(resumption, lead, net, optimizer, cache)
        steps_taken = int(resumption.state["num_optimizer_steps"])
    schedule = build_schedule(optimizer, config.optim, total_steps=config.total_steps, steps_taken=steps_taken)
    return Learner(net, optimizer, schedule, cache, objective(config), process_group=lead.group)


def _warm_start(config: Config, task: Task, lead: Lead, net: nn.Module, view: Watcher) -> None:
    path = find_warm_start(config.warm_start, config.model, config.task, seed=config.run.seed)
    make = partial(load_or_make, net, task, config.warm_start, path, seed=config.run.seed)
    # Rank 0 makes the file if there is none; the others find it made.
    lead.ask(lambda: make(on_step=view.warm_start))
    if not lead.is_lead:
        make()


def _evaluate(config: Config, task: Task, reward: OwnedReward, net: nn.Module, lead: Lead) -> float:
    # Accuracy is the share of right responses, whatever training rewards.
    right = build_right(config.rewards, reward, task)
    return sampled_accuracy(net, task.eval_prompts(), right, _sampling(config, task), seed=EVALUATION_SEED, lead=lead)


def _batch_recorder(config: Config, files: RunFiles | None) -> Any:
    if not config.run.record_batches:
        return None
    if files is None or files.recorder is None:
        return lambda step, tensors: None
    return files.recorder.record_batch


def _announcer(config: Config, lead: Lead) -> Callable[[str], None] | None:
    """Into the run's final place, where there is one yet; a new run is not audited before its first step."""
    return phase_announcer(Path(config.run.output_dir) / f"{PHASE}.{lead.rank}") if config.run.audit else None


def _group_recorder(
    config: Config, files: RunFiles | None, resumption: Resumption | None, stack: ExitStack
) -> Callable[[int, list[ResponseGroup]], None] | None:
    if files is None or not config.run.audit:
        return None
    path = files.directory / CONSUMED
    if resumption is not None:
        rewind_log(path, resumption.step)
    return stack.enter_context(closing(GroupLog(path))).append


def _checkpoints(
    config: Config,
    task: Task,
    lead: Lead,
    learner: Learner,
    feed: RolloutFeed | None,
    files: RunFiles | None,
    timeline: Timeline,
) -> CheckpointWriter | None:
    if config.checkpoint.every == 0:
        return None

    def directory() -> Path:
        assert files is not None
        return files.checkpoints

    def state() -> dict[str, Any]:
        assert feed is not None
        assert files is not None
        assert files.recorder is not None
        return {
            "config": strict(dataclasses.asdict(config)),
            "task_digest": task_digest(config),
            "policy": policy_identity(config),
            "task": task.state_dict(),
            "queue": feed.queue.state_dict(),
            "versions": [*learner.cache.versions, *learner.cache.names],
            "num_optimizer_steps": learner.schedule.last_epoch,
            "has_optimizer_state": bool(learner.optimizer.state),
            "num_events": files.recorder.num_events,
            "elapsed_s": timeline.now_s(),
            "num_ranks": lead.num_ranks,
            "generators": generators(),
        }

    return CheckpointWriter(directory, config.checkpoint, lead, partial(_tensors, learner, lead), state)


def _tensors(learner: Learner, lead: Lead) -> dict[str, Any]:
    """What DCP writes. An optimizer that has not stepped has no state, and asking for it would make it step."""
    versions = learner.cache.tensors()
    return _tree(learner.model, learner.optimizer, versions, lead, with_optimizer=bool(learner.optimizer.state))


def _tree(
    net: nn.Module,
    optimizer: Optimizer,
    versions: Mapping[Key, Mapping[str, Tensor]],
    lead: Lead,
    *,
    with_optimizer: bool,
) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "versions": {str(key): dict(tensors) for key, tensors in versions.items()},
        "generators": {str(lead.rank): torch.get_rng_state()},
    }
    if with_optimizer:
        tree["model"], state = get_state_dict(net, optimizer)
        # Not its param_groups: learning rate, betas and so on are the config's.
        tree["optimizer"] = state["state"]
    else:
        tree["model"] = dict(net.state_dict())
    return tree


def _load(resumption: Resumption, lead: Lead, net: nn.Module, optimizer: Optimizer, cache: StateCache) -> None:
    state = resumption.state
    with cache.receive(state["versions"]) as versions:
        tree = _tree(net, optimizer, versions, lead, with_optimizer=state["has_optimizer_state"])
        if state["num_ranks"] != lead.num_ranks:
            del tree["generators"]
        load_tensors(resumption.path, tree)
    if "optimizer" in tree:
        whole = {"state": tree["optimizer"], "param_groups": get_state_dict(net, optimizer)[1]["param_groups"]}
        set_state_dict(net, optimizer, model_state_dict=tree["model"], optim_state_dict=whole)
    if "generators" in tree:
        torch.set_rng_state(tree["generators"][str(lead.rank)])
    cache.mark_live_changed()
