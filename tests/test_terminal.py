from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from fsdp_async.terminal import Terminal, step_numbers

STEP = {
    "version": 7,
    "reward_mean": 0.5,
    "staleness_total": 30,
    "num_tokens": 20,
    "ledger": {"consumed": 100, "queued": 3, "in_flight": 4},
    "factors": {"mismatch_kl_k3": (2e-6, 2), "lag_kl_k3": (0.0, 0), "update_kl_k3": (0.4, 10)},
    "time_s": 12.0,
}
SUMMARY = {"accuracy_last": 0.8125, "lag_kl_k3_mean": None, "num_versions": 3}


def _terminal(*, is_terminal):
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=100, legacy_windows=False)
    return Terminal(8, console=console)


def _watch(terminal):
    with terminal:
        terminal.plan(["loss: ppo_clip, clipped to [0.8, 1.28]; token-mean"])
        terminal.warm_start(0, 2.5)
        terminal.observe("publication", 0, {"time_s": 2.0})
        terminal.observe("evaluation", 0, {"accuracy": 0.25})
        terminal.observe("step", 3, STEP)
        terminal.finished(SUMMARY, Path("outputs/x"))
    return terminal.console.file.getvalue()


def test_the_numbers_that_matter_stand_in_two_lines():
    assert step_numbers(STEP, 0.25, 10.0) == (
        "version 7, accuracy 0.250, reward 0.500, staleness 1.50\n"
        "queued 3, in flight 4, 10 samples/s, KL (k3): mismatch 1.0e-06, update 4.0e-02"
    )
    assert "accuracy -, " in step_numbers(STEP, None, 0.0)


def test_a_terminal_shows_progress_and_numbers():
    text = _watch(_terminal(is_terminal=True))
    assert "3/8" in text
    # 100 consumed in the 10 s since the first publication
    assert "10 samples/s" in text
    assert "accuracy 0.250" in text


def test_a_file_or_pipe_gets_the_plan_and_the_summary_and_no_control_characters():
    text = _watch(_terminal(is_terminal=False))
    assert text.splitlines() == [
        "loss: ppo_clip, clipped to [0.8, 1.28]; token-mean",
        f"  {'accuracy_last':36s} 0.8125",
        f"  {'lag_kl_k3_mean':36s} -",
        f"  {'num_versions':36s} 3",
        "results: outputs/x",
    ]


def test_brackets_in_a_plan_or_path_are_text_and_no_markup():
    terminal = _terminal(is_terminal=False)
    with terminal:
        terminal.plan(["run: [bold]x[/bold]"])
        terminal.finished({}, Path("[red]out"))
    assert terminal.console.file.getvalue() == "run: [bold]x[/bold]\nresults: [red]out\n"


def test_a_run_that_kept_nothing_points_to_no_results():
    terminal = _terminal(is_terminal=False)
    terminal.finished({}, None)
    assert "nothing was kept" in terminal.console.file.getvalue()


def test_the_screen_is_given_back_when_a_run_fails():
    terminal = _terminal(is_terminal=True)
    try:
        with terminal:
            raise RuntimeError
    except RuntimeError:
        pass
    assert terminal.console.file.getvalue().endswith("\x1b[?25h"), "the cursor must be visible again"
