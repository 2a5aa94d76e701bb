"""Optional packages: who needs which, and how to get it.

Owns the one function by which they are reached. Each has one file that imports it, and that file is imported here,
late: importing `fsdp_async` loads none of them.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from fsdp_async.errors import ConfigError


@dataclass(frozen=True)
class _Backend:
    """`module` is the only file that imports `package`; `extra` installs it."""

    module: str
    package: str
    extra: str


BACKENDS = {
    "reasoning_gym": _Backend("fsdp_async.reasoning_gym_backend", "reasoning-gym", "data"),
    "math_verify": _Backend("fsdp_async.math_verify_backend", "math-verify", "data"),
    "wandb": _Backend("fsdp_async.wandb_backend", "wandb", "wandb"),
    "trackio": _Backend("fsdp_async.trackio_backend", "trackio", "trackio"),
    "plotly": _Backend("fsdp_async.plotly_backend", "plotly", "report"),
}


def resolve_backend(name: str) -> ModuleType:
    """Import the one file that needs the optional package `name` (a key of `BACKENDS`).

    Raises:
        ConfigError: the package, or one that it needs, cannot be imported; names the extra that brings it.
    """
    backend = BACKENDS[name]
    try:
        return importlib.import_module(backend.module)
    except ImportError as error:
        raise _missing(name, backend, str(error)) from error


def require_package(name: str) -> Path:
    """The file that needs the optional package `name`, for a process that will run it; nothing is imported here.

    Raises:
        ConfigError: the package is not installed; names the extra that brings it.
    """
    backend = BACKENDS[name]
    if importlib.util.find_spec(backend.package) is None:
        raise _missing(name, backend, f"no module named {backend.package!r}")
    return Path(__file__).with_name(f"{backend.module.rpartition('.')[2]}.py")


def _missing(name: str, backend: _Backend, why: str) -> ConfigError:
    return ConfigError(
        f"{name} needs the package {backend.package}, which cannot be imported ({why}); "
        f"pip install 'fsdp-async[{backend.extra}]' brings it"
    )
