"""A run that goes on equals one that was never interrupted."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_run import SMALL, Quiet

from fsdp_async.checkpoint import checkpoints_in, newest_checkpoint, read_state
from fsdp_async.config import parse_config
from fsdp_async.errors import CheckpointError, RunDirectoryError
from fsdp_async.resume import config_changes, generators, set_generators
from fsdp_async.run import run_training

SYNCHRONOUS = {"max_staleness": 0, "num_batches": 6, "eval_every": 3}


def small_config(directory, **sections):
    """A small run with a thread engine in `directory/run`."""
    base = {
        "run": {"output_dir": str(directory / "run")},
        "warm_start": {"directory": str(directory.parent / "warm_start")},
        "rollout": {"engine": "thread", "record_weights": False},
        "logging": {"tensorboard": False},
        "checkpoint": {"every": 2, "keep": 10},
    }
    base["run"]["record_batches"] = False
    names = SMALL.keys() | base.keys() | sections.keys()
    return parse_config({n: SMALL.get(n, {}) | base.get(n, {}) | sections.get(n, {}) for n in names})


def _events(run):
    """Everything that was logged, but for times and what came of them."""
    timed = {"time_s", "training_clock_s", "trainer_spans", "engine_spans", "ledger", "cache_bytes"}
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in record.items() if key not in timed}
        for record in records
        if record["event"] not in ("checkpoint", "end")
    ]


def checkpoint_tensors(checkpoint):
    """Every tensor of a checkpoint, by name."""
    reader = dcp.FileSystemReader(checkpoint / "tensors")
    metadata = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if hasattr(entry, "properties")
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("resume") / "whole"
    run_training(small_config(directory, trainer=SYNCHRONOUS), Quiet())
    return directory / "run"


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(uninterrupted):
    directory = uninterrupted.parent.parent / "again"
    shutil.rmtree(directory, ignore_errors=True)
    run = directory / "run"
    shutil.copytree(uninterrupted, run)
    # As if it had been killed during step 5: what it had done since its checkpoint after step 4 is lost.
    shutil.rmtree(run / "checkpoints" / "step_000006")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:-3]) + lines[-3][:20])
    view = Quiet()
    summary = run_training(
        small_config(directory, trainer=SYNCHRONOUS, run={"resume": "auto", "output_dir": str(run)}), view
    )
    assert (
        view.lines[0]
        == f"resume: after step 4, from {run / 'checkpoints' / 'step_000004'}; changed since then: nothing"
    )
    assert not any(line.startswith("start: ") for line in view.lines)

    assert _events(run) == _events(uninterrupted)
    steps = [event["step"] for event in _events(run) if event["event"] == "step"]
    assert steps == [1, 2, 3, 4, 5, 6]
    expected, found = (checkpoint_tensors(r / "checkpoints" / "step_000006") for r in (uninterrupted, run))
    assert len(expected) > 40
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    first, second = (read_state(r / "checkpoints" / "step_000006") for r in (uninterrupted, run))
    for key in ("loop", "task", "num_optimizer_steps", "versions"):
        assert {**first, "loop": 0}[key] == {**second, "loop": 0}[key]
    assert first["num_optimizer_steps"] > 6, "something was learned"

    assert summary["samples_consumed"] == summary["samples_submitted"] == 6 * 4 * 4
    ledgers = [json.loads(line)["ledger"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert ledgers[-1]["num_reissued"] == 4 * 4, "the batch that was in flight"
    discarded = (run / "metrics.discarded.jsonl").read_text().splitlines()
    assert len(discarded) >= 1
    record = json.loads((run / "run.json").read_text())
    assert [entry["after_step"] for entry in record["resumed"]] == [4]


def test_versions_and_queue_of_an_asynchronous_run_come_back(tmp_path):
    first = small_config(tmp_path / "a", trainer={"num_batches": 8, "eval_every": 100})
    stopper = Quiet()
    stopper.observe = lambda event, step, values: (
        stopper.trainer.request_stop() if (event, step) == ("publication", 3) else None
    )
    run_training(first, stopper)
    path, problems = newest_checkpoint(tmp_path / "a" / "run" / "checkpoints")
    assert (path.name, problems) == ("step_000003", [])
    state = read_state(path)
    outstanding = state["queue"]["outstanding"]
    assert len(outstanding) == 6
    again = small_config(tmp_path / "a", trainer={"num_batches": 5, "eval_every": 100}, run={
        "resume": str(tmp_path / "a" / "run"), "output_dir": str(tmp_path / "b" / "run")})  # fmt: skip
    summary = run_training(again, Quiet())
    records = [json.loads(line) for line in (tmp_path / "b" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if r["event"] == "step"] == [1, 2, 3, 4, 5]
    assert [r["version"] for r in records if r["event"] == "publication"] == [0, 1, 2, 3, 4, 5]
    assert summary["samples_consumed"] == summary["samples_submitted"] == 5 * 16
    in_flight = sum(item[2] for item in outstanding if item[3] is None)
    assert records[-1]["ledger"]["num_reissued"] == in_flight
    step4 = next(r for r in records if r["event"] == "step" and r["step"] == 4)
    # Queued groups keep the versions that sampled them, and the staleness that goes with them.
    kept = {span[0] for item in outstanding[:4] if item[3] for r in item[3]["responses"] for span in r["version_spans"]}
    assert kept <= set(step4["behaviour_versions"])
    assert step4["staleness_max"] == 3 - min(step4["behaviour_versions"]) <= 2
    assert step4["canary_gap_nats"], "a new engine shows again that it holds what was published"


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (lambda p: (p / "state.json").write_text("{"), "state.json has 1 bytes instead of"),
        (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda p: next((p / "tensors").glob("*.distcp")).unlink(), "distcp is missing"),
        (lambda p: _flip(next((p / "tensors").glob("*.distcp"))), "is damaged: its checksum"),
        (lambda p: (p / "manifest.json").write_text("[]"), "cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(uninterrupted, tmp_path, harm, problem):
    shutil.copytree(uninterrupted / "checkpoints", tmp_path / "checkpoints")
    harm(tmp_path / "checkpoints" / "step_000006")
    path, problems = newest_checkpoint(tmp_path / "checkpoints")
    assert path == tmp_path / "checkpoints" / "step_000004"
    (told,) = problems
    assert "step_000006: " in told
    assert problem in told


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"num_layers": 3}}, r"model\.num_layers=3, but .* was made with 2, .*old shape"),
        ({"task": {"num_digits": 2, "eval_items": 16}}, r"task\.eval_items=16, but .* was made with 64"),
        ({"run": {"seed": 5}}, r"run\.seed=5, .* it orders the stream"),
        ({"trainer": {"sync_every": 2}}, r"trainer\.sync_every=2"),
        ({"warm_start": {"num_steps": 31}}, r"warm_start\.num_steps=31, .* no effect"),
    ],
)
def test_what_cannot_change_is_refused_with_the_reason_and_nothing_is_touched(uninterrupted, sections, message):
    changed = {name: dict(values) for name, values in sections.items()}
    changed["run"] = changed.get("run", {}) | {"resume": "auto", "output_dir": str(uninterrupted)}
    changed["trainer"] = SYNCHRONOUS | changed.get("trainer", {})
    before = {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=message):
        run_training(small_config(uninterrupted.parent, **changed), Quiet())
    assert {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*") if path.is_file()} == before


def test_what_may_change_takes_effect_and_is_shown(uninterrupted, tmp_path):
    run = tmp_path / "run"
    config = small_config(
        tmp_path,
        trainer=SYNCHRONOUS | {"num_batches": 8},
        optim={"lr": 5e-4},
        run={"resume": str(uninterrupted), "output_dir": str(run)},
        warm_start={"directory": str(uninterrupted.parent.parent / "warm_start")},
    )
    view = Quiet()
    run_training(config, view)
    assert "optim.lr 0.001 -> 0.0005; trainer.num_batches 6 -> 8" in view.lines[0]
    steps = [event for event in _events(run) if event["event"] == "step"]
    assert [step["lr"] for step in steps] == [1e-3] * 6 + [5e-4] * 2


def test_a_run_that_is_complete_has_nothing_to_do(uninterrupted):
    before = (uninterrupted / "metrics.jsonl").read_bytes()
    config = small_config(
        uninterrupted.parent, trainer=SYNCHRONOUS, run={"resume": "auto", "output_dir": str(uninterrupted)}
    )
    summary = run_training(config, Quiet())
    assert summary["num_batches"] == 6
    assert summary["outcome"] == "completed"
    assert (uninterrupted / "metrics.jsonl").read_bytes() == before


def test_auto_starts_anew_where_there_is_no_checkpoint_and_keeps_what_was_there(tmp_path):
    config = small_config(tmp_path, trainer=SYNCHRONOUS | {"num_batches": 1}, run={
        "resume": "auto", "output_dir": str(tmp_path / "run")}, checkpoint={"every": 0, "keep": 2})  # fmt: skip
    run_training(config, Quiet())
    (tmp_path / "run" / "mine").write_text("x")
    run_training(config, Quiet())
    (old,) = tmp_path.glob("run.old-*")
    assert (old / "mine").read_text() == "x"
    assert len([e for e in _events(tmp_path / "run") if e["event"] == "step"]) == 1


@pytest.mark.parametrize("place", ["nowhere", "empty"])
def test_a_place_without_a_checkpoint_is_refused_by_name(tmp_path, place):
    (tmp_path / "empty").mkdir()
    config = small_config(tmp_path, run={"resume": str(tmp_path / place), "output_dir": str(tmp_path / "run")})
    with pytest.raises(CheckpointError, match=f"no whole checkpoint in .*{place}"):
        run_training(config, Quiet())


def test_another_runs_directory_is_not_written_to_by_a_run_that_resumes_from_elsewhere(uninterrupted, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    config = small_config(tmp_path, run={"resume": str(uninterrupted), "output_dir": str(tmp_path / "run")})
    with pytest.raises(RunDirectoryError, match="not empty"):
        run_training(config, Quiet())


def test_only_the_last_checkpoints_are_kept(tmp_path):
    config = small_config(tmp_path, trainer=SYNCHRONOUS | {"num_batches": 5}, checkpoint={"every": 1, "keep": 2})
    run_training(config, Quiet())
    names = [path.name for path in checkpoints_in(tmp_path / "run" / "checkpoints")]
    assert names == ["step_000004", "step_000005"]
    saved = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    saved = [record for record in saved if record["event"] == "checkpoint"]
    assert [record["step"] for record in saved] == [1, 2, 3, 4, 5]
    assert all(0 < record["blocked_s"] < record["blocked_s"] + record["write_s"] for record in saved)


def test_differences_of_configs_are_found_at_every_depth():
    old = {"a": {"b": 1, "c": [1, 2]}, "gone": 1}
    new = {"a": {"b": 2, "c": [1, 2]}, "new": {"x": 1}}
    assert config_changes(old, new) == {"a.b": (1, 2), "gone": (1, None), "new": (None, {"x": 1})}


def test_generators_survive_json():
    before = generators()
    random.seed(3)
    np.random.seed(4)
    random.gauss(0, 1)
    np.random.standard_normal()
    state = json.loads(json.dumps(generators()))
    drawn = [random.random(), random.gauss(0, 1), np.random.standard_normal(), np.random.random()]
    set_generators(state)
    assert [random.random(), random.gauss(0, 1), np.random.standard_normal(), np.random.random()] == drawn
    set_generators(before)


def test_a_damaged_checkpoint_is_replaced_when_the_run_comes_there_again(uninterrupted, tmp_path):
    run = shutil.copytree(uninterrupted, tmp_path / "run")
    last = run / "checkpoints" / "step_000006"
    (last / "state.json").write_bytes((last / "state.json").read_bytes()[:100])
    config = small_config(uninterrupted.parent, trainer=SYNCHRONOUS)
    again = dataclasses.replace(config.run, output_dir=str(run), resume="auto")
    run_training(dataclasses.replace(config, run=again), Quiet())
    assert newest_checkpoint(run / "checkpoints") == (last, [])
    assert not [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]


def test_checkpoints_are_in_order_of_their_steps_and_not_of_their_names(uninterrupted, tmp_path):
    for step in (999999, 1000000):
        shutil.copytree(uninterrupted / "checkpoints" / "step_000006", tmp_path / f"step_{step}")
    assert newest_checkpoint(tmp_path) == (tmp_path / "step_1000000", [])
