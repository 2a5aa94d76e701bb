from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from builders import tiny_model

from fsdp_async.errors import InputError, NonFiniteError
from fsdp_async.evaluation import sampled_accuracy
from fsdp_async.generation import generate
from fsdp_async.rewards import AnswerMatch
from fsdp_async.rollout import SamplingParams
from fsdp_async.types import Prompt

SAMPLING = SamplingParams(num_samples=4, max_response_tokens=2, temperature=1.0, eos_token_id=1, pad_token_id=0)


def _prompts(model):
    """Questions of which every third has the answer that the model will sample."""
    prompts = [Prompt(f"p{n}", (2 + n, 3), "test") for n in range(9)]
    groups = generate(model, prompts, SamplingParams(**vars(SAMPLING) | {"num_samples": 1}), version=0, seed=11)
    answers = [group.responses[0].token_ids for group in groups]
    return [
        Prompt(p.prompt_id, p.token_ids, p.task, {"answer_ids": answer if n % 3 == 0 else (99,)})
        for n, (p, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


def test_accuracy_is_the_share_of_right_answers_and_always_draws_the_same():
    model = tiny_model().eval()
    prompts = _prompts(model)
    for _ in range(2):
        assert sampled_accuracy(model, prompts, AnswerMatch(graded=False), SAMPLING, seed=11) == 3 / 9


def test_modes_and_the_global_generator_are_left_as_they_were():
    model = tiny_model().train()
    prompts = _prompts(model)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    sampled_accuracy(model, prompts, AnswerMatch(graded=False), SAMPLING, seed=1)
    assert torch.equal(torch.rand(2), expected)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("mode", [True, False])
def test_every_module_has_its_own_mode_back_also_after_an_error(mode):
    model = tiny_model().train(mode)
    model.model.layers[0].mlp.train(not mode)
    before = [module.training for module in model.modules()]
    prompts = _prompts(tiny_model().eval())
    sampled_accuracy(model, prompts, AnswerMatch(graded=False), SAMPLING, seed=1)
    assert [module.training for module in model.modules()] == before
    with pytest.raises(IndexError):
        sampled_accuracy(model, [Prompt("p", (10_000,), "test")], AnswerMatch(graded=False), SAMPLING, seed=1)
    assert [module.training for module in model.modules()] == before


def test_an_accuracy_over_nothing_or_of_no_numbers_is_refused():
    model = tiny_model().eval()
    with pytest.raises(InputError, match="at least one prompt"):
        sampled_accuracy(model, [], AnswerMatch(graded=False), SAMPLING, seed=1)
    prompts, nan = _prompts(model), SimpleNamespace(score=lambda prompt, response: float("nan"))
    with pytest.raises(NonFiniteError, match=r"reward of 'p0'\[0\] is nan"):
        sampled_accuracy(model, prompts, nan, SAMPLING, seed=1)
