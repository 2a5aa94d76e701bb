"""A model of your own: a Hugging Face directory as the policy, trained, exported and loaded again. Seconds on a CPU.

python examples/own_model.py [KEY=VALUE ...]

Instead of a model that was trained before, which would have to be downloaded, it makes a tiny Qwen3 of random weights
with a byte-level tokenizer and a chat template. Everything from `prompts` on is the same for a model of yours.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config

from fsdp_async.cli import main

DIRECTORY = Path("outputs/examples")
MODEL, PROMPTS, RUN = DIRECTORY / "tiny_qwen3", DIRECTORY / "more_or_less.jsonl", DIRECTORY / "own_model"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def questions() -> list[tuple[str, str]]:
    """Which of two digits is larger, in words."""
    pairs = [(a, b) for a in range(10) for b in range(10) if a != b]
    random.Random(0).shuffle(pairs)
    return [(f"Is {a} more or less than {b}?", "more" if a > b else "less") for a, b in pairs]


def model() -> None:
    """Config, weights and tokenizer, as `save_pretrained` writes them."""
    learned = Tokenizer(BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    learned.train_from_iterator([f"user assistant {question} {answer}" for question, answer in questions()], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=learned, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(MODEL)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=128, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(MODEL)


def prompts() -> None:
    """A prompt may be a text, or a list of messages for the chat template of the directory."""
    lines = [
        json.dumps({"prompt": [{"role": "user", "content": question}], "answer": answer})
        for question, answer in questions()
    ]
    PROMPTS.write_text("\n".join(lines) + "\n")


# Random weights need supervised steps before anything is rewarded; leave warm_start out for a model that can answer.
TRAIN = [
    "train", "model=directory", f"model.path={MODEL}", "task=jsonl", f"task.path={PROMPTS}", "task.eval_items=16",
    "task.max_prompt_tokens=40", "rewards=exact", "rollout=thread", "rollout.max_response_tokens=4",
    "warm_start.num_steps=60", "warm_start.lr=3e-3", f"warm_start.directory={DIRECTORY / 'warm_start'}",
    "optim.lr=1e-3", "trainer.num_batches=20", "trainer.groups_per_batch=8", "queue.capacity_groups=16",
    "logging.tensorboard=false",
    "run.export=true", f"run.output_dir={RUN}", "run.overwrite=true",
]  # fmt: skip


def ask(directory: Path, asked: list[str]) -> list[str]:
    """The most probable answers of the exported policy, by transformers alone."""
    tokenizer, policy = AutoTokenizer.from_pretrained(directory), AutoModelForCausalLM.from_pretrained(directory)
    answers = []
    for question in asked:
        message = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        answer = policy.generate(**ids, max_new_tokens=4, do_sample=False)[0, ids["input_ids"].shape[1] :]
        answers.append(str(tokenizer.decode(answer, skip_special_tokens=True)))
    return answers


if __name__ == "__main__":
    model()
    prompts()
    if code := main([*TRAIN, *sys.argv[1:]]):
        sys.exit(code)
    held_out = questions()[-8:]
    for (question, right), answer in zip(held_out, ask(RUN / "policy", [q for q, _ in held_out]), strict=True):
        print(f"{question} {answer} (right: {right})")
