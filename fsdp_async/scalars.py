"""Numbers out of an event's nested values, for loggers that keep series of numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def scalars(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Numbers of nested mappings by path; lists are not scalars, and what is keyed by version is not a series."""
    for key, value in values.items():
        if str(key).isdigit():
            continue
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", float(value)
