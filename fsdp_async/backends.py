"""Optional packages: who needs which, and how to get it.

Owns the one function by which they are reached. Each has one file that imports it, and that file is imported here,
late: importing `fsdp_async` loads none of them.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
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
        raise ConfigError(
            f"{name} needs the package {backend.package}, which cannot be imported ({error}); "
            f"pip install 'fsdp-async[{backend.extra}]' brings it"
        ) from error
