"""A reward function in this very process, for whoever stands in a debugger.

Owns the call and nothing else: no time limit, no second chance; what the function raises goes through to where it can
be looked at. Runs that nobody watches use `scoring.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from fsdp_async.errors import ConfigError, RewardError
from fsdp_async.scoring import TextSource, reward_arguments
from fsdp_async.scoring_worker import describe, load
from fsdp_async.types import Prompt, Response


class InlineReward:
    """`function(prompt_text, response_text, info) -> float`, called where the caller stands.

    Args:
        function: "package.module:name" (the working directory is searched, too) or "file.py:name".
        source: the texts.

    Raises:
        ConfigError: the function cannot be imported; names what is missing.
    """

    def __init__(self, function: str, source: TextSource) -> None:
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            self._call = load(function)
        except Exception as error:
            raise ConfigError(
                f"rewards.function={function}: {describe(error)}; name a function that can be imported"
            ) from error
        self._function = function
        self._source = source

    @property
    def failures(self) -> Mapping[str, int]:
        """None: what fails is raised."""
        return {}

    @property
    def first_failures(self) -> Mapping[str, str]:
        """None."""
        return {}

    def score(self, prompt: Prompt, response: Response) -> float:
        """The function's value.

        Raises:
            Exception: whatever the function raises.
            RewardError: its value is no number.
        """
        value = self._call(*reward_arguments(self._source, prompt, response))
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise RewardError(
                f"{self._function} returned {value!r:.200} for {response.prompt_id!r}[{response.sample_index}]; return "
                "a number"
            ) from error

    def try_score(self, prompt: Prompt, response: Response) -> float | None:
        """The function's value; see `score`."""
        return self.score(prompt, response)

    def close(self) -> None:
        """Nothing to leave behind."""
