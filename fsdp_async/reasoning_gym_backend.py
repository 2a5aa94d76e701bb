"""reasoning-gym: questions by name, and its own score of a response.

The only file that imports reasoning_gym. `score` runs in the process of `scoring_worker.py`, which loads this file by
its path, so it imports nothing of this package; `tasks.py` turns its errors into ours.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

SEED = 0


def entries(name: str, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """All entries (question, answer, metadata) of the dataset; without `options["seed"]` those of seed 0.

    Raises:
        ValueError: no dataset has this name, or it refuses the options; says what is known.
    """
    dataset = _dataset(name, json.dumps({"seed": SEED, **options}, sort_keys=True))
    return (dataset[index] for index in range(len(dataset)))


def score(prompt_text: str, response_text: str, info: Mapping[str, Any]) -> float:
    """What the dataset `info["dataset"]` with `info["options"]` says of the response to `info["entry"]`, in [0, 1]."""
    dataset = _dataset(info["dataset"], json.dumps({"seed": SEED, **info["options"]}, sort_keys=True))
    return float(dataset.score_answer(answer=response_text, entry=info["entry"]))


@lru_cache(maxsize=8)
def _dataset(name: str, options: str) -> Any:
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=3)
        meant = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(sorted(DATASETS))}"
        raise ValueError(f"reasoning-gym has no dataset {name!r}; {meant}")
    try:
        return reasoning_gym.create_dataset(name, **json.loads(options))
    except (TypeError, ValueError, AssertionError, AttributeError) as error:
        raise ValueError(f"reasoning-gym's {name} refuses {options}: {error}") from error
