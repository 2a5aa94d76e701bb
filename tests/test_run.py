"""The real main job, small: what it writes, and whether each number in it is true."""

from __future__ import annotations

import dataclasses
import json
from itertools import islice

import pytest
import torch
from safetensors.torch import load_file, load_model

from fsdp_async import trainer as trainer_module
from fsdp_async.advantages import compute_advantages
from fsdp_async.batching import collate
from fsdp_async.config import parse_config
from fsdp_async.errors import CanaryError
from fsdp_async.generation import generate
from fsdp_async.losses import policy_loss
from fsdp_async.modeling import build_model, build_optimizer, response_log_prob
from fsdp_async.rewards import build_reward, score_group
from fsdp_async.rollout import SamplingParams
from fsdp_async.run import run_training
from fsdp_async.tasks import build_task
from fsdp_async.timeline import overlap_fraction, without
from fsdp_async.types import TrainBatch
from fsdp_async.warm_start import find_warm_start, load_or_make

# Engine and trainer compute the same float32 function on differently composed batches, one with a KV cache.
FP32_TOLERANCE = 2e-5


class Quiet:
    """A view that looks away."""

    def plan(self, lines):
        self.lines = lines

    def warm_start(self, step, loss):
        pass

    def observe(self, event, step, values):
        pass

    def trainer_ready(self, trainer):
        self.trainer = trainer

    def finished(self, summary, directory):
        self.directory = directory


SMALL = {
    "run": {"record_batches": True},
    "model": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 32,
    },
    "warm_start": {"num_steps": 30, "batch_size": 32, "lr": 3e-3},
    "task": {"num_digits": 3, "eval_items": 64},
    "rewards": {"kind": "graded"},
    "rollout": {"record_weights": True, "prompts_per_chunk": 2, "max_response_tokens": 5},
    "queue": {"capacity_groups": 6},
    "optim": {"lr": 1e-3},
    "trainer": {
        "num_batches": 8,
        "groups_per_batch": 4,
        "group_size": 4,
        "mini_batches": 2,
        "max_staleness": 2,
        "eval_every": 4,
    },
    "correction": {"mismatch": {"level": "token", "mode": "truncate", "upper": 2.0}},
}


def _config(directory, **sections):
    """The small run in `directory`, with keys of sections changed; a run ends in `directory/run`."""
    paths = {
        "run": {"output_dir": str(directory / "run")},
        "warm_start": {"directory": str(directory / "warm_start")},
    }
    names = SMALL.keys() | sections.keys()
    return parse_config({n: SMALL.get(n, {}) | paths.get(n, {}) | sections.get(n, {}) for n in names})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One asynchronous run with a child process, `last_sync` anchor, published every second batch."""
    directory = tmp_path_factory.mktemp("async")
    config = _config(directory, trainer={"anchor": "last_sync", "sync_every": 2})
    summary = run_training(config, Quiet())
    return config, directory / "run", summary


def _records(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _batches(run):
    return [load_file(path) for path in sorted((run / "batches").glob("*.safetensors"))]


def _engine_model(config, run, version):
    """A fresh unsharded model with the weights that the engine's process wrote to disk itself."""
    task = build_task(config.task, seed=config.run.seed)
    net = build_model(config.model, vocab_size=task.vocab_size, seed=999)
    load_model(net, run / "engine_weights" / f"v{version:06d}.safetensors")
    return net.eval()


def _train_batch(tensors):
    return TrainBatch(**{field.name: tensors[field.name] for field in dataclasses.fields(TrainBatch)})


def test_each_token_is_evaluated_under_the_weights_that_its_engine_had_received(finished):
    config, run, _ = finished
    versions = set()
    for tensors in _batches(run):
        batch = _train_batch(tensors)
        for version in batch.sampled_versions:
            with torch.no_grad():
                fresh = response_log_prob(_engine_model(config, run, version), batch)
            where = batch.versions == version
            torch.testing.assert_close(tensors["behaviour_log_prob"][where], fresh[where], rtol=0, atol=FP32_TOLERANCE)
            versions.add(version)
    assert len(versions) >= 3


def test_versions_differ_by_far_more_than_the_tolerance_they_are_compared_with(finished):
    config, run, _ = finished
    batch = _train_batch(_batches(run)[-1])
    with torch.no_grad():
        first, last = (response_log_prob(_engine_model(config, run, v), batch) for v in (0, 3))
    assert (first - last)[batch.response_mask].abs().max() > 100 * FP32_TOLERANCE


def test_with_both_sides_in_float32_the_engine_mismatch_is_numerically_nothing(finished):
    _, run, summary = finished
    for tensors in _batches(run):
        gap = (tensors["behaviour_log_prob"] - tensors["rollout_log_prob"])[tensors["response_mask"]]
        assert gap.abs().max() < FP32_TOLERANCE
    assert 0 <= summary["mismatch_kl_k3_mean"] < FP32_TOLERANCE**2
    assert summary["canary_gap_max"] < FP32_TOLERANCE


def test_mismatch_times_lag_times_update_is_the_whole_ratio(finished):
    _, run, _ = finished
    for tensors in _batches(run):
        mask = tensors["trained_mask"]
        pi, anchor, behaviour, mu = (
            tensors[name][mask].double()
            for name in ("log_prob", "old_log_prob", "behaviour_log_prob", "rollout_log_prob")
        )
        product = (behaviour - mu).exp() * (anchor - behaviour).exp() * (pi - anchor).exp()
        # float64 arithmetic on the recorded float32 numbers
        torch.testing.assert_close(product, (pi - mu).exp(), rtol=1e-14, atol=0)


def test_every_key_of_the_summary_follows_from_what_was_recorded(finished):
    _, run, summary = finished
    assert json.loads((run / "summary.json").read_text()) == summary
    records, batches = _records(run), _batches(run)
    steps = [r for r in records if r["event"] == "step"]
    evaluations = [r for r in records if r["event"] == "evaluation"]
    expected = {
        "outcome": "completed",
        "accuracy_first": evaluations[0]["accuracy"],
        "accuracy_last": evaluations[-1]["accuracy"],
        "wall_s": evaluations[-1]["time_s"],
        "num_versions": len([r for r in records if r["event"] == "publication"]),
        "num_batches": len(batches),
        "num_optimizer_steps": sum(r["num_optimizer_steps"] for r in steps),
        "num_skipped_steps": sum(r["num_skipped_steps"] for r in steps),
        "time_to_0.80_s": next((r["training_clock_s"] for r in evaluations if r["accuracy"] >= 0.8), None),
    }
    expected |= {
        f"samples_{k}": v for k, v in records[-1]["ledger"].items() if isinstance(v, int) and f"samples_{k}" in summary
    }
    spans = [
        (s, e) for r in records for phase, s, e in r["trainer_spans"] if phase in ("behaviour", "update", "publish")
    ]
    waits = [(s, e) for r in records for phase, s, e in r["trainer_spans"] if phase == "wait"]
    expected["overlap_fraction"] = overlap_fraction(
        without(spans, waits), [tuple(s) for r in records for s in r["engine_spans"]]
    )
    stale = torch.cat([r["version"] - t["versions"][t["response_mask"]] for r, t in zip(steps, batches, strict=True)])
    expected["staleness_mean"], expected["staleness_max"] = float(stale.double().mean()), int(stale.max())
    counts = [len(t["versions"][t["response_mask"]].unique()) for t in batches]
    expected["behaviour_versions_per_batch_mean"] = sum(counts) / len(counts)
    expected["behaviour_versions_per_batch_max"] = max(counts)

    def pooled_k3(numerator, denominator, mask):
        logs = torch.cat([(t[numerator] - t[denominator])[t[mask]] for t in batches]).double()
        return float((logs.expm1() - logs).mean())

    expected["mismatch_kl_k3_mean"] = pooled_k3("behaviour_log_prob", "rollout_log_prob", "response_mask")
    expected["lag_kl_k3_mean"] = pooled_k3("old_log_prob", "behaviour_log_prob", "response_mask")
    expected["update_kl_k3_mean"] = pooled_k3("log_prob", "old_log_prob", "trained_mask")
    seen, gaps = set(), []
    for tensors in batches:
        for version in tensors["versions"][tensors["response_mask"]].unique().tolist():
            if version not in seen:
                seen.add(version)
                where = tensors["versions"] == version
                gaps.append(
                    float((tensors["behaviour_log_prob"] - tensors["rollout_log_prob"])[where].abs().double().mean())
                )
    expected["canary_gap_max"] = max(gaps)
    assert summary.keys() == expected.keys()
    for key, value in expected.items():
        assert summary[key] == (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value), key


def test_the_run_was_asynchronous_and_accounts_for_every_sample(finished):
    config, _, summary = finished
    assert summary["staleness_max"] >= 1
    assert summary["staleness_max"] <= config.trainer.max_staleness
    assert summary["behaviour_versions_per_batch_max"] >= 2
    assert summary["lag_kl_k3_mean"] > 0
    assert summary["samples_consumed"] == 8 * 4 * 4
    assert summary["samples_submitted"] == summary["samples_produced"] + summary["samples_in_flight"]
    assert summary["samples_produced"] == (
        summary["samples_consumed"] + summary["samples_dropped"] + summary["samples_queued"]
    )


def test_the_run_record_says_what_was_run(finished):
    config, run, _ = finished
    record = json.loads((run / "run.json").read_text())
    assert record["config"]["trainer"]["anchor"] == "last_sync"
    assert parse_config(record["config"]) == config
    assert any("last_sync" in line for line in record["plan"])
    assert list((run).glob("**/events.out.tfevents*")), "TensorBoard events"


def _plain_loop(config):
    """Synchronous RL as anybody would write it: no FSDP, cache, queue, engine process or trainer."""
    task = build_task(config.task, seed=config.run.seed)
    net = build_model(config.model, vocab_size=task.vocab_size, seed=config.run.seed)
    path = find_warm_start(config.warm_start, config.model, config.task, seed=config.run.seed)
    load_or_make(net, task, config.warm_start, path, seed=config.run.seed)
    optimizer = build_optimizer(net, config.optim)
    reward, prompts = build_reward(config.rewards), task.prompts()
    sampling = SamplingParams(
        num_samples=config.trainer.group_size,
        max_response_tokens=config.rollout.max_response_tokens,
        temperature=1.0,
        eos_token_id=task.eos_token_id,
        pad_token_id=task.pad_token_id,
    )
    per_step = config.trainer.groups_per_batch // config.trainer.mini_batches
    for version in range(config.trainer.num_batches):
        net.eval()
        questions = list(islice(prompts, config.trainer.groups_per_batch))
        groups = generate(net, questions, sampling, version=version, seed=config.run.seed)
        batch = collate([score_group(group, reward) for group in groups], pad_token_id=task.pad_token_id)
        with torch.no_grad():
            old = response_log_prob(net, batch)
        weights = (old - batch.rollout_log_prob).exp().clamp(max=2.0) * batch.response_mask
        advantages = compute_advantages(batch.rewards, batch.group_ids, config.advantages)
        net.train()
        for start in range(0, config.trainer.groups_per_batch, per_step):
            rows = ((batch.group_ids >= start) & (batch.group_ids < start + per_step)).nonzero().squeeze(1)
            part = batch.rows(rows)
            optimizer.zero_grad()
            policy_loss(
                response_log_prob(net, part),
                old[rows],
                advantages[rows],
                part.response_mask,
                config.loss,
                weights=weights[rows],
            ).loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), config.optim.max_grad_norm)
            optimizer.step()
    return net


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_staleness_zero_is_the_plain_synchronous_loop_bit_for_bit(tmp_path, engine):
    config = _config(
        tmp_path,
        rollout={"engine": engine, "prompts_per_chunk": 4},
        trainer={"num_batches": 4, "max_staleness": 0, "sync_every": 1, "skip_zero_variance": False},
    )
    summary = run_training(config, Quiet())
    trained = _engine_model(config, tmp_path / "run", 4).state_dict()
    plain = _plain_loop(config).state_dict()
    assert summary["staleness_max"] == 0
    # Loading may overlap with publishing, which feeds it; nothing else may.
    records = _records(tmp_path / "run")
    training = [(s, e) for r in records for phase, s, e in r["trainer_spans"] if phase in ("behaviour", "update")]
    assert overlap_fraction(training, [tuple(s) for r in records for s in r["engine_spans"]]) == 0.0
    assert summary["num_optimizer_steps"] == 8
    assert trained.keys() == plain.keys()
    for name in plain:
        assert torch.equal(trained[name], plain[name]), name


def test_the_first_mini_batch_of_a_synchronous_run_has_ratio_one(tmp_path):
    config = _config(
        tmp_path,
        rollout={"engine": "thread"},
        trainer={"num_batches": 3, "mini_batches": 1, "max_staleness": 0, "sync_every": 1},
    )
    run_training(config, Quiet())
    for tensors in _batches(tmp_path / "run"):
        mask = tensors["trained_mask"]
        ratio = (tensors["log_prob"] - tensors["rollout_log_prob"])[mask].exp()
        torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=FP32_TOLERANCE)


TOKEN_TIS = {"level": "token", "mode": "truncate", "upper": 2.0}


@pytest.mark.parametrize(
    ("anchor", "loss", "correction"),
    [
        ("current", "ppo_clip", {"combined": TOKEN_TIS}),
        ("bypass", "ppo_clip", {}),
        ("bypass", "reinforce", {"combined": TOKEN_TIS}),
        ("behaviour", "reinforce", {}),
    ],
)
def test_each_anchor_and_loss_runs_and_reports_the_factors_it_has(tmp_path, anchor, loss, correction):
    config = _config(
        tmp_path,
        trainer={"num_batches": 3, "max_staleness": 1, "anchor": anchor},
        rollout={"engine": "thread"},
        correction={"mismatch": None} | correction,
        loss={"kind": loss},
    )
    summary = run_training(config, Quiet())
    assert summary["outcome"] == "completed"
    assert summary["num_optimizer_steps"] > 0
    assert (summary["lag_kl_k3_mean"] is None) == (anchor in ("behaviour", "bypass"))
    assert summary["mismatch_kl_k3_mean"] < FP32_TOLERANCE**2
    assert summary["update_kl_k3_mean"] > 0


def test_an_engine_that_was_given_wrong_weights_is_found_before_its_tokens_are_trained_on(tmp_path, monkeypatch):
    honest = trainer_module.full_tensors
    num_publications = 0

    def sometimes_wrong(model):
        nonlocal num_publications
        num_publications += 1
        for name, tensor in honest(model):
            yield name, tensor.flip(0) if num_publications == 3 else tensor

    monkeypatch.setattr(trainer_module, "full_tensors", sometimes_wrong)
    config = _config(tmp_path, rollout={"engine": "thread"})
    with pytest.raises(CanaryError, match=r"version 2, engine-0: the engine's log-probs are \d"):
        run_training(config, Quiet())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["outcome"] == "failed"
    for tensors in _batches(tmp_path / "run"):
        assert tensors["versions"].max() < 2
    assert summary["samples_produced"] == summary["samples_consumed"] + summary["samples_dropped"]


def test_a_run_has_the_threads_it_was_given_and_the_process_its_own_again(tmp_path):
    seen = []

    class Watching(Quiet):
        def observe(self, event, step, values):
            seen.append(torch.get_num_threads())

    config = _config(tmp_path, run={"num_threads": 2}, rollout={"engine": "thread"}, trainer={"num_batches": 1})
    run_training(config, Watching())
    assert set(seen) == {2}
    assert torch.get_num_threads() == 1
