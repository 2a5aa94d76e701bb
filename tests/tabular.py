"""A policy small enough to enumerate, in float64.

The policy is a table: V = 3 tokens, T = 3 positions, one row of logits for each of the 1 + 3 + 9 prefixes; its 27
sequences are all there are, so an expectation is a sum without error.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

V, T = 3, 3
SEQUENCES = torch.tensor(list(itertools.product(range(V), repeat=T)))
FIRST_STATE = torch.tensor([0, 1, 1 + V])  # of each position
STATES = FIRST_STATE + torch.stack([SEQUENCES[:, 0] * 0, SEQUENCES[:, 0], SEQUENCES[:, 0] * V + SEQUENCES[:, 1]], dim=1)
EVERYTHING = torch.ones(len(SEQUENCES), T, dtype=torch.bool)


def table(seed: int) -> Tensor:
    """Logits [13, V] of a policy."""
    return torch.randn(1 + V + V * V, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def log_probs(logits: Tensor) -> Tensor:
    """Log-probs [27, T] of the tokens of all sequences."""
    return logits.log_softmax(dim=-1)[STATES, SEQUENCES]


def probability(log_prob: Tensor) -> Tensor:
    """Of the sequences, [27]."""
    return log_prob.detach().sum(dim=1).exp()


def gradient(function, logits: Tensor) -> Tensor:
    leaf = logits.clone().requires_grad_()
    (grad,) = torch.autograd.grad(function(leaf), leaf)
    return grad
