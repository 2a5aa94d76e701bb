"""Runs whose policy comes from a directory, and the directory that they leave."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from builders import TINY
from policies import KINDS, edit_json, make_policy, make_tokenizer, read_policy
from safetensors.torch import load_file, load_model
from test_run import FP32_TOLERANCE, Quiet
from transformers import AutoTokenizer

from fsdp_async.assembly import checked_task
from fsdp_async.checkpoint import newest_checkpoint
from fsdp_async.config import parse_config
from fsdp_async.dtensor_io import full_tensors
from fsdp_async.errors import CheckpointError, ConfigError, InputError, OutputError
from fsdp_async.lead import Lead
from fsdp_async.modeling import ModelConfig, apply_fsdp2, build_model
from fsdp_async.policy_export import export_policy
from fsdp_async.policy_files import open_policy
from fsdp_async.resume import find_resumption
from fsdp_async.run import plan_lines, run_training
from fsdp_async.tokenization import TEXT_CHARACTERS, CharacterVocabulary
from fsdp_async.warm_start import WarmStartConfig, find_warm_start

SUMS = [(f"{a}+{b}=", str(a + b)) for a in range(6) for b in range(6)]


NO_STEPS = {"num_steps": None, "lr": None, "directory": None}


def write_sums(path):
    """A JSONL file whose prompts are texts and conversations in turn."""
    lines = [
        {"prompt": question if number % 2 else [{"role": "user", "content": question}], "answer": answer}
        for number, (question, answer) in enumerate(SUMS)
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")


def own_config(directory, **sections):
    """A small run on `directory/model`; keys of sections changed."""
    sums = directory / "sums.jsonl"
    if not sums.exists():
        write_sums(sums)
    base = {
        "run": {"output_dir": str(directory / "run"), "export": True},
        "model": {"path": str(directory / "model")},
        "task": {"kind": "jsonl", "path": str(sums), "eval_items": 4, "max_prompt_tokens": 24},
        "rewards": {"kind": "graded"},
        "warm_start": {"directory": str(directory / "warm"), "num_steps": 15, "lr": 3e-3},
        "rollout": {"engine": "thread", "max_response_tokens": 4, "record_weights": True},
        "queue": {"capacity_groups": 6},
        "optim": {"lr": 1e-3},
        "trainer": {"num_batches": 3, "groups_per_batch": 4, "group_size": 4},
        "logging": {"tensorboard": False},
    }
    chosen = {name: base.get(name, {}) | sections.get(name, {}) for name in base | sections}
    # None takes a key away.
    return parse_config({n: {k: v for k, v in keys.items() if v is not None} for n, keys in chosen.items()})


def _state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Keeping(Quiet):
    """Keeps the weights that are live when the run ends."""

    def observe(self, event, step, values):
        if event == "end":
            self.live = {name: t.clone() for name, t in full_tensors(self.trainer.parts.learner.model)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_of_a_directory_is_trained_and_exported_bit_for_bit(tmp_path, kind):
    start = _state(make_policy(tmp_path / "model", kind))
    config, view = own_config(tmp_path), Keeping()
    summary = run_training(config, view)
    assert summary["outcome"] == "completed"
    assert summary["num_optimizer_steps"] > 0
    # What the engine says and what the trainer computes agree: they hold the same model.
    assert summary["canary_gap_max"] < FP32_TOLERANCE
    exported = read_policy(tmp_path / "run" / "policy")
    final = _state(exported)
    assert all(torch.equal(final[name], tensor) for name, tensor in view.live.items())
    assert not _equal(final, start)
    assert (exported.lm_head.weight is exported.model.embed_tokens.weight) == kind.endswith("-tied")
    # Files have the names that the architecture has on disk, so that other programs read them, too.
    assert (
        load_file(tmp_path / "run/policy/model.safetensors").keys()
        == load_file(tmp_path / "model/model.safetensors").keys()
    )
    engine = build_model(config.model, vocab_size=300, seed=7)
    load_model(engine, tmp_path / "run" / "engine_weights" / "v000003.safetensors")
    assert _equal(_state(engine), final)
    assert sorted(p.name for p in (tmp_path / "run").glob(".*")) == [], "nothing half written"


def test_an_exported_policy_speaks_and_generates_as_the_directory_did(tmp_path):
    make_policy(tmp_path / "model", dtype=torch.bfloat16)
    config = own_config(tmp_path, trainer={"num_batches": 1})
    run_training(config, Quiet())
    before, after = (open_policy(str(tmp_path / place)) for place in ("model", "run/policy"))
    assert after.identity == before.identity
    assert after.vocabulary.generation_config.eos_token_id == [3, 1]
    messages = [{"role": "user", "content": "Größe 1+1?"}]
    texts = [
        AutoTokenizer.from_pretrained(policy.path).apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        for policy in (before, after)
    ]
    assert texts[0] == texts[1]
    saved = json.loads((tmp_path / "run/policy/config.json").read_text())
    assert (saved["dtype"], saved["use_cache"]) == ("float32", True)


def test_the_engine_process_builds_the_policy_of_the_directory_too(tmp_path):
    make_policy(tmp_path / "model", "llama-untied")
    summary = run_training(own_config(tmp_path, rollout={"engine": "process"}), Quiet())
    assert summary["outcome"] == "completed"
    assert summary["canary_gap_max"] < FP32_TOLERANCE


def test_what_a_run_on_sizes_exports_is_a_directory_that_a_run_can_start_from(tmp_path):
    sizes = {name: value for name, value in dataclasses.asdict(TINY).items() if name != "path"}
    task = {"kind": "sort_digits", "path": None, "num_digits": 2, "eval_items": 20, "max_prompt_tokens": 16}
    first = own_config(tmp_path, model={"path": None, **sizes}, task=task)
    view = Keeping()
    run_training(first, view)
    second = own_config(
        tmp_path, model={"path": str(tmp_path / "run/policy")}, task=task, warm_start=NO_STEPS,
        run={"output_dir": str(tmp_path / "second"), "export": False},
    )  # fmt: skip
    task_of_sizes, task_of_directory = checked_task(first), checked_task(second)
    a, b = next(task_of_sizes.prompts()), next(task_of_directory.prompts())
    assert a == b, "the same tokens under the same names"
    assert task_of_directory.eos_token_id == task_of_sizes.eos_token_id
    assert task_of_directory.pad_token_id == task_of_sizes.pad_token_id
    loaded = _state(build_model(second.model, vocab_size=task_of_directory.vocab_size, seed=0))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in view.live.items())
    events = []

    class Listening(Quiet):
        def observe(self, event, step, values):
            events.append((event, values.get("accuracy")))

    last = run_training(dataclasses.replace(first, run=dataclasses.replace(first.run, resume="auto")), Quiet())
    run_training(second, Listening())
    # Evaluation draws by a generator of its own: the same weights have the same accuracy.
    assert next(accuracy for event, accuracy in events if event == "evaluation") == last["accuracy_last"]


def test_the_vocabulary_of_every_ascii_character_is_exported_too(tmp_path):
    vocabulary = CharacterVocabulary(TEXT_CHARACTERS)
    net = build_model(TINY, vocab_size=vocabulary.size, seed=0)
    export_policy(net, TINY, vocabulary, tmp_path / "policy", Lead())
    assert _equal(_state(build_model(ModelConfig(path=str(tmp_path / "policy")), vocab_size=99, seed=1)), _state(net))
    read = open_policy(str(tmp_path / "policy")).vocabulary
    assert read.encode(TEXT_CHARACTERS) == vocabulary.encode(TEXT_CHARACTERS)


def test_an_export_replaces_the_one_before_and_a_failed_one_leaves_it(tmp_path, monkeypatch):
    vocabulary = CharacterVocabulary()
    nets = [build_model(TINY, vocab_size=vocabulary.size, seed=seed) for seed in (0, 1)]
    place = tmp_path / "policy"
    for net in nets:
        export_policy(net, TINY, vocabulary, place, Lead())
        assert _equal(_state(read_policy(place)), _state(net))

    def full(directory):
        (directory / "half").write_text("")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(vocabulary, "save", full)
    with pytest.raises(OutputError, match=r"policy was not written: .*No space left"):
        export_policy(nets[0], TINY, vocabulary, place, Lead())
    assert _equal(_state(read_policy(place)), _state(nets[1]))
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_a_complete_run_that_is_resumed_exports_what_its_checkpoint_holds(tmp_path):
    make_policy(tmp_path / "model")
    config, view = own_config(tmp_path, run={"export": False}), Keeping()
    run_training(config, view)
    assert not (tmp_path / "run/policy").exists()
    again = own_config(tmp_path, run={"export": True, "resume": "auto"})
    assert run_training(again, Quiet())["num_batches"] == 3
    exported = _state(read_policy(tmp_path / "run/policy"))
    assert all(torch.equal(exported[name], tensor) for name, tensor in view.live.items())


def test_a_run_that_is_stopped_exports_nothing(tmp_path):
    make_policy(tmp_path / "model")

    class Stopping(Quiet):
        def observe(self, event, step, values):
            if event == "step":
                self.trainer.request_stop()

    summary = run_training(own_config(tmp_path, trainer={"num_batches": 50}), Stopping())
    assert summary["outcome"] == "interrupted"
    assert not (tmp_path / "run/policy").exists()


def _finished(tmp_path):
    make_policy(tmp_path / "model")
    config = own_config(tmp_path, run={"export": False}, trainer={"num_batches": 2})
    run_training(config, Quiet())
    return newest_checkpoint(tmp_path / "run/checkpoints")[0]


def _resumed(tmp_path, path):
    return own_config(
        tmp_path, model={"path": str(path)}, run={"resume": "auto", "export": False}, trainer={"num_batches": 3}
    )


def test_a_run_goes_on_when_its_directory_has_moved(tmp_path):
    _finished(tmp_path)
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    config = _resumed(tmp_path, tmp_path / "elsewhere")
    assert any("elsewhere" in change for change in find_resumption(config).changes)
    assert run_training(config, Quiet())["num_batches"] == 3


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("qwen3-tied", {"num_hidden_layers": 3}, r"num_hidden_layers=3 instead of 2, which cannot change"),
        ("qwen3-tied", {"rms_norm_eps": 1e-3}, r"rms_norm_eps=0\.001 instead of 1e-06, which"),
        ("qwen3-tied", {"num_embeddings": 310}, r"vocab_size=310 instead of 320, which"),
        ("qwen3-untied", {}, r"tie_word_embeddings=False instead of True, which"),
        ("llama-tied", {}, r"model_type=llama instead of qwen3"),
        ("qwen3-tied", {"tokenizer": make_tokenizer(num_tokens=290)}, "the tokenizer is another one than"),
    ],
)
def test_another_policy_cannot_go_on_from_a_checkpoint(tmp_path, kind, changes, message):
    _finished(tmp_path)
    make_policy(tmp_path / "other", kind, **changes)
    with pytest.raises(CheckpointError, match=message):
        find_resumption(_resumed(tmp_path, tmp_path / "other"))


def test_a_directory_cannot_take_the_place_of_sizes_nor_they_its(tmp_path):
    _finished(tmp_path)
    resumed = _resumed(tmp_path, tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"model\.path=None, but .* with a policy from a directory, which cannot"):
        find_resumption(dataclasses.replace(resumed, model=ModelConfig(max_position_embeddings=256)))


def test_what_a_directory_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    make_policy(tmp_path / "model")
    with pytest.raises(ConfigError, match="= 80 exceed max_position_embeddings=64"):
        run_training(own_config(tmp_path, task={"max_prompt_tokens": 76}), Quiet())
    (tmp_path / "model/model.safetensors").write_bytes(b"torn")
    with pytest.raises(InputError, match=r"model\.safetensors is torn"):
        run_training(own_config(tmp_path), Quiet())
    assert not (tmp_path / "run").exists()


def test_supervised_steps_start_from_the_weights_of_the_directory(tmp_path):
    make_policy(tmp_path / "model")
    config = own_config(tmp_path)
    starts = (config.warm_start, WarmStartConfig(), WarmStartConfig(num_steps=0))
    found = [find_warm_start(start, config.model, config.task, seed=0) for start in starts]
    assert found[0] is not None
    assert found[1:] == [None, None], "none unless asked for"
    edit_json(tmp_path / "model/config.json", rope_theta=5.0)
    assert find_warm_start(config.warm_start, config.model, config.task, seed=0) != found[0], "another policy"


def test_the_plan_names_the_directory_and_the_export(tmp_path):
    made = make_policy(tmp_path / "model")
    lines = plan_lines(own_config(tmp_path))
    num = sum(p.numel() for p in made.parameters())
    assert f"start: the weights of {tmp_path}/model and 15 supervised steps on jsonl, made once" in "\n".join(lines)
    assert any(f"{num:,} float32 parameters" in line for line in lines)
    assert (
        lines[-1] == f"export: the policy after the last batch, as a Hugging Face directory, to {tmp_path}/run/policy"
    )
    plain = plan_lines(own_config(tmp_path, run={"export": False}, warm_start=NO_STEPS))
    assert f"start: the weights of {tmp_path}/model" in plain
    assert not any(line.startswith("export") for line in plain)


def test_any_architecture_of_the_directory_is_sharded_layer_by_layer(tmp_path, single_rank):
    make_policy(tmp_path / "model", "llama-tied")
    net = build_model(ModelConfig(path=str(tmp_path / "model")), vocab_size=300, seed=0)
    plain = _state(net)
    apply_fsdp2(net)
    assert [type(m).__name__ for m in net.modules()].count("FSDPLlamaDecoderLayer") == 2
    assert all(torch.equal(plain[name], tensor) for name, tensor in full_tensors(net))
