"""The report of a real run, opened in a browser."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys

import pytest
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.support.ui import WebDriverWait
from test_resume import small_config
from test_run import Quiet

from fsdp_async import write_report
from fsdp_async.cli import main
from fsdp_async.errors import ConfigError
from fsdp_async.report_data import RunData
from fsdp_async.report_figures import panels
from fsdp_async.report_timeline import timeline_panel
from fsdp_async.run import run_training

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1240,2400"
)
DEADLINE_S = 60.0
TIS = {"mismatch": {"level": "token", "mode": "truncate", "upper": 2.0}}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("report") / "small"
    config = small_config(directory, trainer={"num_batches": 4, "eval_every": 2}, correction=TIS)
    run_training(config, Quiet())
    return directory / "run"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if not all(programs):
        pytest.skip("no chromium and chromedriver here (Debian: apt-get install chromium chromium-driver)")
    options = ChromeOptions()
    options.binary_location = programs[0]
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('browser')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=ChromeService(programs[1]))
    yield driver
    driver.quit()


def test_every_curve_is_drawn_without_an_error_or_a_request(run, browser):
    path = write_report(run)
    browser.get("about:blank")
    browser.get_log("performance")  # of the browser's own first page
    browser.get(path.as_uri())
    data = RunData.read(run)
    expected = [*panels(data), timeline_panel(data)]
    names = {"learning", "timeline", "staleness", "divergences", "ess", "weights", "shares", "queue"}
    assert {panel.name for panel in expected} == names
    for panel in expected:
        drawn = f"return document.querySelectorAll('#{panel.name} g.trace').length"
        WebDriverWait(browser, DEADLINE_S).until(
            lambda driver, drawn=drawn: driver.execute_script(drawn), f"{panel.name} was not drawn"
        )
        assert browser.execute_script(drawn) == len(panel.figure["data"]), panel.name
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    text = browser.execute_script("return document.body.innerText")
    assert "The run was completed after 4 steps" in text
    assert f"{data.summary['accuracy_last']:.4g}" in text
    assert "the trainer computed" in text


def test_a_curve_that_cannot_be_drawn_would_be_seen(run, browser, tmp_path):
    """The check above can fail: an error in a page is logged, and nothing is drawn."""
    page = tmp_path / "broken.html"
    page.write_text(write_report(run).read_text().replace("Plotly.newPlot", "Plotly.noPlot"))
    browser.get(page.as_uri())
    assert browser.execute_script("return document.querySelectorAll('g.trace').length") == 0
    assert any(entry["level"] == "SEVERE" for entry in browser.get_log("browser"))


def test_the_command_prints_the_path_and_replaces_an_older_report(run, capsys):
    (run / "report.html").write_text("older")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    assert [path.name for path in run.iterdir() if "report" in path.name] == ["report.html"]


def test_a_place_without_a_run_is_refused_in_one_sentence(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 1
    output = capsys.readouterr()
    assert "no run here" in output.err
    assert list(tmp_path.iterdir()) == []


def test_names_and_plans_of_runs_are_text_and_not_html(run, tmp_path):
    odd = shutil.copytree(run, tmp_path / "<b>run & co")
    page = write_report(odd).read_text()
    assert "<h1>&lt;b&gt;run &amp; co</h1>" in page
    assert "<b>run" not in page


def test_a_killed_run_is_reported_as_far_as_it_went(run, tmp_path):
    killed = shutil.copytree(run, tmp_path / "killed")
    metrics = killed / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if json.loads(line)["event"] == "step")
    metrics.write_text("".join(lines[:last]) + lines[last][:50])
    assert "is not finished, or was killed after 3 steps" in " ".join(write_report(killed).read_text().split())


def test_a_resumed_run_shows_where_it_went_on(run, tmp_path):
    resumed = shutil.copytree(run, tmp_path / "resumed")
    config = small_config(run.parent, trainer={"num_batches": 6, "eval_every": 2}, correction=TIS)
    again = dataclasses.replace(config.run, output_dir=str(resumed), resume="auto")
    run_training(dataclasses.replace(config, run=again), Quiet())
    data = RunData.read(resumed)
    assert data.resumed_after == [4]
    learning = next(panel for panel in panels(data) if panel.name == "learning")
    assert "resumed after step 4" in learning.text
    assert [shape["x0"] for shape in learning.figure["layout"]["shapes"] if shape["type"] == "line"][1:] == [4]
    assert "after 6 steps" in write_report(resumed).read_text()


def test_without_plotly_the_extra_that_brings_it_is_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsdp_async.plotly_backend", None)
    with pytest.raises(ConfigError, match=r"plotly.*fsdp-async\[report\]"):
        write_report(run)
