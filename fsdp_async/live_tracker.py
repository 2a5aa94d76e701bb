"""Which retained states equal the live parameters right now, as far as that can be known.

Owns: the watched optimizers, their step hooks, and the list of states known to be live.

Promises: a state is listed only from its snapshot or restore until the next step of a watched optimizer
*begins*, and only if every trainable parameter belongs to a watched optimizer, because nothing else tells when
weights change (version counters do not show optimizer writes). Hooks hold the cache weakly.

Does not: see edits by hand or steps of optimizers that are not watched; see `StateCache.mark_live_changed`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from fsdp_async.dtensor_io import LiveState
from fsdp_async.errors import InputError, StateInUseError
from fsdp_async.version_store import Key


class StepListener(Protocol):
    """Who is told of optimizer steps. `before_step` may raise, and the step then changes nothing."""

    def before_step(self) -> None:
        """A step is about to begin."""

    def after_step(self) -> None:
        """A step has ended."""


class LiveTracker:
    """See the module's promises."""

    def __init__(self) -> None:
        self._optimizers: list[Optimizer] = []
        self._unhook: list[Callable[[], None]] = []
        self._keys: list[Key] = []  # newest last
        self._is_stepping = False

    @property
    def num_watched(self) -> int:
        """How many optimizers are watched."""
        return len(self._optimizers)

    @property
    def live_version(self) -> int | None:
        """The newest integer version among the live states."""
        return next((key for key in reversed(self._keys) if isinstance(key, int)), None)

    def holds(self, key: Key) -> bool:
        """Whether the state equalled the live parameters when one last looked."""
        return key in self._keys

    def is_live(self, key: Key, live: LiveState) -> bool:
        """Whether the state is known to equal the live parameters, as they are now."""
        return self.holds(key) and self.can_know(live)

    def watch(self, optimizer: Optimizer, live: LiveState, listener: StepListener) -> None:
        """Hook into `optimizer`; a second time is a no-op.

        Raises:
            InputError: not a torch optimizer, one without step hooks, or some of its parameters are not among
                `live.owners`.
        """
        if not isinstance(optimizer, Optimizer):
            raise InputError(
                f"watch({type(optimizer).__name__}): expected a torch.optim.Optimizer, whose step hooks tell when "
                "weights change; call mark_live_changed() after each step of anything else"
            )
        if any(watched is optimizer for watched in self._optimizers):
            return
        owners = {id(parameter) for parameter in live.owners}
        foreign = [tuple(parameter.shape) for parameter in _parameters_of(optimizer) if id(parameter) not in owners]
        if foreign:
            raise InputError(
                f"watch({type(optimizer).__name__}): {len(foreign)} of its parameters are not the model's (shapes "
                f"{foreign[:3]}...); build it from model.parameters() after fully_shard, which replaces parameters, "
                "and give parameters of other modules an optimizer of their own"
            )
        # Weakly: an optimizer that outlives the cache must not keep its gigabytes.
        reference = weakref.ref(listener)

        def before(*_: Any) -> None:
            if (alive := reference()) is not None:
                alive.before_step()

        def after(*_: Any) -> None:
            if (alive := reference()) is not None:
                alive.after_step()

        self._unhook += _hook(optimizer, before, after)
        self._optimizers.append(optimizer)

    def can_know(self, live: LiveState) -> bool:
        """Whether a change of the live parameters would be noticed from here on.

        False within a step, too (a closure): what is taken there is outdated when the step ends.
        """
        return bool(self._optimizers) and not self._is_stepping and self.unwatched(live) is None

    def unwatched(self, live: LiveState) -> str | None:
        """The name of a trainable parameter that no watched optimizer steps, if there is one."""
        stepped = {id(parameter) for optimizer in self._optimizers for parameter in _parameters_of(optimizer)}
        specs = zip(live.layout.tensors, live.owners, strict=False)
        return next((spec.fqn for spec, owner in specs if owner.requires_grad and id(owner) not in stepped), None)

    def refuse_lazy(self, key: Key, live: LiveState) -> None:
        """A lazy snapshot needs to be told before weights change.

        Raises:
            StateInUseError: nobody would.
        """
        unwatched = self.unwatched(live)
        if unwatched is not None or not self._optimizers:
            raise StateInUseError(
                f"snapshot({key!r}, lazy=True) needs a watched optimizer for every trainable parameter, or nobody "
                f"tells the cache to copy before weights change; parameter {unwatched!r} has none. watch() the "
                "optimizers, freeze what is not trained, or take the snapshot without lazy"
            )

    def add(self, key: Key, live: LiveState) -> None:
        """`key` was taken from the live parameters just now."""
        self.remove(key)
        if self.can_know(live):
            self._keys.append(key)

    def remove(self, key: Key) -> None:
        """`key` is gone or holds something else."""
        self._keys = [known for known in self._keys if known != key]

    def changed(self) -> None:
        """The live parameters are no longer those of any state."""
        self._keys.clear()

    def begin_step(self) -> None:
        """Already here, because a step that raises half way has changed weights."""
        self._keys.clear()
        self._is_stepping = True

    def end_step(self) -> None:
        """From here on, what is taken is live again."""
        self._is_stepping = False

    def close(self) -> None:
        """Remove the hooks."""
        for unhook in self._unhook:
            unhook()
        self._unhook.clear()
        self._optimizers.clear()
        self._keys.clear()


def _hook(optimizer: Optimizer, before: Callable[..., None], after: Callable[..., None]) -> list[Callable[[], None]]:
    """Have both called around every step; returns what takes the hooks away again."""
    try:
        return [
            optimizer.register_step_pre_hook(before).remove,
            optimizer.register_step_post_hook(after).remove,
        ]
    except AttributeError as error:
        raise InputError(
            f"watch({type(optimizer).__name__}): it has no step hooks, because it only passes steps on to an optimizer "
            "inside it; watch that one (after Accelerate's prepare: optimizer.optimizer)"
        ) from error


def _parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
