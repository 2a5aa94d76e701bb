"""Replay one recorded batch of a run under the weights of a checkpoint, and look at its three factors.

A run with run.record_batches=true keeps every batch. Its tokens are evaluated again, each under the version that
sampled it (as far as the checkpoint retains those versions), and under a state of your choice:

python examples/replay_batch.py outputs/look/batches/step_000003.safetensors outputs/look/checkpoints/step_000002
    --version N    the policy pi: a version that the checkpoint retains; its live model if left out
    --anchor N     the anchor pi_p: such a version, or live; what was recorded if left out

The checkpoint just before the step is the one to take: it holds the versions that sampled its tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fsdp_async.assembly import checked_task
from fsdp_async.behaviour import behaviour_log_probs, log_probs_at
from fsdp_async.config import Config, parse_config
from fsdp_async.errors import FsdpAsyncError, InputError
from fsdp_async.inspection import StoredCheckpoint, checkpoint_at
from fsdp_async.is_correction import CorrectionConfig, compute_correction
from fsdp_async.modeling import build_model, response_log_prob
from fsdp_async.state_cache import StateCache
from fsdp_async.tasks import Task
from fsdp_async.types import TrainBatch

NUM_WORST = 5


@dataclass(frozen=True)
class Replay:
    """Log-probs [B,T] of the sampled tokens under the four policies; `mask` [B,T] says which could be replayed."""

    batch: TrainBatch
    mask: Tensor
    mu: Tensor
    behaviour: Tensor
    anchor: Tensor
    policy: Tensor
    recorded_behaviour: Tensor | None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("batch", type=Path, help="outputs/NAME/batches/step_NNNNNN.safetensors")
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a run's directory (its newest checkpoint)")
    parser.add_argument("--version", help="the state that is pi; the checkpoint's live model if left out")
    parser.add_argument("--anchor", help="the state that is pi_p, or live; as it was recorded if left out")
    options = parser.parse_args()
    try:
        record = json.loads((options.batch.parent.parent / "run.json").read_text(encoding="utf-8"))
        config = parse_config(record["config"])
        task = checked_task(config)
        checkpoint = StoredCheckpoint(checkpoint_at(options.checkpoint))
        replayed = replay(load_file(options.batch), config, task, checkpoint, options.version, options.anchor)
    except (FsdpAsyncError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(f"batch {options.batch}, versions {replayed.batch.sampled_versions}; weights of {checkpoint.path}")
    for line in [*report(replayed), "", *worst_tokens(replayed, task)]:
        print(line)
    return 0


def replay(
    recorded: dict[str, Tensor],
    config: Config,
    task: Task,
    checkpoint: StoredCheckpoint,
    version: str | None,
    anchor: str | None,
) -> Replay:
    """Evaluate the recorded tokens again; InputError or CheckpointError where a state is not held."""
    batch = TrainBatch(**{field.name: recorded[field.name] for field in fields(TrainBatch)})
    held = held_versions(batch, checkpoint)
    mask = batch.response_mask & torch.isin(batch.versions, torch.tensor(held))
    part = replace(batch, response_mask=mask, versions=torch.where(mask, batch.versions, -1))
    wanted: dict[int | str, str | None] = {number: str(number) for number in held}
    wanted["policy"] = version
    if anchor is not None:
        wanted["anchor"] = None if anchor == "live" else anchor
    net = build_model(config.model, vocab_size=task.vocab_size, seed=config.run.seed)
    with StateCache(net) as cache:
        fill(cache, net, checkpoint, wanted)
        budget = config.trainer.micro_batch_tokens  # as in the run: other micro-batches round otherwise
        behaviour = behaviour_log_probs(cache, part, response_log_prob, micro_batch_tokens=budget)
        under = {
            name: log_probs_at(cache, name, part, response_log_prob, micro_batch_tokens=budget)
            for name in ("policy", "anchor")
            if name in wanted
        }
    return Replay(
        batch=batch,
        mask=mask,
        mu=batch.rollout_log_prob,
        behaviour=behaviour,
        anchor=under.get("anchor", recorded["old_log_prob"]),
        policy=under["policy"],
        recorded_behaviour=recorded.get("behaviour_log_prob"),
    )


def held_versions(batch: TrainBatch, checkpoint: StoredCheckpoint) -> list[int]:
    """Versions that sampled a token of the batch and that the checkpoint retains; at least one."""
    held = [number for number in batch.sampled_versions if str(number) in checkpoint.versions]
    if not held:
        raise InputError(
            f"the batch was sampled by versions {batch.sampled_versions}, {checkpoint.path} retains "
            f"{checkpoint.versions}; take the checkpoint before the step (smaller checkpoint.every, larger .keep)"
        )
    return held


def fill(cache: StateCache, net: nn.Module, checkpoint: StoredCheckpoint, wanted: dict[int | str, str | None]) -> None:
    """Put the checkpoint's states into the cache, one after another; None is its live model.

    Raises:
        InputError: the checkpoint is of another model.
    """
    parameters = dict(net.named_parameters())
    own = parameters | dict(net.named_buffers())
    for name, version in wanted.items():
        stored = checkpoint.tensors(version)
        if missing := parameters.keys() - stored.keys():
            raise InputError(f"{checkpoint.path} lacks {sorted(missing)}: it is of another model than the batch")
        with torch.no_grad():
            for fqn in own.keys() & stored.keys():
                own[fqn].copy_(stored[fqn])
        cache.mark_live_changed()
        cache.snapshot(name)


def report(replayed: Replay) -> Iterator[str]:
    """How many tokens were replayed, whether as recorded, and the statistics of each factor."""
    mask = replayed.mask
    num_tokens, num_sampled = int(mask.sum()), int(replayed.batch.response_mask.sum())
    yield f"{num_tokens} of {num_sampled} sampled tokens replayed under their own version"
    if replayed.recorded_behaviour is not None:
        gap = (replayed.behaviour - replayed.recorded_behaviour)[mask].abs().max()
        yield f"recorded and replayed behaviour log-probs differ by at most {gap:.2g} nats"
    yield ""
    yield f"{'factor':<10}{'ratio':<12}{'k3 nats':>10}{'mean ratio':>12}{'min':>10}{'max':>10}{'ESS':>10}"
    for factor, ratio, numerator, denominator in (
        ("mismatch", "pi_b / mu", replayed.behaviour, replayed.mu),
        ("lag", "pi_p / pi_b", replayed.anchor, replayed.behaviour),
        ("update", "pi / pi_p", replayed.policy, replayed.anchor),
        ("all", "pi / mu", replayed.policy, replayed.mu),
    ):
        found = compute_correction(numerator, denominator, mask, CorrectionConfig(nonfinite="mask")).metrics()
        names = ("kl_k3", "weight/mean", "weight/min", "weight/max", "ess_raw")
        k3, mean, least, most, ess = (found[f"combined/{name}"] for name in names)
        yield f"{factor:<10}{ratio:<12}{k3:>10.2e}{mean:>12.4f}{least:>10.4f}{most:>10.4f}{ess:>10.4f}"


def worst_tokens(replayed: Replay, task: Task) -> Iterator[str]:
    """The tokens with the largest mismatch: where to look first when the canary or the mismatch is too large."""
    gap = torch.where(replayed.mask, (replayed.behaviour - replayed.mu).abs(), -1.0)
    width = gap.shape[1]
    yield f"largest mismatch: {'row':>6}{'position':>10}{'version':>9}{'token':>9}{'log mu':>10}{'log pi_b':>10}"
    for index in gap.flatten().topk(min(NUM_WORST, int(replayed.mask.sum()))).indices.tolist():
        row, position = divmod(index, width)
        token = int(replayed.batch.input_ids[row, position - width])
        text = repr(task.decode((token,))) if token != task.eos_token_id else "end"
        mu, pi_b = replayed.mu[row, position], replayed.behaviour[row, position]
        version = int(replayed.batch.versions[row, position])
        yield f"{'':<17}{row:>7}{position:>10}{version:>9}{text:>9}{mu:>10.4f}{pi_b:>10.4f}"


if __name__ == "__main__":
    sys.exit(main())
