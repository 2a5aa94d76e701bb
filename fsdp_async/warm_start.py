"""The policy that reinforcement learning starts from.

Owns a short supervised warm start (an RL run from random weights would never see a reward) and its file, which is
made once, written whole or not at all, and loaded by every later run with the same recipe.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import Tensor, nn
from torch.optim import AdamW

from fsdp_async.batching import position_ids
from fsdp_async.devices import device_of
from fsdp_async.errors import ConfigError, InputError, NonFiniteError
from fsdp_async.files import write_model
from fsdp_async.logprobs import token_log_probs
from fsdp_async.modeling import ModelConfig
from fsdp_async.policy_files import open_policy
from fsdp_async.tasks import Task, TaskConfig

DEFAULT_STEPS = 100
RECIPE = ("batch_size", "lr", "directory")


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    """Supervised steps before RL, or the file that holds their result.

    `path` names a safetensors file to load (then no steps are taken); without it the file is looked for, and made,
    in `directory` under a name that is a digest of model, task, seed and recipe. `num_steps` null means 100, or none
    with model.path, from whose weights they start; 0 starts from those, or from random ones.
    """

    path: str | None = None
    directory: str = "outputs/warm_start"
    num_steps: int | None = None
    batch_size: int = 64
    lr: float = 1e-3

    def __post_init__(self) -> None:
        if self.steps < 0 or self.batch_size < 1 or not 0 < self.lr <= 1:
            raise ConfigError(
                f"warm_start.num_steps={self.steps}, batch_size={self.batch_size}, lr={self.lr}: "
                "need num_steps >= 0, batch_size >= 1, 0 < lr <= 1 (Adam moves every weight by about lr a step)"
            )
        if self.path is not None:
            self._refuse("num_steps", *RECIPE, because=f"warm_start.path={self.path}, which is loaded as it is")
        elif self.num_steps == 0:
            self._refuse(*RECIPE, because="warm_start.num_steps=0, so that no step is taken")

    @property
    def steps(self) -> int:
        """Supervised steps to take."""
        return DEFAULT_STEPS if self.num_steps is None else self.num_steps

    def of(self, model: ModelConfig) -> WarmStartConfig:
        """The same, with what `num_steps` null means for `model`.

        Raises:
            ConfigError: an option that has no effect then.
        """
        is_none = self.path is None and self.num_steps is None and model.path is not None
        return replace(self, num_steps=0) if is_none else self

    def _refuse(self, *names: str, because: str) -> None:
        for name in names:
            if getattr(self, name) != getattr(WarmStartConfig, name):
                raise ConfigError(
                    f"warm_start.{name}={getattr(self, name)} has no effect with {because}; leave one out"
                )


def find_warm_start(config: WarmStartConfig, model: ModelConfig, task: TaskConfig, *, seed: int) -> Path | None:
    """Where the warm start of this recipe lies or will lie; None where no step is taken.

    Raises:
        ConfigError: `path` is given and there is no such file.
    """
    if config.path is not None:
        path = Path(config.path)
        if not path.is_file():
            raise ConfigError(
                f"warm_start.path={config.path}: no such file; give an existing safetensors file, or leave "
                "warm_start.path=null to have one made"
            )
        return path
    config = config.of(model)
    if config.steps == 0:
        return None
    recipe = [asdict(model), asdict(task), seed, config.steps, config.batch_size, config.lr]
    if model.path is not None:
        recipe.append(open_policy(model.path).digest())
    if task.path is not None:
        # What the file says, not its name: an edited file is another task.
        recipe.append(hashlib.sha256(Path(task.path).read_bytes()).hexdigest())
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]
    return Path(config.directory) / f"{digest}.safetensors"


def load_or_make(
    net: nn.Module,
    task: Task,
    config: WarmStartConfig,
    path: Path | None,
    *,
    seed: int,
    on_step: Callable[[int, float], None] | None = None,
) -> None:
    """Give the unsharded float32 `net` the warm-start weights of `path`, training and writing them if absent.

    `on_step(step, loss)` hears of every supervised step.

    Raises:
        InputError: the file is damaged or belongs to another model.
        NonFiniteError: the supervised loss diverged; nothing is written.
    """
    if path is None:
        return
    if path.exists():
        _load(net, path)
        return
    _supervise(net, task, config, seed=seed, on_step=on_step)
    write_model(path, net)


def _load(net: nn.Module, path: Path) -> None:
    try:
        load_model(net, path, strict=True)
    except (SafetensorError, RuntimeError) as error:
        raise InputError(
            f"warm start {path} does not fit this model or is damaged: {error}; "
            "delete it to have it made again, or point warm_start.path to another file"
        ) from error


def _supervise(
    net: nn.Module, task: Task, config: WarmStartConfig, *, seed: int, on_step: Callable[[int, float], None] | None
) -> None:
    optimizer = AdamW(net.parameters(), lr=config.lr)
    pairs = task.sft_pairs(config.steps * config.batch_size, seed)
    net.train()
    for step in range(config.steps):
        loss = _supervised_loss(net, pairs[step * config.batch_size : (step + 1) * config.batch_size])
        _refuse_divergence(loss, step, config)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        if on_step is not None:
            on_step(step, loss.item())
    net.zero_grad(set_to_none=True)
    # The losses above are those before a step: the last one has not been looked at.
    with torch.no_grad():
        _refuse_divergence(_supervised_loss(net, pairs[: config.batch_size]), config.steps, config)


def _refuse_divergence(loss: Tensor, step: int, config: WarmStartConfig) -> None:
    if not torch.isfinite(loss):
        raise NonFiniteError(
            f"the warm start diverged at step {step}: loss {loss.item()}; lower warm_start.lr={config.lr}"
        )


def _supervised_loss(net: nn.Module, pairs: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Tensor:
    """Mean negative log-likelihood of the answer tokens; pairs are right-padded with token 0 off the mask."""
    longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
    ids = torch.zeros(len(pairs), longest, dtype=torch.int64)
    attention = torch.zeros_like(ids)
    is_answer = torch.zeros_like(ids, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(pairs):
        stop = len(prompt) + len(answer)
        ids[row, :stop] = torch.tensor([*prompt, *answer])
        attention[row, :stop] = 1
        is_answer[row, len(prompt) : stop] = True
    ids, attention, positions = (x.to(device_of(net)) for x in (ids, attention, position_ids(attention)))
    logits = net(input_ids=ids, attention_mask=attention, position_ids=positions).logits
    log_prob = token_log_probs(logits[:, :-1], ids[:, 1:]).to(is_answer.device)
    return -log_prob[is_answer[:, 1:]].mean()
