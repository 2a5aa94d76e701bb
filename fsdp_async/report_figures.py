"""The curves of a report, as plotly's JSON.

Owns what is drawn against the step, and how it looks. Pure functions of a run; drawing is the backend's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fsdp_async.metrics import Histogram
from fsdp_async.report_data import Column, RunData, smooth
from fsdp_async.summary import TARGET_ACCURACY

Figure = dict[str, Any]

# Okabe and Ito 2008: told apart by people with any kind of colour vision.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY = (
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8a8f98",
)  # fmt: skip
COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY)
FACTORS = {"mismatch": BLUE, "lag": ORANGE, "update": GREEN}


@dataclass(frozen=True)
class Panel:
    """A figure under a title, with one sentence that says how to read it; `name` is its id in the page."""

    name: str
    title: str
    text: str
    figure: Figure


def panels(run: RunData) -> list[Panel]:
    """Every panel that the run has numbers for."""
    makers = (_learning, _staleness, _divergences, _effective_size, _weights, _shares, _queue)
    return [panel for maker in makers if (panel := maker(run)).figure["data"]]


def layout(x: str, y: str, **more: Any) -> dict[str, Any]:
    """One look for all figures."""
    axis = {"gridcolor": "#e8eaed", "zeroline": False, "linecolor": "#c6cad1", "ticks": "outside"}
    return {
        "template": "none",
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#2b2f36"},
        "margin": {"l": 64, "r": 16, "t": 44, "b": 48},
        "height": 320,
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "#c6cad1", "orientation": "v"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "x unified",
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "xaxis": axis | {"title": {"text": x}},
        "yaxis": axis | {"title": {"text": y}, "rangemode": "tozero"},
        **more,
    }


def _line(name: str, x: Sequence[float], y: Column, colour: str, **style: Any) -> list[dict[str, Any]]:
    """A trace, or none where there is nothing to draw."""
    if all(value is None for value in y):
        return []
    line = {"color": colour, "width": 2} | style
    return [{"type": "scatter", "mode": "lines", "name": name, "x": list(x), "y": y, "line": line}]


def _by_step(run: RunData, columns: Mapping[str, tuple[Column, str]], y: str, **more: Any) -> Figure:
    x = run.column("step")
    data = [trace for name, (column, colour) in columns.items() for trace in _line(name, _known(x), column, colour)]
    return {"data": data, "layout": layout("step", y, **more)}


def _known(column: Column) -> list[float]:
    return [value for value in column if value is not None]


def _learning(run: RunData) -> Panel:
    steps, evaluations = _known(run.column("step")), _known(run.column("step", event="evaluation"))
    reward, accuracy = run.column("reward_mean"), run.column("accuracy", event="evaluation")
    data = [
        *_line("reward of each batch", steps, reward, "#c6cad1", width=1),
        *_line("reward, mean of 10 batches", steps, smooth(reward, 10), ORANGE),
        *_line("accuracy (evaluation)", evaluations, accuracy, BLUE, width=3),
    ]
    shapes = [
        {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": TARGET_ACCURACY, "y1": TARGET_ACCURACY}
        | {"line": {"color": GREY, "dash": "dot", "width": 1}},
        *(
            {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": step, "x1": step}
            | {"line": {"color": RED, "dash": "dash", "width": 1}}
            for step in run.resumed_after
        ),
    ]
    resumed = f" Red lines: resumed after step {', '.join(map(str, run.resumed_after))}." if run.resumed_after else ""
    text = f"Share of right sampled answers, and the reward that training saw. Dotted: {TARGET_ACCURACY:g}.{resumed}"
    return Panel("learning", "Learning", text, {"data": data, "layout": layout("step", "reward", shapes=shapes)})


def _staleness(run: RunData) -> Panel:
    totals, counts = run.column("staleness_total"), run.column("num_tokens")
    mean: Column = [
        None if total is None or not count else total / count for total, count in zip(totals, counts, strict=True)
    ]
    columns = {"oldest token": (run.column("staleness_max"), ORANGE), "mean over tokens": (mean, BLUE)}
    text = "How many versions had been published since a token was sampled, when it was trained on."
    return Panel("staleness", "Staleness", text, _by_step(run, columns, "versions"))


def _divergences(run: RunData) -> Panel:
    columns = {name: (run.factor(f"{name}_kl_k3"), colour) for name, colour in FACTORS.items()}
    figure = _by_step(run, columns, "k3, nats a token")
    figure["layout"]["yaxis"] |= {"type": "log", "rangemode": "normal", "exponentformat": "power"}
    text = (
        "Mismatch is the engine's numerics at equal weights, lag the age of the weights, update what this step "
        "changed. Mismatch that rises by itself means that engine and trainer no longer compute the same function."
    )
    return Panel("divergences", "Three factors of the ratio", text, figure)


def _effective_size(run: RunData) -> Panel:
    names = [key for key in run.keys("correction") if key.partition("/")[2] in ("ess_raw", "ess_applied")]
    columns = {
        key.replace("/ess_raw", ", raw weights").replace("/ess_applied", ", weights as applied"): (
            run.column("correction", key),
            COLOURS[index % len(COLOURS)],
        )
        for index, key in enumerate(names)
    }
    text = "Share of samples that would carry as much information with equal weights (Kong 1992); 1 is all of them."
    return Panel("ess", "Effective sample size", text, _by_step(run, columns, "share of samples"))


def _weights(run: RunData) -> Panel:
    logged = [step["weight_histogram"] for step in run.steps if step.get("weight_histogram")]
    counts = [sum(column) for column in zip(*logged, strict=True)]
    edges = Histogram.edges_log10()
    centres = [edges[0], *((low + high) / 2 for low, high in pairwise(edges)), edges[-1]]
    total = sum(counts)
    used = [index for index, count in enumerate(counts) if count]
    data = []
    if total:
        shown = range(max(0, used[0] - 1), min(len(counts), used[-1] + 2))
        x, y = [10 ** centres[index] for index in shown], [counts[index] / total for index in shown]
        data = [{"type": "bar", "name": "kept tokens", "x": x, "y": y, "marker": {"color": BLUE}}]
    figure: Figure = {"data": data, "layout": layout("importance weight", "share of kept tokens", bargap=0.05)}
    figure["layout"]["xaxis"] |= {"type": "log", "exponentformat": "power"}
    figure["layout"]["yaxis"] |= {"type": "log", "rangemode": "normal", "exponentformat": "power"}
    text = "Weights that multiplied the policy loss, all steps together. Most of them near 1 is what one hopes for."
    return Panel("weights", "Importance weights", text, figure)


def _shares(run: RunData) -> Panel:
    columns = {"kept": (run.column("kept_fraction"), GREEN)}
    names = [key for key in run.keys("correction") if key.startswith("rejected/") or "/fraction_" in key]
    for index, key in enumerate(name for name in names if not name.endswith("/fraction_clamped")):
        words = key.replace("rejected/", "rejected by ").replace("/fraction_", ", bounded: ")
        columns[words] = (run.column("correction", key), COLOURS[index % len(COLOURS)])
    columns["clip, high side"] = (run.column("update", "clip_fraction_high"), PURPLE)
    columns["clip, low side"] = (run.column("update", "clip_fraction_low"), SKY)
    text = (
        "Shares of sampled tokens: kept by the correction, rejected or bounded by each rule, and clipped by the loss."
    )
    return Panel("shares", "Accepted, rejected, bounded", text, _by_step(run, columns, "share of tokens"))


def _queue(run: RunData) -> Panel:
    columns = {
        "waiting to be trained on": (run.column("ledger", "queued"), BLUE),
        "being generated": (run.column("ledger", "in_flight"), ORANGE),
    }
    text = "An empty queue means that the trainer waits for the engine; a full one, that the engine waits."
    return Panel("queue", "Queue", text, _by_step(run, columns, "samples"))
