from __future__ import annotations

import dataclasses
import json
import os

import pytest
import torch
from builders import TINY

from fsdp_async import warm_start
from fsdp_async.errors import ConfigError, InputError, NonFiniteError, OutputError
from fsdp_async.files import write_model
from fsdp_async.modeling import ModelConfig, build_model
from fsdp_async.tasks import TaskConfig, build_task
from fsdp_async.warm_start import WarmStartConfig, find_warm_start, load_or_make

TASK_CONFIG = TaskConfig(num_digits=2, eval_items=10)
TASK = build_task(TASK_CONFIG, seed=0)


def _net(seed=0, config=TINY):
    return build_model(config, vocab_size=TASK.vocab_size, seed=seed)


def _config(tmp_path, **changes):
    return WarmStartConfig(**{"directory": str(tmp_path / "warm"), "num_steps": 12, "batch_size": 8} | changes)


def _path(config, *, model=TINY, task=TASK_CONFIG, seed=0):
    return find_warm_start(config, model, task, seed=seed)


def _same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_it_is_made_once_and_then_loaded_bit_for_bit(tmp_path):
    config, losses = _config(tmp_path, lr=3e-3), []
    made, loaded = _net(), _net(seed=5)
    load_or_make(made, TASK, config, _path(config), seed=0, on_step=lambda step, loss: losses.append(loss))
    assert len(losses) == 12
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    load_or_make(loaded, TASK, config, _path(config), seed=0, on_step=lambda step, loss: losses.append(loss))
    assert len(losses) == 12
    assert _same(made, loaded)
    assert [path.suffix for path in (tmp_path / "warm").iterdir()] == [".safetensors"]


def test_every_other_recipe_has_a_file_of_its_own(tmp_path):
    config = _config(tmp_path)
    paths = {
        _path(config),
        _path(_config(tmp_path, num_steps=13)),
        _path(_config(tmp_path, batch_size=9)),
        _path(_config(tmp_path, lr=2e-3)),
        _path(config, seed=1),
        _path(config, model=dataclasses.replace(TINY, num_layers=1)),
        _path(config, task=dataclasses.replace(TASK_CONFIG, num_digits=3)),
    }
    assert len(paths) == 7


def test_an_edited_task_file_is_another_recipe(tmp_path):
    file, found = tmp_path / "task.jsonl", set()
    for answer in ("1", "2"):
        file.write_text(json.dumps({"prompt": "a", "answer": answer}) + "\n")
        found.add(_path(_config(tmp_path), task=TaskConfig(kind="jsonl", path=str(file), eval_items=1)))
    assert len(found) == 2


def test_no_steps_and_no_path_leave_the_random_weights(tmp_path):
    config, net = WarmStartConfig(num_steps=0), _net()
    assert _path(config) is None
    load_or_make(net, TASK, config, None, seed=0)
    assert _same(net, _net())
    assert not (tmp_path / "warm").exists()


def test_a_path_that_is_not_there_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match=r"warm_start\.path=nowhere\.safetensors: no such file; give an existing"):
        _path(WarmStartConfig(path="nowhere.safetensors"))


@pytest.mark.parametrize("content", [b"", b"not a model", None])
def test_a_damaged_or_foreign_file_is_named_with_the_remedy_and_left_as_it_is(tmp_path, content):
    path = tmp_path / "start.safetensors"
    if content is None:
        write_model(path, _net(config=ModelConfig(hidden_size=64, num_layers=1)))
    else:
        path.write_bytes(content)
    before = path.read_bytes()
    config = WarmStartConfig(path=str(path))
    with pytest.raises(InputError, match=r"(?s)start\.safetensors does not fit this model or is damaged: .*delete it"):
        load_or_make(_net(), TASK, config, _path(config), seed=0)
    assert path.read_bytes() == before


def test_a_start_that_diverges_writes_nothing(tmp_path, monkeypatch):
    config = _config(tmp_path)
    honest = warm_start.token_log_probs
    monkeypatch.setattr(warm_start, "token_log_probs", lambda *args: honest(*args) * torch.nan)
    with pytest.raises(NonFiniteError, match=r"diverged at step 0: loss nan; lower warm_start\.lr=0\.001"):
        load_or_make(_net(), TASK, config, _path(config), seed=0)
    assert not (tmp_path / "warm").exists()


def test_a_start_that_diverges_in_its_last_step_writes_nothing(tmp_path, monkeypatch):
    class Diverging(warm_start.AdamW):
        def step(self):
            for parameter in self.param_groups[0]["params"]:
                parameter.data.mul_(torch.inf)

    monkeypatch.setattr(warm_start, "AdamW", Diverging)
    config = _config(tmp_path, num_steps=1)
    with pytest.raises(NonFiniteError, match=r"diverged at step 1: loss nan; lower warm_start\.lr=0\.001"):
        load_or_make(_net(), TASK, config, _path(config), seed=0)
    assert not (tmp_path / "warm").exists()


def test_others_may_read_a_start_that_was_made(tmp_path):
    config = _config(tmp_path, num_steps=1)
    before = os.umask(0o027)
    try:
        load_or_make(_net(), TASK, config, _path(config), seed=0)
    finally:
        os.umask(before)
    assert _path(config).stat().st_mode & 0o777 == 0o640


def test_a_disk_that_is_full_leaves_no_half_written_file(tmp_path, monkeypatch):
    config = _config(tmp_path, num_steps=1)

    def full(model, path):
        with open(path, "wb") as handle:
            handle.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fsdp_async.files.save_model", full)
    with pytest.raises(OutputError, match="No space left"):
        load_or_make(_net(), TASK, config, _path(config), seed=0)
    assert list((tmp_path / "warm").iterdir()) == []


@pytest.mark.parametrize("change", [{"num_steps": -1}, {"batch_size": 0}, {"lr": 0.0}, {"lr": float("inf")}])
def test_settings_that_cannot_be_are_refused(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        WarmStartConfig(**change)
