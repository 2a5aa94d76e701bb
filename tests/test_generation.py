from __future__ import annotations

import dataclasses

import pytest
import torch
from builders import VOCAB, tiny_model

from fsdp_async.batching import collate
from fsdp_async.generation import Generation, generate
from fsdp_async.modeling import apply_fsdp2, response_log_prob
from fsdp_async.rollout import SamplingParams
from fsdp_async.types import Prompt

# One token at a time with a cache against the whole sequence at once: the same float32 sums in another order.
CACHE_TOLERANCE = 1e-5
PARAMS = SamplingParams(num_samples=3, max_response_tokens=6, temperature=1.0, eos_token_id=1, pad_token_id=0)


def _prompts():
    return [Prompt(f"p{n}", tuple(range(2, 2 + n)), "test") for n in (1, 4, 2, 3)]


def _generate(model, prompts, params=PARAMS, *, version=3, seed=0):
    return generate(model.eval(), prompts, params, version=version, seed=seed)


def _tokens(groups):
    return [[r.token_ids for r in g.responses] for g in groups]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_reported_log_probs_are_those_of_a_fresh_full_forward(temperature):
    model = tiny_model()
    groups = _generate(model, _prompts(), dataclasses.replace(PARAMS, temperature=temperature))
    scored = [dataclasses.replace(g, responses=tuple(r.with_reward(0.0) for r in g.responses)) for g in groups]
    batch = collate(scored, pad_token_id=0)
    with torch.no_grad():
        full = response_log_prob(model, batch)
    mask = batch.response_mask
    torch.testing.assert_close(batch.rollout_log_prob[mask], full[mask], rtol=0, atol=CACHE_TOLERANCE)


def test_an_answer_ends_with_eos_or_with_the_budget():
    groups = _generate(tiny_model(seed=5), _prompts(), dataclasses.replace(PARAMS, num_samples=40))
    answers = [r for g in groups for r in g.responses]
    assert {r.finish_reason for r in answers} == {"stop", "length"}
    for answer in answers:
        assert len(answer.token_ids) <= PARAMS.max_response_tokens
        assert all(answer.response_mask)
        assert (answer.token_ids[-1] == 1) == (answer.finish_reason == "stop")
        assert 1 not in answer.token_ids[:-1]
        assert answer.finish_reason == "stop" or len(answer.token_ids) == PARAMS.max_response_tokens


def test_every_token_has_the_version_it_was_sampled_by():
    for g in _generate(tiny_model(), _prompts(), version=7):
        assert g.submitted_version == 7
        for r in g.responses:
            assert [(s.version, s.start, s.stop) for s in r.version_spans] == [(7, 0, len(r.token_ids))]


def test_answers_depend_on_seed_and_prompt_alone_not_on_company_order_or_global_random_state():
    model, prompts = tiny_model(), _prompts()
    together = _tokens(_generate(model, prompts))
    torch.manual_seed(123)
    state = torch.get_rng_state()
    alone = [_tokens(_generate(model, [prompt]))[0] for prompt in prompts]
    assert torch.equal(torch.get_rng_state(), state)
    assert alone == together
    assert _tokens(_generate(model, prompts[::-1])) == together[::-1]
    assert _tokens(_generate(model, prompts, seed=1)) != together


def test_another_epoch_of_a_prompt_is_answered_anew():
    prompt = _prompts()[1]
    again = dataclasses.replace(prompt, epoch=1)
    first, second = _tokens(_generate(tiny_model(), [prompt, again]))
    assert first != second


def test_samples_follow_the_tempered_distribution():
    model, prompt = tiny_model(seed=2), _prompts()[1]
    num = 20_000
    params = dataclasses.replace(PARAMS, num_samples=num, max_response_tokens=1, temperature=1.3)
    (answers,) = _tokens(_generate(model, [prompt], params))
    counts = torch.bincount(torch.tensor(answers).flatten(), minlength=VOCAB).double()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt.token_ids])).logits[0, -1]
    expected = (logits.double() / 1.3).softmax(-1) * num
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    # 18 degrees of freedom: above 42.3 with probability .001; the seed is fixed.
    assert chi_square < 42.3


def test_a_sharded_model_generates_the_same(single_rank):
    model = tiny_model()
    plain = _tokens(_generate(model, _prompts()))
    apply_fsdp2(model)
    assert _tokens(_generate(model, _prompts())) == plain


def test_giving_up_is_possible_before_every_token():
    steps = []

    def give_up():
        steps.append(1)
        if len(steps) == 3:
            raise KeyError("enough")

    with pytest.raises(KeyError):
        generate(tiny_model().eval(), _prompts(), PARAMS, version=0, seed=0, on_step=give_up)
    assert len(steps) == 3


def _drive(generation, versions):
    """One token under each of `versions`, and on with the last one until the end."""
    versions = list(versions)
    while not generation.is_done:
        generation.step(versions.pop(0) if len(versions) > 1 else versions[0])
    return generation.groups(0)


def test_an_interrupted_response_goes_on_under_the_new_weights_from_what_is_there():
    old, new = tiny_model(seed=0).eval(), tiny_model(seed=1).eval()
    model = tiny_model(seed=0).eval()
    generation = Generation(model, _prompts(), PARAMS, seed=0)
    for _ in range(2):
        generation.step(4)
    model.load_state_dict(new.state_dict())
    generation.weights_changed()
    groups = _drive(generation, [7])
    before = _tokens(_generate(old, _prompts()))
    for group, tokens in zip(groups, before, strict=True):
        for answer, uninterrupted in zip(group.responses, tokens, strict=True):
            assert answer.token_ids[:2] == uninterrupted[:2]
            assert len(answer.token_ids) <= PARAMS.max_response_tokens, "the budget is that of the whole response"
            spans = [(s.version, s.start, s.stop) for s in answer.version_spans]
            length = len(answer.token_ids)
            assert spans == ([(4, 0, 2), (7, 2, length)] if length > 2 else [(4, 0, length)])
    batch = collate(
        [dataclasses.replace(g, responses=tuple(r.with_reward(0.0) for r in g.responses)) for g in groups],
        pad_token_id=0,
    )
    with torch.no_grad():
        under = {4: response_log_prob(old, batch), 7: response_log_prob(new, batch)}
    for version, log_prob in under.items():
        where = batch.versions == version
        assert where.any()
        torch.testing.assert_close(batch.rollout_log_prob[where], log_prob[where], rtol=0, atol=CACHE_TOLERANCE)


def test_weights_that_changed_to_themselves_change_nothing():
    model = tiny_model().eval()
    generation = Generation(model, _prompts(), PARAMS, seed=0)
    while not generation.is_done:
        generation.weights_changed()
        generation.step(3)
    assert _tokens(generation.groups(0)) == _tokens(_generate(model, _prompts()))


def test_a_restarted_response_is_of_one_version():
    model = tiny_model().eval()
    generation = Generation(model, _prompts(), PARAMS, seed=0)
    generation.step(1)
    generation.step(1)
    generation.restart()
    groups = _drive(generation, [2])
    assert {len(r.version_spans) for g in groups for r in g.responses} == {1}
    assert {s.version for g in groups for r in g.responses for s in r.version_spans} == {2}
    assert _tokens(groups) == _tokens(_generate(model, _prompts()))


@pytest.mark.parametrize("num_drawn", [0, 1, 3, 6])
def test_what_was_told_of_unfinished_responses_is_enough_to_go_on(num_drawn):
    model = tiny_model(seed=5).eval()
    expected = _generate(model, _prompts(), version=1)
    first = Generation(model, _prompts(), PARAMS, seed=0)
    for _ in range(num_drawn):
        if not first.is_done:
            first.step(1)
    partials = first.partials()
    assert len(partials) == (4 if num_drawn else 0)
    # In other company and another order, with one that has not begun.
    fresh = Prompt("fresh", (3, 4), "test")
    second = Generation(model, [fresh, *_prompts()[::-1]], PARAMS, seed=0, partials=partials)
    groups = _drive(second, [1])
    assert _tokens(groups[1:][::-1]) == _tokens(expected)
    again = [r.rollout_log_prob for g in groups[1:][::-1] for r in g.responses]
    for mine, theirs in zip(again, [r.rollout_log_prob for g in expected for r in g.responses], strict=True):
        assert mine == pytest.approx(theirs, abs=CACHE_TOLERANCE)


def test_any_of_the_ends_ends_a_response_and_is_part_of_it():
    model = tiny_model()
    free = dataclasses.replace(PARAMS, eos_token_id=VOCAB + 1)
    lengths = {}
    for name, params in (
        ("free", free),
        ("eos", dataclasses.replace(free, eos_token_id=5)),
        ("stops", dataclasses.replace(free, stop_token_ids=(5, 7))),
    ):
        responses = [r for g in _generate(model, _prompts(), params) for r in g.responses]
        lengths[name] = [len(r.token_ids) for r in responses]
        ends = {5} if name == "eos" else {5, 7} if name == "stops" else set()
        for response in responses:
            assert (response.finish_reason == "stop") == (response.token_ids[-1] in ends)
            assert not ends & {*response.token_ids[:-1]}
    # The draws are those of the prompt: a response is what it would have been, up to its end.
    assert sum(lengths["free"]) > sum(lengths["eos"]) > sum(lengths["stops"])
