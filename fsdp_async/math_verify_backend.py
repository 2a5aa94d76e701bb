"""math-verify: is the response the same mathematics as the answer?

The only file that imports math_verify. It runs in the process of `scoring_worker.py`, which loads it by its path, so it
imports nothing of this package. Time limits are those of `rewards.timeout_s`; the library's own are off.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

# It warns that somebody else must watch the clock: somebody does.
for name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(name).setLevel(logging.ERROR)


def score(prompt_text: str, response_text: str, info: Mapping[str, Any]) -> float:
    """1.0 where the response, or an expression in it, equals `info["answer"]`; else 0.0, also if it is no mathematics.

    Raises:
        ValueError: the answer itself is no mathematics, so that no response could be right.
    """
    gold = _gold(info["answer"])
    return float(any(verify(gold, found, timeout_seconds=None) for found in _readings(response_text)))


@lru_cache(maxsize=4096)
def _gold(answer: str) -> list[Any]:
    gold: list[Any] = next(_readings(answer), [])
    if not gold:
        raise ValueError(f"the answer {answer!r} cannot be read as mathematics")
    return gold


def _readings(text: str) -> Iterator[list[Any]]:
    """The whole text as one expression (`2*x` would be found to be 2 otherwise), then whatever is found in it."""
    for candidate in (text if "$" in text or "\\" in text else f"${text}$", text):
        found = parse(candidate, parsing_timeout=None)
        if not all(isinstance(part, str) for part in found):  # what it cannot read it gives back as text
            yield found
