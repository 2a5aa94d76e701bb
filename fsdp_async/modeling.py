"""Policies and their optimizers.

Owns the policy, a small Qwen3 built from sizes or what a Hugging Face directory holds (`policy_files.py`), its FSDP2
wrapping (also at world size 1, without torchrun), AdamW and the learning-rate schedule, and eval mode for a while. It
promises that dropout is off: a policy that answers differently twice has no log-probability to correct.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import pad
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import Qwen3Config, Qwen3ForCausalLM

from fsdp_async.checks import require_choice, require_flag
from fsdp_async.devices import ON_HOST, Placement, device_of
from fsdp_async.errors import ConfigError
from fsdp_async.logprobs import token_log_probs
from fsdp_async.policy_files import open_policy
from fsdp_async.types import TrainBatch

Schedule = Literal["constant", "linear", "cosine"]
MAX_SIZE = 1 << 20
MAX_LAYERS = 10_000
"""Beyond any model there is: a slip of the keyboard, which would only be noticed when memory ends."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of a Qwen3 policy, or a directory that holds one.

    `path` names a local Hugging Face directory (config, safetensors weights, tokenizer) of a causal language model;
    it says the sizes, then. Without it a Qwen3 of random weights is built; the defaults make about 0.6 million
    parameters.
    """

    path: str | None = None
    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    tie_embeddings: bool = True
    max_position_embeddings: int = 256
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if not 1 <= getattr(self, name) <= MAX_SIZE:
                raise ConfigError(f"model.{name}={getattr(self, name)}: must be in 1..{MAX_SIZE:,}")
        if self.num_layers > MAX_LAYERS:
            raise ConfigError(f"model.num_layers={self.num_layers}: must be at most {MAX_LAYERS:,}")
        require_flag("model.tie_embeddings", self.tie_embeddings)
        if self.head_dim % 2:
            raise ConfigError(f"model.head_dim={self.head_dim}: rotary embeddings need an even number")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model.num_heads={self.num_heads} is not divisible by model.num_kv_heads={self.num_kv_heads}; "
                "grouped-query attention shares each key-value head among equally many query heads"
            )
        if self.dropout != 0:
            raise ConfigError(
                f"model.dropout={self.dropout}: must be 0, because log-probs of one policy must be the same in "
                "every forward"
            )
        if self.path is not None:
            self._check_path()

    def _check_path(self) -> None:
        if not self.path:
            raise ConfigError("model.path is empty; name a Hugging Face directory, or leave it out")
        for size in fields(self):
            if size.name != "path" and (value := getattr(self, size.name)) != size.default:
                raise ConfigError(
                    f"model.{size.name}={value} has no effect with model.path={self.path}, whose config.json says all "
                    "sizes; leave one out"
                )


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule; `warmup_steps` and the decay count optimizer steps."""

    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    warmup_steps: int = 0
    schedule: Schedule = "constant"

    def __post_init__(self) -> None:
        require_choice("optim.schedule", self.schedule, get_args(Schedule))
        if not 0 < self.lr <= 1:
            raise ConfigError(
                f"optim.lr={self.lr}: must be above 0 and at most 1; Adam moves every weight by about lr a step"
            )
        for name in ("eps", "max_grad_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"optim.{name}={getattr(self, name)}: must be above 0 and finite")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"optim.{name}={getattr(self, name)}: must be in [0, 1)")
        if not 0 <= self.weight_decay < math.inf or self.warmup_steps < 0:
            raise ConfigError(
                f"optim.weight_decay={self.weight_decay}, optim.warmup_steps={self.warmup_steps}: must be finite and "
                "not negative"
            )

    def check_length(self, total_steps: int) -> None:
        """Refuse a run of `total_steps` optimizer steps that the schedule does not fit.

        Raises:
            ConfigError: no steps to schedule, or a warm-up that never ends.
        """
        if total_steps < 1:
            raise ConfigError(f"total_steps={total_steps}: the schedule must know the length of the run beforehand")
        if self.warmup_steps >= total_steps:
            raise ConfigError(
                f"optim.warmup_steps={self.warmup_steps} is not below the {total_steps} optimizer steps of the run; "
                "shorten the warm-up or lengthen the run (trainer.num_batches)"
            )


def build_model(config: ModelConfig, *, vocab_size: int, seed: int) -> Any:
    """The float32 policy on the CPU: that of `config.path`, or a Qwen3 with weights drawn from `seed`.

    A transformers model. The global RNG is left as it was.

    Raises:
        ConfigError, InputError, UnsupportedModelError: the directory cannot be used.
    """
    if config.path is not None:
        model = open_policy(config.path).load()
        # Only sampling has a use for it.
        model.config.use_cache = False
        return model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(_sized(config, vocab_size)).float()


def outline_model(config: ModelConfig, *, vocab_size: int) -> Any:
    """The same model without memory (on the meta device).

    Raises:
        ConfigError, InputError, UnsupportedModelError: the directory cannot be used.
    """
    if config.path is not None:
        return open_policy(config.path).outline()
    with torch.device("meta"):
        return Qwen3ForCausalLM(_sized(config, vocab_size)).float()


def _sized(config: ModelConfig, vocab_size: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        tie_word_embeddings=config.tie_embeddings,
        max_position_embeddings=config.max_position_embeddings,
        attention_dropout=0.0,
        use_cache=False,
        attn_implementation="sdpa",
    )


def ensure_process_group(placement: Placement = ON_HOST) -> bool:
    """Start a group where none exists, of torchrun's ranks or of this process alone; True if this call did.

    Gloo for what lives on the host and, with GPUs, NCCL for what lives there.
    """
    if placement.device.type == "cuda":
        torch.cuda.set_device(placement.device)
    if dist.is_initialized():
        return False
    if dist.is_torchelastic_launched():
        dist.init_process_group(placement.backend)
        return True
    # Documented, but missing from the module's list of exports.
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(placement.backend, store=store, rank=0, world_size=1)
    return True


def apply_fsdp2(model: Any, placement: Placement = ON_HOST) -> None:
    """Shard `model` of transformers, on that device, in place: each decoder layer, then the root, over all ranks.

    Weights, gradients and their reduction stay in float32; forwards and backwards compute in the placement's dtype.
    """
    mesh = init_device_mesh(placement.device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if placement.dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=placement.dtype, reduce_dtype=torch.float32)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def decoder_layers(model: Any) -> list[nn.Module]:
    """The layers of a transformers model, first to last: its outermost list of as many modules as it has layers."""
    num_layers = model.config.get_text_config().num_hidden_layers
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == num_layers)
    return [*next(lists, [])]


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode for the duration; every module then has its own flag back, not that of the root."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


def build_optimizer(model: nn.Module, config: OptimConfig) -> AdamW:
    """AdamW over all parameters that require a gradient."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    betas = (config.beta1, config.beta2)
    return AdamW(trainable, lr=config.lr, betas=betas, eps=config.eps, weight_decay=config.weight_decay)


def build_schedule(optimizer: Optimizer, config: OptimConfig, *, total_steps: int, steps_taken: int = 0) -> LambdaLR:
    """Linear warm-up, then constant, linear or cosine decay to 0 after `total_steps` optimizer steps.

    `steps_taken` is where a resumed run stands.

    Raises:
        ConfigError: no steps to schedule, or a warm-up that never ends.
    """
    config.check_length(total_steps)

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / (config.warmup_steps + 1)
        progress = min(1.0, (step - config.warmup_steps) / (total_steps - config.warmup_steps))
        if config.schedule == "linear":
            return 1.0 - progress
        return 0.5 * (1.0 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1.0

    if steps_taken:
        for group in optimizer.param_groups:
            group["initial_lr"] = config.lr
    return LambdaLR(optimizer, factor, last_epoch=steps_taken - 1)


def response_log_prob(model: nn.Module, batch: TrainBatch) -> Tensor:
    """Log-probs of the response tokens under `model`, temperature applied.

    Logits are computed at response positions only: the token at response position t is predicted by sequence
    position P + t - 1. Columns that are padding in every row are not computed.

    Returns:
        [B,T] float32 on the host, where the batch is, with gradient where it is enabled; values off `response_mask` are
        meaningless but finite.
    """
    device, columns = device_of(model), _used_columns(batch)
    num_positions = columns.stop - (batch.input_ids.shape[1] - batch.num_response_positions)
    ids = batch.input_ids[:, columns].to(device)
    logits = model(
        input_ids=ids,
        attention_mask=batch.attention_mask[:, columns].to(device),
        position_ids=batch.position_ids[:, columns].to(device),
        logits_to_keep=num_positions + 1,
    ).logits[:, :-1]
    log_prob = token_log_probs(logits, ids[:, -num_positions:], temperature=batch.temperature.to(device))
    return pad(log_prob.to(batch.input_ids.device), (0, batch.num_response_positions - num_positions))


def _used_columns(batch: TrainBatch) -> slice:
    """From the first prompt's first token to the longest response's last; at least one response position."""
    used = batch.attention_mask.any(dim=0).nonzero()
    first_response = batch.input_ids.shape[1] - batch.num_response_positions
    return slice(int(used[0]), max(int(used[-1]), first_response) + 1)
