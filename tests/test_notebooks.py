"""The notebooks of the examples run from their first cell, and show what they were committed with."""

from __future__ import annotations

import ast
import base64
import io
import re
import runpy
from pathlib import Path

import matplotlib.image
import nbformat
import numpy as np
import pytest
from nbclient.exceptions import CellExecutionError

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
MAX_BYTES = 200_000
OF_ONE_MACHINE = re.compile(r"0x[0-9a-f]{6,}|(?<![\w<])/\w+/|\d\d:\d\d:\d\d|\.py:\d+")
"""Addresses of objects, absolute paths, times of day, lines of a traceback or warning."""

execute_notebooks = runpy.run_path(str(EXAMPLES / "execute_notebooks.py"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return request.param


def _read(path):
    return nbformat.read(path, as_version=4)


def _outputs(notebook):
    """(cell, kind, text) of everything shown; of a picture only that there is one."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if output.output_type == "stream":
                yield cell.id, output.name, output.text
            for kind, content in sorted(output.get("data", {}).items()):
                yield cell.id, kind, content if kind.startswith("text/") else "a picture"


def _pictures(notebook):
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if "image/png" in output.get("data", {}):
                yield matplotlib.image.imread(io.BytesIO(base64.b64decode(output.data["image/png"])))


def test_it_runs_and_shows_what_it_was_committed_with(notebook):
    committed, fresh = _read(notebook), execute_notebooks["execute"](notebook)
    assert [*_outputs(fresh)] == [*_outputs(committed)]
    assert [cell.get("execution_count") for cell in fresh.cells] == [
        cell.get("execution_count") for cell in committed.cells
    ]


def test_what_it_shows_is_of_no_one_machine_or_hour(notebook):
    shown = [*_outputs(_read(notebook))]
    assert shown
    assert [(cell, kind) for cell, kind, _ in shown if kind == "stderr"] == []
    assert [text for _, _, text in shown if OF_ONE_MACHINE.search(text)] == []
    assert notebook.stat().st_size < MAX_BYTES


def test_three_factors_are_drawn():
    (picture,) = _pictures(_read(EXAMPLES / "three_factors.ipynb"))
    colours, counts = np.unique((picture[..., :3] * 255).round().astype(int).reshape(-1, 3), axis=0, return_counts=True)
    large = {tuple(colour) for colour, count in zip(colours.tolist(), counts, strict=True) if count > 300}
    # The first three colours of matplotlib's default cycle: one for each factor.
    assert {(31, 119, 180), (255, 127, 14), (44, 160, 44)} <= large


def test_it_uses_public_names_only(notebook):
    private = []
    for cell in _read(notebook).cells:
        for node in ast.walk(ast.parse(cell.source)) if cell.cell_type == "code" else ():
            names = [node.attr] if isinstance(node, ast.Attribute) else []
            if isinstance(node, ast.Import | ast.ImportFrom):
                names += [part for alias in node.names for part in alias.name.split(".")]
            if isinstance(node, ast.ImportFrom):
                names += (node.module or "").split(".")
            private += [name for name in names if name.startswith("_") and not name.endswith("__")]
    assert private == []


def _write(path, *sources):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    stale = nbformat.v4.new_output("stream", name="stdout", text="an output of yesterday\n")
    notebook.cells[-1].outputs = [stale]
    nbformat.write(notebook, path)


def test_outputs_are_written_anew_and_a_notebook_that_fails_is_left_as_it_was(tmp_path):
    good, bad = tmp_path / "good.ipynb", tmp_path / "bad.ipynb"
    _write(good, "x = 20", "import os; print(x + 1, os.environ['OMP_NUM_THREADS'])")
    _write(bad, "1 / 0", "print('never reached')")
    before = bad.read_bytes()
    execute_notebooks["main"]([str(good)])
    assert [text for _, _, text in _outputs(_read(good))] == ["21 1\n"]
    assert "execution" not in _read(good).cells[0].metadata
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        execute_notebooks["main"]([str(bad)])
    assert bad.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.ipynb", "good.ipynb"]
