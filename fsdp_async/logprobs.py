"""Token log-probs and entropy from logits.

Owns the one place where a logit becomes a log-prob, for the engine that samples and for the trainer that learns, so
that equal logits give equal numbers in both. Logits are upcast to float32, divided by the temperature and normalised
in float32, in this order: half an ulp of a bfloat16 log-prob is up to 0.03 nats, and log p / T is no log-prob.

It promises that no float32 copy of all logits ever exists: both directions work through chunks of tokens, the
backward pass recomputes each chunk, and what it writes is one gradient in the logits' dtype. The chunk size changes
no bit of a log-prob or of its gradient. It does not sample, and it does not support logits sharded over the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fsdp_async.errors import InputError

# Elements of one float32 chunk. A CPU wants the few passes over a chunk to stay in its cache; an accelerator wants
# kernels long enough to hide their launch.
_CHUNK_ELEMENTS_CPU = 2**18
_CHUNK_ELEMENTS_DEVICE = 2**26


def token_log_probs(
    logits: Tensor, target_ids: Tensor, *, temperature: float | Tensor = 1.0, chunk_tokens: int | None = None
) -> Tensor:
    """Log-probs of the target tokens under softmax(logits / temperature).

    Args:
        logits: [..., V], any floating dtype. A view such as `logits[:, :-1]` is read in place, not copied flat.
        target_ids: [...] int64 in [0, V).
        temperature: > 0; a number, or a tensor [B] with one value for each index of the first dimension.
        chunk_tokens: tokens to hold in float32 at a time; None picks a size that suits the device.

    Returns:
        [...] float32 in nats (float64 for float64 logits), differentiable once with respect to `logits`.

    Raises:
        InputError: shapes or dtypes do not fit, a target outside [0, V), or a temperature that is not positive and
            finite; in the backward pass, `create_graph=True`.
    """
    _check_logits(logits, chunk_tokens)
    if target_ids.dtype != torch.int64 or target_ids.shape != logits.shape[:-1]:
        raise InputError(
            f"target_ids is {target_ids.dtype} {list(target_ids.shape)}; logits {list(logits.shape)} need int64 "
            f"{list(logits.shape[:-1])}: one token id for each position"
        )
    divisor = _divisor(logits, temperature, target_ids)
    return _apply(_TokenLogProbs, logits, _rows(target_ids, logits.dim() - 1), divisor, chunk_tokens)


def token_entropy(logits: Tensor, *, temperature: float | Tensor = 1.0, chunk_tokens: int | None = None) -> Tensor:
    """Entropy of softmax(logits / temperature) at each position.

    A logit of -inf (a masked token) counts as probability 0.

    Args:
        logits: [..., V], any floating dtype.
        temperature: as in `token_log_probs`.
        chunk_tokens: as in `token_log_probs`.

    Returns:
        [...] float32 in nats (float64 for float64 logits), differentiable once with respect to `logits`.

    Raises:
        InputError: shapes or dtypes do not fit, or a temperature is not positive and finite; in the backward pass,
            `create_graph=True`.
    """
    _check_logits(logits, chunk_tokens)
    return _apply(_TokenEntropy, logits, None, _divisor(logits, temperature), chunk_tokens)


class _TokenLogProbs(torch.autograd.Function):
    """log p(target); d/d logits = (one-hot(target) - p) / T."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, divisor: Tensor | None, chunk_tokens: int) -> Tensor:
        ctx.save_for_backward(logits, targets, divisor)
        ctx.chunk_tokens = chunk_tokens
        result = torch.empty(logits.shape[:-1], dtype=_compute_dtype(logits), device=logits.device)
        for at in _chunks(logits, chunk_tokens):
            # log_softmax, and not logsumexp: it reduces each row alone, so a row's value does not depend on how many
            # rows or threads share the call.
            log_probs = torch.log_softmax(_tempered(logits, divisor, at), dim=-1)
            result[at] = log_probs.gather(-1, targets[at].unsqueeze(-1)).squeeze(-1)
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        _refuse_second_derivative()
        logits, targets, divisor = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for at in _chunks(logits, ctx.chunk_tokens):
            scale = _tempered(grad_output.unsqueeze(-1), divisor, at)
            chunk = torch.softmax(_tempered(logits, divisor, at), dim=-1).mul_(-scale)
            grad[at] = chunk.scatter_add_(-1, targets[at].unsqueeze(-1), scale)
        return grad, None, None, None


class _TokenEntropy(torch.autograd.Function):
    """H = -sum p log p; dH/d logits = -p (log p + H) / T."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, _: None, divisor: Tensor | None, chunk_tokens: int) -> Tensor:
        ctx.chunk_tokens = chunk_tokens
        result = torch.empty(logits.shape[:-1], dtype=_compute_dtype(logits), device=logits.device)
        for at in _chunks(logits, chunk_tokens):
            log_probs = _finite_log_probs(logits, divisor, at)
            result[at] = log_probs.exp().mul_(log_probs).sum(dim=-1).neg_()
        ctx.save_for_backward(logits, divisor, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        _refuse_second_derivative()
        logits, divisor, entropy = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for at in _chunks(logits, ctx.chunk_tokens):
            scale = _tempered(grad_output.unsqueeze(-1), divisor, at)
            log_probs = _finite_log_probs(logits, divisor, at)
            grad[at] = log_probs.exp().mul_(log_probs.add_(entropy[at].unsqueeze(-1))).mul_(-scale)
        return grad, None, None, None


def _apply(
    function: type[torch.autograd.Function],
    logits: Tensor,
    targets: Tensor | None,
    divisor: Tensor | None,
    chunk_tokens: int | None,
) -> Tensor:
    if chunk_tokens is None:
        elements = _CHUNK_ELEMENTS_CPU if logits.device.type == "cpu" else _CHUNK_ELEMENTS_DEVICE
        chunk_tokens = max(1, elements // logits.shape[-1])
    rows = _rows(logits, logits.dim() - 1)
    result: Tensor = function.apply(rows, targets, divisor, chunk_tokens)
    return result.reshape(logits.shape[:-1])


def _rows(tensor: Tensor, num_leading: int) -> Tensor:
    """View the first `num_leading` dimensions of a tensor as two, [B, T]; up to two of them without a copy."""
    if num_leading > 2:
        return tensor.flatten(0, num_leading - 2)
    for _ in range(2 - num_leading):
        tensor = tensor.unsqueeze(0)
    return tensor


def _chunks(logits: Tensor, chunk_tokens: int) -> Iterator[tuple[slice, slice]]:
    """Index pairs that tile the leading [B, T] in chunks of at most `chunk_tokens` positions."""
    num_rows, num_positions = logits.shape[:2]
    step = max(1, min(chunk_tokens, num_positions))
    num_together = max(1, chunk_tokens // max(1, num_positions))
    for row in range(0, num_rows, num_together):
        for position in range(0, num_positions, step):
            yield slice(row, row + num_together), slice(position, position + step)


def _tempered(values: Tensor, divisor: Tensor | None, at: tuple[slice, slice]) -> Tensor:
    chunk = values[at].to(_compute_dtype(values))
    return chunk if divisor is None else chunk / divisor[at].unsqueeze(-1)


def _finite_log_probs(logits: Tensor, divisor: Tensor | None, at: tuple[slice, slice]) -> Tensor:
    """Log-probs of a chunk with -inf made finite, because 0 x -inf would be NaN where the limit is 0."""
    log_probs = torch.log_softmax(_tempered(logits, divisor, at), dim=-1)
    return log_probs.clamp_(min=torch.finfo(log_probs.dtype).min)


def _refuse_second_derivative() -> None:
    # Grad mode is on inside a backward pass only under create_graph. `once_differentiable` would not do: it lets the
    # gradient pass for a constant where the incoming gradient is one.
    if torch.is_grad_enabled():
        raise InputError(
            "create_graph=True through token_log_probs or token_entropy: their second derivative is not implemented; "
            "use torch.log_softmax on float32 logits where one is needed"
        )


def _compute_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _divisor(logits: Tensor, temperature: float | Tensor, target_ids: Tensor | None = None) -> Tensor | None:
    """The temperature of every position as `_rows` sees them, or None where it is 1 everywhere.

    Always a tensor on the device: accelerators divide by a Python number by multiplying with its reciprocal, and the
    engine (a number) and the trainer (a tensor) would differ in the last bit. Targets are judged here, too, since all
    numbers come from the device in one transfer.
    """
    given = torch.as_tensor(temperature, dtype=_compute_dtype(logits), device=logits.device)
    if given.requires_grad:
        raise InputError("temperature requires grad; its gradient is not computed: pass temperature.detach()")
    if given.dim() > 0 and (logits.dim() < 2 or given.shape != logits.shape[:1]):
        raise InputError(
            f"temperature has shape {list(given.shape)}; logits {list(logits.shape)} need a number or "
            f"{list(logits.shape[:1]) if logits.dim() > 1 else 'nothing else'}: one value for each row"
        )
    if given.numel() == 0:
        return None
    ids = [] if target_ids is None or not target_ids.numel() else [end.double() for end in target_ids.aminmax()]
    low, high, *found = torch.stack([*(end.double() for end in given.aminmax()), *ids]).tolist()
    if found and not (found[0] >= 0 and found[1] < logits.shape[-1]):
        raise InputError(
            f"target_ids spans [{found[0]:.0f}, {found[1]:.0f}]; token ids of {logits.shape[-1]} logits lie in "
            f"[0, {logits.shape[-1] - 1}]: were padding labels such as -100, or ids of another vocabulary, passed?"
        )
    if not (low > 0 and math.isfinite(high)):
        raise InputError(
            f"temperature spans [{low}, {high}]; every value must be positive and finite: greedy has no log-probs"
        )
    if low == high == 1.0:
        return None
    positions = given.reshape(given.shape + (1,) * (logits.dim() - 1 - given.dim())).expand(logits.shape[:-1])
    return _rows(positions, logits.dim() - 1)


def _check_logits(logits: Tensor, chunk_tokens: int | None) -> None:
    if logits.dim() < 1 or logits.shape[-1] == 0 or not logits.is_floating_point():
        raise InputError(
            f"logits is {logits.dtype} {list(logits.shape)}; need a floating dtype and [..., V] with V > 0"
        )
    if chunk_tokens is not None and chunk_tokens < 1:
        raise InputError(f"chunk_tokens={chunk_tokens} must be at least 1, or None for a size that suits the device")
