"""Verifiable rewards.

Owns what a reward is, which one is configured, and the score of a group. The two that compare tokens are here and pure;
those that may fail run in a process of their own (`scoring.py`). A reward that is no number is an error here and never
reaches a gradient.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol, get_args

from fsdp_async.backends import resolve_backend
from fsdp_async.checks import require_choice
from fsdp_async.errors import ConfigError, InputError, NonFiniteError
from fsdp_async.scoring import Limits, ProcessReward, TextSource
from fsdp_async.scoring_inline import InlineReward
from fsdp_async.types import Prompt, Response, ResponseGroup

RewardKind = Literal["exact", "graded", "python", "math_verify", "reasoning_gym"]
IN_PROCESS = ("exact", "graded")
LIBRARIES = ("math_verify", "reasoning_gym")
RIGHT = 0.99
"""From here on a library's score says that the response is right."""
FUNCTION = re.compile(r"(.+\.py|[^\W\d]\w*(\.[^\W\d]\w*)*):[^\W\d]\w*")


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """How a response is scored.

    `exact`: 1 for the whole right answer and its end, else 0. `graded`: 1 for it, else the share of right tokens.
    `math_verify`: 1 if it is the same mathematics as the answer, else 0. `reasoning_gym`: what the dataset that asked
    says. `python`: `function`, "package.module:name" or "my_reward.py:name", called as
    function(prompt_text, response_text, info) -> float in a process of its own; info["answer"] is the right answer. A
    response on which one of the last three raises, takes longer than `timeout_s`, ends its process or gives no finite
    number gets `failure_value` and is counted; more than `max_failures` of them end the run.
    """

    kind: RewardKind = "exact"
    function: str | None = None
    failure_value: float = 0.0
    max_failures: int = 10
    timeout_s: float = 5.0

    def __post_init__(self) -> None:
        require_choice("rewards.kind", self.kind, get_args(RewardKind))
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"rewards.timeout_s={self.timeout_s}: must be above 0 and finite")
        if self.max_failures < 0:
            raise ConfigError(f"rewards.max_failures={self.max_failures}: must not be negative")
        if not math.isfinite(self.failure_value):
            raise ConfigError(f"rewards.failure_value={self.failure_value}: must be a finite number")
        self._refuse_inert()
        if self.kind == "python" and not FUNCTION.fullmatch(self.function or ""):
            raise ConfigError(
                f"rewards.function={self.function!r} with rewards.kind=python: name a function as "
                '"package.module:name" or "my_reward.py:name"'
            )

    def _refuse_inert(self) -> None:
        names: tuple[str, ...] = () if self.kind == "python" else ("function",)
        if self.kind in IN_PROCESS:
            names += ("failure_value", "max_failures", "timeout_s")
        for name in names:
            if (value := getattr(self, name)) != getattr(RewardConfig, name):
                raise ConfigError(
                    f"rewards.{name}={value} has no effect with rewards.kind={self.kind}; leave it out, or choose "
                    f"rewards.kind={'python' if name == 'function' else 'python, math_verify or reasoning_gym'}"
                )


class Reward(Protocol):
    """Scores one response."""

    def score(self, prompt: Prompt, response: Response) -> float:
        """A finite number, larger is better."""
        ...


class OwnedReward(Reward, Protocol):
    """A reward that counts its failures and is closed by whoever had it built."""

    @property
    def failures(self) -> Mapping[str, int]:
        """How many responses could not be scored, by kind."""
        ...

    @property
    def first_failures(self) -> Mapping[str, str]:
        """The first message of each kind."""
        ...

    def close(self) -> None:
        """Leave nothing behind."""
        ...


@dataclass(frozen=True)
class AnswerMatch:
    """Compares the sampled tokens with `prompt.info["answer_ids"]`, which end in EOS.

    With `source`, a response that ended and says the same text in other tokens is right, too.
    """

    graded: bool
    source: TextSource | None = None

    def score(self, prompt: Prompt, response: Response) -> float:
        """1.0 for equality; with `graded` the share of positions that agree, over the longer of the two.

        Raises:
            InputError: the prompt carries no answer.
        """
        if not prompt.info.get("answer_ids"):
            raise InputError(
                f"prompt {prompt.prompt_id!r} has no info['answer_ids'] (token ids that end in EOS); add them, or "
                "score with a reward of your own"
            )
        answer: tuple[int, ...] = tuple(prompt.info["answer_ids"])
        if response.token_ids == answer or self._says(answer, response):
            return 1.0
        if not self.graded:
            return 0.0
        agree = sum(a == b for a, b in zip(response.token_ids, answer, strict=False))
        return agree / max(len(answer), len(response.token_ids))

    def _says(self, answer: tuple[int, ...], response: Response) -> bool:
        if self.source is None or response.finish_reason != "stop":
            return False
        return self.source.decode(response.token_ids) == self.source.decode(answer)

    @property
    def failures(self) -> Mapping[str, int]:
        """None: what could fail is an error."""
        return {}

    @property
    def first_failures(self) -> Mapping[str, str]:
        """None."""
        return {}

    def close(self) -> None:
        """Nothing to leave behind."""


@dataclass(frozen=True)
class Verdict:
    """1.0 where the score of `reward` is at least `RIGHT`, else 0.0, also where it failed, whatever a failure earns."""

    reward: ProcessReward | InlineReward

    def score(self, prompt: Prompt, response: Response) -> float:
        """1.0 or 0.0."""
        value = self.reward.try_score(prompt, response)
        return float(value is not None and value >= RIGHT)


def build_reward(config: RewardConfig, source: TextSource | None = None, *, inline: bool = False) -> OwnedReward:
    """The configured reward, for prompts that carry their answers; close it.

    `source` (a task) gives the texts; `exact` and `graded` can do without, and then compare tokens alone. `inline`
    calls a function in this process, where a debugger sees it; `timeout_s`, `max_failures` and `failure_value` then do
    not act.

    Raises:
        ConfigError: the function cannot be imported, or an optional package is not installed; names what is missing.
    """
    if config.kind in IN_PROCESS:
        return AnswerMatch(graded=config.kind == "graded", source=source)
    if source is None:
        raise ConfigError(f"rewards.kind={config.kind} scores texts: pass the task to build_reward, too")
    function = config.function
    if config.kind in LIBRARIES:
        function = f"{resolve_backend(config.kind).__file__}:score"
    assert function is not None
    if inline:
        return InlineReward(function, source)
    return ProcessReward(function, source, Limits(config.timeout_s, config.max_failures, config.failure_value))


def build_right(config: RewardConfig, reward: OwnedReward, source: TextSource | None = None) -> Reward:
    """What counts as right when accuracy is measured, whatever training rewards.

    A response that equals the answer, in text where `source` (a task) gives it, else token for token; with
    `math_verify` and `reasoning_gym`, which know that an answer can be written in several ways, one that `reward`
    scores at least `RIGHT`.
    """
    if config.kind in LIBRARIES:
        assert isinstance(reward, ProcessReward | InlineReward)
        return Verdict(reward)
    return AnswerMatch(graded=False, source=source)


def score_group(group: ResponseGroup, reward: Reward) -> ResponseGroup:
    """The same group with every response scored.

    Raises:
        NonFiniteError: a reward is NaN or infinite.
    """
    scored = []
    for response in group.responses:
        value = float(reward.score(group.prompt, response))
        if not math.isfinite(value):
            raise NonFiniteError(
                f"reward of {response.prompt_id!r}[{response.sample_index}] is {value}; it must be a finite number"
            )
        scored.append(response.with_reward(value))
    return replace(group, responses=tuple(scored))
