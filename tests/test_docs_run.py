"""What the documentation shows must run, and print what is shown; numbers apart, which other machines round anew."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
from documents import DOCS, ROOT, blocks
from torch import nn

from fsdp_async.state_cache import CacheConfig, StateCache

PAGES = [page for page in sorted(DOCS.glob("*.md")) if page.name != "design.md"]  # held by test_docs.py
SHOWN_SECONDS = 240  # one command; a page shows several


def _words(line):
    """A line without what depends on the machine: numbers, digests, names of tensors, characters."""
    line = re.sub(r"\b[0-9a-f]{64}\b", "#", line)
    line = re.sub(r"\b(?:model\.layers\.\d+|lm_head)[\w.]*", "tensor", line)
    line = re.sub(r"'.'(?=\s)|\bend\b(?=\s+-)", "token", line)
    return " ".join(re.sub(r"(?<![\w.])-?\d[\d,.]*(?:e[+-]?\d+)?", "#", line).split())


def _check(printed, shown, what):
    """`shown` is what was printed; a line of three dots stands for any lines."""
    parts = [[_words(line) for line in part.splitlines()] for part in re.split(r"^\.\.\.\n", shown, flags=re.MULTILINE)]
    lines = [_words(line) for line in printed.splitlines()]
    position = 0
    for number, part in enumerate(parts):
        starts = [position] if number == 0 else range(position, len(lines) + 1)
        start = next((start for start in starts if lines[start : start + len(part)] == part), None)
        assert start is not None, f"{what} does not print {part}; it prints:\n{printed}"
        position = start + len(part)
    if not shown.endswith("...\n"):
        assert position == len(lines), f"{what} prints more than is shown:\n{printed}"


def _run(line, directory):
    words = shlex.split(line)
    if words[0] == "fsdp-async":
        words[:1] = ["python", "-m", "fsdp_async"]
    assert words[0] == "python"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *words[1:]], cwd=directory, env=environment, capture_output=True, text=True,
        timeout=SHOWN_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{line}:\n{done.stderr}"
    return done.stdout


def _scene():
    """What the programs of a page may take as given."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return {
        "CacheConfig": CacheConfig,
        "StateCache": StateCache,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
        "forward": lambda net, batch: net(batch).log_softmax(-1),
        "batch": torch.randn(5, 4),
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_programs_and_commands_of_a_page_print_what_it_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    scene = _scene()
    for block in blocks(page):
        if block.language == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(block.text, page.name, "exec"), scene)
            if block.output is not None:
                _check(printed.getvalue(), block.output, block.text)
        elif block.language == "bash" and block.output is not None:
            (line,) = block.text.splitlines()
            _check(_run(line, tmp_path), block.output, line)
    if "cache" in scene:
        scene["cache"].close()


def test_a_wrong_line_a_missing_one_and_one_too_many_are_noticed():
    _check("a 1\nb 2\nc 3\n", "a 7\n...\nc 8\n", "it")
    for shown in ("a 1\nc 3\n", "a 1\nb 2\n", "...\nd\n", "b 2\n...\n"):
        with pytest.raises(AssertionError):
            _check("a 1\nb 2\nc 3\n", shown, "it")
