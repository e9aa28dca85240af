"""Diagnosis of a run: findings in plain language, each with a suggestion.

In: the contents of a run directory (`RunFacts`). Out: findings, most severe first. Invariant: a function of the run
directory alone; every sentence states the numbers it is based on, and every rule has a test that triggers it and one
that does not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gspo.record.alarms import FLAT, NOISY, adapts_clip, rounding_remedy
from gspo.record.run_format import ObjectiveFacts

WINDOW = 20
"""Number of recent steps that a rule considers."""
FEWEST_STEPS = 5
"""With fewer steps, no rule reports a trend or an average."""

MANY_STEPS = 10
"""With fewer steps, no rank is called a straggler: completions of one rank may be longer by chance."""
MUCH_SLOWER = 1.5
"""How much longer than the others a straggler takes."""
_RANK = re.compile(r"rank/[0-9]{1,6}/rollout_s").fullmatch

LOW_ESS = 0.8
"""Effective sample size of tokens below which rollouts are called too old."""
MANY_DROPPED = 0.05
"""Share of dropped completions from which the diagnosis says so."""
MOSTLY_CLIPPED = 0.5
"""Clipped share from which they are, if ratios start from the sampler."""

NEARLY_ALL = 0.95
"""At this share of uniform groups, the reward hardly contributes to training."""

Level = Literal["bad", "warn", "note", "good"]
LEVELS: tuple[Level, ...] = ("bad", "warn", "note", "good")
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One observation about a run."""

    name: str
    level: Level
    what: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The input of the rules."""

    rows: Sequence[Row]
    """The metrics of the last `2 * WINDOW` steps, without step 0."""
    evaluations: Sequence[Row]
    """Every row with a held-out accuracy and its interval, step 0 first."""
    timings: Sequence[Row]
    """The times of the last `WINDOW` steps."""
    events: Sequence[Row]
    settings: Mapping[str, Any]
    """`config.toml` as nested tables."""
    objective: ObjectiveFacts
    state: str
    """As defined by `RunReader.state`."""

    @property
    def recent(self) -> Sequence[Row]:
        """The last `WINDOW` steps."""
        return self.rows[-WINDOW:]

    def setting(self, section: str, key: str, default: Any) -> Any:
        """A setting of the run; `default` if it is missing or has another type."""
        return setting(self.settings, section, key, default)

    @property
    def clips_sequences(self) -> bool:
        """Whether the objective clips whole completions."""
        return self.objective.clips == "sequences"

    def takes(self, key: str) -> bool:
        """Whether the objective of the run has this setting, so that it may be advised."""
        return key in self.objective.settings

    @property
    def objective_settings(self) -> Mapping[str, Any]:
        """The settings of the objective that the run was given."""
        table = self.settings.get("objective")
        return table if isinstance(table, Mapping) else {}

    @property
    def old_from_sampler(self) -> bool:
        """Whether the engine's log-probs are the old ones."""
        return bool(self.setting("learner", "old_logp", "recompute") == "sampler")

    def mean(self, key: str, rows: Sequence[Row] | None = None) -> float:
        """Mean of a metric over the recent steps that have it; NaN if none does."""
        values = [float(r[key]) for r in (self.recent if rows is None else rows) if r.get(key) is not None]
        return sum(values) / len(values) if values else math.nan


def setting(settings: Mapping[str, Any], section: str, key: str, default: Any) -> Any:
    """A setting from untrusted nested tables; `default` if it is missing or has another type."""
    table = settings.get(section)
    value = table.get(key, default) if isinstance(table, Mapping) else default
    # A TOML file may write 1 for 1.0 and the reverse.
    expected = (int, float) if isinstance(default, int | float) else type(default)
    return value if isinstance(value, expected) else default


def diagnose(facts: RunFacts) -> list[Finding]:
    """All findings that hold now, most severe first."""
    found = [finding for rule in RULES if (finding := rule(facts)) is not None]
    if len(facts.recent) >= FEWEST_STEPS and not any(f.level in ("bad", "warn") for f in found):
        found.append(Finding(name="no problems", level="good", what="No problems found."))
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


# ------------------------------------------------------------------------------------------------- how the run ended


def _error(facts: RunFacts) -> Finding | None:
    last = facts.events[-1] if facts.events else {}
    if last.get("event") != "error":
        return None
    return Finding(
        name="error", level="bad", what=f"The run stopped with an error: {last.get('error')}: {last.get('message')}"
    )


def _exited(facts: RunFacts) -> Finding | None:
    """A run without a trainer that wrote no final event and has not reached its end."""
    steps = facts.settings.get("steps")
    tokens = facts.settings.get("tokens")
    if facts.state != "ended" or not isinstance(steps, int):
        return None
    last = facts.recent[-1] if facts.recent else {}
    step = last.get("step", 0)
    sampled = last.get("tokens/sampled") or 0
    if sampled >= tokens if isinstance(tokens, int) and tokens else step >= steps:
        return None
    of = "" if tokens else f" of {steps}"
    return Finding(
        name="exited unexpectedly",
        level="bad",
        what=(
            f"No trainer is running, and the run did not record why it stopped at step {step:.0f}{of}. It was killed, "
            "or this is a copy of a run that continues elsewhere."
        ),
        remedy="Resume from the last checkpoint with gspo train --resume RUN.",
    )


def _alarm(facts: RunFacts) -> Finding | None:
    """The newest alarm of the recent steps."""
    first = facts.recent[0]["step"] if facts.recent else 0
    alarms: list[Row] = []
    for event in facts.events:
        if event.get("event") == "rollback":  # its steps are not in the metrics anymore; `_rollback` reports it
            alarms = [e for e in alarms if e.get("step", 0) <= event.get("step", 0)]
        if event.get("event") == "alarm" and event.get("step", 0) >= first:
            alarms.append(event)
    if not alarms:
        return None
    last = alarms[-1]
    return Finding(
        name="alarm", level="bad", what=f"Alarm at step {last.get('step')}, {last.get('name')}: {last.get('message')}."
    )


def _rollback(facts: RunFacts) -> Finding | None:
    """The newest rollback."""
    found = [e for e in facts.events if e.get("event") == "rollback"]
    if not found:
        return None
    message = str(found[-1].get("message"))
    recent = not facts.recent or found[-1].get("step", 0) >= facts.recent[0]["step"]
    return Finding(
        name="rolled back",
        level="warn" if recent else "note",
        what=f"The run was rolled back. {message[:1].upper()}{message[1:]}.",
        remedy="Read completions of the abandoned steps in abandoned/ to see what went wrong.",
    )


def _early_stop(facts: RunFacts) -> Finding | None:
    """A run that ended early: nothing but its stop follows that event."""
    last = [e for e in facts.events if e.get("event") not in ("stop", "checkpoint")][-1:]
    if not last or last[0].get("event") != "early_stop":
        return None
    return Finding(
        name="ended early",
        level="note",
        what=f"The run ended early at step {last[0].get('step')}: {last[0].get('message')}.",
        remedy="Continue it with gspo train --resume RUN --eval.patience=0.",
    )


# ------------------------------------------------------------------------------------------------- is it learning?


def _held_out(facts: RunFacts) -> Finding | None:
    """Compare the last evaluation with the first and the best; their intervals must not overlap."""
    points = facts.evaluations
    if len(points) < 2:
        return None
    first = points[0]
    last = points[-1]
    best = max(points, key=lambda e: float(e["eval/accuracy"]))
    now = f"{_percent(last['eval/accuracy'])} at step {_step(last)}"
    # Disjoint intervals: a drop within them may be chance.
    if float(last["eval/accuracy_high"]) < float(best["eval/accuracy_low"]):
        return _accuracy_drop(facts, now, best, last)
    if float(last["eval/accuracy_low"]) > float(first["eval/accuracy_high"]):
        return Finding(
            name="learning",
            level="good",
            what=(
                f"Held-out accuracy rose from {_percent(first['eval/accuracy'])} to {now}; the 95 % intervals do not "
                "overlap."
            ),
        )
    return _held_out_reward(first, last)


def _held_out_reward(first: Row, last: Row) -> Finding | None:
    """With partial credit the reward changes where accuracy does not."""
    keys = ("eval/reward_low", "eval/reward", "eval/reward_high")
    if any(row.get(key) is None for row in (first, last) for key in keys):
        return None
    before_low, before, before_high = (float(first[key]) for key in keys)
    low, after, high = (float(last[key]) for key in keys)
    changed = f"from {before:.3g} at step {_step(first)} to {after:.3g} at step {_step(last)}"
    if low > before_high:
        what = f"The mean held-out reward rose {changed}; the 95 % intervals do not overlap."
        return Finding(name="learning", level="good", what=what)
    if high < before_low:
        return Finding(
            name="reward drop",
            level="bad",
            what=f"The mean held-out reward fell {changed}; the 95 % intervals do not overlap.",
            remedy="Start again with a lower learner.learning_rate, or stop at the best checkpoint.",
        )
    return None


def _accuracy_drop(facts: RunFacts, now: str, best: Row, last: Row) -> Finding:
    drop = (
        f"Held-out accuracy is {now}, below its best of {_percent(best['eval/accuracy'])} at step {_step(best)} (the "
        "95 % intervals do not overlap)"
    )
    rewards = [r for r in (best.get("reward/mean"), last.get("reward/mean")) if r is not None]
    if len(rewards) == 2 and rewards[1] > rewards[0]:
        return Finding(
            name="overfitting or reward hacking",
            level="bad",
            what=f"{drop}, while the training reward rose from {rewards[0]:.3g} to {rewards[1]:.3g}.",
            remedy=(
                "The policy overfits the training problems or exploits the reward. Read the completions with the "
                "highest reward in the last steps, use more problems, or stop at the best checkpoint."
            ),
        )
    narrower = " or a narrower clip range" if facts.takes("clip_low") else ""
    return Finding(
        name="accuracy drop",
        level="bad",
        what=f"{drop}.",
        remedy=(
            "Start a new run from a checkpoint near that step (model.path), with a lower learner.learning_rate"
            f"{narrower}."
        ),
    )


def _plateau(facts: RunFacts) -> Finding | None:
    """Compare the reward of the last window with the window before it."""
    before = facts.rows[:-WINDOW]
    after = facts.recent
    if len(before) < WINDOW or facts.mean("reward/correct_fraction") > 0.9:
        return None
    x, y = ([float(r["reward/mean"]) for r in rows if r.get("reward/mean") is not None] for rows in (before, after))
    if min(len(x), len(y)) < FEWEST_STEPS:
        return None
    change = abs(_mean(y) - _mean(x))
    # Two standard errors of the difference. The relative floor below covers rewards without any noise.
    error = math.hypot(_standard_error(x), _standard_error(y))
    if change > max(2 * error, 0.005 * max(abs(_mean(x)), 1e-9)):
        return None
    return Finding(
        name="plateau",
        level="note",
        what=(
            f"The reward has not changed over the last {len(before) + len(after)} steps ({_mean(x):.3g} before, "
            f"{_mean(y):.3g} now, within noise)."
        ),
        remedy="If it should still improve, check uniform groups, the clip fraction and the learning rate.",
    )


# ------------------------------------------------------------------------------------------------- is there a signal?


def _no_trainable_samples(facts: RunFacts) -> Finding | None:
    """Steps that did not change the policy."""
    idle = [r for r in facts.recent if r.get("samples/trained") == 0]
    if not idle:
        return None
    prefix = "samples/dropped/"
    counts: dict[str, float] = {}
    for key, value in ((k, v) for r in idle for k, v in r.items() if k.startswith(prefix)):
        counts[key.removeprefix(prefix)] = counts.get(key.removeprefix(prefix), 0) + float(value or 0)
    why, remedy = _DROP_REASONS.get(max(counts, key=counts.__getitem__, default=""), _DROP_REASONS[""])
    return Finding(
        name="no trainable samples",
        level="bad" if 2 * len(idle) >= len(facts.recent) else "warn",
        what=(
            f"{len(idle)} of the last {len(facts.recent)} steps had no trainable samples{why}. They did not change "
            "the policy."
        ),
        remedy=remedy,
    )


_DROP_REASONS = {
    "": ("", "The events give the reason."),
    "uniform": (
        ", because all completions of every sampled group had the same reward",
        "Use problems that the model sometimes solves, a reward with partial credit, or more completions per prompt "
        "(rollout.group_size). Sampling more of the same (rollout.refill_budget) costs more and helps little.",
    ),
    "overlong": (
        ", because all completions were truncated and objective.shape drops truncated ones",
        "Raise rollout.max_tokens, or ask for shorter answers (data.instruction).",
    ),
    "over_lag": (
        ', because completions were too long for their turns and rollout.over_lag = "drop" gives them up',
        'Raise rollout.span_tokens or rollout.max_lag, or set rollout.over_lag = "wait".',
    ),
    "unscored": (
        ", because the completions could not be scored",
        "Open a step and filter by 'unscored' to see why: the reward raises, hangs or returns invalid values.",
    ),
    "alone": (
        ", because no group had two trainable completions to compare",
        "Raise rollout.group_size, and check why the others were dropped: samples/dropped counts the reasons.",
    ),
    "empty": (
        ", because the completions were empty",
        "The model stops immediately. Check the chat template and the stop tokens (gspo doctor), or start from another "
        "model.",
    ),
}
"""By the most frequent reason for dropping completions: the reason in words, and the remedy."""


def _no_gradient(facts: RunFacts) -> Finding | None:
    """Steps whose completions were trained on, but with a gradient of 0."""
    idle = _zero_gradient(facts)
    # One such step in ten is chance if a step has few groups.
    if not idle or (10 * len(idle) <= len(facts.recent) and len(facts.recent) >= 10):
        return None
    why, remedy = _zero_gradient_cause(facts, idle)
    return Finding(
        name="no gradient",
        level="bad" if 2 * len(idle) >= len(facts.recent) else "warn",
        what=(
            f"The gradient was 0 in {len(idle)} of the last {len(facts.recent)} steps, so the policy learned nothing "
            f"from their completions: {why}."
        ),
        remedy=remedy,
    )


def _zero_gradient(facts: RunFacts) -> list[Row]:
    return [r for r in facts.recent if r.get("grad/norm") == 0 and r.get("samples/trained") != 0]


def _zero_gradient_cause(facts: RunFacts, idle: Sequence[Row]) -> tuple[str, str]:
    """Why the gradient of these steps is 0, and what to change."""
    if not facts.mean("advantage/std", idle) >= FLAT:
        correct = facts.mean("reward/correct_fraction", idle)
        reward = f"the rewards within every group are equal (mean {facts.mean('reward/mean', idle):.3g}"
        if math.isnan(correct):
            return f"{reward})", f"Use {_better_problems(correct)}, or check the reward: {_PARTIAL_CREDIT}."
        why = f"{reward}, {_percent(correct)} of the completions correct)"
        if 0.05 < correct < NEARLY_ALL:
            more = "more completions per prompt (rollout.group_size)"
            return why, f"Use problems that the model solves sometimes instead of always or never, or {more}."
        check = "" if correct >= 0.5 else f", and check the reward: {_PARTIAL_CREDIT}"
        return why, f"Use {_better_problems(correct)}{check}."
    if facts.mean("clip/fraction_tokens", idle) >= 1:
        sampler = (
            'Set learner.old_logp = "recompute", so that ratios start from the current policy, or widen'
            if facts.old_from_sampler
            else "Widen"
        )
        return "every token is clipped", f"{sampler} objective.clip_low and objective.clip_high{_adaptive(facts)}."
    return (
        f"the advantages differ (standard deviation {facts.mean('advantage/std', idle):.2g}), but no token of a "
        "completion with an advantage contributes to the loss",
        "Look at the clip fraction and the sampler-learner mismatch: a trust region or a mismatch correction that "
        "leaves out every token causes this.",
    )


_PARTIAL_CREDIT = "it may never be reached, and partial credit gives a gradient before the first success"


def _uniform(facts: RunFacts) -> Finding | None:
    """Groups in which all rewards are equal. A penalty that is added to the reward can still give them a gradient."""
    share = facts.mean("groups/uniform_fraction")
    penalty = _penalty(facts)
    # `not share >= 0.5` instead of `share < 0.5`: an unknown share (NaN) is no finding.
    if len(facts.recent) < FEWEST_STEPS or not share >= 0.5:
        return None
    # `_no_gradient` reports it.
    if len(_zero_gradient(facts)) == len(facts.recent):
        return None
    # An objective that compares completions across groups gets a gradient from uniform groups, too.
    if facts.objective.advantage_scope == "batch" and facts.mean("reward/std") >= FLAT:
        return None
    if penalty and share >= NEARLY_ALL:
        return _penalty_only(facts, share, penalty)
    correct = facts.mean("reward/correct_fraction")
    accuracy = "" if math.isnan(correct) else f" ({_percent(correct)} of the completions are correct)"
    # Dynamic sampling helps only if it can fill a batch. Otherwise it samples more and trains on just as little.
    full = facts.setting("rollout", "refill_budget", "") == "full"
    fills = share < 1 if full else (1 - share) * facts.setting("rollout", "refill_budget", 3) >= 1
    disabled = not facts.mean("groups/discarded") > 0
    dynamic = (
        'enable dynamic sampling (objective.keep = "mixed"), ' if disabled and fills and facts.takes("keep") else ""
    )
    except_penalty = f" beyond {penalty}" if penalty else ""
    return Finding(
        name="uniform groups",
        level="warn",
        what=(
            f"{_percent(share)} of the groups are uniform{accuracy}: all their completions have the same reward, so "
            f"{_percent(share)} of the sampled groups give no training signal{except_penalty}."
        ),
        remedy=(
            f"To waste less, {dynamic}use {_better_problems(correct)}, or more completions per prompt "
            "(rollout.group_size)."
        ),
    )


def _better_problems(correct: float) -> str:
    if math.isnan(correct):
        return "problems that the model sometimes solves"
    return "harder problems" if correct >= 0.5 else "easier problems or a cold start (cold_start.steps)"


def _penalty(facts: RunFacts) -> str:
    """The penalties that give uniform groups a gradient; empty if there are none or the groups are discarded."""
    if facts.mean("groups/discarded") > 0 or not facts.mean("advantage/std") >= FLAT:
        return ""
    length = "the length penalty" if facts.mean("reward/length_penalty") > 0 else ""
    kl = "the KL penalty" if facts.objective.kl_in == "reward" and facts.mean("kl/ref") > 0 else ""
    return " and ".join(filter(None, (length, kl)))


def _penalty_only(facts: RunFacts, share: float, penalty: str) -> Finding:
    return Finding(
        name="penalty only",
        level="warn",
        what=(
            f"The training signal is only {penalty}: in {_percent(share)} of the groups all completions have the same "
            f"reward (mean {facts.mean('reward/mean'):.3g}), but their advantages differ (standard deviation "
            f"{facts.mean('advantage/std'):.2g})."
        ),
        remedy=(
            "Correct completions are not rewarded. Use problems that the model sometimes solves, a cold start "
            "(cold_start.steps) or more completions per prompt (rollout.group_size), check the reward, or disable the "
            "penalty until rewards differ."
        ),
    )


def _unscored(facts: RunFacts) -> Finding | None:
    steps = [r for r in facts.recent if (r.get("samples/unscored") or 0) > 0]
    if not steps:
        return None
    total = sum(int(r["samples/unscored"]) for r in steps)
    return Finding(
        name="unscored",
        level="warn",
        what=(
            f"{total} completions of the last {len(facts.recent)} steps could not be scored. They are excluded from "
            "every mean and never count as wrong."
        ),
        remedy="Open a step and filter by 'unscored' to see why: the reward raises, hangs or returns invalid values.",
    )


def _other_format(facts: RunFacts) -> Finding | None:
    """Tool calls that are not read."""
    prefix = "conversation/other_format/"
    names = {name for row in facts.recent for name in row if name.startswith(prefix)}
    counts = {name: sum(int(row.get(name) or 0) for row in facts.recent) for name in sorted(names)}
    most = max(counts, key=lambda name: counts[name], default="")
    if not most or counts[most] < len(facts.recent):
        return None
    style = most.removeprefix(prefix)
    return Finding(
        name="tool calls in another format",
        level="warn",
        what=(
            f"{counts[most]} turns of the last {len(facts.recent)} steps would be tool calls in format {style}, which "
            "environment.tool_format does not read: they call nothing."
        ),
        remedy=f'Set environment.tool_format = "{style}", or ask for the other format in data.instruction.',
    )


def _truncated(facts: RunFacts) -> Finding | None:
    share = facts.mean("length/truncated_fraction")
    limit = facts.setting("rollout", "max_tokens", 0)
    if len(facts.recent) < FEWEST_STEPS or not share >= 0.1:
        return None
    soft = '"soft_overlong" to penalize length or ' if facts.objective.takes_penalties else ""
    shaping = f', or set objective.shape = {soft}"overlong_filter" to drop truncated completions'
    return Finding(
        name="truncated completions",
        level="warn",
        what=f"{_percent(share)} of the completions are truncated at the limit of {limit} tokens.",
        remedy=(
            "Raise rollout.max_tokens, or ask for shorter answers (data.instruction)"
            f"{shaping if facts.objective.shape == 'none' and facts.takes('shape') else ''}."
        ),
    )


def _length_drift(facts: RunFacts) -> Finding | None:
    ends = _ends(facts, "length/mean")
    if ends is None or not (ends[1] >= 2 * ends[0] or ends[1] <= 0.5 * ends[0]):
        return None
    change = "doubled" if ends[1] > ends[0] else "halved"
    return Finding(
        name="length drift",
        level="note",
        what=(
            f"The mean completion length has {change} in {len(facts.recent)} steps, from {ends[0]:.0f} to "
            f"{ends[1]:.0f} tokens."
        ),
        remedy="Read completions from both ends: longer reasoning is fine, padding and repetition are not.",
    )


# ------------------------------------------------------------------------------------------------- the trust region


def _one_update(facts: RunFacts) -> Finding | None:
    if facts.setting("learner", "mini_batches", 1) != 1 or not facts.rows or math.isnan(facts.mean("clip/high")):
        return None
    if facts.old_from_sampler:  # with older weights
        return None
    return Finding(
        name="one update per batch",
        level="note",
        what="Each batch is used for one update, so every importance ratio is 1 and nothing can be clipped.",
        remedy=(
            "This is fully on-policy training. learner.mini_batches = 4 makes more updates from the same completions."
        ),
    )


def _clip_too_wide(facts: RunFacts) -> Finding | None:
    high = facts.mean("clip/high")
    if len(facts.recent) < FEWEST_STEPS or facts.setting("learner", "mini_batches", 1) < 2 or math.isnan(high):
        return None
    # Token-level objectives often clip less than 0.1 % of the tokens, so only 0 is suspicious there.
    if not facts.mean("clip/fraction_tokens") <= (1e-3 if facts.clips_sequences else 0):
        return None
    std = facts.mean("ratio/sequence_log_std" if facts.clips_sequences else "ratio/token_log_std")
    ratio = "sequence" if facts.clips_sequences else "token"
    # The metric is of a mean over the completion, which a range for a sum does not bound.
    summed = facts.setting("objective", "length_norm", "mean") != "mean" or facts.objective.clips_log_ratio
    moved = f": the {ratio}-level log-ratio has a standard deviation of {std:.1e}, the upper clip range is {high:.1e}"
    return Finding(
        name="clip range too wide",
        level="warn",
        what=(
            f"The trust region is inactive ({_percent(facts.mean('clip/fraction_tokens'))} of the tokens are clipped)"
            f"{'' if facts.clips_sequences and summed else moved}."
        ),
        remedy=(
            "Nothing limits the policy update. If the reward is unstable, narrow objective.clip_low and clip_high"
            f"{_adaptive(facts)}."
        ),
    )


def _clip_too_narrow(facts: RunFacts) -> Finding | None:
    share = facts.mean("clip/fraction_sequences")
    if len(facts.recent) < FEWEST_STEPS or not facts.clips_sequences or not share >= 0.5:
        return None
    return Finding(
        name="clip range too narrow",
        level="warn",
        what=f"{_percent(share)} of the completions are clipped, so most of the batch has no gradient.",
        remedy=f"Widen objective.clip_low and clip_high{_adaptive(facts)}, or lower learner.learning_rate.",
    )


def _adaptive(facts: RunFacts) -> str:
    """A hint at the adaptive clip range, if the run could use it."""
    # A rollback narrows only a fixed range, so the two are refused together.
    if facts.setting("alarms", "rollback_clip", 1.0) != 1:
        return ""
    return ' ("auto:0.15" adapts the range until about 15 % of the tokens are clipped)'


# ------------------------------------------------------------------------------------------------- the policy


def _entropy(facts: RunFacts) -> Finding | None:
    ends = _ends(facts, "entropy/mean")
    # A policy that solves nearly all problems has low entropy for a good reason.
    if ends is None or not ends[1] <= 0.5 * ends[0] or facts.mean("reward/correct_fraction", facts.recent[-3:]) > 0.95:
        return None
    clip_higher = "raise objective.clip_high above clip_low (clip-higher), " if facts.takes("clip_high") else ""
    return Finding(
        name="entropy drop",
        level="warn",
        what=(
            f"Entropy fell from {ends[0]:.3g} to {ends[1]:.3g} nats per token in {len(facts.recent)} steps: the policy "
            "stops exploring."
        ),
        remedy=(
            f"To explore more, {clip_higher}lower learner.learning_rate, or add an entropy bonus (objective.entropy)."
        ),
    )


def _large_updates(facts: RunFacts) -> Finding | None:
    kl = facts.mean("kl/old_new")
    if len(facts.recent) < FEWEST_STEPS or not kl >= 0.05:
        return None
    return Finding(
        name="large policy updates",
        level="warn",
        what=(
            f"The updates of one batch change the policy by {kl:.2g} nats per token, so the last mini-batches are "
            "trained on off-policy completions."
        ),
        remedy="Lower learner.learning_rate or learner.mini_batches.",
    )


def _mismatch(facts: RunFacts) -> Finding | None:
    k3 = facts.mean("mismatch/k3")
    # Ten times what rounding alone gives. With older weights, most of the difference is what training has changed.
    if len(facts.recent) < FEWEST_STEPS or not k3 >= 1e-3 or facts.mean("lag/updates") > 0:
        return None
    truncated = facts.setting("rollout", "top_p", 1.0) < 1 or facts.setting("rollout", "top_k", 0)
    largest = facts.mean("mismatch/abs_max")
    single = f", up to {largest:.2g} on single tokens" if largest >= 0.01 else ""
    return Finding(
        name="sampler-learner mismatch",
        level="warn",
        what=(
            f"The engine's log-probs differ from the learner's by {k3:.1e} nats per token (k3){single}; rounding alone "
            "gives less than 1e-4."
        ),
        remedy=_mismatch_remedy(facts, bool(truncated)),
    )


def _mismatch_remedy(facts: RunFacts, truncated: bool) -> str:
    if truncated:
        return "top_p and top_k truncate the sampling distribution; rollout.top_p = 1 and rollout.top_k = 0 do not."
    flips = facts.mean("routing/flip_fraction_sampler")
    if flips > 0.005:
        return (
            f'The engine routed {flips:.1%} of the tokens\' experts differently. routing.replay = "sampler" makes the '
            f"learner use the same experts. {_correction(facts)}"
        )
    return f"The engine uses other kernels or another precision. {_correction(facts)}"


def _correction(facts: RunFacts) -> str:
    """What accounts for a mismatch, with an objective of this kind."""
    if not facts.takes("mismatch"):
        return "The objective already divides by the sampler's probability, which corrects for the mismatch."
    if facts.old_from_sampler:
        return (
            'learner.old_logp = "recompute" keeps the mismatch out of the ratios; with it, objective.mismatch = '
            '"token_tis" corrects for it.'
        )
    return 'objective.mismatch = "token_tis" or "icepop" corrects for the mismatch.'


def _lag(facts: RunFacts) -> Finding | None:
    """Rollouts that are too old for the objective: the policy that trains on them is no longer the one that sampled."""
    updates, steps = facts.mean("lag/updates"), facts.mean("lag/steps")
    ess = facts.mean("mismatch/ess")
    if len(facts.recent) < FEWEST_STEPS or not updates > 0:
        return None
    clipped = facts.mean("clip/fraction_sequences" if facts.clips_sequences else "clip/fraction_tokens")
    costs = []
    if ess < LOW_ESS:
        costs.append(f"the effective sample size of their tokens is {_percent(ess)} before the first update")
    if facts.old_from_sampler and clipped >= MOSTLY_CLIPPED:
        what = "completions" if facts.clips_sequences else "tokens"
        costs.append(f"{_percent(clipped)} of the {what} are clipped, because ratios start from the sampler")
    if not costs:
        return None
    remedies = ["lower rollout.max_lag, learner.mini_batches (updates per step) or learner.learning_rate"]
    if facts.old_from_sampler:
        remedies.append('set learner.old_logp = "recompute", so that ratios start from the current policy')
    elif facts.takes("mismatch") and facts.objective_settings.get("mismatch", "none") == "none":
        remedies.append('weight tokens by pi_old / mu with objective.mismatch = "token_tis"')
    return Finding(
        name="rollouts too old",
        level="warn",
        what=(
            f"Rollouts are {updates:.3g} optimizer updates old on average ({steps:.3g} steps), which is too much for "
            f"this objective: {'; '.join(costs)}."
        ),
        remedy=_sentence(f"{'; or '.join(remedies)}."),
    )


def _dropped(facts: RunFacts) -> Finding | None:
    """Completions that are dropped because they are long."""
    share = facts.mean("lag/dropped_fraction")
    if len(facts.recent) < FEWEST_STEPS or not share >= MANY_DROPPED:
        return None
    left, all_ = facts.mean("lag/dropped_correct_fraction"), facts.mean("reward/correct_fraction")
    harder = f"; in their groups {_percent(left)} of the others are correct, in all {_percent(all_)}" * (left < all_)
    return Finding(
        name="long completions dropped",
        level="warn",
        what=f"{_percent(share)} of the completions are dropped because they are too long for their turns{harder}.",
        remedy='Raise rollout.span_tokens or rollout.max_lag, or set rollout.over_lag = "wait".',
    )


def _noise(facts: RunFacts) -> Finding | None:
    beyond = facts.mean("noise/beyond_clip")
    size = facts.mean("noise/log_ratio")
    if len(facts.recent) < FEWEST_STEPS or not beyond >= NOISY:
        return None
    ratio = "sequence" if facts.clips_sequences else "token"
    low = facts.mean("clip/low")
    high = facts.mean("clip/high")
    remedy = rounding_remedy(
        dtype=facts.setting("model", "dtype", "float32"),
        old_logp=facts.setting("learner", "old_logp", "recompute"),
        replay=facts.setting("routing", "replay", "off"),
        adaptive=adapts_clip(facts.objective_settings),
    )
    return Finding(
        name="rounding noise",
        level="warn",
        what=(
            f"Rounding alone changes the {ratio}-level log-ratios by {size:.1e} and moves {_percent(beyond)} of them "
            f"out of the clip range ({low:.1e} below, {high:.1e} above): much of the clipping is random."
        ),
        remedy=_sentence(f"{remedy}. Rounding noise also averages out over longer completions."),
    )


def _skipped(facts: RunFacts) -> Finding | None:
    skipped = sum(int(r.get("grad/skipped") or 0) for r in facts.recent)
    if not skipped:
        return None
    return Finding(
        name="skipped updates",
        level="warn",
        what=(
            f"{skipped} updates of the last {len(facts.recent)} steps were skipped because of a non-finite loss or "
            "gradient, or a gradient spike."
        ),
        remedy=(
            "An occasional skipped update is harmless. If there are many, lower learner.learning_rate; the events give "
            "the reasons."
        ),
    )


def _flips(facts: RunFacts) -> Finding | None:
    share = facts.mean("routing/flip_fraction")
    if len(facts.recent) < FEWEST_STEPS or not share >= 0.05:
        return None
    # With the engine's log-probs as the old ones, the old policy has no forward pass whose experts could be replayed.
    replay = "sampler" if facts.old_from_sampler else "old"
    return Finding(
        name="expert flips",
        level="note",
        what=f"{_percent(share)} of the routed experts change during the updates of a batch.",
        remedy=(
            f'This makes token-level ratios noisy. routing.replay = "{replay}" keeps the experts fixed within a batch.'
        ),
    )


def _load(facts: RunFacts) -> Finding | None:
    busiest = facts.mean("routing/load_max")
    if len(facts.recent) < FEWEST_STEPS or not busiest >= 8:
        return None
    needs = ', with learner.old_logp = "recompute"' if facts.old_from_sampler else ""
    return Finding(
        name="load imbalance",
        level="note",
        what=f"The busiest expert processes {busiest:.1f} times its even share of the tokens.",
        remedy=f"routing.balance_loss = 1e-3 adds a load-balancing loss{needs}.",
    )


# ------------------------------------------------------------------------------------------------- time


def _time(facts: RunFacts) -> Finding | None:
    """The first phase with a known remedy that dominates the step time."""
    rows = [r for r in facts.timings if r.get("time/step_s")]
    if len(rows) < FEWEST_STEPS:
        return None
    total = sum(float(r["time/step_s"]) for r in rows)
    phases = {
        "reward": (0.3, "scoring", "Raise reward.workers, or find out what the reward waits for."),
        "eval": (0.35, "evaluation", "Raise eval.every, or lower eval.samples."),
        "rollout": (0.8, "sampling", _sampling_remedy(facts)),
    }
    for key, (limit, phase, remedy) in phases.items():
        share = sum(float(r.get(f"time/{key}_s") or 0) for r in rows) / total
        if share >= limit:
            what = f"{_percent(share)} of the step time is {phase} ({seconds(total / len(rows))} per step)."
            return Finding(name=f"time in {phase}", level="note", what=what, remedy=remedy)
    return None


def _sampling_remedy(facts: RunFacts) -> str:
    concurrent = facts.mean("sampler/running_mean")
    completions = facts.setting("rollout", "prompts", 0) * facts.setting("rollout", "group_size", 0)
    slots = setting({"options": facts.setting("rollout", "engine_options", {})}, "options", "slots", 256)
    if concurrent < min(completions, slots) / 3:
        return (
            f"Sampling waits for a few long completions: on average {concurrent:.0f} of {completions} are sampled "
            "concurrently. More prompts per step (rollout.prompts) or a lower rollout.max_tokens use the hardware "
            "better."
        )
    return "Shorter completions, fewer uniform groups or a faster engine help; a faster learner does not."


def _straggler(facts: RunFacts) -> Finding | None:
    """A rank that samples much longer than the others in most steps. Training cannot show it: there, all ranks wait for
    each other in every layer."""
    rows = [times for row in facts.timings if len(times := _sampling_times(row)) > 1]
    if len(rows) < MANY_STEPS:
        return None
    # A rank that has one prompt more than the others may take longer without being slow.
    shares = {rank: len(range(rank, facts.setting("rollout", "prompts", 0), len(rows[-1]))) or 1 for rank in rows[-1]}
    for rank in rows[-1]:
        slow = [times for times in rows if rank in times and _slower(times, rank, shares)]
        if len(slow) < 0.8 * len(rows):
            continue
        own = _mean([times[rank] for times in slow])
        others = _mean([_others_mean(times, rank) for times in slow])
        log = f", and its log (ranks/{rank}.log)" if rank else ""
        return Finding(
            name="straggler",
            level="warn",
            what=(
                f"Rank {rank} is slower than the others: it samples for {seconds(own)}, they for {seconds(others)}, in "
                f"{len(slow)} of the last {len(rows)} steps. All ranks wait for it."
            ),
            remedy=f"Check what else uses its machine or GPU{log}.",
        )
    return None


def _sampling_times(row: Row) -> dict[int, float]:
    """Seconds by rank; empty for a run in one process."""
    found = {key.removeprefix("rank/").removesuffix("/rollout_s"): value for key, value in row.items() if _RANK(key)}
    return {int(rank): float(value) for rank, value in found.items()}


def _slower(times: Mapping[int, float], rank: int, shares: Mapping[int, int]) -> bool:
    per_prompt = {other: value / shares.get(other, 1) for other, value in times.items()}
    return all(given[rank] >= MUCH_SLOWER * _others_mean(given, rank) > 0 for given in (times, per_prompt))


def _others_mean(times: Mapping[int, float], rank: int) -> float:
    return _mean([value for other, value in times.items() if other != rank])


Rule = Callable[[RunFacts], Finding | None]
RULES: tuple[Rule, ...] = (
    _error,
    _exited,
    _alarm,
    _rollback,
    _early_stop,
    _held_out,
    _plateau,
    _no_trainable_samples,
    _no_gradient,
    _uniform,
    _unscored,
    _other_format,
    _truncated,
    _length_drift,
    _one_update,
    _clip_too_wide,
    _clip_too_narrow,
    _entropy,
    _large_updates,
    _mismatch,
    _lag,
    _dropped,
    _noise,
    _skipped,
    _flips,
    _load,
    _time,
    _straggler,
)


# ------------------------------------------------------------------------------------------------- helpers


def _ends(facts: RunFacts, key: str) -> tuple[float, float] | None:
    """Mean of a metric over the first and the last three of the recent steps."""
    # Six, so that the first and the last three do not overlap.
    if len(facts.recent) < max(6, WINDOW // 2):
        return None
    first = facts.mean(key, facts.recent[:3])
    last = facts.mean(key, facts.recent[-3:])
    return None if math.isnan(first) or math.isnan(last) else (first, last)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.0995 or share == 0 else f"{100 * share:.1f} %"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def seconds(value: float) -> str:
    """A duration in seconds, with three significant digits below 100."""
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"


def _step(row: Row) -> int:
    return int(row["step"])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _standard_error(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1) / len(values))
