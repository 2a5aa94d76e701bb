"""The policy as a Hugging Face directory.

Owns how live, sharded weights become a directory that `transformers` and `model.path` load: gathered on rank 0, in
float32, bit for bit, under the names that the architecture has on disk, with config, generation config and tokenizer.
The directory is whole or absent.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from fsdp_async.dtensor_io import full_tensors
from fsdp_async.files import write_directory
from fsdp_async.lead import Lead
from fsdp_async.modeling import ModelConfig, outline_model
from fsdp_async.policy_files import silent_transformers
from fsdp_async.tokenization import Vocabulary

POLICY = "policy"


def export_policy(net: nn.Module, config: ModelConfig, vocabulary: Vocabulary, directory: Path, lead: Lead) -> None:
    """Write the weights of `net` to `directory`, in place of what is there. Collective.

    Rank 0 holds the whole model once in host memory.

    Args:
        net: built by `build_model`, plain or under FSDP2, at rest.
        config: what it was built from.
        vocabulary: what it speaks.
        directory: read on rank 0 alone.
        lead: this rank among all.

    Raises:
        OutputError: the disk is full or the place cannot be written.
        RankFailedError: rank 0 raised that.
    """
    weights: dict[str, Tensor] = {}
    for name, tensor in full_tensors(net):
        if lead.is_lead:
            weights[name] = tensor.to("cpu", copy=True).contiguous()
    lead.ask(lambda: _write(weights, config, vocabulary, directory))


def _write(weights: dict[str, Tensor], config: ModelConfig, vocabulary: Vocabulary, directory: Path) -> None:
    outline = outline_model(config, vocab_size=vocabulary.size)
    outline.generation_config = vocabulary.generation_config
    if config.path is None:
        outline.config.update(
            {"use_cache": True, "eos_token_id": vocabulary.eos_token_id, "pad_token_id": vocabulary.pad_token_id}
        )

    def write(place: Path) -> None:
        with silent_transformers():
            outline.save_pretrained(place, state_dict=weights)
        vocabulary.save(place)

    write_directory(directory, write)
