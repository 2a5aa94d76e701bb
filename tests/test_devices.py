"""What `auto` means, and what is refused where a machine does not have it."""

from __future__ import annotations

import pickle
from functools import partial

import pytest
import torch
from builders import TINY, VOCAB
from safetensors.torch import load_file
from test_run import SMALL, Quiet
from torch.distributed.tensor import DTensor

from fsdp_async.buckets import WeightBucket, WeightReceiver, pack
from fsdp_async.config import parse_config
from fsdp_async.devices import DTYPES, ON_HOST, PlacedBuilder, Placement, engine_placement, trainer_placement
from fsdp_async.errors import ConfigError, StateMismatchError
from fsdp_async.modeling import apply_fsdp2, build_model
from fsdp_async.plan import effective_plan
from fsdp_async.run import run_training

BUILD = partial(build_model, TINY, vocab_size=VOCAB, seed=3)


@pytest.fixture
def machine(monkeypatch):
    """A machine with so many GPUs on which torchrun started so many ranks, this one being `rank`."""

    def describe(*, gpus=0, ranks=1, rank=0):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        monkeypatch.setenv("LOCAL_RANK", str(rank))

    return describe


def test_without_gpus_everything_is_on_the_cpu_in_float32(machine):
    machine()
    assert trainer_placement("auto", "auto") == ON_HOST
    assert engine_placement("auto", "auto", ON_HOST) == ON_HOST
    assert ON_HOST.backend == "gloo"


def test_each_rank_has_its_own_gpu_and_computes_in_bfloat16(machine):
    machine(gpus=4, ranks=3, rank=2)
    placement = trainer_placement("auto", "auto")
    assert placement == Placement(torch.device("cuda", 2), torch.bfloat16)
    assert placement.backend == "cpu:gloo,cuda:nccl"
    assert str(placement) == "cuda:2, bfloat16"


@pytest.mark.parametrize(("gpus", "ranks", "index"), [(4, 3, 3), (2, 2, 0), (1, 1, 0)])
def test_the_engine_takes_a_gpu_without_a_rank_where_there_is_one(machine, gpus, ranks, index):
    machine(gpus=gpus, ranks=ranks)
    trainer = trainer_placement("cuda", "auto")
    assert engine_placement("auto", "auto", trainer) == Placement(torch.device("cuda", index), torch.bfloat16)


def test_an_engine_may_have_the_gpu_that_a_trainer_on_the_cpu_leaves_free(machine):
    machine(gpus=1, ranks=2)
    assert engine_placement("cuda", "auto", ON_HOST) == Placement(torch.device("cuda", 0), torch.float32)


def test_a_word_said_is_taken(machine):
    machine(gpus=1)
    assert trainer_placement("cpu", "bfloat16") == Placement(torch.device("cpu"), torch.bfloat16)
    on_gpu = trainer_placement("auto", "float32")
    assert on_gpu.dtype == torch.float32
    assert engine_placement("cpu", "bfloat16", on_gpu) == Placement(torch.device("cpu"), torch.bfloat16)


def test_a_gpu_that_is_not_there_is_refused_with_what_to_set(machine):
    machine()
    with pytest.raises(
        ConfigError, match=r"trainer\.device=cuda: .* sees no GPU here; set trainer\.device=cpu, or auto"
    ):
        trainer_placement("cuda", "auto")
    with pytest.raises(ConfigError, match=r"rollout\.device=cuda: .* sees no GPU here"):
        engine_placement("cuda", "auto", ON_HOST)


def test_more_ranks_than_gpus_are_refused(machine):
    machine(gpus=1, ranks=2)
    with pytest.raises(ConfigError, match=r"2 ranks on this machine and 1 GPU\(s\), and each rank needs one"):
        trainer_placement("auto", "auto")


def test_the_plan_says_where_things_compute():
    config = parse_config({"trainer": {"device": "cpu"}, "rollout": {"dtype": "bfloat16"}})
    assert effective_plan(config, num_parameters=1)[0] == (
        "compute: each rank of the trainer on cpu, float32 (weights in float32), the engine on cpu, bfloat16"
    )


def test_a_placed_model_has_its_parameters_but_not_its_buffers_in_the_dtype():
    builder = pickle.loads(pickle.dumps(PlacedBuilder(BUILD, Placement(torch.device("cpu"), torch.bfloat16))))
    model, reference = builder(), BUILD()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for mine, theirs in zip(model.buffers(), reference.buffers(), strict=True):
        assert torch.equal(mine, theirs)


def test_what_is_published_in_float32_is_rounded_once_to_the_dtype_of_the_engine():
    model = PlacedBuilder(BUILD, Placement(torch.device("cpu"), torch.bfloat16))()
    source = build_model(TINY, vocab_size=VOCAB, seed=4)
    receiver = WeightReceiver(model, casts=True)
    # An odd size, so that tensors and even elements are cut.
    pieces = list(pack(dict(source.named_parameters()).items(), 1001))
    for index, piece in enumerate(pieces):
        memory = torch.empty(piece.num_bytes, dtype=torch.uint8)
        piece.copy_to(memory)
        entries = tuple(entry for entry, _ in piece.entries)
        receiver.take(WeightBucket(0, index, index == len(pieces) - 1, entries, memory), memory)
    for mine, theirs in zip(model.parameters(), source.parameters(), strict=True):
        assert torch.equal(mine, theirs.to(torch.bfloat16))


def test_another_dtype_is_refused_where_nobody_asked_for_rounding():
    receiver = WeightReceiver(torch.nn.Linear(2, 2, bias=False))
    (piece,) = pack([("weight", torch.zeros(2, 2, dtype=torch.bfloat16))], 1 << 20)
    memory = torch.zeros(piece.num_bytes, dtype=torch.uint8)
    with pytest.raises(StateMismatchError, match=r"published as torch\.bfloat16"):
        receiver.take(WeightBucket(0, 0, True, tuple(entry for entry, _ in piece.entries), memory), memory)


def test_integers_are_never_rounded_to():
    model = torch.nn.Module()
    model.register_buffer("count", torch.zeros(2, dtype=torch.int64))
    (piece,) = pack([("count", torch.zeros(2))], 1 << 20)
    memory = torch.zeros(piece.num_bytes, dtype=torch.uint8)
    with pytest.raises(StateMismatchError, match=r"expects torch\.int64"):
        WeightReceiver(model, casts=True).take(
            WeightBucket(0, 0, True, tuple(entry for entry, _ in piece.entries), memory), memory
        )


def test_a_sharded_model_computes_in_bfloat16_and_keeps_float32_weights_and_gradients(single_rank):
    model = BUILD()
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    apply_fsdp2(model, Placement(torch.device("cpu"), torch.bfloat16))
    logits = model(input_ids=torch.tensor([[3, 4, 5]])).logits
    assert logits.dtype == torch.bfloat16
    logits.float().logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.grad.dtype == torch.float32
        assert torch.equal(parameter.full_tensor(), whole[name])


@pytest.mark.parametrize(
    ("trainer", "rollout", "least", "most"),
    [("float32", "float32", 0.0, 1e-9), ("float32", "bfloat16", 1e-7, 1e-2), ("bfloat16", "float32", 1e-7, 1e-2)],
)
def test_mismatch_is_the_rounding_of_the_two_sides(tmp_path, trainer, rollout, least, most):
    sections = {
        **SMALL,
        "run": {"output_dir": str(tmp_path / "run")},
        "warm_start": {"num_steps": 0},
        "logging": {"tensorboard": False},
        "rollout": {**SMALL["rollout"], "engine": "thread", "dtype": rollout},
        "trainer": {**SMALL["trainer"], "num_batches": 3, "dtype": trainer},
    }
    summary = run_training(parse_config(sections), Quiet())
    assert summary["num_batches"] == 3
    assert least <= summary["mismatch_kl_k3_mean"] <= most
    received = load_file(tmp_path / "run" / "engine_weights" / "v000001.safetensors")
    assert {tensor.dtype for tensor in received.values()} == {DTYPES[rollout]}
