"""The panels of a run and their curves: one list for the dashboard, the report and the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A metric, by its name in docs/metrics.md, and its label on a panel."""

    key: str
    label: str
    band: tuple[str, str] | None = None
    """Metrics of the lower and upper end of an interval around it."""
    every_step: bool = True
    """Whether every step has a value. Sparse metrics are not smoothed."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Curves that share an axis."""

    id: str
    title: str
    what: str
    """What the curves show and what to look for."""
    curves: Sequence[Curve]
    form: str = "number"
    """`share` (displayed in percent), `number`, or `count`."""
    log: bool = False
    """Whether the axis is logarithmic by default."""
    hide_zero: bool = False
    """Whether the panel is hidden while all values are 0."""


PANELS = (
    Panel(
        id="learning",
        title="Reward and held-out accuracy",
        what=(
            "Mean reward of the sampled completions, and accuracy on the held-out set with its 95 % interval. If the "
            "reward rises but held-out accuracy does not, the policy overfits or exploits the reward."
        ),
        curves=(
            Curve(key="reward/mean", label="reward"),
            Curve(
                key="eval/accuracy",
                label="held-out, sampled",
                band=("eval/accuracy_low", "eval/accuracy_high"),
                every_step=False,
            ),
            Curve(key="eval/accuracy_greedy", label="held-out, greedy", every_step=False),
        ),
    ),
    Panel(
        id="clipping",
        title="Clip fraction",
        form="share",
        what=(
            "Share of tokens on which the trust region acts, and of completions with at least one such token. GSPO "
            "usually clips 10 to 20 % of the completions."
        ),
        curves=(
            Curve(key="clip/fraction_tokens", label="tokens"),
            Curve(key="clip/fraction_sequences", label="completions"),
        ),
    ),
    Panel(
        id="signal",
        title="Training signal",
        form="share",
        what=(
            "In a uniform group all completions have the same reward, so it gives no gradient, except from a length or "
            "KL penalty."
        ),
        curves=(
            Curve(key="groups/uniform_fraction", label="uniform groups"),
            Curve(key="reward/correct_fraction", label="correct completions"),
            Curve(key="length/truncated_fraction", label="truncated completions"),
        ),
    ),
    Panel(
        id="entropy",
        title="Entropy",
        what="Entropy of the policy in nats per token. After a fast drop the policy no longer explores.",
        curves=(Curve(key="entropy/mean", label="entropy"),),
    ),
    Panel(
        id="length",
        title="Completion length",
        form="count",
        what=(
            "Tokens per completion, truncated at rollout.max_tokens. If the maximum is far above the rest, sampling "
            "waits for a few long completions."
        ),
        curves=(
            Curve(key="length/mean", label="mean"),
            Curve(key="length/p90", label="90th percentile"),
            Curve(key="length/max", label="maximum"),
        ),
    ),
    Panel(
        id="padding",
        title="Padding",
        form="share",
        hide_zero=True,
        what="Share of the compute spent on padding: idle sequence slots in sampling, padding tokens in training.",
        curves=(
            Curve(key="sampler/idle_fraction", label="idle slots, sampling"),
            Curve(key="padding/learner", label="padding tokens, training"),
        ),
    ),
    Panel(
        id="shaping",
        title="Overlong completions",
        form="share",
        hide_zero=True,
        what=(
            "Share of completions truncated at the limit, and of trained completions with a length penalty "
            '(objective.shape = "soft_overlong").'
        ),
        curves=(
            Curve(key="length/truncated_fraction", label="truncated"),
            Curve(key="length/penalized_fraction", label="penalized"),
            Curve(key="reward/length_penalty", label="mean penalty"),
        ),
    ),
    Panel(
        id="ratio",
        title="Importance ratio",
        log=True,
        what=(
            "Standard deviation of the log importance ratio (new over old policy), over tokens and over completions. "
            "The latter is the scale of GSPO's clip range."
        ),
        curves=(
            Curve(key="ratio/token_log_std", label="over tokens"),
            Curve(key="ratio/sequence_log_std", label="over completions"),
            Curve(key="noise/log_ratio", label="rounding noise"),
            Curve(key="clip/high", label="upper clip range"),
        ),
    ),
    Panel(
        id="mismatch",
        title="KL divergence",
        log=True,
        what=(
            "KL divergence in nats per token between sampler and learner, and between old and new policy. The first "
            "should stay well below the second; otherwise rounding in the engine dominates the training signal."
        ),
        curves=(
            Curve(key="mismatch/k3", label="sampler to learner"),
            Curve(key="kl/old_new", label="old to new policy"),
            Curve(key="kl/ref", label="to the reference"),
        ),
    ),
    Panel(
        id="mismatch-tokens",
        title="Sampler-learner mismatch per token",
        log=True,
        what=(
            "Absolute log-prob difference between engine and learner; 0.7 is a factor of two. Below 0.001 is float32 "
            "rounding, a mean around 0.02 is bfloat16. A high maximum with a low mean indicates expert flips in a MoE "
            'model (routing.replay = "sampler" fixes it). If all curves are high, the engine and the learner have '
            "different weights."
        ),
        curves=(
            Curve(key="mismatch/abs_mean", label="mean"),
            Curve(key="mismatch/abs_max", label="maximum"),
            Curve(key="mismatch/extreme_fraction", label="share of tokens above a factor of two"),
        ),
    ),
    Panel(
        id="gradient",
        title="Gradient norm",
        log=True,
        what=(
            "Norm before gradient clipping. Updates with a spike are skipped; a slow increase means that the learning "
            "rate is too high."
        ),
        curves=(Curve(key="grad/norm", label="gradient norm"),),
    ),
    Panel(
        id="routing",
        title="Expert flips",
        form="share",
        what="Share of routed experts that differ between old and new policy, and between sampler and learner.",
        curves=(
            Curve(key="routing/flip_fraction", label="old to new"),
            Curve(key="routing/flip_fraction_native", label="without replay"),
            Curve(key="routing/flip_fraction_sampler", label="sampler to learner"),
        ),
    ),
    Panel(
        id="load",
        title="Expert load",
        what="Load of the busiest expert relative to an even load: 1 is perfectly balanced.",
        curves=(Curve(key="routing/load_max", label="busiest expert"),),
    ),
    Panel(
        id="trouble",
        title="Failures",
        form="count",
        hide_zero=True,
        what="Completions that could not be scored, and skipped updates.",
        curves=(
            Curve(key="samples/unscored", label="unscored completions"),
            Curve(key="grad/skipped", label="skipped updates"),
        ),
    ),
)

PHASES = (
    Curve(key="time/rollout_s", label="sampling"),
    Curve(key="time/reward_s", label="scoring"),
    Curve(key="time/learn_s", label="training"),
    Curve(key="time/eval_s", label="evaluation"),
)
"""Phases of a step. The remainder of `time/step_s` is other work."""

KEYS = tuple(
    dict.fromkeys(key for panel in PANELS for curve in panel.curves for key in (curve.key, *(curve.band or ())))
)
"""All metrics that appear on a panel."""
