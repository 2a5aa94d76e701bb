"""Every error the package raises on purpose.

Each class also is the standard-library error it refines, so that a caller may catch either. A message
names the value, the cause and the remedy.
"""


class FsdpAsyncError(Exception):
    """Base of all errors raised on purpose by this package."""


class ConfigError(FsdpAsyncError, ValueError):
    """A setting, or a combination of settings, that cannot be honoured."""


class InputError(FsdpAsyncError, ValueError):
    """Data (tensors, prompts, responses) that breaks a stated contract."""


class UnknownVersionError(FsdpAsyncError, KeyError):
    """A version or named state that the cache does not retain."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class VersionExistsError(FsdpAsyncError, ValueError):
    """A snapshot under a version that is retained already."""


class StateMismatchError(FsdpAsyncError, ValueError):
    """A stored state and the live model differ in names, shapes, dtypes, mesh or placements."""


class StateInUseError(FsdpAsyncError, RuntimeError):
    """An operation that is not allowed while a version is being visited (or on a closed cache)."""


class CacheBudgetError(FsdpAsyncError, MemoryError):
    """A snapshot that would exceed `max_versions` or `max_bytes`; nothing was copied."""


class RankDisagreementError(FsdpAsyncError, RuntimeError):
    """Ranks asked for different states, or a rank did not arrive in time."""


class RankFailedError(FsdpAsyncError, RuntimeError):
    """Another rank failed, and the run ends on this one, too."""


class UnsupportedModelError(FsdpAsyncError, TypeError):
    """A model, layout or dtype that the package does not handle."""


class NonFiniteError(FsdpAsyncError, ArithmeticError):
    """NaN or infinity where a number is needed."""


class EngineError(FsdpAsyncError, RuntimeError):
    """A rollout engine failed."""


class EngineDiedError(EngineError):
    """The engine's process or thread ended; the message carries its traceback or exit code."""


class EngineTimeoutError(EngineError, TimeoutError):
    """The engine did not answer in time; the message says who waited for what."""


class RewardError(FsdpAsyncError, RuntimeError):
    """A reward failed on more responses than allowed; the message names what failed, how, and on which prompt."""


class CanaryError(FsdpAsyncError, RuntimeError):
    """The first responses of a version disagree with the weights published under it."""


class QueueClosedError(FsdpAsyncError, RuntimeError):
    """The sample queue was closed while somebody waited on it."""


class RunDirectoryError(FsdpAsyncError, FileExistsError):
    """An output directory that is in use or holds another run."""


class CheckpointError(FsdpAsyncError, ValueError):
    """A checkpoint that is torn, or does not fit the run that should go on from it."""


class OutputError(FsdpAsyncError, OSError):
    """A file could not be written; nothing half-written is left in its place."""
