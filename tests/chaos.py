"""Kill a run again and again, resume it each time, and count what was lost.

    python tests/chaos.py [--kills 30] [--seed 0] [--output outputs/chaos]

Trains the demo task while it kills, by SIGKILL and at random points inside optimizer steps, visits, publications and
checkpoints: the engine (started again by the run), the driver (the only process of a run on one rank), one rank of two,
and torchrun. What is lost or doubled is found by joining the engines' own log of sample identities with the trainer's
log of consumed ones, not from the ledger. A kill counts only if the process ended by signal 9 while the phase in hand
was the one that was meant. The last line says everything; the exit code is 0 only if nothing was lost or doubled, the
ledger balances, learning is done, and no process and no shared memory is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from fsdp_async.audit import CONSUMED, PHASE, PRODUCED, read_log

MARK = "FSDP_ASYNC_CHAOS"
PHASES = {"update": "step", "behaviour": "visit", "publish": "publication", "checkpoint": "checkpoint"}
VICTIMS = ("engine", "driver", "rank", "launcher")
START_S = 90.0
PHASE_S = 8.0
TARGET_ACCURACY = 0.80


@dataclass(frozen=True)
class Kill:
    """One that is wanted: `phase` is of the trainer, and means nothing for an engine."""

    victim: str
    phase: str


def plan_kills(num: int, chance: random.Random) -> list[list[Kill]]:
    """Segments, each a start of the run and its kills; all but the last kill of a segment are engines'."""
    order = ["driver", "rank", "driver", "launcher"]
    segments: list[list[Kill]] = []
    left = num
    while left:
        engines = min(left - 1, chance.randint(0, 2))
        victim = order[len(segments) % len(order)]
        phases = chance.choices(list(PHASES), k=engines + 1)
        # Each phase is met, whatever the dice say.
        phases[-1] = list(PHASES)[len(segments) % len(PHASES)]
        segments.append([*(Kill("engine", phase) for phase in phases[:-1]), Kill(victim, phases[-1])])
        left -= engines + 1
    return segments


class Run:
    """One start of the run, below `directory`; its processes are found by a mark in their environment."""

    def __init__(self, directory: Path, num_ranks: int, overrides: list[str]) -> None:
        self.directory = directory
        self.num_ranks = num_ranks
        launch = [sys.executable, "-m", "fsdp_async"]
        if num_ranks > 1:
            launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
            launch += ["-m", "fsdp_async.cli"]
        self.log = (directory.parent / f"{directory.name}.log").open("ab")
        self.process = subprocess.Popen(
            [*launch, "train", "experiment=demo", f"run.output_dir={directory}", "run.resume=auto", *overrides],
            stdout=self.log, stderr=self.log, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", MARK: str(directory)},
        )  # fmt: skip

    def steps(self) -> list[int]:
        return [record["step"] for record in self.events("step")]

    def events(self, *names: str) -> list[dict]:
        path = self.directory / "metrics.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [record for record in map(json.loads, lines) if record["event"] in names]

    def wait_for_steps(self, num: int) -> None:
        """Until `num` steps have been taken since the start."""
        started = self.last_step()
        deadline = time.monotonic() + START_S
        count = 0
        while count < num:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the run ended or hangs; see {self.log.name}")
            time.sleep(0.05)
            now = self.last_step()
            # A resumed run first cuts its metrics back, and the last step with them.
            count += now > started
            started = now

    def last_step(self) -> int:
        return max(self.steps()[-1:], default=0)

    def phase(self, rank: int) -> str:
        path = self.directory / f"{PHASE}.{rank}"
        return path.read_text().strip() if path.exists() else ""

    def pid_of(self, victim: str) -> tuple[int, int]:
        """(process id, rank whose phase is meant)."""
        if (self.num_ranks == 1 and victim != "engine") or victim == "launcher":
            return self.process.pid, 0
        deadline = time.monotonic() + START_S
        while (found := self.child_of(victim)) is None:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no {victim} is left to kill: the run ended or hangs; see {self.log.name}")
            time.sleep(0.05)
        return found

    def child_of(self, victim: str) -> tuple[int, int] | None:
        """The same for a child of the run; None while it is being started."""
        ranks = {}
        engines = []
        for pid, environment, command in marked(str(self.directory)):
            if "fsdp_async" in command and "RANK" in environment and "multiprocessing" not in command:
                ranks[int(environment["RANK"])] = pid
            if "spawn_main" in command:
                engines.append(pid)
        if victim == "engine":
            # The other child of a spawning process only tracks resources, and is small.
            return (max(engines, key=memory_of), 0) if engines else None
        rank = max(ranks, default=0)
        return (ranks[rank], rank) if ranks else None

    def kill(self, kill: Kill) -> bool:
        """Strike when the phase is the one that is meant; whether it hit."""
        pid, rank = self.pid_of(kill.victim)
        deadline = time.monotonic() + PHASE_S
        while self.phase(rank) != kill.phase:
            if time.monotonic() > deadline:
                return False
        os.kill(pid, signal.SIGKILL)
        if kill.victim == "engine":
            return True
        code = self.process.wait(START_S)
        if kill.victim == "launcher":
            self.wait_for_nobody()
            return code == -signal.SIGKILL
        hit = self.phase(rank) == kill.phase
        self.wait_for_nobody()
        return hit and (self.num_ranks > 1 or code == -signal.SIGKILL)

    def wait_for_nobody(self) -> None:
        deadline = time.monotonic() + START_S
        while found := [pid for pid, _, _ in marked(str(self.directory))]:
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes {found} outlived their run")
            time.sleep(0.05)


def marked(mark: str) -> list[tuple[int, dict[str, str], str]]:
    """(pid, environment, command line) of every living process of the run."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            items = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            command = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
        except OSError:
            continue
        environment = dict(item.split("=", 1) for item in items if "=" in item)
        if environment.get(MARK) == mark and state != "Z":
            found.append((int(entry.name), environment, command))
    return found


def memory_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0


def judge(directory: Path) -> tuple[str, bool]:
    """What the two logs and the summary say."""
    produced = Counter(tuple(s) for line in read_log(directory / PRODUCED) for s in line["samples"])
    consumed = Counter(tuple(s) for line in read_log(directory / CONSUMED) for s in line["samples"])
    lost = produced.keys() - consumed.keys()
    invented = consumed.keys() - produced.keys()
    doubled = [sample for sample, count in consumed.items() if count > 1]
    summary = json.loads((directory / "summary.json").read_text())
    balanced = (
        summary["samples_submitted"] == summary["samples_consumed"] == consumed.total()
        and summary["samples_dropped"] == summary["samples_queued"] == summary["samples_in_flight"] == 0
    )
    accuracy = summary["accuracy_last"] or 0.0
    good = not lost and not doubled and not invented and balanced and accuracy >= TARGET_ACCURACY
    again = sum(count - 1 for count in produced.values())
    text = (
        f"samples consumed {consumed.total()}, made again {again}, lost {len(lost)}, doubled {len(doubled)}, invented "
        f"{len(invented)}; ledger {'balanced' if balanced else 'NOT balanced'}; accuracy {accuracy:.3f}"
    )
    return text, good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("outputs/chaos"))
    parser.add_argument("overrides", nargs="*", help="further KEY=VALUE of the run")
    options = parser.parse_args()
    directory = options.output.resolve()
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    (directory.parent / f"{directory.name}.log").unlink(missing_ok=True)
    memory = set(Path("/dev/shm").iterdir())
    chance = random.Random(options.seed)
    overrides = ["run.audit=true", "checkpoint.every=4", "logging.tensorboard=false", "trainer.eval_every=50",
                 f"trainer.num_batches={max(200, 12 * options.kills)}", *options.overrides]  # fmt: skip
    hits: Counter[tuple[str, str]] = Counter()
    start_s = time.monotonic()
    wanted = options.kills
    while hits.total() < wanted:
        for segment in plan_kills(wanted - hits.total(), chance):
            last = segment[-1].victim
            run = Run(directory, 1 if last == "driver" else 2, overrides)
            run.wait_for_steps(chance.randint(2, 5))
            for kill in segment:
                hit = run.kill(kill)
                hits[kill.victim, PHASES[kill.phase]] += hit
                print(
                    f"{time.monotonic() - start_s:5.0f} s  {kill.victim} in a {PHASES[kill.phase]}: "
                    f"{'killed' if hit else 'missed'}; {hits.total()} of {wanted}",
                    flush=True,
                )
                if kill.victim == "engine":
                    run.wait_for_steps(chance.randint(1, 2))
            if run.process.poll() is None:
                run.process.kill()
            run.process.wait()
            run.wait_for_nobody()
    run = Run(directory, 1, overrides)
    if run.process.wait() != 0:
        print(f"the last start failed; see {run.log.name}")
        return 1
    run.wait_for_nobody()
    text, good = judge(directory)
    leavings = [path.name for path in set(Path("/dev/shm").iterdir()) - memory]
    leavings += [str(path) for path in directory.rglob(".*") if path.name != ".metadata"]
    by_victim = Counter({v: sum(n for (who, _), n in hits.items() if who == v) for v in VICTIMS})
    by_phase = Counter({p: sum(n for (_, where), n in hits.items() if where == p) for p in PHASES.values()})
    print(
        f"kills {hits.total()} ({', '.join(f'{v} {by_victim[v]}' for v in VICTIMS)}; "
        f"{', '.join(f'{p} {n}' for p, n in by_phase.items())}); {text}; left behind {leavings or 'nothing'}"
    )
    return 0 if good and not leavings else 1


if __name__ == "__main__":
    sys.exit(main())
