"""Writes `docs/configuration.md` from the config dataclasses and `conf/`: python docs/make_configuration.py."""

from __future__ import annotations

from pathlib import Path

from fsdp_async.cli import config_directory
from fsdp_async.config_reference import Section, sections

PAGE = Path(__file__).parent / "configuration.md"

INTRODUCTION = """\
# Configuration

This page is made by `python docs/make_configuration.py` from the config dataclasses; do not edit it.

A setting is given as `KEY=VALUE` after `fsdp-async train` or `fsdp-async plan`, as in `optim.lr=1e-4`. A mapping is
written in braces and quoted for the shell, as in `'correction.mismatch={level: sequence, upper: 8}'`. `~KEY` takes away
what an experiment has set. `fsdp-async plan` prints what a run would do with its settings, and starts nothing.
`fsdp-async train --help` prints what stands here. Defaults are those of the dataclasses; groups and experiments may set
others. What the text calls None, True and False is written `null`, `true` and `false`.

Which combinations are refused, and why: [design](design.md), section 7. What the words mean: [concepts](concepts.md).

## Groups

A group is chosen by name, as in `correction=disabled`. Those that a run takes by itself are listed in
[conf/config.yaml](../conf/config.yaml)."""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION, _groups(), *(_section(section) for section in sections())]
    return "\n\n".join(parts) + "\n"


def _groups() -> str:
    rows = ["| choice | what it sets |", "|---|---|"]
    for group in sorted(path for path in config_directory().iterdir() if path.is_dir()):
        for file in sorted(group.glob("*.yaml")):
            lines = file.read_text().splitlines()
            comments = [line.removeprefix("#").strip() for line in lines if line.startswith("#")]
            said = " ".join(line for line in comments if not line.startswith("@"))
            values = ", ".join(f"`{line}`" for line in lines if not line.startswith("#"))
            name = f"{group.name}={file.stem}"
            rows.append(f"| [`{name}`](../conf/{group.name}/{file.name}) | {_cell(said or values)} |")
    return "\n".join(rows)


def _section(section: Section) -> str:
    title = ", ".join(f"`{path}`" for path in section.paths)
    if "." in section.paths[0]:
        title = f"{section.name}: {title}"
    has_meanings = any(key.meaning for key in section.keys)
    head = ["key", "default", "values", *(["meaning"] if has_meanings else [])]
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for key in section.keys:
        cells = [f"`{key.name}`", f"`{key.default}`", key.values, *([key.meaning] if has_meanings else [])]
        rows.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join([f"## {title}", "", section.text, "", *rows])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
