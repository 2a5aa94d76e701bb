"""Figures as HTML, by plotly; the only file that imports it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plotly.io import to_html
from plotly.offline import get_plotlyjs

CONFIG = {"displayModeBar": False, "responsive": True}


def script() -> str:
    """Plotly's own JavaScript, to be put into a page once."""
    text: str = get_plotlyjs()
    return text


def figure_html(figure: Mapping[str, Any], name: str) -> str:
    """A `div` with id `name` that draws `figure` (plotly's JSON: `data`, `layout`) where the script is in the page.

    Raises:
        ValueError: a trace or layout that plotly does not know.
    """
    text: str = to_html(figure, config=CONFIG, include_plotlyjs=False, full_html=False, div_id=name)
    return text
