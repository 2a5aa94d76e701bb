"""The canary: an engine whose weights are wrong is found before its tokens are trained on.

Owns one check: for the first responses of every version, the engine's log-probs must agree with a trainer forward
under the weights published as that version. Rewards stay plausible when a publication went wrong; this does not.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_async.errors import CanaryError, NonFiniteError
from fsdp_async.metrics import Mean, Statistics, Total
from fsdp_async.types import TrainBatch

# Of each version and rank: enough tokens for a mean, few enough not to be felt where every batch is a version's first.
NUM_FIRST_ROWS = 16


class Canary:
    """Remembers which versions have been seen; not thread-safe."""

    def __init__(self, bound_nats: float) -> None:
        self.bound_nats = bound_nats
        self._seen: set[int] = set()

    def unseen(self, batch: TrainBatch) -> list[int]:
        """Versions of `batch`, ascending, whose responses have not been checked yet."""
        return [version for version in batch.sampled_versions if version not in self._seen]

    def first_rows(self, batch: TrainBatch) -> Tensor:
        """Row indices (int64, ascending) that are enough to check each unseen version; its first, at most 16.

        Rows with log-probs that the engine could state come before others.
        """
        chosen = torch.zeros(batch.num_rows, dtype=torch.bool)
        for version in self.unseen(batch):
            sampled = batch.versions == version
            has_gap = (sampled & batch.rollout_log_prob.isfinite()).any(dim=1)
            rows = (has_gap if has_gap.any() else sampled.any(dim=1)).nonzero().squeeze(1)
            chosen[rows[:NUM_FIRST_ROWS]] = True
        return chosen.nonzero().squeeze(1)

    def forget(self) -> None:
        """Check every version again, because an engine was started anew."""
        self._seen.clear()

    def check(
        self,
        batch: TrainBatch,
        behaviour_log_prob: Tensor,
        *,
        engine: str,
        process_group: ProcessGroup | None = None,
    ) -> dict[int, float]:
        """Compare the first responses of each unseen version. Collective over `process_group`.

        Args:
            batch: rows that hold (on all ranks together) first responses of their versions.
            behaviour_log_prob: [B,T] pi_b, right at least where an unseen version sampled.
            engine: name for the error.
            process_group: ranks that hold rows of one batch.

        Returns:
            Version -> mean |log pi_b - log mu| in nats over its tokens, for versions checked now.

        Raises:
            CanaryError: a gap is above the bound or not a number; on every rank.
            NonFiniteError: the trainer's log-probs are not numbers; on every rank.
        """
        # A gap ignores tokens whose log-prob the engine could not state: they are the correction's business
        # (`nonfinite`). A version of nothing else has no mean: NaN, which is above every bound.
        found: dict[str, Mean | Total] = {}
        for version in self.unseen(batch):
            where = batch.versions == version
            difference = (behaviour_log_prob - batch.rollout_log_prob).double().abs()
            found[f"gap/{version}"] = Mean.of(difference, where & difference.isfinite())
            found[f"numbers/{version}"] = Total(int((where & ~behaviour_log_prob.isnan()).sum()))
        found_anywhere = Statistics(found).all_reduce(process_group).entries
        versions = sorted(int(name.removeprefix("gap/")) for name in found_anywhere if name.startswith("gap/"))
        gaps = {}
        for version in versions:
            gap, numbers = found_anywhere[f"gap/{version}"], found_anywhere[f"numbers/{version}"]
            assert isinstance(gap, Mean)
            assert isinstance(numbers, Total)
            self._judge(version, gap.value, numbers.value, engine)
            gaps[version] = gap.value
        self._seen.update(gaps)
        return gaps

    def _judge(self, version: int, gap: float, num_numbers: float, engine: str) -> None:
        if not num_numbers:
            raise NonFiniteError(
                f"version {version}: the trainer's own log-probs are not numbers, so its weights are not either; "
                "lower optim.lr, or start from other weights. Nothing of it was trained on"
            )
        if not gap <= self.bound_nats:
            raise CanaryError(
                f"version {version}, {engine}: the engine's log-probs are {gap:.4g} nats from the trainer's "
                f"forward under the same version (bound {self.bound_nats:.4g}); the engine holds other weights "
                "than those published, or computes another function. Nothing of it was trained on. Look at the "
                "publication (names, shards, dtype) first; if engine and trainer differ by design, raise "
                "trainer.canary_bound_nats"
            )
