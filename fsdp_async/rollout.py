"""What the trainer asks of a rollout engine.

Owns the protocol, the sampling parameters and the engine's settings; engines live in files of their own, and nothing
above this file knows which one it talks to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from fsdp_async.buckets import WeightBucket
from fsdp_async.checks import require_choice, require_flag, require_number, require_whole
from fsdp_async.devices import DeviceKind, DtypeKind
from fsdp_async.errors import ConfigError
from fsdp_async.types import GroupKey, PartialGroup, Prompt, ResponseGroup

EngineKind = Literal["process", "thread"]
MIN_TEMPERATURE = 1e-3
MIN_BUCKET_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How responses are drawn: `num_samples` to each prompt, from the whole tempered distribution.

    A response ends with `eos_token_id`, with one of `stop_token_ids`, or at its greatest length.
    """

    num_samples: int
    max_response_tokens: int
    temperature: float
    eos_token_id: int
    pad_token_id: int
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("num_samples", 1), ("max_response_tokens", 1), ("eos_token_id", 0), ("pad_token_id", 0)):
            require_whole(f"sampling: {name}", getattr(self, name), least)
        for token in self.stop_token_ids:
            require_whole("sampling: each of stop_token_ids", token, 0)
        require_number(
            "sampling: temperature",
            self.temperature,
            lambda x: MIN_TEMPERATURE <= x < math.inf,
            f"at least {MIN_TEMPERATURE} and finite; greedy responses have no log-prob ratio",
        )


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Settings of the transformers engine. Times in seconds.

    `prompts_per_chunk` prompts are generated together. With `interrupt` new weights are taken between two tokens, and
    responses under way go on under them (`partial`: each token is labelled with its own version) or begin anew
    (`partial=false`: one version each); without it the weights wait for the end of the chunk, which suits short
    responses. `partial` null means true. `answer_timeout_s` is how long an engine may give no sign of life (it gives
    one at least each second), `load_timeout_s` how long it may take to copy a bucket of weights. An engine that died or
    fell silent is started again, at most `max_restarts` times without a batch trained in between, and its prompts are
    issued again. `record_weights` has the engine write what it received to `engine_weights/` of the run. `device` and
    `dtype` `auto` are those of the trainer; another dtype makes the engine's mismatch larger, and generation faster.
    """

    engine: EngineKind = "process"
    temperature: float = 1.0
    top_p: float = 1.0
    max_response_tokens: int = 8
    prompts_per_chunk: int = 16
    interrupt: bool = True
    partial: bool | None = None
    max_restarts: int = 3
    start_timeout_s: float = 120.0
    answer_timeout_s: float = 20.0
    load_timeout_s: float = 120.0
    bucket_bytes: int = 64 << 20
    record_weights: bool = False
    device: DeviceKind = "auto"
    dtype: DtypeKind = "auto"

    def __post_init__(self) -> None:
        require_choice("rollout.engine", self.engine, get_args(EngineKind))
        require_choice("rollout.device", self.device, get_args(DeviceKind))
        require_choice("rollout.dtype", self.dtype, get_args(DtypeKind))
        for name in ("interrupt", "record_weights", *(["partial"] if self.partial is not None else [])):
            require_flag(f"rollout.{name}", getattr(self, name))
        if not MIN_TEMPERATURE <= self.temperature < math.inf:
            raise ConfigError(
                f"rollout.temperature={self.temperature}: must be at least {MIN_TEMPERATURE} and finite; greedy "
                "responses have no log-prob ratio"
            )
        for name in ("max_response_tokens", "prompts_per_chunk"):
            if getattr(self, name) < 1:
                raise ConfigError(f"rollout.{name}={getattr(self, name)}: must be at least 1")
        if self.max_restarts < 0:
            raise ConfigError(f"rollout.max_restarts={self.max_restarts}: must not be negative")
        for name in ("start_timeout_s", "answer_timeout_s", "load_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"rollout.{name}={getattr(self, name)}: must be above 0 and finite")
        if self.bucket_bytes < MIN_BUCKET_BYTES:
            raise ConfigError(f"rollout.bucket_bytes={self.bucket_bytes}: must be at least {MIN_BUCKET_BYTES}")
        self._refuse_inert()

    def _refuse_inert(self) -> None:
        if self.engine == "thread" and self.start_timeout_s != RolloutConfig.start_timeout_s:
            raise ConfigError(
                f"rollout.start_timeout_s={self.start_timeout_s} has no effect with rollout.engine=thread, whose model "
                "is built before it starts; leave it out"
            )
        if self.top_p != 1.0:
            raise ConfigError(
                f"rollout.top_p={self.top_p}: must be 1. The trainer's policy is not truncated, so every ratio of a "
                "token would be the mass that was kept, not the difference of two policies"
            )
        if self.partial is not None and not self.interrupt:
            raise ConfigError(
                f"rollout.partial={self.partial} has no effect with rollout.interrupt=false: no response is ever "
                "interrupted; leave one out"
            )


class RolloutEngine(Protocol):
    """Generates under the weights loaded last. Everything but `poll` and `wait_loaded` returns at once.

    Every method raises `EngineDiedError` when the engine has ended (with its traceback or exit code), and
    `EngineTimeoutError` when it has work and gave no sign of life for the engine's timeout.
    """

    @property
    def name(self) -> str:
        """For messages."""
        ...

    @property
    def version(self) -> int | None:
        """The last version whose weights the engine itself said it holds."""
        ...

    def submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        partials: Mapping[GroupKey, PartialGroup] | None = None,
    ) -> None:
        """Queue prompts; their groups carry the version last handed to `load` as `submitted_version`.

        `partials` holds what is there already of some of them; their responses go on from it.
        """
        ...

    def poll(self, timeout_s: float) -> list[ResponseGroup]:
        """Finished groups; waits up to `timeout_s` for the first one. They are handed out before an error is raised."""
        ...

    def pause(self) -> None:
        """Generate nothing more after the token in hand, until `resume`; weights are still taken."""
        ...

    def resume(self) -> None:
        """Generate again."""
        ...

    def load(self, version: int, source: WeightBucket) -> None:
        """Hand over one bucket of weights; `version` is current once its last bucket has been copied."""
        ...

    def wait_loaded(self, version: int, bucket: int, timeout_s: float) -> None:
        """Wait until the engine has copied that bucket, so that its memory may be reused."""
        ...

    def drain_busy_spans(self) -> list[tuple[float, float]]:
        """(start, stop) on `time.monotonic` of real work (generating, loading) heard of since the last call."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """What a restarted engine needs beyond weights."""
        ...

    def restart(self) -> Mapping[GroupKey, PartialGroup]:
        """End the engine, dead or not, and start it again, without weights and without work.

        Returns what it had last told of unfinished groups.
        """
        ...

    def close(self) -> None:
        """End the engine; leaves no process, thread or memory. Idempotent, never raises for a dead engine."""
        ...
