from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from fsdp_async.backends import BACKENDS, resolve_backend
from fsdp_async.errors import ConfigError
from fsdp_async.rewards import RewardConfig, build_reward
from fsdp_async.tasks import TaskConfig, build_task


@pytest.fixture
def without_extras(monkeypatch):
    """As if no optional package were installed."""
    for name, backend in BACKENDS.items():
        for module in [module for module in sys.modules if module.startswith(f"{name}.")]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, backend.module, raising=False)


# These run in a process of their own and are asked for by `require_package` alone.
LIBRARIES = {"wandb", "trackio"}
IMPORTED = sorted(BACKENDS.keys() - LIBRARIES)


@pytest.mark.parametrize("name", IMPORTED)
def test_a_backend_is_the_module_that_imports_the_package(name):
    assert resolve_backend(name) is importlib.import_module(f"fsdp_async.{name}_backend")


@pytest.mark.parametrize("name", IMPORTED)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(without_extras, name):
    with pytest.raises(ConfigError, match=rf"{name} needs the package .*import.*fsdp-async\[{BACKENDS[name].extra}\]"):
        resolve_backend(name)


@pytest.mark.parametrize("name", sorted(LIBRARIES))
def test_a_library_is_found_without_importing_it(name):
    code = (
        "import sys; from fsdp_async.backends import require_package; "
        f"print(require_package({name!r}).name, {name!r} in sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.split() == [f"{name}_backend.py", "False"]


def test_a_task_and_a_reward_say_which_extra_they_miss(without_extras):
    with pytest.raises(ConfigError, match=r"fsdp-async\[data\]"):
        build_task(TaskConfig(kind="reasoning_gym", name="basic_arithmetic"), seed=0)
    task = build_task(TaskConfig(num_digits=1, eval_items=5), seed=0)
    with pytest.raises(ConfigError, match=r"fsdp-async\[data\]"):
        build_reward(RewardConfig(kind="math_verify"), task)
