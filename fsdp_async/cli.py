"""The command line: `fsdp-async train|plan [KEY=VALUE ...]`, `report DIR`, `inspect PATH`, `diff A B`.

Owns argument parsing, Hydra composition, signals and exit codes: 0 done, 1 refused or failed, 2 unusable arguments,
130 Ctrl-C, 143 SIGTERM, 129 SIGHUP. The only file that imports hydra; after composition there is one frozen `Config`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from types import FrameType
from typing import Any, Self

import torch.distributed as dist
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from fsdp_async.config import Config, parse_config, unknown_key_message
from fsdp_async.config_reference import Key, sections
from fsdp_async.errors import ConfigError, FsdpAsyncError
from fsdp_async.inspection import diff_lines, inspect_lines
from fsdp_async.report import write_report
from fsdp_async.run import plan_lines, run_training
from fsdp_async.terminal import Output, Terminal
from fsdp_async.trainer import AsyncTrainer

EPILOG = """\
KEY=VALUE follows Hydra: a group is chosen by name (experiment=demo, correction=decoupled_token_is), a key is set by
its path (optim.lr=1e-4 trainer.max_staleness=0), a mapping is quoted for the shell and written in braces.

examples:
  fsdp-async train experiment=demo
  fsdp-async train experiment=demo optim.lr=1e-4 run.output_dir=outputs/lr1e-4
  fsdp-async plan experiment=demo correction=bypass_ppo_clip
  fsdp-async plan experiment=demo 'correction.mismatch={level: sequence, mode: mask, upper: 2}'
  fsdp-async report outputs/demo
  fsdp-async inspect outputs/demo
  fsdp-async diff outputs/demo/checkpoints/step_000150 outputs/demo@200
"""
HELP_WIDTH = 120
# What looks at a run without training, and prints lines.
AFTERWARDS: dict[str, Callable[[argparse.Namespace], Iterable[str]]] = {
    "report": lambda options: [str(write_report(options.directory))],
    "inspect": lambda options: inspect_lines(options.path),
    "diff": lambda options: diff_lines(options.a, options.b),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What a terminal cannot show must not end a run.
            stream.reconfigure(errors="backslashreplace")
    options = _parser().parse_args(arguments)
    errors = Console(stderr=True)
    is_debugged = False
    try:
        if options.command in AFTERWARDS:
            _print(AFTERWARDS[options.command](options))
            return 0
        config = compose_config(options.overrides)
        if options.command == "plan":
            _print(plan_lines(config))
            return 0
        is_debugged = config.trainer.debug
        return _train(config)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (FsdpAsyncError, OSError) as error:
        if is_debugged:
            raise
        errors.print(f"[bold red]{type(error).__name__}[/bold red]: ", end="")
        errors.print(str(error), markup=False, highlight=False, soft_wrap=True)
        return 1


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        Output().print(line, highlight=False, soft_wrap=True, markup=False)


def compose_config(overrides: Sequence[str]) -> Config:
    """Compose `conf/` and the overrides, and parse the result.

    Raises:
        ConfigError: whatever Hydra or `parse_config` refuse, in one sentence.
    """
    for override in overrides:
        if re.match(r"[+~]*hydra\b", override):
            raise ConfigError(f"{override}: Hydra's own settings have no effect here; a run writes to run.output_dir")
    ConfigStore.instance().store(name="defaults", node=asdict(Config()))
    try:
        with initialize_config_dir(str(config_directory()), version_base="1.3"):
            composed = compose("config", overrides=list(overrides))
        mapping = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # Hydra raises the last one, too
        raise ConfigError(_hydra_message(error)) from error
    assert isinstance(mapping, dict)
    try:
        return parse_config({str(key): value for key, value in mapping.items()})
    except ConfigError as error:
        if "has no effect" not in str(error):
            raise
        raise ConfigError(f"{error} (~KEY takes away what an experiment or a group has set)") from error


def config_directory() -> Path:
    """`conf/` inside the installed package, or at the top of a checkout."""
    package = Path(__file__).resolve().parent
    return next(path for path in (package / "conf", package.parent / "conf") if path.is_dir())


def _hydra_message(error: Exception) -> str:
    """Hydra's words, or, where a key is unknown, ours: Hydra's advise to add it, and we would refuse it then."""
    text = str(error)
    overridden = re.search(r"Could not override '([\w.]+)'", text)
    if overridden is None:
        return text
    # Inside a mapping in braces it is not the key on the left that is unknown.
    path = str(getattr(error.__cause__, "full_key", None) or overridden[1])
    names = {*asdict(Config()), *(group.name for group in _groups())}
    section = path.partition(".")[0]
    if section not in names:
        return unknown_key_message(section, names)
    mapping: Any = None
    for part in reversed(path.split(".")):
        mapping = {part: mapping}
    try:
        parse_config(mapping)
    except ConfigError as refused:
        return str(refused) if str(refused).startswith("unknown key") else text
    return text


def _parser() -> argparse.ArgumentParser:
    epilog = f"{EPILOG}\n{_groups_help()}\n\nall keys and their defaults (groups may set others):\n{_keys_help()}"
    parser = argparse.ArgumentParser(
        prog="fsdp-async",
        description="Asynchronous RL post-training on FSDP2 with a versioned weight-state cache.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (("train", "run a training"), ("plan", "print what a training run would do")):
        command = commands.add_parser(
            name, help=text, description=text, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="Hydra overrides; see below")
    text = "write DIR/report.html: curves and a timeline of a run, on one page that needs no network"
    command = commands.add_parser("report", help=text, description=text)
    command.add_argument("directory", type=Path, metavar="DIR", help="run.output_dir of a run, finished or not")
    text = "print versions, bytes and fingerprints of a checkpoint"
    command = commands.add_parser("inspect", help=text, description=text)
    command.add_argument("path", type=Path, metavar="PATH", help="a run's directory, a checkpoint, a safetensors file")
    text = "print which parameters differ, in how many elements and by how much"
    command = commands.add_parser("diff", help=text, description=text)
    for name in ("a", "b"):
        command.add_argument(name, metavar=name.upper(), help="as PATH of inspect, or PATH@VERSION for a retained one")
    return parser


def _groups() -> list[Path]:
    return sorted(path for path in config_directory().iterdir() if path.is_dir())


def _groups_help() -> str:
    choices = (f"  {g.name}: {', '.join(sorted(f.stem for f in g.glob('*.yaml')))}" for g in _groups())
    return "groups:\n" + "\n".join(choices)


def _keys_help() -> str:
    """Every section with its docstring, every key with its default and, where there are few, its values."""
    lines: list[str] = []
    for section in sections():
        lines += ["", f"{', '.join(section.paths)}:", *(f"  # {line}".rstrip() for line in section.text.splitlines())]
        for key in section.keys:
            lines += _comment(key)
            lines.append(f"  {key.name}: {key.default}" + (f"  # {' | '.join(key.choices)}" if key.choices else ""))
    return "\n".join(lines)


def _comment(key: Key) -> list[str]:
    text = f"{key.name}: {key.meaning}" if key.meaning else ""
    return wrap(text, HELP_WIDTH, initial_indent="  # ", subsequent_indent="  #   ")


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Signals:
    """The first Ctrl-C, SIGTERM or SIGHUP ends the run after the step in hand and a checkpoint, the second at once.

    So does a step or checkpoint in hand that takes longer than `stop_timeout_s`. Old handlers come back at the end.
    Once the run is ending, signals change nothing: what is left takes bounded time, and files would be left unwritten.
    """

    def __init__(self, stop_timeout_s: float) -> None:
        self._stop_timeout_s = stop_timeout_s
        self.received: int | None = None
        self._trainer: AsyncTrainer | None = None
        self._is_ending = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in STOP_SIGNALS:
            # Whoever started us under nohup wants us to outlive the terminal.
            if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGINT:
                self._before[number] = signal.signal(number, self._handle)
        self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._abandon)
        return self

    def __exit__(self, *exc_info: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def stop_gently(self, trainer: AsyncTrainer) -> None:
        """From now on a first signal is a request to `trainer`."""
        self._trainer = trainer

    def let_end(self) -> None:
        """From now on no signal stops anything."""
        self._is_ending = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_ending:
            return
        again = self.received is not None
        self.received = number
        if again or self._trainer is None:
            self._is_ending = True
            raise KeyboardInterrupt
        self._trainer.request_stop()
        signal.setitimer(signal.ITIMER_REAL, self._stop_timeout_s)

    def _abandon(self, number: int, frame: FrameType | None) -> None:
        """The step in hand took too long."""
        if not self._is_ending:
            self._is_ending = True
            raise KeyboardInterrupt


class _View(Terminal):
    """The terminal, plus the moments between which a signal can stop the trainer."""

    def __init__(self, config: Config, signals: _Signals | None) -> None:
        super().__init__(
            config.trainer.num_batches,
            # Under torchrun rank 0 speaks for all.
            console=None if os.environ.get("RANK", "0") == "0" else Output(quiet=True),
            # A debugger needs the terminal for itself.
            is_live=not config.trainer.debug,
        )
        self._signals = signals

    def trainer_ready(self, trainer: AsyncTrainer) -> None:
        if self._signals is not None:
            self._signals.stop_gently(trainer)

    def observe(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        if event == "end" and self._signals is not None:
            self._signals.let_end()
        super().observe(event, step, values)


def _end_with_launcher(stop_timeout_s: float) -> None:
    """End this rank when torchrun, which started it, was killed and cannot say so."""
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2 * stop_timeout_s)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def _train(config: Config) -> int:
    if config.trainer.debug:
        # Ctrl-C is the debugger's: it ends a run where it stands.
        with _View(config, None) as view:
            run_training(config, view)
        return 0
    if dist.is_torchelastic_launched():
        _end_with_launcher(config.run.stop_timeout_s)
    with (
        _Signals(config.run.stop_timeout_s) as signals,
        _View(config, signals) as view,
        contextlib.suppress(KeyboardInterrupt),
    ):
        run_training(config, view)
    return 0 if signals.received is None else 128 + signals.received


if __name__ == "__main__":
    sys.exit(main())
