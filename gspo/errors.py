"""User-facing errors, by kind. Each message names the setting or file and the fix; the CLI prints it on one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gspo.site import linked


class GspoError(Exception):
    """Base of every error that the user can fix; anything else is a bug."""

    def __str__(self) -> str:
        return linked(super().__str__())


class ConfigError(GspoError, ValueError):
    """A setting is unknown, malformed, missing, or has no effect."""


class DataError(GspoError, ValueError):
    """A data file or one of its rows cannot be used."""


class RewardError(GspoError, RuntimeError):
    """A reward cannot be loaded, or too many completions could not be scored."""


class CheckpointError(GspoError, RuntimeError):
    """There is no checkpoint to resume from, or it is incomplete."""


class RunLockedError(ConfigError):
    """Another process holds the run directory, or the directory was moved or deleted."""


class TrustError(GspoError, RuntimeError):
    """A run directory names code that this user has not approved."""


class NumericalError(GspoError, RuntimeError):
    """Loss, gradients or weights are not finite, or the gradient norm spikes repeatedly."""


FLOAT16_HINT = ' (float16 holds nothing above 65504: if this repeats, use model.dtype = "bfloat16" or "float32")'
"""The end of a message about a number that is not finite, for a float16 model."""


class AlarmError(GspoError, RuntimeError):
    """An alarm that the settings mark as fatal was raised."""


class MemoryLimitError(GspoError, RuntimeError):
    """There is too little memory even for the smallest micro-batch."""


class EngineError(GspoError, RuntimeError):
    """A sampling engine died, hung or returned invalid results, and no other engine could take over."""


class WeightSyncError(EngineError):
    """A sampling engine does not hold the learner's weights."""


class LagError(EngineError):
    """A batch was sampled from weights that are older than `rollout.max_lag` allows."""


class MismatchError(GspoError, RuntimeError):
    """The sampling engine's log-probs differ too much from the learner's for the chosen settings."""


class RankError(GspoError, RuntimeError):
    """Another rank of the run failed, or did not answer in time."""


class KernelWarning(RuntimeWarning):
    """A kernel of this package failed on an input it supports. This is a bug, so tests turn it into an error."""


class DiskError(GspoError, OSError):
    """A file of a run or a report cannot be written."""


class PanicError(RuntimeError):
    """A Rust library (tokenizers, safetensors) panicked, typically on a malformed file."""


def is_panic(error: BaseException) -> bool:
    """Whether an error is a Rust panic.

    pyo3's `PanicException` derives from `BaseException`, so `except Exception` does not catch it, and its class cannot
    be imported."""
    return type(error).__module__ == "pyo3_runtime"


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Re-raise Rust panics as `PanicError`."""
    try:
        yield
    except BaseException as error:
        if is_panic(error):
            raise PanicError(str(error)) from error
        raise
