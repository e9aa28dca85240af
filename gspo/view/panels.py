"""The curves that are shown of a run, and the question each panel answers. One list for dashboard, report and terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A metric, by its name in docs/metrics.md, and what it is called on a panel."""

    key: str
    label: str
    band: tuple[str, str] | None = None
    """Metrics of the lower and upper end of an interval around it."""
    every_step: bool = True
    """False: measured now and then, so smoothing would only hide it."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Curves that share an axis."""

    id: str
    title: str
    what: str
    """What to look for, in a sentence."""
    curves: Sequence[Curve]
    form: str = "number"
    """`share` (shown in percent), `number`, or `count`."""
    log: bool = False
    """Whether a logarithmic axis is the better one to begin with."""
    hide_zero: bool = False
    """Whether the panel is only shown when something is not 0."""


PANELS = (
    Panel(
        id="learning", title="Is it learning?", form="number",
        what="Reward of the sampled replies, and accuracy on held-out problems with its 95 % interval. Reward that rises while held-out accuracy does not is memorising, or a reward that can be fooled.",
        curves=(
            Curve(key="reward/mean", label="reward"),
            Curve(key="eval/accuracy", label="held-out, sampled", band=("eval/accuracy_low", "eval/accuracy_high"), every_step=False),
            Curve(key="eval/accuracy_greedy", label="held-out, greedy", every_step=False),
        ),
    ),
    Panel(
        id="clipping", title="How much is clipped?", form="share",
        what="Share of tokens and of whole replies on which the trust region acted. For GSPO 10 to 20 % of the replies is usual.",
        curves=(Curve(key="clip/fraction_tokens", label="tokens"), Curve(key="clip/fraction_sequences", label="replies")),
    ),
    Panel(
        id="signal", title="Is there something to learn from?", form="share",
        what="Uniform groups (every reply the same reward) teach nothing, or a penalty for length or KL alone; discarded ones were sampled in vain.",
        curves=(
            Curve(key="groups/uniform_fraction", label="uniform groups"),
            Curve(key="reward/correct_fraction", label="correct replies"),
            Curve(key="length/truncated_fraction", label="replies cut at the limit"),
        ),
    ),
    Panel(
        id="entropy", title="How sure of itself is the policy?", what="Entropy in nats per token. A quick fall means that it stops exploring.",
        curves=(Curve(key="entropy/mean", label="entropy"),),
    ),
    Panel(
        id="length", title="How long are the replies?", form="count",
        what="Tokens per reply; a reply is cut at rollout.max_tokens. A longest far above the rest means that sampling waits for a few.",
        curves=(Curve(key="length/mean", label="mean"), Curve(key="length/p90", label="90 % have at most"), Curve(key="length/max", label="longest")),
    ),
    Panel(
        id="padding", title="How much is computed for nothing?", form="share", hide_zero=True,
        what="Share of the work that is for no token of any reply: idle rows while sampling, padding while learning.",
        curves=(Curve(key="padding/sampler", label="idle rows, sampling"), Curve(key="padding/learner", label="padding, learning")),
    ),
    Panel(
        id="shaping", title="What becomes of long replies?", form="share", hide_zero=True,
        what="Share of the replies that are cut at the limit, and of those learned from that lose reward for nearing it (objective.shape = \"soft_overlong\").",
        curves=(Curve(key="length/truncated_fraction", label="cut"), Curve(key="length/punished_fraction", label="punished"), Curve(key="reward/length_penalty", label="mean loss of reward")),
    ),
    Panel(
        id="ratio", title="How far does a step move the policy?", log=True,
        what="Spread of the log-ratio of new to old policy over tokens and over whole replies: the latter is what GSPO's clip range is compared with.",
        curves=(
            Curve(key="ratio/token_log_std", label="over tokens"),
            Curve(key="ratio/sequence_log_std", label="over replies"),
            Curve(key="noise/log_ratio", label="rounding alone"),
            Curve(key="clip/high", label="clip range, upper side"),
        ),
    ),
    Panel(
        id="mismatch", title="Do sampler and learner agree?", log=True,
        what="Distance between the engine's probabilities and the learner's, and how far the updates moved the policy, both in nats per token. The first should stay well below the second: else much of what is learned from is the engine's rounding.",
        curves=(Curve(key="mismatch/k3", label="sampler to learner"), Curve(key="kl/old_new", label="old to new policy"), Curve(key="kl/ref", label="to the reference")),
    ),
    Panel(
        id="mismatch-tokens", title="How far apart are they on single tokens?", log=True,
        what="Difference of log-probabilities between engine and learner: 0.7 is a factor of two. Below 0.001 is float32 rounding, around 0.02 on average is bfloat16; a high maximum with a low mean is a mixture whose experts flip (routing.replay = \"sampler\" mends it). Everything high at once: the engine has other weights.",
        curves=(
            Curve(key="mismatch/abs_mean", label="mean difference"),
            Curve(key="mismatch/abs_max", label="largest difference"),
            Curve(key="mismatch/extreme_fraction", label="share of tokens off by more than a factor of two"),
        ),
    ),
    Panel(
        id="gradient", title="Are the gradients sound?", log=True, what="Norm before clipping. A spike is skipped; a slow climb means that the learning rate is too high.",
        curves=(Curve(key="grad/norm", label="gradient norm"),),
    ),
    Panel(
        id="routing", title="Do experts flip?", form="share",
        what="Share of a mixture's experts that changed between old and new policy, and between sampler and learner.",
        curves=(
            Curve(key="routing/flip_fraction", label="old to new"),
            Curve(key="routing/flip_fraction_native", label="without replay"),
            Curve(key="routing/flip_fraction_sampler", label="sampler to learner"),
        ),
    ),
    Panel(
        id="load", title="Are the experts evenly used?", what="The busiest expert's share of the work, times the number of experts: 1 is even.",
        curves=(Curve(key="routing/load_max", label="busiest expert"),),
    ),
    Panel(
        id="trouble", title="What went wrong?", form="count", hide_zero=True, what="Replies that could not be scored, and updates that were skipped.",
        curves=(Curve(key="samples/unscored", label="unscored replies"), Curve(key="grad/skipped", label="skipped updates")),
    ),
)  # fmt: skip

PHASES = (
    Curve(key="time/rollout_s", label="sampling"),
    Curve(key="time/reward_s", label="scoring"),
    Curve(key="time/learn_s", label="learning"),
    Curve(key="time/eval_s", label="evaluating"),
)
"""Where a step's time goes; what is left of `time/step_s` is other work."""

KEYS = tuple(
    dict.fromkeys(key for panel in PANELS for curve in panel.curves for key in (curve.key, *(curve.band or ())))
)
"""Every metric that a panel shows."""
