"""Which checkpoints a run keeps besides the newest `checkpoint.keep`, and how many that can be.

In: settings, and the steps that have a checkpoint. Out: the steps to keep. Invariant: at any time an alarm that rolls
the run back finds a checkpoint from before its condition held, if the run has ever saved one that old.
"""

from __future__ import annotations

from collections.abc import Iterable

from gspo.config import Config
from gspo.record.rollbacks import horizon


def for_rollback(steps: Iterable[int], reach: int) -> set[int]:
    """The steps to keep for a rollback over `reach` steps, at most two; none without a reach.

    They are the newest step that is old enough for an alarm right after the newest step, and the oldest step after
    it, which takes its place when it is old enough itself. Without the second, checkpoints in quick succession would
    delete each other before they are old enough, and the first would become older and older."""
    ordered = sorted(steps)
    if not reach or not ordered:
        return set()
    old_enough = max((step for step in ordered if step <= ordered[-1] + 1 - reach), default=ordered[0])
    following = min((step for step in ordered if step > old_enough), default=old_enough)
    return {old_enough, following}


def extra_checkpoints(config: Config) -> int:
    """The number of checkpoints that a run may keep in addition to `checkpoint.keep`."""
    reach = horizon(config)
    between = config.checkpoint.every
    if config.checkpoint.keep_best:
        between = min(between, config.eval.every)
    # With saves that are further apart than the reach, the second newest is old enough.
    rollback = 0 if not reach else 2 if between < reach else max(0, 2 - config.checkpoint.keep)
    return rollback + config.checkpoint.keep_best


def planned_saves(config: Config, *, done: int = 0) -> int:
    """The largest number of checkpoints that the steps after `done` save."""
    left = config.steps - done
    # Besides those at intervals there is one before the first step and one after the last.
    saves = 2 + left // config.checkpoint.every
    return saves + left // config.eval.every if config.checkpoint.keep_best else saves


def most_checkpoints(config: Config) -> int:
    """The largest number of checkpoints at a time, the one being written included."""
    # An old checkpoint is deleted only after the newest is complete.
    most = config.checkpoint.keep + extra_checkpoints(config) + 1
    return min(planned_saves(config), most) if config.checkpoint.keep else planned_saves(config)


def abandoned_steps(config: Config) -> int:
    """About how many steps rollbacks may abandon. What they wrote stays in `abandoned/`."""
    reach = horizon(config)
    # From the alarm back to weights that were good, and from there to the checkpoint before.
    return config.alarms.max_rollbacks * (reach + config.checkpoint.every) if reach else 0
