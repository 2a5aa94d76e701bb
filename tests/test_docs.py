"""What the documentation says must be true: settings, files, commands, programs and what they print."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def test_the_configuration_page_is_made_from_the_dataclasses():
    made = runpy.run_path(str(DOCS / "make_configuration.py"))["page"]()
    shown = (DOCS / "configuration.md").read_text()
    assert shown == made, "run python docs/make_configuration.py"
