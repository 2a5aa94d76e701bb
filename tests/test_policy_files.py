"""A Hugging Face directory as the policy: what is loaded, and what is refused with which words."""

from __future__ import annotations

import json

import pytest
import torch
from policies import KINDS, edit_json, make_policy, make_tokenizer
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertLMHeadModel, BloomConfig, GPT2Config, GPT2LMHeadModel, T5Config
from transformers.utils import logging

from fsdp_async.config import parse_config
from fsdp_async.errors import ConfigError, InputError, UnsupportedModelError
from fsdp_async.modeling import ModelConfig, build_model, decoder_layers, outline_model
from fsdp_async.policy_files import open_policy, silent_transformers

WEIGHTS = "model.safetensors"


def _same(a, b):
    names = a.state_dict().keys()
    return names == b.state_dict().keys() and all(torch.equal(a.state_dict()[n], b.state_dict()[n]) for n in names)


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_has_the_weights_of_its_directory_bit_for_bit(tmp_path, kind):
    made = make_policy(tmp_path, kind)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    loaded = build_model(ModelConfig(path=str(tmp_path)), vocab_size=300, seed=0)
    assert torch.equal(torch.rand(3), expected), "the global generator is left alone"
    assert type(loaded) is type(made)
    assert _same(loaded, made)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == kind.endswith("-tied")
    ids = torch.randint(300, (2, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(loaded.eval()(input_ids=ids).logits, made.eval()(input_ids=ids).logits)


def test_weights_in_several_files_are_one_policy(tmp_path):
    make_policy(tmp_path / "one")
    whole = build_model(ModelConfig(path=str(tmp_path / "one")), vocab_size=300, seed=0)
    make_policy(tmp_path / "many")
    (tmp_path / "many" / WEIGHTS).unlink()
    with silent_transformers():
        whole.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 2
    assert _same(build_model(ModelConfig(path=str(tmp_path / "many")), vocab_size=300, seed=0), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_trained_as_float32_with_the_same_values(tmp_path, dtype):
    made = make_policy(tmp_path, dtype=dtype)
    loaded = build_model(ModelConfig(path=str(tmp_path)), vocab_size=300, seed=0)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert all(torch.equal(a, b.float()) for a, b in zip(loaded.parameters(), made.parameters(), strict=True))


def test_an_outline_has_names_and_shapes_and_no_memory(tmp_path):
    made = make_policy(tmp_path, dtype=torch.bfloat16)
    outline = outline_model(ModelConfig(path=str(tmp_path)), vocab_size=300)
    shapes = {name: p.shape for name, p in made.named_parameters()}
    assert {name: p.shape for name, p in outline.named_parameters()} == shapes
    assert {(p.device.type, p.dtype) for p in outline.parameters()} == {("meta", torch.float32)}


def test_the_layers_that_are_sharded_are_the_decoder_layers_of_whatever_architecture(tmp_path):
    moe = make_policy(tmp_path, "qwen3-moe")
    assert decoder_layers(moe) == [*moe.model.layers]
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=3, n_head=2, n_embd=8, vocab_size=10))
    assert decoder_layers(gpt2) == [*gpt2.transformer.h]


def test_loading_says_nothing_and_leaves_the_settings_of_transformers(tmp_path, capfd):
    make_policy(tmp_path)
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    capfd.readouterr()
    build_model(ModelConfig(path=str(tmp_path)), vocab_size=300, seed=0)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def _unlink(*names):
    return lambda path: [(path / name).unlink() for name in names]


def _write(name, content):
    return lambda path: (path / name).write_bytes(content)


def _config(**changes):
    return lambda path: edit_json(path / "config.json", **changes)


def _weights(change):
    def damage(path):
        tensors = load_file(path / WEIGHTS)
        change(tensors)
        save_file(tensors, path / WEIGHTS, {"format": "pt"})

    return damage


def _tear(path):
    data = (path / WEIGHTS).read_bytes()
    (path / WEIGHTS).write_bytes(data[: len(data) // 2])


def _to_pickle(path):
    (path / WEIGHTS).rename(path / "pytorch_model.bin")


def _lost_shard(path):
    (path / WEIGHTS).rename(path / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def _large_tokenizer(path):
    make_tokenizer(num_tokens=330).save_pretrained(path)


def _of_config(config):
    def replace(path):
        (path / "config.json").write_text(config.to_json_string(use_diff=False))

    return replace


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (_unlink("config.json"), InputError, r"holds no config\.json; give the directory that"),
        (_write("config.json", b"{"), InputError, r"none that transformers can read .*not a valid JSON"),
        (_config(model_type="zzz"), InputError, r"config\.json is none that transformers can read .*`zzz`"),
        (_config(hidden_size="wide"), InputError, r"config\.json is none that transformers can read .*hidden_size"),
        (_config(model_type="zzz", auto_map={"AutoConfig": "a.B"}), InputError, "without code of its own"),
        (_config(architectures=["Qwen3ForSequenceClassification"]), UnsupportedModelError,
         r"says Qwen3ForSequenceClassification, which is no causal .* \(known for qwen3: Qwen3ForCausalLM\)"),
        (_of_config(T5Config()), UnsupportedModelError, r"no causal language model \(known for t5: none\)"),
        (_of_config(BertConfig(architectures=["BertForMaskedLM"])), UnsupportedModelError, "BertForMaskedLM, which"),
        (_of_config(BloomConfig()), UnsupportedModelError, "BloomForCausalLM takes no .*position_ids"),
        (_config(layer_types=["full_attention", "linear_attention"]), UnsupportedModelError, "of linear_attention"),
        (_config(attention_dropout=0.1), UnsupportedModelError, r"attention_dropout=0\.1 in config\.json must be 0"),
        (_of_config(GPT2Config()), UnsupportedModelError, r"_pdrop=0\.1 in config\.json must be 0"),
        (_config(quantization_config={"quant_method": "fp8"}), UnsupportedModelError, "the weights are quantized"),
        (_unlink(WEIGHTS), InputError, r"holds no weights \(model\.safetensors or"),
        (_to_pickle, InputError, r"holds no weights .* but pytorch_model\.bin, which are not read"),
        (_tear, InputError, r"model\.safetensors is torn or no safetensors file .* copy it again"),
        (_write(WEIGHTS, b""), InputError, r"model\.safetensors is torn"),
        (_lost_shard, InputError, r"names model-00002-of-00002\.safetensors, not there"),
        (_weights(lambda t: t.update({NORM: t[NORM].double()})), UnsupportedModelError, rf"{NORM} is F64, which"),
        (_weights(lambda t: t.update({NORM: t[NORM].to(torch.float8_e4m3fn)})), UnsupportedModelError, "is F8_E4M3"),
        (_unlink("tokenizer.json"), InputError, r"holds no tokenizer \(tokenizer\.json"),
        (_write("tokenizer.json", b"{"), InputError, "its tokenizer cannot be read"),
        (_write("generation_config.json", b"{"), InputError, r"generation_config\.json cannot be read"),
        (lambda path: (edit_json(path / "tokenizer_config.json", eos_token=None),
                       edit_json(path / "generation_config.json", eos_token_id=None)), InputError, "could end"),
        (_large_tokenizer, InputError, "the tokenizer has ids up to 329, the embedding 320 rows"),
        (lambda path: edit_json(path / "generation_config.json", eos_token_id=[3, 400]), InputError, "ids up to 400"),
    ],
)  # fmt: skip
def test_a_directory_that_cannot_be_the_policy_is_refused_before_its_weights_are_loaded(
    tmp_path, monkeypatch, damage, error, message
):
    make_policy(tmp_path)
    damage(tmp_path)
    monkeypatch.setattr("fsdp_async.policy_files.AutoModelForCausalLM", None)
    with pytest.raises(error, match=message) as raised:
        open_policy(str(tmp_path)).vocabulary  # noqa: B018 - reads the tokenizer
    assert f"model.path={tmp_path}" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_weights(lambda t: t.pop(NORM)), rf"missing weights \['{NORM}'\]; the files do not fit config\.json"),
        (_weights(lambda t: t.update({"value.weight": torch.zeros(2)})), r"unexpected weights \['value\.weight'\]"),
        (_weights(lambda t: t.update({NORM: torch.zeros(7)})), rf"mismatched weights .*{NORM}"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_refused_and_never_drawn_at_random(tmp_path, damage, message):
    make_policy(tmp_path)
    damage(tmp_path)
    with pytest.raises(InputError, match=message):
        open_policy(str(tmp_path)).load()


def test_a_model_whose_sizes_its_kernels_refuse_is_named(tmp_path):
    make_policy(tmp_path, "qwen3-moe", hidden_size=33)  # experts want rows of whole 16 bytes
    with pytest.raises(UnsupportedModelError, match=r"Qwen3MoeForCausalLM of these sizes cannot compute .*16 bytes"):
        open_policy(str(tmp_path)).load()


def test_a_directory_that_is_not_there_is_refused_and_not_looked_for_elsewhere(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path=Qwen/Qwen3-0\.6B: no such directory; .*nothing is downloaded"):
        open_policy("Qwen/Qwen3-0.6B")


@pytest.mark.parametrize("is_decoder", [False, True])
def test_a_model_that_reads_in_both_directions_is_refused(tmp_path, is_decoder):
    make_policy(tmp_path)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    with silent_transformers():
        bert = BertLMHeadModel(BertConfig(vocab_size=320, is_decoder=is_decoder, **sizes, **dropouts))
        bert.save_pretrained(tmp_path)
    if is_decoder:
        open_policy(str(tmp_path)).load()
        return
    with pytest.raises(UnsupportedModelError, match="BertLMHeadModel as configured, tokens change what is said"):
        open_policy(str(tmp_path)).load()


def test_sequences_longer_than_the_model_are_refused(tmp_path):
    make_policy(tmp_path)
    policy = open_policy(str(tmp_path))
    policy.check_length(64)
    with pytest.raises(ConfigError, match=r"= 65 exceed max_position_embeddings=64 of model\.path="):
        policy.check_length(65)


def test_the_digest_is_that_of_the_files(tmp_path):
    make_policy(tmp_path / "a")
    make_policy(tmp_path / "b")
    before = open_policy(str(tmp_path / "a")).digest()
    assert before == open_policy(str(tmp_path / "b")).digest()
    _weights(lambda t: t[NORM].add_(1))(tmp_path / "b")
    assert before != open_policy(str(tmp_path / "b")).digest()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"path": "d", "hidden_size": 64}}, r"model\.hidden_size=64 has no effect with model\.path=d"),
        ({"model": {"path": "d", "max_position_embeddings": 9}}, r"model\.max_position_embeddings=9 has no effect"),
        ({"model": {"path": "d", "tie_embeddings": False}}, r"model\.tie_embeddings=False has no effect"),
        ({"model": {"path": ""}}, r"model\.path is empty"),
        ({"model": {"path": "d"}, "warm_start": {"path": "w"}}, r"warm_start\.path=w with model\.path=d: each holds"),
        ({"model": {"path": "d"}, "warm_start": {"lr": 0.1}}, r"warm_start\.lr=0\.1 has no effect .* no step is taken"),
    ],
)
def test_options_that_could_not_act_beside_a_directory_are_refused(sections, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(sections)
