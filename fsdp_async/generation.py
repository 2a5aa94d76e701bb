"""Sampling from a transformers model.

Owns the loop that draws responses with a KV cache and records what each token's log-prob and version was. It uses no
global random state: a response depends on the weights, the seed and the prompt's identity, not on what else is
generated with it (up to float32 rounding) or when.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from fsdp_async.batching import position_ids
from fsdp_async.devices import device_of
from fsdp_async.logprobs import token_log_probs
from fsdp_async.rollout import SamplingParams
from fsdp_async.types import (
    FinishReason,
    GroupKey,
    PartialGroup,
    PartialResponse,
    Prompt,
    Response,
    ResponseGroup,
    VersionSpan,
)


def generate(
    model: nn.Module,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    version: int,
    seed: int,
    on_step: Callable[[], None] | None = None,
    is_over: Callable[[bool], bool] = bool,
) -> list[ResponseGroup]:
    """Answer every prompt `params.num_samples` times, without interruption.

    Args:
        model: a causal LM of transformers in eval mode, plain or under FSDP2; called through its root module.
        prompts: N prompts of any lengths.
        params: how to sample.
        version: what the tokens are labelled with, as behaviour and as submitted version.
        seed: with the prompt's identity, seeds the draws of its responses.
        on_step: called before every forward; may raise to give up.
        is_over: told whether every response has ended, says whether to stop; ranks of one sharded model agree by it.

    Returns:
        One group a prompt, in order. A sampled EOS (or another end) is part of the response and under the mask;
        `finish_reason` is "length" for a response that reached `max_response_tokens` without it.
    """
    generation = Generation(model, prompts, params, seed=seed)
    while not is_over(generation.is_done):
        if on_step is not None:
            on_step()
        generation.step(version)
    return generation.groups(version)


@dataclass
class _Row:
    """A response under way."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    starts: list[tuple[int, int]] = field(default_factory=list)
    """(version, first position) of each span."""
    finish_reason: FinishReason | None = None

    def append(self, token: int, log_prob: float, version: int, params: SamplingParams) -> None:
        if not self.starts or self.starts[-1][0] != version:
            self.starts.append((version, len(self.tokens)))
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        self.finish_reason = _finish_reason(self.tokens, params)

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        stops = [start for _, start in self.starts[1:]] + [len(self.tokens)]
        return tuple(VersionSpan(v, start, stop) for (v, start), stop in zip(self.starts, stops, strict=True))


class Generation:
    """A set of prompts being answered, which may change weights between any two tokens.

    Args:
        model: as for `generate`.
        prompts: at least one.
        params: how to sample.
        seed: with a prompt's identity, seeds the draws of its responses.
        partials: what is there already of some groups. Their tokens count towards the budget, and the draws
            go on where they ended.
    """

    def __init__(
        self,
        model: nn.Module,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        seed: int,
        partials: Mapping[GroupKey, PartialGroup] | None = None,
    ) -> None:
        self._model = model
        self._device = device_of(model)
        self._prompts = list(prompts)
        self._params = params
        self._uniforms = torch.cat([_uniforms(prompt, params, seed) for prompt in prompts])
        begun = partials or {}
        self._rows = [row for p in self._prompts for row in _rows_of(begun.get(p.key), params)]
        self._active: list[int] = []
        self._input: tuple[Tensor, Tensor, Tensor] | None = None
        self._cache = DynamicCache()

    @property
    def is_done(self) -> bool:
        """Every response has ended."""
        return all(row.finish_reason for row in self._rows)

    def weights_changed(self) -> None:
        """The next token is drawn under other weights: what the KV cache holds was computed with the old ones."""
        self._input = None

    def restart(self) -> None:
        """Forget all tokens drawn so far."""
        self._rows = [_Row() for _ in self._rows]
        self._input = None

    def step(self, version: int) -> None:
        """Draw one more token of every response that has not ended, and label it with `version`.

        Where all have ended it is one more forward, for ranks that must take part in it.
        """
        with torch.no_grad():
            logits = self._prefill() if self._input is None else self._forward(*self._input)
            lengths = torch.tensor([min(len(self._rows[i].tokens), self._uniforms.shape[1] - 1) for i in self._active])
            draws = self._uniforms[torch.tensor(self._active), lengths].to(self._device)
            token = _draw(logits, draws, self._params.temperature)
            log_prob = token_log_probs(logits, token, temperature=self._params.temperature)
        for index, drawn, value in zip(self._active, token.tolist(), log_prob.tolist(), strict=True):
            # Those that have ended stay in the cache until it is built anew; what is drawn for them is nobody's.
            if self._rows[index].finish_reason is None:
                self._rows[index].append(drawn, value, version, self._params)
        assert self._input is not None
        _, attention, positions = self._input
        ids = token.unsqueeze(1)
        self._input = (ids, torch.cat([attention, torch.ones_like(ids)], dim=1), positions[:, -1:] + 1)

    def partials(self) -> dict[GroupKey, PartialGroup]:
        """What is there so far; only groups of which a token has been drawn."""
        return {
            prompt.key: tuple(PartialResponse(tuple(r.tokens), tuple(r.log_probs), r.spans) for r in rows)
            for prompt, rows in self._by_prompt()
            if any(row.tokens for row in rows)
        }

    def groups(self, submitted_version: int) -> list[ResponseGroup]:
        """The finished responses; `is_done` must hold."""
        return [
            ResponseGroup(
                prompt, tuple(_response(prompt, i, row, self._params) for i, row in enumerate(rows)), submitted_version
            )
            for prompt, rows in self._by_prompt()
        ]

    def _by_prompt(self) -> list[tuple[Prompt, list[_Row]]]:
        size = self._params.num_samples
        return [(p, self._rows[i * size : (i + 1) * size]) for i, p in enumerate(self._prompts)]

    def _prefill(self) -> Tensor:
        """Read prompts and what was answered so far into a new KV cache; logits [R,V] of the rows that go on."""
        self._cache = DynamicCache()
        if any(row.tokens for row in self._rows):
            self._active = [i for i, row in enumerate(self._rows) if row.finish_reason is None]
            size = self._params.num_samples
            known = [[*self._prompts[i // size].token_ids, *self._rows[i].tokens] for i in self._active]
            return self._forward(*self._left_padded(known))
        # Each prompt is read once; its responses share what was read.
        num = self._params.num_samples
        self._active = list(range(len(self._rows)))
        ids, attention, positions = self._left_padded([p.token_ids for p in self._prompts])
        logits = self._forward(ids, attention, positions)
        self._cache.batch_repeat_interleave(num)
        self._input = (ids, attention.repeat_interleave(num, dim=0), positions.repeat_interleave(num, dim=0))
        return logits.repeat_interleave(num, dim=0)

    def _left_padded(self, sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids, attention mask and positions [N,S] of sequences of any lengths, where the model is."""
        width = max(map(len, sequences))
        pads = [width - len(sequence) for sequence in sequences]
        filler = self._params.pad_token_id
        ids = torch.tensor([[filler] * pad + [*sequence] for pad, sequence in zip(pads, sequences, strict=True)])
        attention = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads])
        return ids.to(self._device), attention.to(self._device), position_ids(attention).to(self._device)

    def _forward(self, ids: Tensor, attention: Tensor, positions: Tensor) -> Tensor:
        self._input = (ids, attention, positions)
        output: Any = self._model(
            input_ids=ids,
            attention_mask=attention,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits


def _rows_of(partial: PartialGroup | None, params: SamplingParams) -> list[_Row]:
    if partial is None:
        return [_Row() for _ in range(params.num_samples)]
    return [
        _Row(
            [*part.token_ids],
            [*part.rollout_log_prob],
            [(span.version, span.start) for span in part.version_spans],
            _finish_reason(part.token_ids, params),
        )
        for part in partial
    ]


def _finish_reason(tokens: Sequence[int], params: SamplingParams) -> FinishReason | None:
    if tokens and (tokens[-1] == params.eos_token_id or tokens[-1] in params.stop_token_ids):
        return "stop"
    return "length" if len(tokens) >= params.max_response_tokens else None


def _draw(logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
    """Inverse-CDF sampling: the first token [R] whose cumulative probability exceeds `uniform` [R] in [0, 1)."""
    cumulative = (logits.double() / temperature).softmax(dim=-1).cumsum(dim=-1)
    # Normalised by its own last value, so that rounding cannot leave a uniform above the whole mass.
    return (cumulative / cumulative[:, -1:] <= uniform.unsqueeze(1)).sum(dim=-1)


def _uniforms(prompt: Prompt, params: SamplingParams, seed: int) -> Tensor:
    """Draws [G,T] float64 of one prompt."""
    digest = hashlib.sha256(f"{seed}/{prompt.prompt_id}/{prompt.epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.rand(params.num_samples, params.max_response_tokens, generator=generator, dtype=torch.float64)


def _response(prompt: Prompt, index: int, row: _Row, params: SamplingParams) -> Response:
    assert row.finish_reason is not None, "a response is made of a row that has ended"
    return Response(
        prompt_id=prompt.prompt_id,
        sample_index=index,
        token_ids=tuple(row.tokens),
        rollout_log_prob=tuple(row.log_probs),
        response_mask=(True,) * len(row.tokens),
        version_spans=row.spans,
        finish_reason=row.finish_reason,
        temperature=params.temperature,
    )
