"""`report.html`: what happened in a run, on one page that needs no network.

Owns the page. Numbers are the summary's, figures those of `report_figures.py` and `report_timeline.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from fsdp_async.backends import resolve_backend
from fsdp_async.files import write_bytes
from fsdp_async.report_data import RunData
from fsdp_async.report_figures import Panel, panels
from fsdp_async.report_timeline import timeline_panel

REPORT = "report.html"
WIDE = ("learning", "timeline")
TILES = {
    "accuracy_last": "accuracy at the end",
    "time_to_0.80_s": "seconds to .80",
    "num_batches": "steps",
    "num_versions": "versions published",
    "staleness_mean": "mean staleness",
    "overlap_fraction": "overlap of engine and trainer",
}
PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>$title</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #2b2f36; background: #f6f7f9; margin: 0; }
main { max-width: 1180px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 26px; margin: 0; } h2 { font-size: 17px; margin: 0 0 2px; }
p { margin: 0 0 8px; color: #5a616c; max-width: 95ch; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 20px 0; }
.tile, section, details { background: #fff; border: 1px solid #e3e6ea; border-radius: 8px; padding: 14px 18px; }
.tile b { display: block; font-size: 24px; font-variant-numeric: tabular-nums; }
.tile span { color: #5a616c; font-size: 13px; }
.panels { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; margin-bottom: 16px; }
.wide { grid-column: 1 / -1; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin-top: 8px; }
td { padding: 2px 24px 2px 0; } pre { overflow-x: auto; margin: 8px 0 0; }
@media (max-width: 800px) { .panels { grid-template-columns: minmax(0, 1fr); } }
</style>
<script>$script</script>
</head>
<body><main>
<h1>$title</h1>
<p>$subtitle</p>
<div class="tiles">$tiles</div>
<div class="panels">$panels</div>
<details><summary>All numbers of the summary</summary><table>$table</table></details>
$plan
</main></body>
</html>
""")


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into the directory of a run, finished or not, and return its path.

    Raises:
        InputError: there is no run, or nothing was logged.
        ConfigError: plotly is not installed.
        OutputError: the page could not be written; an older one is as it was.
    """
    run = RunData.read(run_dir)
    plotly = resolve_backend("plotly")
    drawn = [*panels(run), timeline_panel(run)]
    # Timeline and learning curve first: they answer what is asked most.
    drawn.sort(key=lambda panel: panel.name not in WIDE)
    page = PAGE.substitute(
        title=escape(run.name),
        subtitle=escape(_subtitle(run)),
        script=plotly.script(),
        tiles="".join(_tile(run.summary[key], words) for key, words in TILES.items()),
        panels="".join(_section(panel, plotly.figure_html(panel.figure, panel.name)) for panel in drawn),
        table="".join(f"<tr><td>{escape(k)}</td><td>{escape(_shown(v))}</td></tr>" for k, v in run.summary.items()),
        plan=_plan(run.record),
    )
    path = run_dir / REPORT
    write_bytes(path, page.encode())
    return path


def _subtitle(run: RunData) -> str:
    outcome = run.summary["outcome"]
    what = "is not finished, or was killed" if outcome == "unfinished" else f"was {outcome}"
    return f"The run {what} after {len(run.steps)} steps and {run.events[-1]['time_s']:.1f} s."


def _tile(value: Any, words: str) -> str:
    return f'<div class="tile"><b>{escape(_shown(value))}</b><span>{escape(words)}</span></div>'


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _section(panel: Panel, figure: str) -> str:
    kind = ' class="wide"' if panel.name in WIDE else ""
    return f"<section{kind}><h2>{escape(panel.title)}</h2><p>{escape(panel.text)}</p>{figure}</section>"


def _plan(record: Mapping[str, Any]) -> str:
    lines = record.get("plan", ())
    if not lines:
        return ""
    text = escape("\n".join(map(str, lines)))
    return f'<details style="margin-top: 16px"><summary>The plan of the run</summary><pre>{text}</pre></details>'
