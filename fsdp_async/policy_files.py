"""A policy in a Hugging Face directory.

Owns what is read of `model.path`: config, weights, and every reason why a directory is refused. It promises that a
model that was loaded has all its weights from the directory, exactly, in float32, and that nothing else was there; that
no network is asked and no code of the directory is run. Its tokenizer is `tokenization.py`'s business, writing a
directory that of `policy_export.py`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from fsdp_async.errors import ConfigError, InputError, UnsupportedModelError
from fsdp_async.tokenization import DirectoryVocabulary, Vocabulary

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
READ_EXACTLY = ("F32", "BF16", "F16")
"""What float32 holds without rounding."""
FORWARD = frozenset({"input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"})
"""What training and sampling ask a forward for."""
ATTENTION = frozenset({"full_attention", "sliding_attention"})
"""Layers whose state is a cache of keys and values, which left padding leaves alone."""
ELSEWHERE = ("summary", "classifier")
"""Dropouts that a causal language model does not use."""
NOISE = ("drop", "jitter")
PASSING = frozenset({"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache"})
"""Keys of a config that change no log-prob."""
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError)


@dataclass(frozen=True)
class PolicyDirectory:
    """A directory that has passed every check that needs no weights in memory; `config` is transformers'."""

    path: Path
    config: Any

    @property
    def num_embeddings(self) -> int:
        """Rows of the embedding."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def max_positions(self) -> int | None:
        """The longest sequence; None where the config does not say."""
        value = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return None if value is None else int(value)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """That of its tokenizer.

        Raises:
            InputError: none, or one that cannot be read, or one with tokens that the embedding has no row for.
        """
        vocabulary = DirectoryVocabulary(self.path, self.config)
        if vocabulary.size > self.num_embeddings:
            raise InputError(
                f"model.path={self.path}: the tokenizer has ids up to {vocabulary.size - 1:,}, the embedding "
                f"{self.num_embeddings:,} rows; give the model its own tokenizer, or resize its embedding"
            )
        return vocabulary

    @property
    def identity(self) -> dict[str, Any]:
        """What a resumed run must find again: the config, as far as it decides log-probs, and the vocabulary."""
        return {
            "config": {key: value for key, value in _as_json(self.config).items() if key not in PASSING},
            "vocabulary": self.vocabulary.digest,
        }

    def check_length(self, num_tokens: int) -> None:
        """Refuse sequences longer than the model.

        Raises:
            ConfigError: names the model's length.
        """
        if self.max_positions is not None and num_tokens > self.max_positions:
            raise ConfigError(
                f"task.max_prompt_tokens + rollout.max_response_tokens = {num_tokens} exceed max_position_embeddings="
                f"{self.max_positions} of model.path={self.path}; lower one of the two"
            )

    def outline(self) -> Any:
        """The model without memory (on the meta device), in float32."""
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(self.config, dtype=torch.float32, trust_remote_code=False)

    def load(self) -> Any:
        """The model on the CPU, in float32; random generators are left as they were.

        Raises:
            InputError: weights are missing, left over, of another shape, or cannot be read.
            UnsupportedModelError: what it says of a token depends on tokens after it, or it cannot compute at all.
        """
        with torch.random.fork_rng(devices=[]), silent_transformers():
            try:
                model, report = AutoModelForCausalLM.from_pretrained(
                    str(self.path), config=self.config, dtype=torch.float32, local_files_only=True,
                    trust_remote_code=False, use_safetensors=True, ignore_mismatched_sizes=True,
                    output_loading_info=True,
                )  # fmt: skip
            except (*UNREADABLE, RuntimeError, SafetensorError) as error:
                raise InputError(
                    f"model.path={self.path}: its weights cannot be read: {error}; save it again"
                ) from error
        for kind in ("missing", "unexpected", "mismatched"):
            if names := report[f"{kind}_keys"]:
                raise InputError(
                    f"model.path={self.path}: {kind} weights {sorted(map(str, names))!r:.400}; the files do not fit "
                    f"{CONFIG_FILE}: save config and weights of one model together"
                )
        _check_causal(model, self)
        return model

    def digest(self) -> str:
        """Of every file that the policy is read from."""
        whole = hashlib.sha256()
        for path in sorted(p for p in self.path.iterdir() if p.is_file() and not p.name.startswith(".")):
            with path.open("rb") as handle:
                whole.update(f"{path.name}:{hashlib.file_digest(handle, 'sha256').hexdigest()};".encode())
        return whole.hexdigest()


def open_policy(path: str) -> PolicyDirectory:
    """Look at the directory `path` without loading its weights.

    Raises:
        ConfigError: there is no such directory.
        InputError: no config, or one that cannot be read; no safetensors weights, or torn ones.
        UnsupportedModelError: no causal language model, or one that could not be trained and sampled as it is.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError(
            f"model.path={path}: no such directory; give a local Hugging Face directory (nothing is downloaded), or "
            "leave it out to build a policy from sizes"
        )
    config = _read_config(directory)
    policy = PolicyDirectory(directory, config)
    _check_architecture(policy)
    _check_noise(policy)
    _check_weights(policy)
    return policy


def _read_config(directory: Path) -> Any:
    if not (directory / CONFIG_FILE).is_file():
        raise InputError(
            f"model.path={directory} holds no {CONFIG_FILE}; give the directory that model.save_pretrained wrote"
        )
    try:
        with silent_transformers():
            return AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except UNREADABLE as error:
        first = str(error).strip().splitlines()[0]
        raise InputError(
            f"model.path={directory}: {CONFIG_FILE} is none that transformers can read without code of its own "
            f"({first}); save the model with a release of transformers that knows it"
        ) from error


def _check_architecture(policy: PolicyDirectory) -> None:
    where, config = f"model.path={policy.path}", policy.config
    known = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), ())
    classes = {kind.__name__: kind for kind in (known if isinstance(known, tuple) else (known,))}
    named = config.architectures or list(classes)
    fitting = [classes[name] for name in named if name in classes]
    if not fitting:
        raise UnsupportedModelError(
            f"{where}: {CONFIG_FILE} says {', '.join(named) or config.model_type}, which is no causal language model "
            f"(known for {config.model_type}: {', '.join(classes) or 'none'}); give one that generates text"
        )
    if lacking := FORWARD - inspect.signature(fitting[0].forward).parameters.keys():
        raise UnsupportedModelError(
            f"{where}: {fitting[0].__name__} takes no {', '.join(sorted(lacking))}, which sampling with a cache and "
            "training on padded batches need; choose another architecture"
        )
    layers = set(getattr(config.get_text_config(), "layer_types", None) or ())
    if foreign := layers - ATTENTION:
        raise UnsupportedModelError(
            f"{where}: {fitting[0].__name__} has layers of {', '.join(sorted(foreign))}, whose state left padding "
            "would change; choose a model of attention layers only"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError(
            f"{where}: the weights are quantized, and cannot be trained in float32 as they are; give the directory of "
            "the model before it was quantized"
        )


def _check_noise(policy: PolicyDirectory) -> None:
    for key, value in _as_json(policy.config.get_text_config()).items():
        is_noise = any(word in key for word in NOISE) and not key.startswith(ELSEWHERE)
        if is_noise and isinstance(value, int | float) and value > 0 and value is not True:
            raise UnsupportedModelError(
                f"model.path={policy.path}: {key}={value} in {CONFIG_FILE} must be 0, because log-probs of one policy "
                "must be the same in every forward; set it to 0 there"
            )


def _check_weights(policy: PolicyDirectory) -> None:
    for path in _weight_files(policy.path):
        try:
            with safe_open(path, "pt") as file:
                dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - no mapping
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"model.path={policy.path}: {path.name} is torn or no safetensors file ({error}); copy it again"
            ) from error
        for name, dtype in dtypes.items():
            if dtype not in READ_EXACTLY:
                raise UnsupportedModelError(
                    f"model.path={policy.path}: {name} is {dtype}, which float32 training cannot start from without "
                    f"rounding; save the model in one of {', '.join(READ_EXACTLY)}"
                )


def _check_causal(model: Any, policy: PolicyDirectory) -> None:
    """Some classes that generate read in both directions, unless their config says otherwise."""
    ids = torch.tensor([[0, 1, 2, 3], [0, 1, 4, 5]]) % policy.num_embeddings
    try:
        with torch.no_grad():
            one, two = model(input_ids=ids, use_cache=False).logits[:, :2]
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        raise UnsupportedModelError(
            f"model.path={policy.path}: {type(model).__name__} of these sizes cannot compute four tokens here "
            f"({first}); choose another model"
        ) from error
    # Experts sum in an order that depends on what else is there; reading ahead changes far more.
    if not torch.allclose(one, two, rtol=0, atol=1e-3 * float(one.abs().max())):
        raise UnsupportedModelError(
            f"model.path={policy.path}: with {type(model).__name__} as configured, tokens change what is said of "
            "tokens before them; give a model that reads in one direction (is_decoder=true, where config.json has that)"
        )


def _weight_files(directory: Path) -> list[Path]:
    if (directory / WEIGHTS_FILE).is_file():
        return [directory / WEIGHTS_FILE]
    if not (directory / INDEX_FILE).is_file():
        others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
        found = f" but {', '.join(others)}, which are not read since reading them runs code" if others else ""
        raise InputError(
            f"model.path={directory} holds no weights ({WEIGHTS_FILE} or {INDEX_FILE}){found}; save the model there "
            "with model.save_pretrained"
        )
    try:
        index = json.loads((directory / INDEX_FILE).read_text(encoding="utf-8"))
        names = sorted({*map(str, index["weight_map"].values())})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"model.path={directory}: {INDEX_FILE} cannot be read ({error!r}); copy it again") from error
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise InputError(f"model.path={directory}: {INDEX_FILE} names {', '.join(missing)}, not there; copy them, too")
    return [directory / name for name in names]


def _as_json(config: Any) -> Mapping[str, Any]:
    values: Mapping[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return values


@contextmanager
def silent_transformers() -> Iterator[None]:
    """Keep transformers from drawing bars and tables: what they would say is said by errors here."""
    level, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_bars:
            logging.enable_progress_bar()
