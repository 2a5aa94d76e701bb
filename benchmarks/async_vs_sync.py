"""How much faster the demo trains asynchronously than synchronously, against how much faster it could.

    python benchmarks/async_vs_sync.py [--slice-s 6] [--probes 4]

Both sides do the same work: the demo task, as many batches, from the same warm start, to the same accuracy; engine and
trainer are two processes with one thread each. The synchronous side waits for its samples, so that it needs neither
behaviour log-probs (anchor `bypass`) nor a correction. With g, t and b the seconds that generation, training and
behaviour forward of one batch take alone, a synchronous step takes g + t, and an asynchronous one, whose engine works
beside the trainer, at least max(g, t + b): the bound of the speed-up is (g + t) / max(g, t + b).

Other work on the machine comes and goes, so everything is measured in turns of a few seconds: the asynchronous run goes
while the others stand still (SIGSTOP), then the synchronous one, then the synchronous one with two threads, then g, t
and b on the batches that the asynchronous run recorded, with the other core idle. Each turn gives one mean; ratios are
medians over turns. Other work would slow the asynchronous run alone, which needs both cores: a round of turns in which
it took more than a tenth of a core is left out, and too few quiet rounds are an error.

Prints `ratio async_over_bound` (measured speed-up / bound; higher is better), `ratio async_vs_sync` (the speed-up), and
`ratio async_vs_sync_two_threads`; exits with 1 if it could not measure: a run failed or did not learn, or the measured
speed-up is above its bound by more than 5 %.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: two threads on busy cores can be 20 times slower

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from safetensors.torch import load_file, load_model

from fsdp_async.assembly import checked_task, objective
from fsdp_async.cli import compose_config
from fsdp_async.config import Config
from fsdp_async.devices import ON_HOST
from fsdp_async.generation import generate
from fsdp_async.learner import Learner
from fsdp_async.modeling import apply_fsdp2, build_model, build_optimizer, build_schedule, ensure_process_group
from fsdp_async.rollout import SamplingParams
from fsdp_async.state_cache import StateCache
from fsdp_async.types import Prompt, TrainBatch
from fsdp_async.warm_start import find_warm_start, load_or_make

SYNCHRONOUS = ["trainer.max_staleness=0", "trainer.anchor=bypass", "correction=disabled"]
SIDES = {
    "async": ["run.record_batches=true"],
    "sync": SYNCHRONOUS,
    "sync, two threads": [*SYNCHRONOUS, "run.num_threads=2", "rollout.engine=thread"],
}
# A run that stands still must not be taken for one that hangs; evaluation is not part of a step.
PATIENCE = ["rollout.answer_timeout_s=900", "rollout.load_timeout_s=900", "logging.tensorboard=false"]
TARGET_ACCURACY = 0.8
TOLERANCE = 1.05
TIMEOUT_S = 570
# A step that stood still is no measurement, and the one after it finds cold caches.
STEPS_DISCARDED = 2
MAX_OTHERS = 0.1
MIN_ROUNDS = 3
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Load:
    """A context manager that measures what other work took of the machine, in cores.

    `own_s()` says how many CPU seconds the measured work has taken so far.
    """

    def __init__(self, own_s: Callable[[], float]) -> None:
        self._own_s = own_s
        self.others = 0.0

    def __enter__(self) -> Load:
        self._begun = (time.monotonic(), _busy_s() - self._own_s())
        return self

    def __exit__(self, *exc_info: object) -> None:
        begun, others = self._begun
        self.others = (_busy_s() - self._own_s() - others) / (time.monotonic() - begun)


def _busy_s() -> float:
    """CPU seconds that all cores have worked, or wanted to and could not (steal)."""
    user, nice, system, _idle, _waiting, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


class Run:
    """A training in processes of its own that goes only when it is told to."""

    def __init__(self, name: str, overrides: list[str], directory: Path) -> None:
        self.name, self.directory = name, directory / name.replace(", ", "_").replace(" ", "_")
        self._log = (directory / f"{self.directory.name}.log").open("w+")
        command = [sys.executable, "-m", "fsdp_async.cli", "train", *overrides, f"run.output_dir={self.directory}"]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log, start_new_session=True)

    def is_over(self) -> bool:
        """Whether it ended.

        Raises:
            RuntimeError: by a failure; says its last words.
        """
        code = self._process.poll()
        if code:
            self._log.seek(0)
            raise RuntimeError(f"{self.name} ended with {code}: {self._log.read()[-2000:]}")
        return code is not None

    def step_times_s(self) -> list[float]:
        """When each training step was done, seconds on the run's clock."""
        path = self.directory / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [event["time_s"] for event in map(json.loads, lines) if event["event"] == "step"]

    def cpu_s(self) -> float:
        """CPU seconds that its processes have taken."""
        total = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                if int(fields[2]) == self._process.pid:
                    total += int(fields[11]) + int(fields[12])
        return total / TICKS_PER_S

    def go_for(self, seconds: float) -> float | None:
        """Seconds a step during one turn; None if it was too short."""
        first = len(self.step_times_s())
        os.killpg(self._process.pid, signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        if not self.is_over():
            os.killpg(self._process.pid, signal.SIGSTOP)
        times = self.step_times_s()[first:][STEPS_DISCARDED - 1 :]
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 2 else None

    def accuracy(self) -> float:
        """Of the last evaluation."""
        return float(json.loads((self.directory / "summary.json").read_text())["accuracy_last"])

    def end(self) -> None:
        """Leave nothing behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


class Probe:
    """Generation, training and behaviour forward of one batch, alone, by the code that runs use."""

    def __init__(self, config: Config) -> None:
        self._config, self._task = config, checked_task(config)
        path = find_warm_start(config.warm_start, config.model, config.task, seed=config.run.seed)
        assert path is not None
        self._engine, net = (build_model(config.model, vocab_size=self._task.vocab_size, seed=0) for _ in range(2))
        for model in (self._engine, net):
            load_model(model, path)
        self._engine.eval()
        apply_fsdp2(net, ON_HOST)
        optimizer = build_optimizer(net, config.optim)
        self._cache = StateCache(net)
        self._cache.watch(optimizer)
        schedule = build_schedule(optimizer, config.optim, total_steps=config.total_steps)
        self._learner = Learner(net, optimizer, schedule, self._cache, objective(config))

    def seconds(self, tensors: dict[str, torch.Tensor]) -> tuple[float, float, float]:
        """g, t and b of a recorded batch."""
        batch = TrainBatch(**{name: tensors[name] for name in TrainBatch.__dataclass_fields__})
        for version in batch.sampled_versions:
            self._cache.snapshot(version)
        behaviour_s = _seconds(lambda: self._learner.behaviour_log_probs(batch))
        self._cache.retain(())
        training_s = _seconds(partial(self._train, batch, tensors["behaviour_log_prob"]))
        return _seconds(partial(self._generate, _prompts(batch))), training_s, behaviour_s

    def _train(self, batch: TrainBatch, behaviour_log_prob: torch.Tensor) -> None:
        published = max(batch.sampled_versions)
        prepared = self._learner.prepare(batch, published_version=published, behaviour_log_prob=behaviour_log_prob)
        self._learner.update(prepared)

    def _generate(self, prompts: list[Prompt]) -> None:
        config = self._config
        sampling = SamplingParams(
            num_samples=config.trainer.group_size,
            max_response_tokens=config.rollout.max_response_tokens,
            temperature=config.rollout.temperature,
            eos_token_id=self._task.eos_token_id,
            pad_token_id=self._task.pad_token_id,
        )
        size = config.rollout.prompts_per_chunk
        for start in range(0, len(prompts), size):
            generate(self._engine, prompts[start : start + size], sampling, version=0, seed=0)


def _seconds(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def _prompts(batch: TrainBatch) -> list[Prompt]:
    """One of each group."""
    num_prompt = batch.input_ids.shape[1] - batch.num_response_positions
    firsts = {group: row for row, group in reversed(list(enumerate(batch.group_ids.tolist())))}
    prompts = []
    for group, row in sorted(firsts.items()):
        real = batch.attention_mask[row, :num_prompt].bool()
        ids = batch.input_ids[row, :num_prompt][real].tolist()
        prompts.append(Prompt(prompt_id=str(group), token_ids=tuple(ids), task="recorded"))
    return prompts


@contextlib.contextmanager
def _running(overrides: list[str], directory: Path) -> Iterator[dict[str, Run]]:
    """Each run, brought to its first steps and then stopped."""
    runs: dict[str, Run] = {}
    try:
        for name, own in SIDES.items():
            runs[name] = Run(name, [*overrides, *own], directory)
            while len(runs[name].step_times_s()) < STEPS_DISCARDED:
                if runs[name].is_over():
                    raise RuntimeError(f"{name} ended before it could be measured")
                runs[name].go_for(0.5)
        yield runs
    finally:
        for run in runs.values():
            run.end()


def _probe(probe: Probe, directory: Path, num: int) -> dict[str, float]:
    """Means over the batches that were recorded last."""
    paths = sorted((directory / "batches").glob("step_*.safetensors"))[-num:]
    seconds = [probe.seconds(load_file(path)) for path in paths]
    g, t, b = (fmean(column) for column in zip(*seconds, strict=True))
    return {"g": g, "t": t, "b": b}


def measure(slice_s: float, num_probes: int, directory: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Quiet rounds, each with seconds a step of every side and g, t, b; and the accuracies at the end."""
    overrides = ["experiment=demo", *PATIENCE, f"warm_start.directory={directory / 'warm_start'}"]
    config = compose_config(overrides)
    overrides.append(f"trainer.eval_every={config.trainer.num_batches}")
    task = checked_task(config)
    path = find_warm_start(config.warm_start, config.model, config.task, seed=config.run.seed)
    net = build_model(config.model, vocab_size=task.vocab_size, seed=config.run.seed)
    load_or_make(net, task, config.warm_start, path, seed=config.run.seed)
    ensure_process_group(ON_HOST)
    probe, rounds, num_rounds, deadline = Probe(config), [], 0, time.monotonic() + TIMEOUT_S
    with _running(overrides, directory) as runs:
        _probe(probe, runs["async"].directory, 1)  # the first of anything is slow
        while not all(run.is_over() for run in runs.values()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"not done within {TIMEOUT_S} s")
            round_, others = {}, []
            for name, run in runs.items():
                if not run.is_over():
                    with Load(run.cpu_s) as load:
                        round_[name] = run.go_for(slice_s)
                    others.append(load.others)
            if len(round_) == len(SIDES) and all(round_.values()):
                with Load(time.process_time) as load:
                    round_ |= _probe(probe, runs["async"].directory, num_probes)
                num_rounds += 1
                if max(*others, load.others) <= MAX_OTHERS:
                    rounds.append(round_)
        print(f"{len(rounds)} of {num_rounds} rounds were quiet")
        return rounds, {name: run.accuracy() for name, run in runs.items()}


def report(rounds: list[dict[str, Any]], accuracies: dict[str, float]) -> int:
    """Print what was measured; the exit code."""
    if len(rounds) < MIN_ROUNDS:
        print(
            f"need {MIN_ROUNDS} quiet rounds; stop other work on this machine, or make turns shorter", file=sys.stderr
        )
        return 1
    middle = {name: median(turn[name] for turn in rounds) for name in rounds[0]}
    for name in SIDES:
        print(f"{name}: {1e3 * middle[name]:.0f} ms a step, accuracy {accuracies[name]:.3f}")
    g, t, b = (1e3 * middle[name] for name in "gtb")
    print(f"alone: generation g {g:.0f} ms, training t {t:.0f} ms, behaviour forward b {b:.0f} ms")
    bound = median((turn["g"] + turn["t"]) / max(turn["g"], turn["t"] + turn["b"]) for turn in rounds)
    speed_up = median(turn["sync"] / turn["async"] for turn in rounds)
    two_threads = median(turn["sync, two threads"] / turn["async"] for turn in rounds)
    print(f"bound of the speed-up (g + t) / max(g, t + b): {bound:.3f}")
    print(f"ratio async_over_bound {speed_up / bound:.3f}")
    print(f"ratio async_vs_sync {speed_up:.3f}")
    print(f"ratio async_vs_sync_two_threads {two_threads:.3f}")
    for name, accuracy in accuracies.items():
        if accuracy < TARGET_ACCURACY:
            print(f"{name} reached {accuracy:.3f}, below {TARGET_ACCURACY}: not the same work", file=sys.stderr)
            return 1
    if speed_up / bound > TOLERANCE:
        print(f"faster than its bound by {speed_up / bound - 1:.1%}: a fault of measuring", file=sys.stderr)
        return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slice-s", type=float, default=6.0, help="seconds of a turn of one run")
    parser.add_argument("--probes", type=int, default=4, help="batches a turn of which g, t and b are measured")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        try:
            return report(*measure(arguments.slice_s, arguments.probes, Path(directory)))
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
