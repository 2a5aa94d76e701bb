"""The built wheel works by itself, away from the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from test_cli import QUICK

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of what a build needs, and a cache file that it must leave out."""
    source = tmp_path_factory.mktemp("source")
    for name in ("fsdp_async", "conf", "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    cached = source / "fsdp_async" / "__pycache__" / "left_over.pyc"
    cached.parent.mkdir(exist_ok=True)
    cached.touch()
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(source / "dist"),
        str(source),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (built,) = (source / "dist").iterdir()
    return built


@pytest.fixture(scope="module")
def run(wheel, tmp_path_factory):
    """Runs python where only the installed wheel, and no checkout, provides the package."""
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    environment = {**os.environ, "PYTHONPATH": str(target)}

    def python(*arguments, cwd):
        return subprocess.run(
            [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
        )

    python.target = target
    return python


def test_it_holds_the_package_and_its_configs_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"fsdp_async"}
    configs = {f"fsdp_async/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    modules = {f"fsdp_async/{path.name}" for path in (ROOT / "fsdp_async").glob("*.py")}
    assert {name for name in names if ".dist-info/" not in name} == configs | modules | {"fsdp_async/py.typed"}


def test_importing_it_loads_no_optional_library(run, tmp_path):
    heavy = ["ray", "vllm", "hydra", "megatron", "matplotlib"]
    code = f"import sys, fsdp_async; print(fsdp_async.__file__, [m for m in {heavy!r} if m in sys.modules])"
    result = run("-c", code, cwd=tmp_path)
    assert result.stdout.split() == [str(run.target / "fsdp_async" / "__init__.py"), "[]"], result.stderr


def test_it_runs_the_demo(run, tmp_path):
    result = run("-m", "fsdp_async.cli", "train", *QUICK, "run.output_dir=here", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    summary = json.loads((tmp_path / "here" / "summary.json").read_text())
    assert (summary["outcome"], summary["num_batches"]) == ("completed", 3)
    record = json.loads((tmp_path / "here" / "run.json").read_text())
    assert record["commit"] is None, "a wheel is no checkout"
