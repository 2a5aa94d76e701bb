"""The nouns that travel between tasks, engines, queue and learner.

All are frozen. B rows, T response tokens, P prompt tokens, S = P + T. Prompts are left-padded to P and
responses right-padded to T; `position_ids` count real tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fsdp_async.checks import is_finite, is_whole, only_of
from fsdp_async.errors import InputError

FinishReason = Literal["stop", "length", "aborted"]

GroupKey = tuple[str, int]
"""(prompt_id, epoch): the identity of a group."""


@dataclass(frozen=True)
class VersionSpan:
    """Response positions `start <= t < stop` were sampled by `version`."""

    version: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        whole = is_whole(self.version, 0) and is_whole(self.start, 0) and is_whole(self.stop, 1)
        if not whole or self.start >= self.stop:
            raise InputError(f"{self} is no span: needs integers, version >= 0 and 0 <= start < stop")


@dataclass(frozen=True)
class Prompt:
    """One question. `info` carries what the task's reward needs (the answer, for instance)."""

    prompt_id: str
    token_ids: tuple[int, ...]
    task: str
    info: Mapping[str, Any] = field(default_factory=dict)
    epoch: int = 0

    def __post_init__(self) -> None:
        _freeze(self, "token_ids")
        if not self.token_ids:
            raise InputError(f"prompt {self.prompt_id!r} has no tokens; a policy needs at least one to condition on")
        _refuse_no_ids(f"prompt {self.prompt_id!r}", self.token_ids)

    @property
    def key(self) -> GroupKey:
        """Identity of the group that answers it; survives being issued again."""
        return (self.prompt_id, self.epoch)


@dataclass(frozen=True)
class Response:
    """What was sampled for a prompt once; a sample.

    `rollout_log_prob[t]` is the engine's log-prob of `token_ids[t]` (nats, temperature applied);
    `response_mask[t]` is True where the policy sampled the token. The spans tile the response. Sequences
    of any kind are kept as tuples, of plain Python numbers.
    """

    prompt_id: str
    sample_index: int
    token_ids: tuple[int, ...]
    rollout_log_prob: tuple[float, ...]
    response_mask: tuple[bool, ...]
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    temperature: float
    reward: float | None = None
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where = f"response {self.prompt_id!r}[{self.sample_index}]"
        _freeze(self, "token_ids", "rollout_log_prob", "response_mask", "version_spans")
        lengths = {"token_ids": len(self.token_ids), "rollout_log_prob": len(self.rollout_log_prob),
                   "response_mask": len(self.response_mask)}  # fmt: skip
        if len(set(lengths.values())) != 1:
            raise InputError(f"{where}: lengths differ: {lengths}; all three describe the same tokens")
        if self.finish_reason not in get_args(FinishReason):
            raise InputError(f"{where}: finish_reason {self.finish_reason!r} is none of {get_args(FinishReason)}")
        _refuse_no_ids(where, self.token_ids)
        self._check_numbers(where)
        edges = [0, *(span.stop for span in self.version_spans)]
        starts = [span.start for span in self.version_spans]
        if starts != edges[:-1] or edges[-1] != len(self.token_ids):
            raise InputError(f"{where}: version_spans {self.version_spans} do not tile {len(self.token_ids)} tokens")

    def _check_numbers(self, where: str) -> None:
        if not is_whole(self.sample_index, 0):
            raise InputError(f"{where}: sample_index must be an integer of at least 0")
        if not only_of(self.response_mask, bool):
            raise InputError(f"{where}: response_mask must hold True and False only; pass bool(x) for each")
        if not only_of(self.rollout_log_prob, float, int):
            raise InputError(f"{where}: rollout_log_prob must hold plain numbers; pass tensor.tolist()")
        if not is_finite(self.temperature) or self.temperature <= 0:
            raise InputError(f"{where}: temperature={self.temperature!r} must be above 0 and finite")
        if self.reward is not None and not is_finite(self.reward):
            raise InputError(f"{where}: reward={self.reward!r} must be a finite number, or None before it is scored")

    def with_reward(self, reward: float) -> Response:
        """The same response, scored."""
        return replace(self, reward=reward)


@dataclass(frozen=True)
class PartialResponse:
    """The tokens of a response that was interrupted; empty where none was drawn yet. Fields as in `Response`."""

    token_ids: tuple[int, ...]
    rollout_log_prob: tuple[float, ...]
    version_spans: tuple[VersionSpan, ...]


PartialGroup = tuple[PartialResponse, ...]
"""One for each sample of a group."""


@dataclass(frozen=True)
class ResponseGroup:
    """The G responses to one prompt; groups move through the queue whole."""

    prompt: Prompt
    responses: tuple[Response, ...]
    submitted_version: int

    @property
    def sample_ids(self) -> tuple[tuple[str, int, int], ...]:
        """Identity (prompt_id, sample_index, epoch) of each sample; survives being issued again."""
        return tuple((r.prompt_id, r.sample_index, self.prompt.epoch) for r in self.responses)


@dataclass(frozen=True)
class TrainBatch:
    """What one training step sees, as tensors on one device.

    Shapes: input_ids, attention_mask, position_ids [B,S] int64; response_mask [B,T] bool; rollout_log_prob
    [B,T] float32; versions [B,T] int64, -1 off the mask; rewards, temperature [B] float32; group_ids [B] int64.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    response_mask: Tensor
    rollout_log_prob: Tensor
    versions: Tensor
    rewards: Tensor
    group_ids: Tensor
    temperature: Tensor

    @property
    def num_rows(self) -> int:
        """B."""
        return int(self.response_mask.shape[0])

    @property
    def num_response_positions(self) -> int:
        """T, padding included."""
        return int(self.response_mask.shape[1])

    @property
    def sampled_versions(self) -> list[int]:
        """Behaviour versions of the tokens under the mask, ascending, each once."""
        return sorted(set(self.versions[self.response_mask].tolist()))

    def rows(self, index: Tensor | Sequence[int]) -> TrainBatch:
        """The batch restricted to the rows in `index` (integers [b], in that order).

        Raises:
            InputError: an index that is no integer; True and False would select rows 1 and 0.
        """
        where = torch.as_tensor(index, device=self.input_ids.device)
        if where.dim() != 1 or (where.numel() and (where.dtype == torch.bool or where.is_floating_point())):
            raise InputError(
                f"rows are selected by integers [b], not by {where.dtype} {list(where.shape)}; of a mask pass "
                "mask.nonzero().squeeze(1)"
            )
        where = where.to(torch.int64)
        return TrainBatch(**{f.name: getattr(self, f.name)[where] for f in fields(self)})


def _freeze(noun: Prompt | Response, *names: str) -> None:
    for name in names:
        object.__setattr__(noun, name, tuple(getattr(noun, name)))


def _refuse_no_ids(where: str, token_ids: tuple[int, ...]) -> None:
    if not only_of(token_ids, int) or min(token_ids, default=0) < 0:
        raise InputError(f"{where}: token_ids must be plain integers of at least 0; pass tensor.tolist()")
