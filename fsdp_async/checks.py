"""Checks of single values, for settings and data that come from outside.

Owns the question whether one value is of the kind that it must be: Python would take True for 1, and a typo in a word
for the branch that happens to come last. A message names the value and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from numbers import Real

from fsdp_async.errors import ConfigError, FsdpAsyncError, InputError


def require_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse what is none of the words in `allowed`.

    Raises:
        ConfigError: another word, or no text.
    """
    if not isinstance(value, str) or value not in allowed:
        raise unknown_choice(name, value, allowed)


def unknown_choice(name: str, value: object, allowed: tuple[str, ...]) -> ConfigError:
    """The error to raise where every branch on a word has been tried."""
    return ConfigError(f"{name}={value!r} is unknown; choose one of {allowed}")


def require_flag(name: str, value: object) -> None:
    """Refuse what only counts as true or false, such as 1 or the text "no".

    Raises:
        ConfigError: neither True nor False.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} must be true or false")


def require_number(name: str, value: object, holds: Callable[[float], bool], allowed: str) -> None:
    """Refuse what is no number (True and text are none) or does not satisfy `holds`, which `allowed` puts in words.

    Raises:
        ConfigError: not such a number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not holds(value):
        raise ConfigError(f"{name}={value!r} must be {allowed}")


def require_whole(
    name: str, value: object, least: int, error: type[ConfigError] | type[InputError] = ConfigError
) -> None:
    """Refuse what is no integer (True and 2.0 are none) of at least `least`.

    Raises:
        FsdpAsyncError: `error`.
    """
    if not is_whole(value, least):
        raise error(f"{name}={value!r} must be an integer of at least {least}")


def is_whole(value: object, least: int) -> bool:
    """Whether `value` is an integer (not a bool) of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_finite(value: object) -> bool:
    """Whether `value` is a real number, neither NaN nor infinite."""
    return isinstance(value, Real) and math.isfinite(value)


def only_of(values: Iterable[object], *kinds: type) -> bool:
    """Whether every value is of exactly one of `kinds`; runs no Python code for each value."""
    return set(map(type, values)) <= set(kinds)


def require_type(name: str, value: object, kind: type, error: type[FsdpAsyncError] = InputError) -> None:
    """Refuse what is no `kind`.

    Raises:
        FsdpAsyncError: `error`.
    """
    if not isinstance(value, kind):
        raise error(f"{name} is {type(value).__name__}; need a {kind.__name__}")
