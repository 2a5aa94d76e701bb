"""The effective plan: what a run will do, in words, before it does it.

Owns sentences only: which forward computes which policy under which version, what is clipped, what is weighted, how
many bytes the cache may take and which staleness can occur.
"""

from __future__ import annotations

from fsdp_async.config import Config
from fsdp_async.correction_config import Bounds, Rejection
from fsdp_async.devices import engine_placement, trainer_placement
from fsdp_async.rewards import IN_PROCESS

BYTES_PER_PARAMETER = 4


def effective_plan(config: Config, *, num_parameters: int) -> list[str]:
    """One sentence a line; `num_parameters` are those of the whole model, tied ones counted once."""
    return [
        _compute(config),
        _start(config),
        _generation(config),
        _reward(config),
        _batches(config),
        _behaviour(config),
        _anchor(config),
        _correction(config),
        _loss(config),
        _optimizer(config),
        _staleness(config),
        _cache(config, num_parameters),
        _canary(config),
        *_export(config),
    ]


def _compute(config: Config) -> str:
    """Raises ConfigError where a device is not there."""
    trainer = trainer_placement(config.trainer.device, config.trainer.dtype)
    engine = engine_placement(config.rollout.device, config.rollout.dtype, trainer)
    return f"compute: each rank of the trainer on {trainer} (weights in float32), the engine on {engine}"


def _start(config: Config) -> str:
    start, path = config.warm_start.of(config.model), config.model.path
    if start.path is not None:
        return f"start: the weights of {start.path}"
    weights = "random weights" if path is None else f"the weights of {path}"
    if start.steps == 0:
        return f"start: {weights}" + ("; RL learns only if some responses are rewarded" if path is None else "")
    return (
        f"start: {weights} and {start.steps} supervised steps on {config.task.kind}, made once and kept in "
        f"{start.directory}"
    )


def _export(config: Config) -> list[str]:
    if not config.run.export:
        return []
    return [f"export: the policy after the last batch, as a Hugging Face directory, to {config.run.output_dir}/policy"]


def _optimizer(config: Config) -> str:
    optim = config.optim
    warmup = f" after {optim.warmup_steps} steps of warm-up" if optim.warmup_steps else ""
    return (
        f"optimizer: AdamW, lr {optim.lr:g} {optim.schedule}{warmup}, over up to {config.total_steps} steps; gradient "
        f"norm clipped to {optim.max_grad_norm:g}"
    )


def _generation(config: Config) -> str:
    where = {"process": "a child process", "thread": "a thread of this process"}[config.rollout.engine]
    if config.trainer.debug:
        where = "this thread, as soon as prompts are submitted (trainer.debug),"
    return (
        f"rollout: {where} samples {config.trainer.group_size} responses of at most "
        f"{config.rollout.max_response_tokens} tokens to each prompt at temperature "
        f"{config.rollout.temperature:g}; mu = log-probs of that engine"
    )


def _reward(config: Config) -> str:
    rewards = config.rewards
    text = {
        "exact": "1 for the right answer and its end, else 0",
        "graded": "share of positions that agree with the right answer, its end included",
        "python": f"{rewards.function}, in a process of its own",
        "math_verify": "1 for the same mathematics as the answer (math-verify), else 0, in a process of its own",
        "reasoning_gym": "the score of the dataset that asked (reasoning-gym), in a process of its own",
    }[rewards.kind]
    if config.trainer.debug:
        text = text.replace("in a process of its own", "in this process (trainer.debug); an error in it ends the run")
    elif rewards.kind not in IN_PROCESS:
        text += (
            f"; a response that it fails on, or takes more than {rewards.timeout_s:g} s for, gets "
            f"{rewards.failure_value:g}, and more than {rewards.max_failures} of them end the run"
        )
    return f"reward: {text}"


def _batches(config: Config) -> str:
    trainer = config.trainer
    rows = trainer.groups_per_batch * trainer.group_size
    fate = "consumed but not trained on" if trainer.skip_zero_variance else "forwarded too, with advantage 0"
    return (
        f"batches: {trainer.num_batches} of {trainer.groups_per_batch} groups ({rows} responses), up to "
        f"{trainer.mini_batches} optimizer steps each; weights are published every {trainer.sync_every} batch(es); "
        f"groups without reward variance are {fate}"
    )


def _behaviour(config: Config) -> str:
    if config.trainer.anchor == "bypass":
        return "behaviour_log_prob: not computed, except for the canary (the first responses of each version)"
    return "behaviour_log_prob: one eval-mode forward of every row under each version that sampled it (state cache)"


def _anchor(config: Config) -> str:
    trainer = config.trainer
    text = {
        "behaviour": "behaviour_log_prob itself, no forward of its own; lag is exactly 1 and not reported",
        "last_sync": "a second forward under the newest published version",
        "current": "a second forward under the live weights when the batch is taken",
        "bypass": "rollout_log_prob (mu), no forward; mismatch and lag stay inside the clipped ratio",
    }[trainer.anchor]
    if trainer.anchor == "last_sync" and trainer.sync_every == 1:
        text += "; with trainer.sync_every=1 these are the live weights, so this equals anchor `current`"
    return f"old_log_prob (anchor {trainer.anchor}): {text}"


def _correction(config: Config) -> str:
    correction = config.correction
    parts = [
        f"{name} weight: {_bounds(bounds)}"
        for name, bounds in (
            ("mismatch pi_b/mu", correction.mismatch),
            ("lag pi_p/pi_b", correction.lag),
            ("combined pi_p/mu", correction.combined),
        )
        if bounds is not None
    ]
    parts += [_rejection(rejection) for rejection in correction.rejections]
    if not parts:
        return "correction: none; the loss is not weighted"
    if config.weights_inside_loss:
        parts.append("formed inside the loss as pi/mu, micro-batch by micro-batch; advantages over all responses")
    if correction.batch_normalize:
        parts.append("divided by its mean over the whole batch")
    parts.append(
        f"denominator of the loss: {correction.denominator} tokens; non-finite log-probs: {correction.nonfinite}"
    )
    return "correction: " + "; ".join(parts)


def _bounds(bounds: Bounds) -> str:
    return f"{bounds.level} level, {bounds.mode} to {_interval(bounds.lower, bounds.upper)}"


def _rejection(rule: Rejection) -> str:
    what = "tokens" if rule.aggregate == "token" else "responses"
    value = f"{rule.aggregate} {rule.factor} {rule.statistic}"
    return f"rejects {what} whose {value} is outside {_interval(rule.lower, rule.upper)}"


def _interval(lower: float | None, upper: float | None) -> str:
    low, high = ("-" if bound is None else f"{bound:g}" for bound in (lower, upper))
    return f"[{low}, {high}]"


def _loss(config: Config) -> str:
    loss, trainer = config.loss, config.trainer
    if loss.kind == "reinforce":
        return f"loss: reinforce, no clip; {loss.aggregate}"
    clip = f"pi/old clipped to [{1 - loss.clip_low:g}, {1 + loss.clip_high:g}]"
    if loss.dual_clip is not None:
        clip += f", dual clip {loss.dual_clip:g} for negative advantages"
    if trainer.anchor_is_live and trainer.mini_batches == 1:
        clip += ", BUT IT CANNOT ACT: the anchor is the live policy and there is one mini-batch, so the ratio is 1"
    elif trainer.anchor_is_live:
        clip += ", which acts from the second mini-batch on (the first has ratio 1)"
    return f"loss: ppo_clip, {clip}; {loss.aggregate}"


def _staleness(config: Config) -> str:
    trainer = config.trainer
    if trainer.max_staleness == 0:
        alone = "; this is the synchronous loop" if trainer.sync_every == 1 else ""
        return f"staleness: 0, engine and trainer take turns at each publication{alone}"
    capacity = config.queue.capacity_groups
    reachable = min(trainer.max_staleness, reachable_staleness(capacity, trainer.groups_per_batch, trainer.sync_every))
    short = "" if reachable == trainer.max_staleness else ", below trainer.max_staleness for want of queue capacity"
    return (
        f"staleness: 0 to {reachable} versions, by admission (at most {capacity} groups outstanding){short}; groups "
        f"older than {trainer.max_staleness} versions would be dropped and counted"
    )


def reachable_staleness(capacity_groups: int, groups_per_batch: int, sync_every: int) -> int:
    """Versions by which the last of `capacity_groups` outstanding groups may be old when its batch is taken.

    Groups are submitted when a batch has been taken, before the next publication: the batch that holds the last of
    them is the one after (capacity - 1) // groups_per_batch others, with a publication every `sync_every` batches.
    """
    num_batches_ahead = (capacity_groups - 1) // groups_per_batch + 1
    return -(-num_batches_ahead // sync_every)


def cache_bytes(config: Config, num_parameters: int) -> int:
    """Host memory, over all ranks, of the versions that may be retained at once and the parking place of a visit."""
    return (config.trainer.max_versions + 1) * num_parameters * BYTES_PER_PARAMETER


def _cache(config: Config, num_parameters: int) -> str:
    versions, num_bytes = config.trainer.max_versions, cache_bytes(config, num_parameters)
    return (
        f"state cache: at most {versions} versions of {num_parameters:,} float32 parameters, plus one parking place "
        f"while visiting: {num_bytes:,} bytes over all ranks; a version "
        "nobody asks for is not copied"
    )


def _canary(config: Config) -> str:
    return (
        "canary: the first responses of each version must agree with the trainer to "
        f"{config.trainer.canary_bound_nats:g} nats on average, or the run stops before it trains on them"
    )
