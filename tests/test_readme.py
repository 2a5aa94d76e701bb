"""What the README shows must be true."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def _block(language):
    return re.search(rf"```{language}\n(.*?)```", README, re.DOTALL)[1]


def _log_prob(model, batch):
    x, y = batch
    return model(x).log_softmax(-1).gather(-1, y[:, None]).squeeze(-1)


def _scene(sharded):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(8, 5, generator=generator), torch.randint(3, (8,), generator=generator))] * 5
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {"log_prob": _log_prob, "model": model, "optimizer": optimizer, "batches": batches}


def test_the_cache_example_runs_and_leaves_training_as_it_is_without_the_cache(single_rank):
    code = _block("python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    shown, plain = _scene(sharded=True), _scene(sharded=False)
    exec(compile(code, "README.md", "exec"), shown)
    with shown["cache"] as cache:
        assert cache.versions == [3, 4]
        assert shown["lag"] < 0, "two steps ago the log-prob was lower"
    for batch in plain["batches"]:
        (-_log_prob(plain["model"], batch).mean()).backward()
        plain["optimizer"].step()
        plain["optimizer"].zero_grad()
    for trained, expected in zip(shown["model"].parameters(), plain["model"].parameters(), strict=True):
        assert torch.equal(trained.full_tensor(), expected)


def test_every_file_of_the_package_is_on_the_map():
    listed = set(re.findall(r"`(?:fsdp_async/)?(\w+\.py)`", README))
    present = {path.name for path in (ROOT / "fsdp_async").glob("*.py")} - {"__init__.py", "__main__.py"}
    assert present - listed == set()
    assert listed - present == set()


def test_every_example_is_listed_with_a_sentence():
    rows = dict(re.findall(r"^\| `examples/(\S+)` \| (.+) \|$", README, re.MULTILINE))
    present = {path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb")}
    present.remove("execute_notebooks.py")  # no example; CONTRIBUTING.md says what it is for
    assert rows.keys() == present


def test_the_files_of_the_design_are_those_of_the_package():
    design = (ROOT / "docs" / "design.md").read_text()
    section = design[design.index("## 3. Files") : design.index("## 4.")]
    listed = set(re.findall(r"\b(\w+\.py)\b", section)) - {"test_imports.py"}
    assert listed == {path.name for path in (ROOT / "fsdp_async").glob("*.py")}


def test_the_commands_that_are_shown_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make (\w+)", README)) <= targets
    for group, name in re.findall(r"(experiment|correction)=(\w+)", README):
        assert (ROOT / "conf" / group / f"{name}.yaml").is_file()
