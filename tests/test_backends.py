from __future__ import annotations

import importlib
import sys

import pytest

from fsdp_async.backends import BACKENDS, resolve_backend
from fsdp_async.errors import ConfigError
from fsdp_async.rewards import RewardConfig, build_reward
from fsdp_async.tasks import TaskConfig, build_task


@pytest.fixture
def without_extras(monkeypatch):
    """As if no optional package were installed."""
    for package in ("reasoning_gym", "math_verify"):
        monkeypatch.setitem(sys.modules, package, None)
    for backend in BACKENDS.values():
        monkeypatch.delitem(sys.modules, backend.module, raising=False)


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_a_backend_is_the_module_that_imports_the_package(name):
    assert resolve_backend(name) is importlib.import_module(f"fsdp_async.{name}_backend")


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_a_missing_package_is_named_with_the_extra_that_brings_it(without_extras, name):
    with pytest.raises(ConfigError, match=rf"{name} needs the package .*import.*fsdp-async\[data\]"):
        resolve_backend(name)


def test_a_task_and_a_reward_say_which_extra_they_miss(without_extras):
    with pytest.raises(ConfigError, match=r"fsdp-async\[data\]"):
        build_task(TaskConfig(kind="reasoning_gym", name="basic_arithmetic"), seed=0)
    task = build_task(TaskConfig(num_digits=1, eval_items=5), seed=0)
    with pytest.raises(ConfigError, match=r"fsdp-async\[data\]"):
        build_reward(RewardConfig(kind="math_verify"), task)
