"""Run one function on several ranks: spawned processes, gloo, a file as the meeting point.

Promises: every rank has one OpenMP thread and a gloo world; the caller gets the return value of each rank
in rank order, or `RankFailedError` with the traceback of the rank that failed *first* (later failures are
usually its echo); nothing outlives the call. Does not capture the ranks' output.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RANK_FAILED_GRACE_S = 3.0
"""How long the other ranks may still report after the first failure, before they are killed."""


class RankFailedError(AssertionError):
    """A rank raised, died or did not finish in time."""


def run_distributed(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Call `fn(rank, world_size, *args)` on `world_size` spawned ranks.

    Args:
        fn: a module-level function; its arguments and its result must pickle.
        world_size: number of ranks.
        *args: handed to every rank.
        timeout_s: wall-clock limit for all of it, imports included.

    Returns:
        The results in rank order.

    Raises:
        RankFailedError: with the traceback of the first rank that failed, or the ranks that did not finish.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        meeting_point = str(Path(directory, "rendezvous"))
        processes: list[BaseProcess] = []
        pipes: list[Connection] = []
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank_main, args=(fn, rank, world_size, meeting_point, sender, args), daemon=True
                )
                process.start()
                sender.close()
                processes.append(process)
                pipes.append(receiver)
            results = _collect(pipes, processes, timeout_s)
            for process in processes:
                process.join(timeout=RANK_FAILED_GRACE_S)  # they are leaving together
            return results
        finally:
            for process in processes:
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()


def _rank_main(
    fn: Callable[..., Any], rank: int, world_size: int, meeting_point: str, sender: Connection, args: tuple[Any, ...]
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=world_size,
            timeout=timedelta(seconds=60),
        )  # fmt: skip
        result = fn(rank, world_size, *args)
    except BaseException:  # noqa: BLE001 - the edge of the process: the parent raises it
        sender.send((False, time.monotonic(), traceback.format_exc()))
        raise SystemExit(1) from None
    sender.send((True, time.monotonic(), result))
    # A rank that leaves early closes the connections that its peers still use.
    dist.barrier()
    dist.destroy_process_group()


def _collect(pipes: list[Connection], processes: list[BaseProcess], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    failures: list[tuple[float, int, str]] = []
    pending = dict(enumerate(pipes))
    while pending and time.monotonic() < deadline:
        ready = wait(list(pending.values()), timeout=max(0.0, deadline - time.monotonic()))
        for rank in [rank for rank, pipe in pending.items() if pipe in ready]:
            try:
                ok, when, payload = pending.pop(rank).recv()
            except EOFError:
                processes[rank].join(timeout=1.0)
                ok, when = False, time.monotonic()
                payload = f"the process died without a traceback, exit code {processes[rank].exitcode}"
            if ok:
                results[rank] = payload
            else:
                failures.append((when, rank, payload))
                deadline = min(deadline, time.monotonic() + RANK_FAILED_GRACE_S)
    if failures:
        _, rank, text = min(failures)
        raise RankFailedError(f"rank {rank} of {len(pipes)} failed first:\n{text}")
    if pending:
        raise RankFailedError(f"ranks {sorted(pending)} of {len(pipes)} did not finish within {timeout_s} s")
    return [results[rank] for rank in range(len(pipes))]
