"""What a run reports before its first step: its model, data and objective, its components, and room for checkpoints.

In: the components of a run and its directory. Out: messages and events. Invariant: nothing here changes what is
trained, and a run that will not fit on the disk is warned about, not refused.
"""

from __future__ import annotations

import shutil
from collections import Counter

from gspo.context import RunContext
from gspo.learner import checkpoint
from gspo.model.quantization import parameter_count
from gspo.model.sharding import module_class
from gspo.record.incidents import Incidents
from gspo.record.progress import Display
from gspo.record.retention import extra_checkpoints, planned_saves
from gspo.record.run_dir import RunDir


def report_setup(context: RunContext, run_dir: RunDir, display: Display, incidents: Incidents) -> None:
    """Display the model, the data and the objective of a new run, and warn about settings that bias training."""
    config, problems = context.config, context.problems
    # Booleans compare as numbers: `>= False` holds for every parameter, `>= True` only for trained ones.
    size, trained = (
        sum(parameter_count(p) for p in context.policy.model.parameters() if p.requires_grad >= only)
        for only in (False, True)
    )
    share = f" ({_human(trained)} in adapters are trained)" if trained < size else ""
    display.message(
        f"{module_class(context.policy.model).__name__}, {_human(size)} parameters{share} on {context.policy.device}; "
        f"{len(problems.train)} training and {len(problems.held_out)} held-out problems{_by_source(context)}; "
        f"objective {context.objective.name}; run directory {run_dir.path}"
    )
    if problems.crowded:
        incidents.warn(problems.crowded)
    elif removed := problems.overlapping - problems.replaced:
        which = "problem that duplicates" if removed == 1 else "problems that duplicate"
        sets = " or one of an evaluation set" if problems.sets else ""
        display.message(f"excluded {removed} training {which} a held-out problem{sets}")
    if problems.skipped:
        rows = "1 bad row" if problems.skipped == 1 else f"{problems.skipped} bad rows"
        display.message(f"skipped {rows} (data.on_bad_row = skip)")
    if config.rollout.top_p < 1 or config.rollout.top_k:
        incidents.warn(
            "with rollout.top_p or rollout.top_k the engine samples from a truncated distribution, and the learner's "
            "log-probs are of the full one: mismatch/k3 will show it; top_p = 1 and top_k = 0 are safe"
        )


def _by_source(context: RunContext) -> str:
    """The problems of each source and evaluation set; empty if there is only one source."""
    problems, data = context.problems, context.config.data
    counts = Counter(p.source for p in problems.train)
    total = sum(source.weight for source in data.mix.values())
    parts = [f"{name}: {counts[name]}, {source.weight / total:.0%} of the prompts" for name, source in data.mix.items()]
    parts += [f"evaluation set {name}: {len(prompts)}" for name, prompts in problems.sets.items()]
    return f" ({'; '.join(parts)})" if parts else ""


def _human(count: int) -> str:
    return f"{count / 1e6:.2f}M" if count >= 1e5 else f"{count / 1e3:.1f}K"


def report_components(context: RunContext, run_dir: RunDir, display: Display) -> None:
    """Report what rewards and engine say about themselves: the sandbox, how adapters are sent."""
    for name, text in context.rewards.about.items():
        run_dir.event("reward", name=name, message=text)
        display.message(f"{name}: {text}")
    engines = [context.engine] + ([context.sampler] if context.sampler is not None else [])
    for about in dict.fromkeys(filter(None, (engine.about for engine in engines))):
        run_dir.event("engine", message=about)
        display.message(f"{context.config.rollout.engine}: {about}")


def check_disk_space(context: RunContext, run_dir: RunDir, incidents: Incidents, *, done: int) -> None:
    """Warn if the checkpoints of the steps after `done` will not fit on the disk."""
    config = context.config
    keep = config.checkpoint.keep
    saves = planned_saves(config, done=done)
    existing = len(checkpoint.saved(run_dir.checkpoints))
    # The oldest checkpoint is deleted only after the newest is complete, so one more than those kept must fit.
    count = saves if not keep else max(1, min(saves, keep + extra_checkpoints(config) + 1 - existing))
    need = count * checkpoint.size_of(context.policy.model, config.learner.optimizer, config.rollout.max_lag)
    free = shutil.disk_usage(run_dir.path).free
    if need > free:
        incidents.warn(
            f"checkpoints will need {need / 1e9:.3g} GB more, and {free / 1e9:.3g} GB are free at {run_dir.path}: "
            "make room, lower checkpoint.keep, or raise checkpoint.every"
        )
