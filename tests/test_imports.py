"""The package is a stack of levels: imports go down or sideways, never up, never round, never inside a function."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import fsdp_async

PACKAGE = Path(fsdp_async.__file__).parent
LEVELS = [
    {"types", "errors", "checks", "timeline"},
    {
        "metrics",
        "logprobs",
        "advantages",
        "loss_config",
        "losses",
        "batching",
        "files",
        "audit",
        "devices",
        "tokenization",
    }
    | {"backends", "scoring_worker", "math_verify_backend", "reasoning_gym_backend", "plotly_backend"}
    | {"scalars", "library_logger", "logger_worker", "wandb_backend", "trackio_backend"}
    | {"is_correction", "correction_config", "correction_statistics", "correction_verl"},
    {"dtensor_io", "arena", "swaps", "agreement", "live_tracker", "version_store", "state_cache"}
    | {"interrupts", "visits", "description", "contents", "pending", "state_reading", "inspection"}
    | {"tasks", "rewards", "scoring", "scoring_inline", "lead", "checkpoint", "ledger", "sample_queue", "loggers"}
    | {"queue_state", "run_dir", "buckets", "shared_block", "policy_files"},
    {
        "modeling",
        "policy_export",
        "generation",
        "rollout",
        "rollout_hf",
        "rollout_inline",
        "engine_proxy",
        "engine_worker",
    }
    | {"weight_sync", "warm_start", "evaluation", "behaviour", "mini_batch", "update_report", "learner", "canary"}
    | {"factors", "feed"},
    {"trainer", "trainer_config", "step_report", "config", "plan", "summary", "recorder", "terminal"}
    | {"resume", "run_files", "assembly", "run", "config_reference"}
    | {"report", "report_data", "report_time", "report_figures", "report_timeline"},
    {"cli", "__main__"},
]
ONLY_HERE = {"hydra": {"cli"}, "omegaconf": {"cli"}, "ray": set(), "vllm": set(), "megatron": set()}
ONLY_HERE |= {"reasoning_gym": {"reasoning_gym_backend"}, "math_verify": {"math_verify_backend"}}
ONLY_HERE |= {name: {f"{name}_backend"} for name in ("plotly", "wandb", "trackio")}
# Run without the package: loaded by their paths, in a process that must start in milliseconds.
ALONE = {"scoring_worker", "math_verify_backend", "reasoning_gym_backend"}
ALONE |= {"logger_worker", "wandb_backend", "trackio_backend"}


def _imports(path):
    """(imported module, is inside a function) for every import of a file."""
    tree = ast.parse(path.read_text())
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", id(node) in inside


def _graph():
    return {
        path.stem: {
            name.split(".")[1] for name, _ in _imports(path) if name.startswith("fsdp_async.") and name.count(".") >= 1
        }
        for path in sorted(PACKAGE.glob("*.py"))
        if path.stem != "__init__"
    }


def test_every_module_has_a_level():
    placed = [name for level in LEVELS for name in level]
    assert sorted(placed) == sorted(_graph())


def test_imports_never_go_up():
    level_of = {name: number for number, level in enumerate(LEVELS) for name in level}
    upward = [(module, used) for module, uses in _graph().items() for used in uses if level_of[used] > level_of[module]]
    assert upward == []


def test_imports_have_no_cycle():
    graph = _graph()
    while leaves := {module for module, uses in graph.items() if not uses & graph.keys()}:
        graph = {module: uses for module, uses in graph.items() if module not in leaves}
    assert graph == {}


def test_nothing_is_imported_inside_a_function():
    late = [(path.stem, name) for path in PACKAGE.glob("*.py") for name, inside in _imports(path) if inside]
    assert late == []


def test_optional_and_framework_packages_stay_in_their_one_file():
    for path in PACKAGE.glob("*.py"):
        for name, _ in _imports(path):
            root = name.split(".")[0]
            assert root not in ONLY_HERE or path.stem in ONLY_HERE[root], f"{path.stem} imports {root}"


def test_what_the_process_of_a_reward_loads_imports_nothing_of_the_package():
    graph = _graph()
    assert {name: graph[name] for name in ALONE} == {name: set() for name in ALONE}
    names = {name.split(".")[0] for name, _ in _imports(PACKAGE / "scoring_worker.py")}
    assert names <= sys.stdlib_module_names


def test_importing_the_package_loads_no_optional_library():
    heavy = ["ray", "vllm", "hydra", "megatron", "matplotlib", "plotly", "reasoning_gym", "math_verify"]
    code = f"import sys, fsdp_async; print([m for m in {heavy!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_no_private_name_of_another_package_is_used():
    """Attribute or import names that begin with one underscore are our own."""
    offenders = []
    for path in [*PACKAGE.glob("*.py"), *Path(__file__).parent.rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(("fsdp_async", "__future__")):
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                offenders += [(path.name, n) for n in names if n.startswith("_") and not n.startswith("__")]
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                root = node.value
                while isinstance(root, ast.Attribute):
                    root = root.value
                if isinstance(root, ast.Name) and root.id in {"torch", "dist", "nn", "F", "transformers", "DTensor"}:
                    offenders.append((path.name, ast.unparse(node)))
    assert offenders == []
