import math

import pytest
import torch
from torch import Tensor

from fsdp_async.errors import InputError
from fsdp_async.logprobs import token_entropy, token_log_probs


def example(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Logits [*shape] of a realistic spread, and target ids."""
    generator = torch.Generator().manual_seed(sum(shape))
    logits = torch.randn(shape, generator=generator).mul(4).to(dtype)
    return logits, torch.randint(shape[-1], shape[:-1], generator=generator)


def gradient(function, logits: Tensor, weights: Tensor, **kwargs) -> tuple[Tensor, Tensor]:
    """Value, and gradient of its `weights`-weighted sum with respect to `logits`."""
    leaf = logits.detach().clone().requires_grad_()
    value = function(leaf, **kwargs)
    (value * weights).sum().backward()
    return value.detach(), leaf.grad


def with_targets(targets: Tensor):
    return lambda logits, **kwargs: token_log_probs(logits, targets, **kwargs)


def plain_log_probs(targets: Tensor, temperature: float | Tensor = 1.0):
    return lambda logits: (
        (logits.double() / temperature).log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1).float()
    )


def test_values_are_log_softmax_of_tempered_logits():
    logits = torch.tensor([[0.0, math.log(3.0)], [math.log(8.0), 0.0]])
    # At T = 3/2 the second row's odds are 8 ** (2/3) = 4; at T = 1 the first row's odds are 3.
    values = token_log_probs(logits, torch.tensor([1, 1]), temperature=torch.tensor([1.0, 1.5]))
    # float32 rounding of three elementary functions
    torch.testing.assert_close(values, torch.tensor([math.log(0.75), math.log(0.2)]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.tensor([0.5, 1.0, 2.0])])
def test_values_and_gradients_match_a_float64_reference(dtype, temperature):
    logits, targets = example(3, 7, 97, dtype=dtype)
    weights = torch.linspace(-1, 1, 21).reshape(3, 7)
    divisor = temperature.reshape(3, 1, 1) if isinstance(temperature, Tensor) else temperature
    value, grad = gradient(with_targets(targets), logits, weights, temperature=temperature, chunk_tokens=4)
    expected, expected_grad = gradient(plain_log_probs(targets, divisor), logits, weights)
    assert value.dtype == torch.float32
    assert grad.dtype == dtype
    # values: a few float32 roundings at magnitude 30; gradients: one rounding to the logits' dtype
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(grad, expected_grad, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_gradients_match_finite_differences_in_float64():
    logits, targets = example(2, 3, 5, dtype=torch.float64)
    temperature = torch.tensor([0.7, 1.3], dtype=torch.float64)
    leaf = logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: token_log_probs(x, targets, temperature=temperature), leaf)
    assert torch.autograd.gradcheck(lambda x: token_entropy(x, temperature=temperature), leaf)


@pytest.mark.parametrize("chunk_tokens", [1, 2, 5, 6, 7, 20, None])
@pytest.mark.parametrize("shape", [(4, 6, 131), (24, 131), (2, 2, 6, 131)])
def test_the_chunk_size_changes_no_bit_of_value_or_gradient(chunk_tokens, shape):
    logits, targets = example(*shape, dtype=torch.bfloat16)
    weights = torch.linspace(-1, 1, 24).reshape(shape[:-1])
    temperature = torch.linspace(0.5, 1.5, shape[0])
    for function in (with_targets(targets), token_entropy):
        whole = gradient(function, logits, weights, temperature=temperature, chunk_tokens=24)
        chunked = gradient(function, logits, weights, temperature=temperature, chunk_tokens=chunk_tokens)
        assert torch.equal(chunked[0], whole[0])
        assert torch.equal(chunked[1], whole[1])


def test_engine_and_trainer_shapes_give_the_same_numbers():
    # The engine sees [B,V] with a number for T; the trainer sees a slice of [B,T+1,V] with T for each row.
    padded, _ = example(3, 6, 211, dtype=torch.bfloat16)
    trainer_view = padded[:, :-1]
    targets = torch.arange(15).reshape(3, 5)
    trainer = token_log_probs(trainer_view, targets, temperature=torch.full((3,), 0.9), chunk_tokens=7)
    for t in range(5):
        engine = token_log_probs(trainer_view[:, t].contiguous(), targets[:, t], temperature=0.9)
        assert torch.equal(trainer[:, t], engine)
    single = token_log_probs(trainer_view[1, 2], targets[1, 2], temperature=0.9)
    assert torch.equal(single, trainer[1, 2])


def test_bfloat16_logits_are_normalised_in_float32():
    logits, targets = example(1, 50, 1000, dtype=torch.bfloat16)
    exact = plain_log_probs(targets)(logits)
    in_bfloat16 = logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1).float()
    assert (token_log_probs(logits, targets) - exact).abs().max() < 1e-5  # float32 rounding at magnitude 20
    assert (in_bfloat16 - exact).abs().max() > 1e-3  # what the upcast is for


def test_a_dtype_narrower_than_the_tempered_logit_does_not_overflow():
    logits = torch.tensor([[6e4, 0.0]], dtype=torch.float16)  # / 0.5 is beyond float16
    assert token_log_probs(logits, torch.tensor([0]), temperature=0.5).item() == 0.0


def test_a_masked_token_has_no_probability_and_no_gradient():
    logits = torch.tensor([[1.0, -math.inf, 1.0]])
    value, grad = gradient(with_targets(torch.tensor([0])), logits, torch.ones(1))
    # two equal logits remain: log 1/2, gradient one-hot - p; exact up to the rounding of log 2
    torch.testing.assert_close(value, torch.tensor([-math.log(2.0)]))
    torch.testing.assert_close(grad, torch.tensor([[0.5, 0.0, -0.5]]))
    assert token_log_probs(logits, torch.tensor([1])).item() == -math.inf
    entropy, entropy_grad = gradient(token_entropy, logits, torch.ones(1))
    torch.testing.assert_close(entropy, torch.tensor([math.log(2.0)]))
    torch.testing.assert_close(entropy_grad, torch.zeros(1, 3), rtol=0, atol=1e-7)


def test_entropy_is_that_of_the_tempered_distribution():
    logits = torch.tensor([[0.0, math.log(9.0)], [0.0, 0.0]])
    # at T = 2 the odds are 3: H(1/4, 3/4); equal logits have log 2 at any T
    expected = torch.tensor([-0.25 * math.log(0.25) - 0.75 * math.log(0.75), math.log(2.0)])
    torch.testing.assert_close(token_entropy(logits, temperature=2.0), expected, rtol=1e-6, atol=0)


def test_no_float32_copy_of_all_logits_is_made(monkeypatch):
    logits, targets = example(64, 300, dtype=torch.bfloat16)
    largest = 0
    to = Tensor.to

    def probe(self, *args, **kwargs):
        nonlocal largest
        result = to(self, *args, **kwargs)
        largest = max(largest, result.numel() if result.dtype == torch.float32 else 0)
        return result

    monkeypatch.setattr(Tensor, "to", probe)
    gradient(with_targets(targets), logits, torch.ones(64), chunk_tokens=8)
    assert largest == 8 * 300


def test_no_graph_is_kept_under_no_grad():
    logits, targets = example(2, 3, 5)
    with torch.no_grad():
        assert not token_log_probs(logits.requires_grad_(), targets).requires_grad


def test_a_second_derivative_is_refused_in_words():
    logits, targets = example(2, 5)
    leaf = logits.requires_grad_()
    for value in (token_log_probs(leaf, targets), token_entropy(leaf)):
        with pytest.raises(InputError, match="second derivative is not implemented"):
            torch.autograd.grad(value.sum(), leaf, create_graph=True)


def test_empty_batches_give_empty_results():
    for shape in ((0, 4, 7), (3, 0, 7), (0, 7), (0, 2, 3, 7)):
        logits = torch.zeros(shape, requires_grad=True)
        value = token_log_probs(logits, torch.zeros(shape[:-1], dtype=torch.int64), temperature=torch.ones(shape[0]))
        value.sum().backward()
        assert value.shape == shape[:-1]
        assert logits.grad.shape == shape


@pytest.mark.parametrize(
    ("logits", "targets", "kwargs", "message"),
    [
        (torch.zeros(2, 3, 5), torch.zeros(2, 3), {}, "int64"),
        (torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.int64), {}, r"\[2, 4\].*need int64 \[2, 3\]"),
        (torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), {}, "floating"),
        (torch.zeros(2, 0), torch.zeros(2, dtype=torch.int64), {}, "V > 0"),
        (torch.zeros(2, 5), torch.tensor([0, 5]), {}, r"target_ids spans \[0, 5\].*lie in \[0, 4\]"),
        (torch.zeros(2, 5), torch.tensor([-100, 4]), {"temperature": 0.7}, r"target_ids spans \[-100, 4\]"),
        (torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), {"chunk_tokens": 0}, "chunk_tokens=0"),
        (torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), {"temperature": 0.0}, "positive and finite"),
        (torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), {"temperature": -1.0}, "positive and finite"),
        (torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), {"temperature": math.nan}, "positive and finite"),
        (torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), {"temperature": math.inf}, "positive and finite"),
        (
            torch.zeros(2, 5),
            torch.zeros(2, dtype=torch.int64),
            {"temperature": torch.tensor([1.0, 0.0])},
            r"\[0.0, 1.0\]",
        ),
        (torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), {"temperature": torch.ones(3)}, r"shape \[3\]"),
        (torch.zeros(5), torch.tensor(0), {"temperature": torch.ones(1)}, "a number"),
        (
            torch.zeros(2, 5),
            torch.zeros(2, dtype=torch.int64),
            {"temperature": torch.ones(2, requires_grad=True)},
            "detach",
        ),
    ],
)
def test_what_does_not_fit_is_refused(logits, targets, kwargs, message):
    with pytest.raises(InputError, match=message):
        token_log_probs(logits, targets, **kwargs)
