"""Run the notebooks beside this file and write what they print into them.

python examples/execute_notebooks.py [NAME.ipynb ...]       # pip install -e '.[notebook]'

Notebooks are committed with outputs that were really produced, and tests/test_notebooks.py produces them again. So they
hold nothing that differs from one machine or hour to the next: no times, no paths, no digits that a CPU's kernels
decide.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

DIRECTORY = Path(__file__).parent
TIMEOUT_S = 180
NOT_PASSED_ON = ("MPLBACKEND", "RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTHONSTARTUP")
"""Settings of the caller that would change what a notebook shows."""


def execute(path: Path) -> NotebookNode:
    """Run a notebook from its first cell in a new kernel of this interpreter, in a directory of its own.

    Raises:
        CellExecutionError: a cell raised; the message holds its source and traceback.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as directory:
        client = NotebookClient(
            notebook,
            timeout=TIMEOUT_S,
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": directory}},
        )
        client.execute(env=_environment(directory))
    # Its version is the interpreter's.
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def _environment(directory: str) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in NOT_PASSED_ON}
    paths = [str(DIRECTORY.parent), environment.get("PYTHONPATH", "")]
    return environment | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "IPYTHONDIR": directory,  # not the user's profile and history
        "PYTHONWARNINGS": "ignore:IProgress not found",  # of tqdm, which would rather draw its bars with ipywidgets
    }


def main(names: Sequence[str]) -> None:
    for path in [DIRECTORY / name for name in names] or sorted(DIRECTORY.glob("*.ipynb")):
        notebook = execute(path)
        unfinished = path.with_suffix(".unfinished")
        nbformat.write(notebook, unfinished)
        unfinished.replace(path)
        print(path.name)


if __name__ == "__main__":
    main(sys.argv[1:])
