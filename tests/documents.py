"""The documentation, taken apart: blocks, words in code type, commands, links."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAM = re.compile(r"(?:(?:\.venv/bin/)?fsdp-async|-m fsdp_async(?:\.cli)?)\s+(?=\S)")


@dataclass(frozen=True)
class Block:
    """A fenced block; `output` is the text block that directly follows it, if one does."""

    language: str
    text: str
    output: str | None


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = list(FENCE.finditer(text))
    made = []
    for index, match in enumerate(found):
        after = found[index + 1] if index + 1 < len(found) else None
        follows = after is not None and after[1] == "text" and not text[match.end() : after.start()].strip()
        made.append(Block(match[1], match[2], after[2] if after is not None and follows else None))
    return made


def prose(page: Path) -> str:
    """A page without its blocks."""
    return FENCE.sub("", page.read_text())


def code_words(page: Path) -> list[str]:
    """What stands in code type inside sentences and tables."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def shell_lines(page: Path) -> list[str]:
    """Lines of the blocks that are for a shell, comments left out."""
    lines = [line for block in blocks(page) if block.language == "bash" for line in block.text.splitlines()]
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def arguments_of(line: str) -> list[str] | None:
    """What a shell line hands to `fsdp-async`; None where it calls something else."""
    found = PROGRAM.search(line)
    return None if found is None else shlex.split(line[found.end() :], comments=True)


def cells(page: Path) -> list[list[str]]:
    """Rows of the page's tables."""
    rows = [line.strip().strip("|") for line in prose(page).splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)] for row in rows]
