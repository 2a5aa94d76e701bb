"""A policy that is spread over ranks is exported whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import run_distributed
from policies import make_policy, read_policy
from safetensors.torch import load_model
from test_run import Quiet
from test_run_own_model import own_config

from fsdp_async.lead import Lead
from fsdp_async.modeling import ModelConfig, apply_fsdp2, build_model
from fsdp_async.policy_export import export_policy
from fsdp_async.policy_files import open_policy
from fsdp_async.run import run_training


def _export(rank, world_size, directory):
    """Change every weight where its shards lie, and export."""
    path = str(Path(directory) / "model")
    config, policy = ModelConfig(path=path), open_policy(path)
    net = build_model(config, vocab_size=300, seed=0)
    apply_fsdp2(net)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.5).sub_(0.25)
    lead = Lead(torch.distributed.new_group(backend="gloo"))
    export_policy(net, config, policy.vocabulary, Path(directory) / "policy", lead)


@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-moe"])
def test_two_ranks_export_what_each_holds_a_part_of(tmp_path, kind):
    # 321 rows of the embedding: one rank has more.
    made = make_policy(tmp_path / "model", kind, num_embeddings=321, hidden_size=36, num_hidden_layers=3)
    run_distributed(_export, 2, str(tmp_path))
    exported = read_policy(tmp_path / "policy")
    for name, tensor in made.state_dict().items():
        assert torch.equal(exported.state_dict()[name], tensor.mul(1.5).sub(0.25)), name
    assert open_policy(str(tmp_path / "policy")).identity == open_policy(str(tmp_path / "model")).identity


def _train(rank, world_size, directory):
    return run_training(own_config(Path(directory)), Quiet())


def test_a_run_on_two_ranks_exports_the_weights_that_it_published_last(tmp_path):
    make_policy(tmp_path / "model")
    summary = run_distributed(_train, 2, str(tmp_path))[0]
    assert (summary["outcome"], summary["num_versions"]) == ("completed", 4)
    assert summary["num_optimizer_steps"] > 0
    engine = build_model(ModelConfig(path=str(tmp_path / "model")), vocab_size=300, seed=0)
    load_model(engine, tmp_path / "run" / "engine_weights" / "v000003.safetensors")
    exported = read_policy(tmp_path / "run" / "policy").state_dict()
    for name, tensor in engine.state_dict().items():
        assert torch.equal(exported[name], tensor), name
