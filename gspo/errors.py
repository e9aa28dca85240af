"""Errors a user can meet, by kind. Each message names the place and the remedy; the command line prints it in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class GspoError(Exception):
    """Base of every error that is the user's to mend, not a bug."""


class ConfigError(GspoError, ValueError):
    """A setting is unknown, malformed, missing, or has no effect where it was set."""


class DataError(GspoError, ValueError):
    """A data file or one of its rows cannot be used."""


class RewardError(GspoError, RuntimeError):
    """A reward cannot be loaded, or too many replies could not be scored."""


class CheckpointError(GspoError, RuntimeError):
    """No checkpoint to resume from, or one that is not whole."""


class RunLockedError(ConfigError):
    """Another process works in a directory, or it is no longer where it was."""


class TrustError(GspoError, RuntimeError):
    """A run directory names code that this user has not asked for."""


class NumericalError(GspoError, RuntimeError):
    """Loss, gradient or weights are not finite, or gradients keep jumping."""


class AlarmError(GspoError, RuntimeError):
    """An alarm that the settings call fatal."""


class MemoryLimitError(GspoError, RuntimeError):
    """There is too little memory, however small the micro-batch."""


class EngineError(GspoError, RuntimeError):
    """A sampling engine died, hangs, or answers nonsense, and no other could do its work."""


class WeightSyncError(EngineError):
    """A sampling engine does not hold the learner's weights."""


class MismatchError(GspoError, RuntimeError):
    """The sampling engine's probabilities are too far from the learner's for what was asked."""


class KernelWarning(RuntimeWarning):
    """A kernel of this package failed where it should work: a bug here, not a limit of the model. Tests raise it."""


class DiskError(GspoError, OSError):
    """A file of a run or a report cannot be written."""


class PanicError(RuntimeError):
    """A library written in Rust (tokenizers, safetensors) has panicked, as it does over files that it did not expect."""


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """A panic is no `Exception`, so whoever catches those would not catch it: raise one that is."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ == "pyo3_runtime":
            raise PanicError(str(error)) from error
        raise
