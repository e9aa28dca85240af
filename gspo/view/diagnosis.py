"""What is going on in a run, in plain language: what the numbers mean together, and what to try.

In: what a run directory says (`RunFacts`). Out: findings, the gravest first. Invariant: a function of the run directory alone;
every sentence carries the numbers it rests on, and every rule has a test that triggers it and one that does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gspo.record.alarms import FLAT, NOISY

WINDOW = 20
"""Steps that a rule looks back over."""
FEWEST = 5
"""Steps below which nothing is said about a trend or a habit."""

SEQUENCE_ROWS = ("gspo", "gspo_token", "luspo")
"""Objectives that clip whole replies."""
TOKEN_ROWS = ("grpo", "dr_grpo", "dapo", "reinforce_pp", "ppo_clip", "minirl")
"""Objectives that compare each token's ratio with 1 - clip_low and 1 + clip_high."""
SHAPED_ROWS = {"dapo": "soft_overlong"}
"""Objectives that shape the reward by length unless they are told otherwise."""
WHITENED_ROWS = ("reinforce_pp",)
"""Objectives that compare a reply with the whole batch; their KL penalty is in the reward unless they are told otherwise."""
NEARLY_ALL = 0.95
"""Of the groups uniform: what is learned is not the reward."""

Level = Literal["bad", "warn", "note", "good"]
LEVELS: tuple[Level, ...] = ("bad", "warn", "note", "good")
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is worth knowing."""

    name: str
    level: Level
    what: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What the rules look at."""

    rows: Sequence[Row]
    """The metrics of the last `2 * WINDOW` steps, step 0 not among them."""
    evaluations: Sequence[Row]
    """Every row that has a held-out accuracy with its interval, step 0 first."""
    timings: Sequence[Row]
    """The times of the last `WINDOW` steps."""
    events: Sequence[Row]
    settings: Mapping[str, Any]
    """`config.toml` as nested tables."""
    state: str
    """Of the run, as `RunReader.state` says it."""

    @property
    def recent(self) -> Sequence[Row]:
        """The last `WINDOW` steps."""
        return self.rows[-WINDOW:]

    def setting(self, section: str, key: str, otherwise: Any) -> Any:
        """A setting of the run; `otherwise` if it is missing or of another kind."""
        return setting(self.settings, section, key, otherwise)

    @property
    def clips_sequences(self) -> bool:
        """Whether the objective clips whole replies."""
        return self.setting("objective", "name", "gspo") in SEQUENCE_ROWS

    @property
    def shape(self) -> str:
        """How the objective treats long replies."""
        return str(
            self.setting("objective", "shape", SHAPED_ROWS.get(self.setting("objective", "name", "gspo"), "none"))
        )

    @property
    def whitens(self) -> bool:
        """Whether the objective compares replies across groups."""
        return self.setting("objective", "name", "gspo") in WHITENED_ROWS

    def mean(self, key: str, rows: Sequence[Row] | None = None) -> float:
        """Mean of a metric over the recent steps that have it; NaN if none has."""
        found = [float(r[key]) for r in (self.recent if rows is None else rows) if r.get(key) is not None]
        return sum(found) / len(found) if found else math.nan


def setting(settings: Mapping[str, Any], section: str, key: str, otherwise: Any) -> Any:
    """A setting of nested tables that anybody may have written; `otherwise` if it is missing or of another kind."""
    table = settings.get(section)
    found = table.get(key, otherwise) if isinstance(table, Mapping) else otherwise
    kind = (int, float) if isinstance(otherwise, int | float) else type(otherwise)
    return found if isinstance(found, kind) else otherwise


def diagnose(look: RunFacts) -> list[Finding]:
    """Everything that holds now, the gravest first."""
    found = [finding for rule in RULES if (finding := rule(look)) is not None]
    if len(look.recent) >= FEWEST and not any(f.level in ("bad", "warn") for f in found):
        found.append(Finding(name="no trouble", level="good", what="Nothing here looks wrong."))
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


# ------------------------------------------------------------------------------------------------- how the run ended


def _error(look: RunFacts) -> Finding | None:
    last = look.events[-1] if look.events else {}
    if last.get("event") != "error":
        return None
    return Finding(
        name="error", level="bad", what=f"The run ended with an error: {last.get('error')}: {last.get('what')}"
    )


def _died(look: RunFacts) -> Finding | None:
    """A run that nobody works on, that said nothing at its end and is not at its end."""
    steps, tokens = look.settings.get("steps"), look.settings.get("tokens")
    if look.state != "ended" or not isinstance(steps, int):
        return None
    last = look.recent[-1] if look.recent else {}
    step, sampled = last.get("step", 0), last.get("tokens/sampled") or 0
    if sampled >= tokens if isinstance(tokens, int) and tokens else step >= steps:
        return None
    of = "" if tokens else f" of {steps}"
    return Finding(
        name="ended without a word", level="bad",
        what=f"No trainer works on this run, and it did not say why: it is at step {step:.0f}{of}. It was killed, or this is a copy of a run that goes on elsewhere.",
        remedy="gspo train --resume RUN goes on from its last checkpoint.",
    )  # fmt: skip


def _alarm(look: RunFacts) -> Finding | None:
    """The newest alarm of the recent steps."""
    first = look.recent[0]["step"] if look.recent else 0
    alarms = [e for e in look.events if e.get("event") == "alarm" and e.get("step", 0) >= first]
    if not alarms:
        return None
    last = alarms[-1]
    return Finding(
        name="alarm", level="bad", what=f"Alarm at step {last.get('step')}, {last.get('name')}: {last.get('what')}."
    )


# ------------------------------------------------------------------------------------------------- is it learning?


def _held_out(look: RunFacts) -> Finding | None:
    """The last evaluation against the first and the best, beyond their intervals."""
    points = look.evaluations
    if len(points) < 2:
        return None
    first, last, best = points[0], points[-1], max(points, key=lambda e: float(e["eval/accuracy"]))
    now = f"{_percent(last['eval/accuracy'])} at step {_step(last)}"
    if float(last["eval/accuracy_high"]) < float(best["eval/accuracy_low"]):
        return _fallen(look, now, best, last)
    if float(last["eval/accuracy_low"]) > float(first["eval/accuracy_high"]):
        return Finding(
            name="learning",
            level="good",
            what=f"Held-out accuracy rose from {_percent(first['eval/accuracy'])} to {now}, beyond its 95 % interval.",
        )
    return None


def _fallen(look: RunFacts, now: str, best: Row, last: Row) -> Finding:
    best_now = f"Held-out accuracy is {now}, below its best of {_percent(best['eval/accuracy'])} at step {_step(best)}, beyond both intervals"
    rewards = [r for r in (best.get("reward/mean"), last.get("reward/mean")) if r is not None]
    if len(rewards) == 2 and rewards[1] > rewards[0]:
        return Finding(
            name="reward without accuracy", level="bad",
            what=f"{best_now}, while the training reward rose from {rewards[0]:.3g} to {rewards[1]:.3g}.",
            remedy="The policy has learned the training problems or a weakness of the reward: read the best-paid replies of the last steps, use more problems, or stop at the best checkpoint.",
        )  # fmt: skip
    return Finding(
        name="forgetting", level="bad", what=f"{best_now}.",
        remedy="Start a new run from the checkpoint near that step (model.path), with a lower learner.learning_rate or a narrower clip range.",
    )  # fmt: skip


def _plateau(look: RunFacts) -> Finding | None:
    """The reward of the last window against the one before it."""
    before, after = look.rows[:-WINDOW], look.recent
    if len(before) < WINDOW or look.mean("reward/correct_fraction") > 0.9:
        return None
    x, y = ([float(r["reward/mean"]) for r in rows if r.get("reward/mean") is not None] for rows in (before, after))
    if min(len(x), len(y)) < FEWEST:
        return None
    moved, error = abs(_mean(y) - _mean(x)), math.hypot(_standard_error(x), _standard_error(y))
    if moved > max(2 * error, 0.005 * max(abs(_mean(x)), 1e-9)):
        return None
    return Finding(
        name="plateau", level="note",
        what=f"The reward has not moved over the last {len(before) + len(after)} steps ({_mean(x):.3g} before, {_mean(y):.3g} now, within the noise).",
        remedy="If it should still climb: look at uniform groups, the clipped share and the learning rate below.",
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------- is there a signal?


def _nothing_trained(look: RunFacts) -> Finding | None:
    """Steps that left the policy as it was."""
    idle = [r for r in look.recent if r.get("samples/trained") == 0]
    if not idle:
        return None
    prefix = "samples/left_out/"
    counts: dict[str, float] = {}
    for key, value in ((k, v) for r in idle for k, v in r.items() if k.startswith(prefix)):
        counts[key.removeprefix(prefix)] = counts.get(key.removeprefix(prefix), 0) + float(value or 0)
    why, remedy = _WHY_NOTHING.get(max(counts, key=counts.__getitem__, default=""), _WHY_NOTHING[""])
    return Finding(
        name="trained on nothing",
        level="bad" if 2 * len(idle) >= len(look.recent) else "warn",
        what=f"{len(idle)} of the last {len(look.recent)} steps trained on nothing{why}: the policy did not change.",
        remedy=remedy,
    )


_WHY_NOTHING = {
    "": ("", "The events say what became of the replies."),
    "not_mixed": (
        ", because in every sampled group all replies had the same reward",
        "Use problems that are sometimes solved, a reward with partial credit, or more replies per prompt "
        "(rollout.replies). More sampling of the same (rollout.refill_budget) would cost more and help little.",
    ),
    "overlong": (
        ", because the replies were cut and objective.shape leaves cut ones out",
        "Raise rollout.max_tokens, or ask for shorter replies (data.instruction).",
    ),
    "unscored": (
        ", because the replies could not be scored",
        "Open a step and filter by 'unscored' to read why: a reward that raises, hangs or returns nonsense.",
    ),
    "alone": (
        ", because no group had two replies left to compare",
        "Raise rollout.replies, and look at why the others were left out: samples/left_out counts the reasons.",
    ),
    "empty": (
        ", because the replies were empty",
        "The model ends at once: check the chat template and the stop tokens (gspo doctor), or start from another model.",
    ),
}
"""By the most frequent reason why replies were left out: why nothing was trained on, and what to do."""


def _uniform(look: RunFacts) -> Finding | None:
    """Groups without a difference in reward. They can still teach a penalty that is added to it."""
    share, penalty = look.mean("groups/uniform_fraction"), _penalty(look)
    if len(look.recent) < FEWEST or not share >= 0.5 or (look.whitens and look.mean("reward/std") >= FLAT):
        return None
    if penalty and share >= NEARLY_ALL:
        return _only_penalty(look, share, penalty)
    correct = look.mean("reward/correct_fraction")
    solved = "" if math.isnan(correct) else f" ({_percent(correct)} of the replies are correct)"
    harder = "problems that are sometimes solved" if math.isnan(correct) else "harder problems" if correct >= 0.5 else "easier problems, or a warm start"  # fmt: skip
    # Dynamic sampling helps only where it can fill a batch; beyond that it samples more and trains on as little.
    fills = (1 - share) * look.setting("rollout", "refill_budget", 3) >= 1
    off = not look.mean("groups/discarded") > 0
    mixed = ' turn on dynamic sampling (objective.keep = "mixed"), or' if off and fills else ""
    return Finding(
        name="uniform groups", level="warn",
        what=f"{_percent(share)} of the groups are uniform{solved}: all their replies have the same reward, so {_percent(share)} of the sampling teaches nothing{f' but {penalty}' if penalty else ''}.",
        remedy=f"To waste less:{mixed} use {harder}, or more replies per prompt (rollout.replies).",
    )  # fmt: skip


def _penalty(look: RunFacts) -> str:
    """What is learned from groups that are uniform in reward; empty: nothing, as where they are discarded."""
    if look.mean("groups/discarded") > 0 or not look.mean("advantage/std") >= FLAT:
        return ""
    kl_in = look.setting("objective", "kl_in", "reward" if look.whitens else "loss")
    length = "the length penalty" if look.mean("reward/length_penalty") > 0 else ""
    kl = "the KL penalty" if kl_in == "reward" and look.mean("kl/ref") > 0 else ""
    return " and ".join(filter(None, (length, kl)))


def _only_penalty(look: RunFacts, share: float, penalty: str) -> Finding:
    return Finding(
        name="only a penalty is learned", level="warn",
        what=f"Only {penalty} is being learned: in {_percent(share)} of the groups all replies have the same reward (mean {look.mean('reward/mean'):.3g}), and yet their advantages differ (standard deviation {look.mean('advantage/std'):.2g}).",
        remedy="Nothing rewards being right. Use problems that are sometimes solved, a warm start or more replies per prompt (rollout.replies), look at the reward, or do without the penalty until there is something to learn.",
    )  # fmt: skip


def _unscored(look: RunFacts) -> Finding | None:
    steps = [r for r in look.recent if (r.get("samples/unscored") or 0) > 0]
    if not steps:
        return None
    total = sum(int(r["samples/unscored"]) for r in steps)
    return Finding(
        name="unscored", level="warn",
        what=f"{total} replies of the last {len(look.recent)} steps could not be scored. They are left out of every mean, never counted as wrong.",
        remedy="Open a step and filter by 'unscored' to read why: a reward that raises, hangs or returns nonsense.",
    )  # fmt: skip


def _truncated(look: RunFacts) -> Finding | None:
    share, limit = look.mean("length/truncated_fraction"), look.setting("rollout", "max_tokens", 0)
    if len(look.recent) < FEWEST or not share >= 0.1:
        return None
    shapes = ', or set a shape that makes length cost something (objective.shape = "soft_overlong") or leaves cut replies out ("overlong_filter")'
    return Finding(
        name="length limit", level="warn",
        what=f"{_percent(share)} of the replies are cut at the limit of {limit} tokens.",
        remedy=f"Raise rollout.max_tokens, or ask for shorter replies (data.instruction){shapes if look.shape == 'none' else ''}.",
    )  # fmt: skip


def _length_drift(look: RunFacts) -> Finding | None:
    ends = _ends(look, "length/mean")
    if ends is None or not (ends[1] >= 2 * ends[0] or ends[1] <= 0.5 * ends[0]):
        return None
    way = "doubled" if ends[1] > ends[0] else "halved"
    return Finding(
        name="length drift", level="note",
        what=f"Replies have {way} in {len(look.recent)} steps: from {ends[0]:.0f} to {ends[1]:.0f} tokens.",
        remedy="Read a few of both ends: reasoning that grows is fine, padding and repetition are not.",
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------- the trust region


def _one_update(look: RunFacts) -> Finding | None:
    if look.setting("learner", "mini_batches", 1) != 1 or not look.rows or look.mean("clip/high") != look.mean("clip/high"):  # fmt: skip
        return None
    return Finding(
        name="one update per batch", level="note",
        what="Each batch is used for one update, so every ratio is 1 and the clip range cannot act.",
        remedy="That is the most on-policy way to train. learner.mini_batches = 4 gets more updates out of the same replies.",
    )  # fmt: skip


def _clip_never(look: RunFacts) -> Finding | None:
    high = look.mean("clip/high")
    if len(look.recent) < FEWEST or look.setting("learner", "mini_batches", 1) < 2 or math.isnan(high):
        return None
    if not look.mean("clip/fraction_tokens") <= (1e-3 if look.clips_sequences else 0):
        return None
    spread = look.mean("ratio/sequence_log_std" if look.clips_sequences else "ratio/token_log_std")
    per = "replies' mean log-ratios" if look.clips_sequences else "tokens' log-ratios"
    return Finding(
        name="clip never fires", level="warn",
        what=f"The clip range never acts ({_percent(look.mean('clip/fraction_tokens'))} of the tokens): the {per} spread by {spread:.1e}, the range reaches to {high:.1e}.",
        remedy='Nothing holds the policy back. If rewards are unstable, narrow it: objective.clip_low = "auto:0.15" and clip_high alike find the range that clips about 15 % of the tokens.',
    )  # fmt: skip


def _clip_always(look: RunFacts) -> Finding | None:
    share = look.mean("clip/fraction_sequences")
    if len(look.recent) < FEWEST or not look.clips_sequences or not share >= 0.5:
        return None
    return Finding(
        name="clip always fires", level="warn",
        what=f"{_percent(share)} of the replies are clipped, so most of what was sampled has no gradient.",
        remedy='Widen the range (objective.clip_low/clip_high = "auto:0.15" finds it), or lower learner.learning_rate.',
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------- the policy


def _entropy(look: RunFacts) -> Finding | None:
    ends = _ends(look, "entropy/mean")
    if ends is None or not ends[1] <= 0.5 * ends[0] or look.mean("reward/correct_fraction", look.recent[-3:]) > 0.95:
        return None
    return Finding(
        name="entropy falls", level="warn",
        what=f"Entropy fell from {ends[0]:.3g} to {ends[1]:.3g} nats per token in {len(look.recent)} steps: the policy is ceasing to explore.",
        remedy="Raise objective.clip_high above clip_low (clip-higher), lower learner.learning_rate, or add objective.entropy.",
    )  # fmt: skip


def _moves_far(look: RunFacts) -> Finding | None:
    kl = look.mean("kl/old_new")
    if len(look.recent) < FEWEST or not kl >= 0.05:
        return None
    return Finding(
        name="large steps", level="warn",
        what=f"The updates of one batch move the policy by {kl:.2g} nats per token; the last mini-batches learn from replies of what is by then another policy.",
        remedy="Lower learner.learning_rate or learner.mini_batches.",
    )  # fmt: skip


def _mismatch(look: RunFacts) -> Finding | None:
    k3, truncated = look.mean("mismatch/k3"), look.setting("rollout", "top_p", 1.0) < 1 or look.setting("rollout", "top_k", 0)  # fmt: skip
    if len(look.recent) < FEWEST or not k3 >= 1e-3:
        return None
    largest, flips = look.mean("mismatch/abs_max"), look.mean("routing/flip_fraction_sampler")
    tail = f", on single tokens by up to {largest:.2g}" if largest >= 0.01 else ""
    return Finding(
        name="mismatch", level="warn",
        what=f"The engine's probabilities differ from the learner's by {k3:.1e} nats per token (k3){tail}; rounding alone gives below 1e-4.",
        remedy=_mismatch_remedy(bool(truncated), flips),
    )  # fmt: skip


def _mismatch_remedy(truncated: bool, flips: float) -> str:
    if truncated:
        return "Sampling with top_p or top_k draws from a truncated distribution; 1 and 0 agree."
    if flips > 0.005:
        return f"The engine used other experts for {flips:.1%} of the choices: routing.replay = \"sampler\" makes the learner use the engine's. What is left, objective.mismatch = \"token_tis\" or \"icepop\" corrects for."  # fmt: skip
    return 'Another engine or precision computes them: objective.mismatch = "token_tis" corrects for it.'


def _noise(look: RunFacts) -> Finding | None:
    beyond, size = look.mean("noise/beyond_clip"), look.mean("noise/log_ratio")
    if len(look.recent) < FEWEST or not beyond >= NOISY:
        return None
    what = "replies" if look.clips_sequences else "tokens"
    low, high = look.mean("clip/low"), look.mean("clip/high")
    return Finding(
        name="rounding noise", level="warn",
        what=f"Rounding alone moves the {what}' log-ratios by {size:.1e}, and {_percent(beyond)} of them out of the clip range ({low:.1e} below, {high:.1e} above): much of what is clipped is chance.",
        remedy='Train in float32 (model.dtype = "float32"), widen the range (objective.clip_low, clip_high), or make one update per batch (learner.mini_batches = 1), where every ratio is 1 to the bit. Longer replies average more of it away.',
    )  # fmt: skip


def _skipped(look: RunFacts) -> Finding | None:
    skipped = sum(int(r.get("grad/skipped") or 0) for r in look.recent)
    if not skipped:
        return None
    return Finding(
        name="skipped updates", level="warn",
        what=f"{skipped} updates of the last {len(look.recent)} steps were skipped: their loss or gradient was not finite, or a spike.",
        remedy="One now and then is harmless. Many: lower learner.learning_rate; the events say which and why.",
    )  # fmt: skip


def _flips(look: RunFacts) -> Finding | None:
    share = look.mean("routing/flip_fraction")
    if len(look.recent) < FEWEST or not share >= 0.05:
        return None
    return Finding(
        name="experts flip", level="note",
        what=f"{_percent(share)} of the experts that compute a token change within a batch's updates.",
        remedy='Token-level ratios become noisy; routing.replay = "old" holds the experts fixed within a batch.',
    )  # fmt: skip


def _load(look: RunFacts) -> Finding | None:
    busiest = look.mean("routing/load_max")
    if len(look.recent) < FEWEST or not busiest >= 8:
        return None
    return Finding(
        name="uneven experts", level="note",
        what=f"The busiest expert does {busiest:.1f} times its even share of the work.",
        remedy="routing.balance_loss = 1e-3 pulls towards an even load.",
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------- time


def _time(look: RunFacts) -> Finding | None:
    """The phase that a user can do something about, if it takes much of the time."""
    rows = [r for r in look.timings if r.get("time/step_s")]
    if len(rows) < FEWEST:
        return None
    total = sum(float(r["time/step_s"]) for r in rows)
    share = {key: sum(float(r.get(f"time/{key}_s") or 0) for r in rows) / total for key in ("reward", "eval", "rollout")}  # fmt: skip
    remedies = {
        "reward": (0.3, "scoring", "Raise reward.workers, or look at what the reward waits for."),
        "eval": (0.35, "evaluating", "Raise eval.every, or lower eval.samples."),
        "rollout": (0.8, "sampling", _sampling_remedy(look)),
    }  # fmt: skip
    for key, (limit, doing, remedy) in remedies.items():
        if share[key] >= limit:
            return Finding(name=f"time: {doing}", level="note", what=f"{_percent(share[key])} of the time goes into {doing} ({seconds(total / len(rows))} per step).", remedy=remedy)  # fmt: skip
    return None


def _sampling_remedy(look: RunFacts) -> str:
    live, replies = look.mean("sampler/live_mean"), look.setting("rollout", "prompts", 0) * look.setting("rollout", "replies", 0)  # fmt: skip
    slots = setting({"options": look.setting("rollout", "engine_options", {})}, "options", "slots", 256)
    if live < min(replies, slots) / 3:
        return f"A few long replies are waited for: on average {live:.0f} are drawn together, of {replies}. More prompts per step (rollout.prompts) or a lower rollout.max_tokens use the machine better."
    return "Shorter replies, fewer uniform groups and a faster engine help; a faster learner does not."


Rule = Callable[[RunFacts], Finding | None]
RULES: tuple[Rule, ...] = (
    _error, _died, _alarm, _held_out, _plateau, _nothing_trained, _uniform, _unscored, _truncated, _length_drift, _one_update, _clip_never,
    _clip_always, _entropy, _moves_far, _mismatch, _noise, _skipped, _flips, _load, _time,
)  # fmt: skip


# ------------------------------------------------------------------------------------------------- words


def _ends(look: RunFacts, key: str) -> tuple[float, float] | None:
    """Mean of a metric over the first and the last three of the recent steps."""
    if len(look.recent) < max(6, WINDOW // 2):
        return None
    first, last = look.mean(key, look.recent[:3]), look.mean(key, look.recent[-3:])
    return None if math.isnan(first) or math.isnan(last) else (first, last)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.0995 or share == 0 else f"{100 * share:.1f} %"


def seconds(value: float) -> str:
    """A duration in seconds with three digits, or with all that stand before the point."""
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"


def _step(row: Row) -> int:
    return int(row["step"])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _standard_error(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1) / len(values))
