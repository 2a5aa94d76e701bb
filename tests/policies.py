"""Small Hugging Face directories for tests: config, random weights, a byte-level tokenizer trained on the spot."""

from __future__ import annotations

import json

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

from fsdp_async.policy_files import silent_transformers

PAD, END, START, STOP = "<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'nobody' %}{{ raise_exception('no such role') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [f"{a}+{b}={a + b} the sum of {a} and {b} is {a + b}" for a in range(30) for b in range(30)]
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
KINDS = {
    "qwen3-tied": (Qwen3Config, {"tie_word_embeddings": True}),
    "qwen3-untied": (Qwen3Config, {"tie_word_embeddings": False}),
    "llama-tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama-untied": (LlamaConfig, {"tie_word_embeddings": False}),
    "qwen3-moe": (Qwen3MoeConfig, {"tie_word_embeddings": False, **EXPERTS}),
}


def make_tokenizer(*, template=TEMPLATE, begins_with=None, eos=STOP, num_tokens=300):
    """Byte-level BPE: any text has tokens, and longer pieces of the corpus have one."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=num_tokens, special_tokens=[PAD, END, START, STOP], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(CORPUS, trainer)
    if begins_with is not None:
        special = [(begins_with, tokenizer.token_to_id(begins_with))]
        tokenizer.post_processor = TemplateProcessing(single=f"{begins_with} $A", special_tokens=special)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=eos)
    made.chat_template = template
    return made


def make_policy(directory, kind="qwen3-tied", *, tokenizer=None, dtype=torch.float32, num_embeddings=320, **changes):
    """A directory as `save_pretrained` writes it, with more rows in the embedding than tokens; returns the model."""
    config_class, options = KINDS[kind]
    config = config_class(vocab_size=num_embeddings, **SIZES | options | changes)
    with torch.random.fork_rng(), silent_transformers():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.save_pretrained(directory)
    (tokenizer or make_tokenizer()).save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 1], "pad_token_id": 0}))
    return model


def edit_json(path, **changes):
    """Change keys of a JSON file; None takes one away."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def read_policy(directory):
    """What transformers alone reads."""
    with silent_transformers():
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
