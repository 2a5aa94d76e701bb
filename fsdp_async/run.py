"""One run, from a `Config` to a summary.

Owns the frame of a run: its directory, record and checkpoints, where it goes on, who watches, and that everything is
taken down in reverse order whatever happened. What is built is `assembly.py`'s business.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fsdp_async.assembly import assemble, checked_task, export_checkpoint, export_live
from fsdp_async.backends import require_package
from fsdp_async.config import Config
from fsdp_async.devices import trainer_placement
from fsdp_async.errors import ConfigError, FsdpAsyncError, RankFailedError
from fsdp_async.lead import Lead
from fsdp_async.modeling import ensure_process_group, outline_model
from fsdp_async.plan import cache_bytes, effective_plan
from fsdp_async.resume import Resumption, find_resumption
from fsdp_async.rewards import build_reward
from fsdp_async.run_files import RunFiles
from fsdp_async.trainer import AsyncTrainer
from fsdp_async.warm_start import find_warm_start


class View(Protocol):
    """Who watches a run."""

    def plan(self, lines: Sequence[str]) -> None:
        """The effective plan, before anything starts."""
        ...

    def warm_start(self, step: int, loss: float) -> None:
        """A supervised step was taken."""
        ...

    def observe(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """The trainer did something."""
        ...

    def trainer_ready(self, trainer: AsyncTrainer) -> None:
        """The loop is about to start; `trainer.request_stop` ends it from now on."""
        ...

    def finished(self, summary: Mapping[str, Any], directory: Path | None) -> None:
        """The run ended; None where nothing was kept, because it was stopped before it took the old one's place."""
        ...


def plan_lines(config: Config) -> list[str]:
    """The effective plan of `config`; parameters are counted on a model without memory.

    Raises:
        ConfigError, InputError: the task or the cache's budget do not fit, or a logging library is not installed.
    """
    for name in config.logging.libraries:
        require_package(name)
    task = checked_task(config)
    net = outline_model(config.model, vocab_size=task.vocab_size)
    num_parameters = sum(p.numel() for p in net.parameters())
    limit, needed = config.cache.max_bytes, cache_bytes(config, num_parameters)
    if limit is not None and limit < needed:
        raise ConfigError(
            f"cache.max_bytes={limit:,}: {config.trainer.max_versions} versions and a parking place of "
            f"{num_parameters:,} float32 parameters take {needed:,} bytes; raise it, or lower trainer.max_staleness"
        )
    return effective_plan(config, num_parameters=num_parameters)


def run_training(config: Config, view: View) -> dict[str, Any]:
    """Train as configured and return the summary, which also lies in `config.run.output_dir`.

    Under torchrun every rank calls it; rank 0 alone has engines and writes files, and others return {}.

    Raises:
        RunDirectoryError: the directory is in use, or not empty and neither overwritten nor resumed.
        CheckpointError: there is nothing to resume from, or what cannot change has changed.
        FsdpAsyncError: whatever ended the run; what was done until then is on disk.
    """
    with ExitStack() as stack:
        if config.trainer.debug:
            stack.enter_context(_deterministic())
        if ensure_process_group(trainer_placement(config.trainer.device, config.trainer.dtype)):
            stack.callback(dist.destroy_process_group)
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(config.run.num_threads)
        lead = Lead(dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None)
        files = RunFiles(config, stack)
        resumption = lead.ask(lambda: _open(config, view, files))
        summary: dict[str, Any] = {}
        if resumption is not None and resumption.is_complete(config):
            summary = lead.ask(resumption.summary)
            if config.run.export:
                export_checkpoint(config, lead, resumption, files if lead.is_lead else None, view, stack)
        else:
            try:
                with _ranks_named(lead):
                    trainer = assemble(config, lead, stack, resumption, files if lead.is_lead else None, view)
                    view.trainer_ready(trainer)
                    if trainer.run() and config.run.export:
                        export_live(config, trainer, lead, files if lead.is_lead else None)
            finally:
                if lead.is_lead:
                    summary = files.finish()
        if lead.is_lead:
            view.finished(summary, Path(config.run.output_dir) if files.are_kept else None)
        return summary


@contextmanager
def _deterministic() -> Iterator[None]:
    """For a debugger: one process, and kernels that give the same each time.

    Raises:
        ConfigError: there are other ranks.
    """
    if (num_ranks := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise ConfigError(
            f"trainer.debug=true on {num_ranks} ranks: it runs everything in one process, where a debugger sees it; "
            "start it without torchrun"
        )
    before = torch.are_deterministic_algorithms_enabled()
    if torch.cuda.is_available():
        # What cuBLAS needs for it; read when it starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def _ranks_named(lead: Lead) -> Iterator[None]:
    """Say that a rank ended where gloo says that a connection did; it has no error of its own for that."""
    try:
        yield
    except RuntimeError as error:
        if lead.num_ranks == 1 or isinstance(error, FsdpAsyncError) or "gloo" not in str(error):
            raise
        raise RankFailedError(
            f"rank {lead.rank} lost another rank, which ended or cannot be reached ({str(error).splitlines()[0]}); "
            "look at what that rank printed. The last checkpoint is whole: go on with run.resume=auto"
        ) from error


def _open(config: Config, view: View, files: RunFiles) -> Resumption | None:
    """Everything that may refuse the run, before anything starts; on rank 0."""
    lines = plan_lines(config)
    if config.run.resume is None:
        find_warm_start(config.warm_start, config.model, config.task, seed=config.run.seed)
    # A function that is missing is heard of before anything is written.
    build_reward(config.rewards, checked_task(config), inline=config.trainer.debug).close()
    files.lock()
    resumption = find_resumption(config)
    if resumption is not None:
        lines = [*resumption.lines, *(line for line in lines if not line.startswith("start: "))]
    view.plan(lines)
    if resumption is None or not resumption.is_complete(config):
        files.begin(lines, resumption)
    return resumption
