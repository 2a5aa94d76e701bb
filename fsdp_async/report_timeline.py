"""Who worked when, drawn: a lane for the engine and one for each phase of the trainer.

Owns the overlap timeline of a report, as plotly's JSON. Long runs show their last steps only.
"""

from __future__ import annotations

from typing import Any

from fsdp_async.report_data import RunData
from fsdp_async.report_figures import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, Figure, Panel, layout
from fsdp_async.report_time import Interval, spans_of, time_shares
from fsdp_async.timeline import without

LANES = {
    "engine: generate": ("engine", BLUE),
    "trainer: behaviour": ("behaviour", ORANGE),
    "trainer: update": ("update", GREEN),
    "trainer: publish": ("publish", PURPLE),
    "trainer: checkpoint": ("checkpoint", SKY),
    "trainer: evaluate": ("evaluate", GREY),
    "trainer: wait": ("wait", RED),
}
MAX_STEPS = 500
SHOWN_STEPS = 12
MAX_LABELLED = 100_000


def timeline_panel(run: RunData) -> Panel:
    """The panel; without bars where no span was recorded."""
    steps = run.steps[-MAX_STEPS:]
    first_s = steps[0]["time_s"] if len(run.steps) > MAX_STEPS else 0.0
    spans = spans_of(run)
    data = []
    for lane, (phase, colour) in LANES.items():
        holes = [] if phase in ("wait", "engine") else spans.get("wait", [])
        mine = without(spans.get(phase, []), holes)
        shown = [span for span in mine if span[1] > first_s][-MAX_LABELLED:]
        if shown:
            data.append(_bars(lane, shown, colour))
    figure: Figure = {
        "data": data,
        "layout": layout("seconds since the run began", "", showlegend=False, barmode="overlay"),
    }
    figure["layout"] |= {"height": 340, "hovermode": "closest", "margin": {"l": 150, "r": 16, "t": 16, "b": 48}}
    figure["layout"]["yaxis"] |= {"autorange": "reversed", "rangemode": "normal"}
    if steps:
        figure["layout"]["xaxis"]["range"] = [steps[-SHOWN_STEPS:][0]["time_s"], steps[-1]["time_s"]]
    limit = f" Only the last {MAX_STEPS} steps are drawn." if len(run.steps) > MAX_STEPS else ""
    text = f"{time_shares(run).sentence()} Shown are the last steps; drag to zoom, double-click for all.{limit}"
    return Panel("timeline", "Who worked when", text, figure)


def _bars(lane: str, spans: list[Interval], colour: str) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": lane,
        "y": [lane] * len(spans),
        "base": [start for start, _ in spans],
        "x": [stop - start for start, stop in spans],
        "marker": {"color": colour, "line": {"width": 0}},
        "hovertemplate": "%{base:.3f} s, for %{x:.3f} s<extra>" + lane + "</extra>",
    }
