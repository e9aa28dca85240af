"""What every metric is, in one place: key, definition, unit, reduction over ranks, panel and label.

In: nothing. Out: `METRICS` and `TIMINGS`, and the `PANELS` that they are shown on. The tables of `docs/metrics.md`, the
panels of the page, of the report and of `curves.png`, and the headings of the terminal are made from them; a test
compares them with what a run writes. Upper-case parts of a key stand for a name: `reward/part/NAME`. Invariant: imports
nothing of the package, so that a viewer starts without torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum


class Reduction(StrEnum):
    """How the values of several ranks become one."""

    SAME = "same on all ranks"
    SUM = "sum"
    MAX = "maximum"
    MEAN = "mean, weighted by its denominator"
    GROUP_MEAN = "mean, weighted by groups"
    COMPLETION_MEAN = "mean, weighted by completions"
    TOKEN_MEAN = "mean, weighted by tokens"
    GATHER = "computed from gathered values"


@dataclass(frozen=True)
class Metric:
    """One number of `metrics.jsonl` or `timings.jsonl`."""

    key: str
    definition: str
    present: str
    """When it is written."""
    unit: str
    """`number`, `count`, `share`, `nats`, `seconds` or `GB` (1e9 bytes)."""
    reduction: Reduction
    panels: tuple[str, ...] = ()
    """Ids of the panels that show it. A panel shows its curves in the order of `METRICS`."""
    label: str = ""
    """Its name on a panel, next to the panel's title."""
    heading: str = ""
    """Its name in the terminal and in the page's line about a step. Empty if that line does not show it."""
    band: tuple[str, str] | None = None
    """Metrics of the lower and upper end of an interval around it."""
    same_as: str = ""
    """A metric that often has the same values. While all of them are equal, panels hide this one."""

    @property
    def every_step(self) -> bool:
        """Whether every step has a value. Other metrics are not smoothed."""
        return not self.key.startswith("eval/")

    @property
    def form(self) -> str:
        """How a single value is displayed: `share` in percent, or `number`."""
        return "share" if self.unit == "share" else "number"


class Section(StrEnum):
    """The parts of the page, in order; a value is the heading."""

    REWARD = "Reward"
    OPTIMIZATION = "Optimization"
    LENGTHS = "Lengths"
    MOE = "Mixture of experts"
    SYSTEM = "System"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Metrics that share an axis."""

    id: str
    """Metrics name their panels by it."""
    section: Section
    title: str
    what: str
    """What the curves show and what to look for."""
    form: str = "number"
    """`share` (displayed in percent), `number`, or `count`."""
    log: bool = False
    """Whether the axis is logarithmic by default."""
    hide_zero: bool = False
    """Whether the panel is hidden while all values are 0."""
    in_image: bool = False
    """Whether `curves.png` has the panel: those that tell first whether a run learns, and why not."""


PANELS = (
    Panel(
        id="learning",
        section=Section.REWARD,
        in_image=True,
        title="Reward and held-out accuracy",
        what=(
            "Mean reward of the sampled completions, and accuracy and mean reward on the held-out set with their 95 % "
            "intervals. If the training reward rises but the held-out numbers do not, the policy overfits or exploits "
            "the reward. The held-out reward is hidden while it equals the accuracy."
        ),
    ),
    Panel(
        id="sets",
        section=Section.REWARD,
        title="Evaluation sets",
        form="share",
        what=(
            "Accuracy on each set of eval.sets, and on the held-out problems of each source in data.mix, with its 95 % "
            "interval."
        ),
    ),
    Panel(
        id="set-rewards",
        section=Section.REWARD,
        title="Reward on evaluation sets",
        what=(
            "Mean reward on each set of eval.sets, and on the held-out problems of each source in data.mix, with its "
            "95 % interval. A curve is hidden while it equals that of the accuracy."
        ),
    ),
    Panel(
        id="sources",
        section=Section.REWARD,
        title="Reward by source",
        what="Mean reward of the sampled completions of each source in data.mix.",
    ),
    Panel(
        id="clipping",
        section=Section.OPTIMIZATION,
        in_image=True,
        title="Clip fraction",
        form="share",
        what=(
            "Share of tokens on which the trust region acts, and of completions with at least one such token. GSPO "
            "usually clips 10 to 20 % of the completions."
        ),
    ),
    Panel(
        id="clip-probability",
        section=Section.OPTIMIZATION,
        title="Clip fraction by token probability",
        form="share",
        hide_zero=True,
        what=(
            "Share of clipped tokens among those with a probability below 0.1, from 0.1 to 0.9, and above 0.9 under "
            "the old policy. If mostly unlikely tokens are clipped, the range limits exploration: raise "
            "objective.clip_high."
        ),
    ),
    Panel(
        id="signal",
        section=Section.REWARD,
        in_image=True,
        title="Training signal",
        form="share",
        what=(
            "In a uniform group all completions have the same reward, so it gives no gradient, except from a length or "
            "KL penalty."
        ),
    ),
    Panel(
        id="difficulty",
        section=Section.REWARD,
        title="Measured difficulty",
        form="share",
        what=(
            "Estimated pass rate of the sampled problems before they were sampled, and the share of visited problems "
            'that were skipped because theirs is near 0 or 1 (data.sampling = "difficulty").'
        ),
    ),
    Panel(
        id="entropy",
        section=Section.OPTIMIZATION,
        in_image=True,
        title="Entropy",
        what="Entropy of the policy in nats per token. After a fast drop the policy no longer explores.",
    ),
    Panel(
        id="length",
        section=Section.LENGTHS,
        in_image=True,
        title="Completion length",
        form="count",
        what=(
            "Tokens per completion, truncated at rollout.max_tokens. If the maximum is far above the rest, sampling "
            "waits for a few long completions."
        ),
    ),
    Panel(
        id="padding",
        section=Section.SYSTEM,
        title="Padding",
        form="share",
        hide_zero=True,
        what="Share of the compute spent on padding: idle sequence slots in sampling, padding tokens in training.",
    ),
    Panel(
        id="shaping",
        section=Section.LENGTHS,
        title="Ends of completions",
        form="share",
        hide_zero=True,
        what=(
            "Share of completions truncated at the limit, ended by a stop string, and with their thinking cut, and of "
            'trained completions with a length penalty (objective.shape = "soft_overlong").'
        ),
    ),
    Panel(
        id="ratio",
        section=Section.OPTIMIZATION,
        in_image=True,
        title="Importance ratio",
        log=True,
        what=(
            "Standard deviation of the log importance ratio (new over old policy), over tokens and over completions. "
            "The latter is the scale of GSPO's clip range."
        ),
    ),
    Panel(
        id="ess",
        section=Section.OPTIMIZATION,
        title="Effective sample size",
        form="share",
        what=(
            "How many of an update's completions count, if each is weighted by its probability ratio to the sampler. "
            "When it drops, a few completions dominate; learner.ess_scaling then lowers the learning rate."
        ),
    ),
    Panel(
        id="mismatch",
        section=Section.OPTIMIZATION,
        title="KL divergence",
        log=True,
        what=(
            "KL divergence in nats per token between old and new policy, and between sampler and learner. Sampler to "
            "learner should stay well below old to new; otherwise the mismatch dominates the training signal."
        ),
    ),
    Panel(
        id="mismatch-tokens",
        section=Section.OPTIMIZATION,
        title="Sampler-learner mismatch per token",
        log=True,
        what=(
            "Absolute log-prob difference between engine and learner; 0.7 is a factor of two. Below 0.001 is float32 "
            "rounding, a mean around 0.02 is bfloat16. A high maximum with a low mean indicates expert flips in an MoE "
            'model (routing.replay = "sampler" fixes it). If all curves are high, the engine and the learner have '
            "different weights."
        ),
    ),
    Panel(
        id="lag",
        section=Section.OPTIMIZATION,
        title="Age of the rollouts",
        what=(
            "With rollout.max_lag: how old the weights that sampled a batch are when it is trained on, in training "
            "steps and in optimizer updates. Each step adds learner.mini_batches updates."
        ),
    ),
    Panel(
        id="lag-cost",
        section=Section.OPTIMIZATION,
        title="What age costs",
        form="share",
        what=(
            "With rollout.max_lag: effective sample size and clipped share of the trained tokens, by age in optimizer "
            "updates. If the effective sample size falls with age, a few tokens dominate the gradient: lower "
            "rollout.max_lag or learner.mini_batches."
        ),
    ),
    Panel(
        id="gradient",
        section=Section.OPTIMIZATION,
        title="Gradient norm",
        log=True,
        what=(
            "Norm before gradient clipping. Updates with a spike are skipped; a slow increase means that the learning "
            "rate is too high."
        ),
    ),
    Panel(
        id="loss-scale",
        section=Section.OPTIMIZATION,
        title="Loss scale",
        log=True,
        what=(
            "Factor of the loss in the backward pass of a float16 model. It halves when gradients overflow and doubles "
            "after 200 updates without an overflow. A steady fall means that gradients or activations grow."
        ),
    ),
    Panel(
        id="routing",
        section=Section.MOE,
        title="Expert flips",
        form="share",
        what="Share of routed experts that differ between old and new policy, and between sampler and learner.",
    ),
    Panel(
        id="load",
        section=Section.MOE,
        title="Expert load",
        what="Load of the busiest expert relative to an even load: 1 is perfectly balanced.",
    ),
    Panel(
        id="trouble",
        section=Section.REWARD,
        title="Failures",
        form="count",
        hide_zero=True,
        what=(
            "Completions that could not be scored, skipped updates, gradients that overflowed float16, and groups that "
            "a batch lacks."
        ),
    ),
    Panel(
        id="rank-sampling",
        section=Section.SYSTEM,
        title="Sampling time by rank",
        what=(
            "Seconds that each rank spends on its own share of the completions. All ranks wait for the slowest one. A "
            "rank that is always above the others is a straggler: something else uses its machine or GPU. 0 if vLLM "
            "samples, and the same for all ranks if they gather the weights layer by layer."
        ),
    ),
    Panel(
        id="rank-memory",
        section=Section.SYSTEM,
        title="Memory by rank",
        what=(
            "Peak memory of each rank in GB since it started: allocated memory on a GPU, the resident set on a CPU. "
            "Weights, gradients and optimizer states are sharded; while engine `local` samples, every rank holds all "
            "weights (`ranks.sampling_weights`)."
        ),
    ),
)
"""The panels, in the order of the page."""

PHASES = Panel(
    id="phases",
    section=Section.SYSTEM,
    title="Step time by phase",
    what="Seconds of each phase of a step. The remainder of `time/step_s` is other work.",
)
"""The one panel of bars, over `TIMINGS`."""

METRICS = (
    # What a row belongs to. Runs are compared by tokens, because completion lengths differ between arms.
    Metric(
        "step",
        "Number of the training step (rollout batch). 0 is before training.",
        present="always",
        unit="count",
        reduction=Reduction.SAME,
    ),
    Metric(
        "tokens/sampled",
        "Completion tokens sampled since the run started, including this step. Use it to compare runs.",
        present="always",
        unit="count",
        reduction=Reduction.SAME,
    ),
    # Rewards and groups, over all sampled completions: discarded groups show what the policy can do, too.
    Metric(
        "reward/mean",
        "Mean reward of the scored sampled completions: the weighted sum of the reward functions, before "
        "length shaping and before a KL penalty in the reward.",
        present="step ≥ 1",
        unit="number",
        reduction=Reduction.COMPLETION_MEAN,
        panels=("learning",),
        label="reward",
        heading="reward",
    ),
    Metric(
        "reward/std",
        "Standard deviation (population) of the same rewards, over the whole step, not within groups.",
        present="step ≥ 1",
        unit="number",
        reduction=Reduction.GATHER,
    ),
    Metric(
        "reward/correct_fraction",
        "Share of correct completions among sampled completions that have a verdict (`reward.correct_above`).",
        present="step ≥ 1",
        unit="share",
        reduction=Reduction.COMPLETION_MEAN,
        panels=("signal",),
        label="correct completions",
        heading="correct",
    ),
    Metric(
        "reward/part/NAME",
        "Mean of one reward function over the sampled completions for which it returned a number, before its weight.",
        present="two or more reward functions",
        unit="number",
        reduction=Reduction.COMPLETION_MEAN,
    ),
    Metric(
        "groups/sampled",
        "Sampled groups, including discarded ones.",
        present="step ≥ 1",
        unit="count",
        reduction=Reduction.SUM,
    ),
    Metric(
        "groups/uniform_fraction",
        "Share of the sampled groups whose scored completions all have the same reward (or that have none"
        " scored). Their advantages are 0, so a high share means little gradient. If a length penalty "
        "(`soft_overlong`) or a KL penalty in the reward separates their completions, that alone gives a "
        "gradient (`advantage/std` is not 0). `reinforce_pp` compares completions across groups.",
        present="step ≥ 1",
        unit="share",
        reduction=Reduction.GROUP_MEAN,
        panels=("signal",),
        label="uniform groups",
        heading="uniform groups",
    ),
    Metric(
        "groups/discarded",
        'Groups discarded by `keep = "mixed"` because their trainable completions (not unscored, empty, '
        "or truncated under `overlong_filter`) all had the same reward before length shaping, or there "
        'were none; 0 with `keep = "all"`.',
        present="step ≥ 1",
        unit="count",
        reduction=Reduction.SUM,
    ),
    Metric(
        "groups/missing",
        "How many groups fewer than `rollout.prompts` the batch has, because sampling found too few to keep "
        "(`rollout.refill_budget`). A short batch gets fewer updates (`learner.mini_batches`).",
        present="step ≥ 1",
        unit="count",
        reduction=Reduction.SUM,
        panels=("trouble",),
        label="missing groups",
    ),
    Metric(
        "samples/unscored",
        "Sampled completions without a score. Means of rewards exclude them; lengths and tokens include "
        "all completions.",
        present="step ≥ 1",
        unit="count",
        reduction=Reduction.SUM,
        panels=("trouble",),
        label="unscored completions",
        heading="unscored",
    ),
    Metric(
        "samples/unscored/KIND",
        "Of these, the number of each kind: `raised`, `timeout`, `not_run`, `died`, `memory`, `invalid`, `abstained`.",
        present="if there are any",
        unit="count",
        reduction=Reduction.SUM,
    ),
    Metric(
        "reward/note/FUNCTION/WORD",
        "Share of sampled completions to which a reward function attached a note. `code_tests` notes how "
        "a program ended (`passed`, `wrong`, `error`, `timeout`, `died`, `output`, `protocol`, `empty`), "
        "and adds `trick` if the program uses a known way to get a reward without solving the problem "
        "([rewards](rewards.md#programs-and-tests)). `llm_judge` and `reward_model` note `unparsable`, `too_long`, "
        "`truncated`, `unavailable` and `refused` ([rewards](rewards.md#a-language-model-as-judge)).",
        present="if there are any",
        unit="share",
        reduction=Reduction.COMPLETION_MEAN,
    ),
    # Where the prompts come from.
    Metric(
        "source/NAME/reward_mean",
        "Mean reward of the scored sampled completions of one source.",
        present="with `data.mix`, step ≥ 1",
        unit="number",
        reduction=Reduction.COMPLETION_MEAN,
        panels=("sources",),
        label="NAME",
    ),
    Metric(
        "source/NAME/correct_fraction",
        "Share of correct completions among the sampled completions of one source that have a verdict.",
        present="with `data.mix`, step ≥ 1",
        unit="share",
        reduction=Reduction.COMPLETION_MEAN,
    ),
    Metric(
        "source/NAME/prompt_fraction",
        "Share of the sampled groups whose prompts come from one source. Its mean over steps is the source's weight "
        "relative to all weights.",
        present="with `data.mix`, step ≥ 1",
        unit="share",
        reduction=Reduction.GROUP_MEAN,
    ),
    Metric(
        "source/NAME/kept_fraction",
        'Share of the sampled groups of one source that were not discarded; 1 with `keep = "all"`.',
        present="with `data.mix`, step ≥ 1",
        unit="share",
        reduction=Reduction.GROUP_MEAN,
    ),
    Metric(
        "difficulty/pass_rate",
        "Mean estimated pass rate of the sampled problems, as it was before this step.",
        present='with `data.sampling = "difficulty"`, step ≥ 1',
        unit="share",
        reduction=Reduction.GROUP_MEAN,
        panels=("difficulty",),
        label="pass rate of sampled problems",
    ),
    Metric(
        "difficulty/skipped_fraction",
        "Share of the visited problems that were skipped because of their estimated pass rates.",
        present='with `data.sampling = "difficulty"`, step ≥ 1',
        unit="share",
        reduction=Reduction.MEAN,
        panels=("difficulty",),
        label="skipped problems",
    ),
    Metric(
        "difficulty/measured_fraction",
        "Share of the training problems that have been measured at least once.",
        present='with `data.sampling = "difficulty"`, step ≥ 1',
        unit="share",
        reduction=Reduction.SAME,
        panels=("difficulty",),
        label="measured problems",
    ),
    # Lengths. Percentiles, because a few very long completions decide how long sampling takes.
    Metric(
        "length/mean",
        "Mean tokens per sampled completion, including EOS.",
        present="step ≥ 1",
        unit="count",
        reduction=Reduction.COMPLETION_MEAN,
        panels=("length",),
        label="mean",
        heading="length",
    ),
    Metric(
        "length/p10",
        "10th percentile of the tokens per sampled completion (interpolated).",
        present="step ≥ 1",
        unit="count",
        reduction=Reduction.GATHER,
    ),
    Metric(
        "length/median",
        "50th percentile.",
        present="step ≥ 1",
        unit="count",
        reduction=Reduction.GATHER,
    ),
    Metric(
        "length/p90",
        "90th percentile.",
        present="step ≥ 1",
        unit="count",
        reduction=Reduction.GATHER,
        panels=("length",),
        label="90th percentile",
    ),
    Metric(
        "length/max",
        "Maximum.",
        present="step ≥ 1",
        unit="count",
        reduction=Reduction.MAX,
        panels=("length",),
        label="maximum",
    ),
    Metric(
        "length/truncated_fraction",
        "Share of sampled completions truncated at `rollout.max_tokens`.",
        present="step ≥ 1",
        unit="share",
        reduction=Reduction.COMPLETION_MEAN,
        panels=("signal", "shaping"),
        label="truncated completions",
        heading="truncated",
    ),
    Metric(
        "length/stop_string_fraction",
        "Share of sampled completions that ended with a stop string (`rollout.stop`).",
        present="step ≥ 1, with `rollout.stop`",
        unit="share",
        reduction=Reduction.COMPLETION_MEAN,
        panels=("shaping",),
        label="ended with a stop string",
    ),
    Metric(
        "length/thinking_cut_fraction",
        "Share of sampled completions whose thinking was cut, because it had not ended after "
        "`rollout.thinking_budget` tokens.",
        present="step ≥ 1, with `rollout.thinking_budget`",
        unit="share",
        reduction=Reduction.COMPLETION_MEAN,
        panels=("shaping",),
        label="thinking cut",
    ),
    Metric(
        "length/repetitive_fraction",
        "Share of sampled completions of 16 tokens or more in which one token makes up more than four fifths.",
        present="step ≥ 1",
        unit="share",
        reduction=Reduction.COMPLETION_MEAN,
    ),
    # Conversations with an environment.
    Metric(
        "conversation/turns",
        "Mean number of turns of the model in a conversation.",
        present="`environment.name`",
        unit="number",
        reduction=Reduction.COMPLETION_MEAN,
    ),
    Metric(
        "conversation/branches",
        "Mean number of branches of a conversation: more than 1 if the chat template rewrites earlier turns. All "
        "branches are one sequence.",
        present="`environment.name`",
        unit="number",
        reduction=Reduction.COMPLETION_MEAN,
    ),
    Metric(
        "conversation/call_fraction",
        "Share of conversations in which the model called a tool.",
        present="`environment.name`",
        unit="share",
        reduction=Reduction.COMPLETION_MEAN,
    ),
    Metric(
        "conversation/failed_call_fraction",
        "Share of tool calls that were malformed, or whose arguments or tool raised an error.",
        present="`environment.name`",
        unit="share",
        reduction=Reduction.MEAN,
    ),
    Metric(
        "conversation/other_format/NAME",
        "Turns that are no tool call in `environment.tool_format`, but would be one in this format. Some models do not "
        "write calls as their chat template asks them to.",
        present="`environment.name`, if there are such turns",
        unit="count",
        reduction=Reduction.SUM,
    ),
    Metric(
        "conversation/observation_tokens",
        "Mean number of tokens of a conversation that the model was given: observations, what the chat template writes "
        "around them, and earlier turns that it has rewritten. They are not trained on.",
        present="`environment.name`",
        unit="number",
        reduction=Reduction.COMPLETION_MEAN,
    ),
    Metric(
        "conversation/reused_fraction",
        "Share of the tokens before the turns of conversations that were not prefilled again, because the engine had "
        "kept them in its KV cache (`rollout.engine_options.keep_gb`).",
        present="engine `local`, `environment.name`",
        unit="share",
        reduction=Reduction.MEAN,
    ),
    Metric(
        "conversation/end/NAME",
        "Share of conversations that ended this way: `done` (the environment said so), at a limit (`turns`, "
        "`turn_tokens`, `tokens`, `time`), or `failed` (unscored).",
        present="`environment.name`",
        unit="share",
        reduction=Reduction.COMPLETION_MEAN,
    ),
    Metric(
        "tokens/generated",
        "Tokens of all sampled completions.",
        present="step ≥ 1",
        unit="count",
        reduction=Reduction.SUM,
    ),
    # Work of the engine.
    Metric(
        "sampler/decode_steps",
        "Decoding steps: forward passes of one token for each running sequence.",
        present="engine `local`",
        unit="count",
        reduction=Reduction.SUM,
    ),
    Metric(
        "sampler/running_mean",
        "Tokens sampled per decoding step: how many sequences ran concurrently. A value far below "
        "`rollout.engine_options.slots` (or completions per step, if fewer) means that a few long "
        "completions were sampled after the others had ended.",
        present="engine `local`",
        unit="number",
        reduction=Reduction.MEAN,
    ),
    Metric(
        "sampler/idle_fraction",
        "Share of the rows of the decoding steps that produced no completion token: idle slots, and "
        "preempted sequences. 0 on a CPU, where no idle row is computed.",
        present="engine `local`",
        unit="share",
        reduction=Reduction.GATHER,
        panels=("padding",),
        label="idle slots, sampling",
    ),
    # The loss and the optimizer. A run whose gradient is not finite stops only after several skipped updates.
    Metric(
        "loss/policy",
        "The policy term of the loss, mean over the step's updates. Its value does not measure progress: "
        "for objectives with a ratio it is minus the weighted mean of the advantages at ratio 1, and "
        "centered advantages sum to 0.",
        present="trained",
        unit="number",
        reduction=Reduction.SUM,
    ),
    Metric(
        "loss/kl",
        "The KL term as added to the loss, including its coefficient, mean over updates. 0 without a KL "
        'penalty, or with `kl_in = "reward"`.',
        present="trained",
        unit="number",
        reduction=Reduction.SUM,
    ),
    Metric(
        "loss/entropy",
        "The entropy term as added to the loss: minus the coefficient times the weighted entropy. 0 without a bonus.",
        present="trained",
        unit="number",
        reduction=Reduction.SUM,
    ),
    Metric(
        "grad/norm",
        "Gradient norm before clipping to `learner.max_grad_norm`, mean over updates. `null` if one was not finite.",
        present="trained",
        unit="number",
        reduction=Reduction.SAME,
        panels=("gradient",),
        label="gradient norm",
        heading="gradient norm",
    ),
    Metric(
        "grad/skipped",
        "Updates of this step that were skipped: loss or gradient not finite, or a gradient spike (`learner.spike`).",
        present="trained",
        unit="count",
        reduction=Reduction.SAME,
        panels=("trouble",),
        label="skipped updates",
    ),
    Metric(
        "grad/loss_scale",
        "Loss scale of the step's last update. The gradient norm and the losses are reported without it.",
        present="trained, `float16`",
        unit="number",
        reduction=Reduction.SAME,
        panels=("loss-scale",),
        label="loss scale",
    ),
    Metric(
        "grad/overflows",
        "How often gradients of this step overflowed float16 and were computed again with half the loss scale. No "
        "update is lost.",
        present="trained, `float16`",
        unit="count",
        reduction=Reduction.SAME,
        panels=("trouble",),
        label="gradient overflows",
    ),
    Metric(
        "learning_rate",
        "Learning rate of the step's last update.",
        present="trained",
        unit="number",
        reduction=Reduction.SAME,
    ),
    Metric(
        "ratio/ess",
        "Effective sample size of the computed completions of an update as a share of their number, mean over updates: "
        "`(sum w)^2 / (N sum w^2)` with `w = prod pi/mu` over the tokens of a completion, before the update. 1 if all "
        "weights are equal; a low value means that a few completions dominate the importance-weighted gradient. Long "
        "completions have a lower one, because differences between engine and learner multiply up, too.",
        present="computed",
        unit="share",
        reduction=Reduction.SAME,
        panels=("ess",),
        label="effective sample size",
    ),
    Metric(
        "ratio/ess_factor",
        "What `learner.ess_scaling` multiplied the learning rate by, mean over updates. 1 if it is `off`.",
        present="computed",
        unit="share",
        reduction=Reduction.SAME,
        panels=("ess",),
        label="learning-rate factor",
    ),
    # The trust region: how far the updates of one batch move the policy, and where that is limited.
    Metric(
        "clip/fraction_tokens",
        "Share of computed tokens on which the trust region acted: the ratio is out of range in the "
        "direction of the advantage (clipping objectives), the weight is at its cap (`cispo`), or the token "
        "is selected (`clip_cov`, `kl_cov`) or masked (`dppo_tv`, `dppo_kl`, `trm`). 0 for soft objectives "
        "(`sapo`, `sspo`, `maspo`, `vespo`) and for "
        "objectives without a bound (`gpg`, `rloo`).",
        present="computed",
        unit="share",
        reduction=Reduction.TOKEN_MEAN,
        panels=("clipping",),
        label="tokens",
        heading="clipped tokens",
    ),
    Metric(
        "clip/fraction_sequences",
        "Share of computed completions with at least one such token. With one ratio and one advantage per "
        "completion (`gspo`, `luspo`), a completion is clipped as a whole.",
        present="computed",
        unit="share",
        reduction=Reduction.COMPLETION_MEAN,
        panels=("clipping",),
        label="completions",
        heading="clipped completions",
    ),
    Metric(
        "clip/probability_low",
        "Share of clipped tokens among computed tokens with `pi_old < 0.1`. `null` if there are none.",
        present="computed",
        unit="share",
        reduction=Reduction.MEAN,
        panels=("clip-probability",),
        label="below 0.1",
    ),
    Metric(
        "clip/probability_middle",
        "The same for `pi_old` from 0.1 to 0.9.",
        present="computed",
        unit="share",
        reduction=Reduction.MEAN,
        panels=("clip-probability",),
        label="0.1 to 0.9",
    ),
    Metric(
        "clip/probability_high",
        "The same for `pi_old > 0.9`.",
        present="computed",
        unit="share",
        reduction=Reduction.MEAN,
        panels=("clip-probability",),
        label="above 0.9",
    ),
    Metric(
        "clip/low",
        'Lower side of the clip range of this step; it changes only if it was set to `"auto:SHARE"`.',
        present="trained, and the objective has a range",
        unit="number",
        reduction=Reduction.SAME,
    ),
    Metric(
        "clip/high",
        "Upper side.",
        present="trained, and the objective has a range",
        unit="number",
        reduction=Reduction.SAME,
        panels=("ratio",),
        label="upper clip range",
    ),
    Metric(
        "ratio/mean",
        "Mean of the ratio that the trust region uses: over computed completions for `gspo`, `gspo_token`,"
        " `luspo`, `fspo` and `vespo` (with their `length_norm`), over computed tokens for the others. `gmpo`: after "
        "its bounds. `dppo_tv`, `dppo_kl`, `trm`: `pi/mu`. 1 for `gpg` and `rloo`.",
        present="computed",
        unit="number",
        reduction=Reduction.MEAN,
    ),
    Metric(
        "ratio/max",
        "Maximum of this ratio over computed tokens.",
        present="computed",
        unit="number",
        reduction=Reduction.MAX,
    ),
    Metric(
        "ratio/token_log_std",
        "Standard deviation (population) over computed tokens of `log pi - log pi_old`, for every objective.",
        present="computed",
        unit="number",
        reduction=Reduction.GATHER,
        panels=("ratio",),
        label="over tokens",
    ),
    Metric(
        "ratio/sequence_log_std",
        "Standard deviation over computed completions of the completion's mean of `log pi - log pi_old`, "
        "for every objective. If tokens were independent, it would be the token value divided by the square "
        "root of the length.",
        present="computed",
        unit="number",
        reduction=Reduction.GATHER,
        panels=("ratio",),
        label="over completions",
    ),
    Metric(
        "ratio/sequence_log_abs_mean",
        "Mean over computed completions of `|log s|`, with `log s` the completion's mean of `log pi - log pi_old`: how "
        "far whole completions have drifted, for every objective. A clip range on token ratios does not bound it. The "
        "standard deviation above excludes a drift that all completions share.",
        present="computed",
        unit="number",
        reduction=Reduction.COMPLETION_MEAN,
        panels=("ratio",),
        label="drift of completions, mean",
    ),
    Metric(
        "ratio/sequence_log_abs_max",
        "The maximum.",
        present="computed",
        unit="number",
        reduction=Reduction.MAX,
        panels=("ratio",),
        label="drift of completions, maximum",
    ),
    Metric(
        "kl/old_new",
        "Mean over computed tokens of `r - 1 - log r`, `r = pi/pi_old`: how far the updates of this step "
        "moved the policy, in nats per token (KL(pi_old ‖ pi), estimator k3). Never below 0 except for "
        "rounding.",
        present="computed",
        unit="nats",
        reduction=Reduction.TOKEN_MEAN,
        panels=("mismatch",),
        label="old to new policy",
    ),
    # Engine against learner. Several estimates, because a mean hides the few tokens that matter in an MoE model.
    Metric(
        "mismatch/abs_mean",
        "Mean over computed tokens of `|log rho|`, `rho = pi_old/mu`: how far the engine's log-probs are "
        "from the learner's. With the `local` engine in float32 and without top-p or top-k only rounding "
        'remains. With `learner.old_logp = "sampler"` all mismatch metrics are over the tokens of the '
        "first mini-batch.",
        present="computed",
        unit="number",
        reduction=Reduction.TOKEN_MEAN,
        panels=("mismatch-tokens",),
        label="mean",
    ),
    Metric(
        "mismatch/abs_max",
        "The maximum. An MoE model with routing flips has a high maximum and a low mean.",
        present="computed",
        unit="number",
        reduction=Reduction.MAX,
        panels=("mismatch-tokens",),
        label="maximum",
    ),
    Metric(
        "mismatch/k1",
        "Mean of `-log rho`: the plain estimate of KL(mu ‖ pi_old); may be below 0.",
        present="computed",
        unit="nats",
        reduction=Reduction.TOKEN_MEAN,
    ),
    Metric(
        "mismatch/k3",
        "Mean of `rho - 1 - log rho`: a nonnegative estimate of the same.",
        present="computed",
        unit="nats",
        reduction=Reduction.TOKEN_MEAN,
        panels=("mismatch",),
        label="sampler to learner",
    ),
    Metric(
        "mismatch/chi2",
        "Mean of `rho^2 - 1`: the variance that importance weights would add.",
        present="computed",
        unit="number",
        reduction=Reduction.TOKEN_MEAN,
    ),
    Metric(
        "mismatch/ess",
        "Effective sample size of these weights, as a share of the tokens: `mean(rho)^2 / mean(rho^2)`. 1"
        " if all weights are equal.",
        present="computed",
        unit="share",
        reduction=Reduction.GATHER,
    ),
    Metric(
        "mismatch/extreme_fraction",
        "Share of tokens to which engine and learner assign probabilities more than a factor of two apart.",
        present="computed",
        unit="share",
        reduction=Reduction.TOKEN_MEAN,
        panels=("mismatch-tokens",),
        label="share of tokens above a factor of two",
    ),
    Metric(
        "noise/log_ratio",
        "Root mean square of `log pi_old - log mu` if the `local` engine sampled with the learner's own "
        "weights, so that only rounding separates the two: per completion (mean over its tokens) for "
        "objectives that clip completions, per token for the others. The effect of rounding on a ratio "
        '([precision.md](precision.md)). With `learner.old_logp = "sampler"`: the log-ratio between learner and engine '
        "before any update, with every engine, in the first mini-batch.",
        present="computed, the objective has a range, two or more updates, and engine `local` without top-p and top-k "
        'or `old_logp = "sampler"`',
        unit="number",
        reduction=Reduction.GATHER,
        panels=("ratio",),
        label="rounding noise",
    ),
    Metric(
        "noise/beyond_clip",
        "Share of computed completions (or tokens) whose ratio this difference alone would move out of the clip range.",
        present="the same",
        unit="share",
        reduction=Reduction.MEAN,
    ),
    # What was trained on.
    Metric(
        "entropy/mean",
        "Mean entropy of `pi_old` at the computed tokens (of the first mini-batch with `learner.old_logp ="
        ' "sampler"`), in nats.',
        present="computed",
        unit="nats",
        reduction=Reduction.TOKEN_MEAN,
        panels=("entropy",),
        label="entropy",
    ),
    Metric(
        "advantage/std",
        "Standard deviation (population) of the advantages of trained completions. For z-scores of groups"
        " of G scored completions it is the root of (G-1)/G times the share of completions in groups that"
        " are not uniform, including penalties in the reward.",
        present="trained",
        unit="number",
        reduction=Reduction.GATHER,
    ),
    Metric(
        "tokens/trained",
        "Trained tokens.",
        present="step ≥ 1",
        unit="count",
        reduction=Reduction.SUM,
    ),
    Metric(
        "samples/trained",
        "Trained completions.",
        present="step ≥ 1",
        unit="count",
        reduction=Reduction.SUM,
    ),
    Metric(
        "learner/uncomputed_fraction",
        "Share of the trained tokens whose completion was not computed: its advantages are all 0, so it has no "
        "gradient, but it counts in the denominators of the loss. 0 for objectives that need such completions (a KL or "
        "entropy term, `clip_cov`, `kl_cov`), with `routing.balance_loss` and with `learner.ess_scaling`.",
        present="trained",
        unit="share",
        reduction=Reduction.TOKEN_MEAN,
    ),
    Metric(
        "samples/dropped/KIND",
        "Sampled completions that were not trained on, by reason: `unscored`, `overlong` (truncated, with"
        ' `shape = "overlong_filter"`), `empty`, `alone` (no other trainable completion in its group), '
        '`uniform` (its group was discarded), `over_lag` (dropped, with `rollout.over_lag = "drop"`).',
        present="if there are any",
        unit="count",
        reduction=Reduction.SUM,
    ),
    Metric(
        "padding/learner",
        "Share of the positions of a pass over the batch that are padding: 0 for models that support packing.",
        present="computed",
        unit="share",
        reduction=Reduction.MEAN,
        panels=("padding",),
        label="padding tokens, training",
    ),
    Metric(
        "padding/saved",
        "Share of the positions that packing, and storing a prompt once per group, save in a pass over the batch, "
        "compared with one row per completion, with its prompt, padded to the longest row of its update.",
        present="computed",
        unit="share",
        reduction=Reduction.GATHER,
    ),
    Metric(
        "reward/length_penalty",
        "Mean over trained completions of what length shaping subtracts from the reward.",
        present='trained, `shape = "soft_overlong"`',
        unit="number",
        reduction=Reduction.COMPLETION_MEAN,
        panels=("shaping",),
        label="mean penalty",
    ),
    Metric(
        "length/penalized_fraction",
        "Share of trained completions with a length penalty.",
        present="the same",
        unit="share",
        reduction=Reduction.COMPLETION_MEAN,
        panels=("shaping",),
        label="penalized completions",
    ),
    Metric(
        "kl/ref",
        "Mean over computed tokens of `r - 1 - log r`, `r = pi_ref/pi`: distance from the reference in "
        "nats per token (KL(pi ‖ pi_ref), estimator k3, for every `kl_estimator`).",
        present="computed, and the objective has a KL penalty",
        unit="nats",
        reduction=Reduction.TOKEN_MEAN,
        panels=("mismatch",),
        label="to the reference",
    ),
    Metric(
        "loss/balance",
        "The auxiliary load-balancing loss as added to the loss, including its coefficient, mean over "
        "updates. An even load gives the coefficient itself; all tokens on the same experts give up to "
        "E/top-k times that.",
        present="trained, and `routing.balance_loss` is set",
        unit="number",
        reduction=Reduction.SUM,
    ),
    # Routers of an MoE model.
    Metric(
        "routing/flip_fraction",
        "Share of the experts used in a forward pass for the loss that the old policy's forward pass did not "
        "use for the same token, over computed tokens of the updates after the first. 0 with replay, which"
        " proves that it took effect. With one update it is measured by one more forward pass over its "
        "middle micro-batch, after the update.",
        present="computed, MoE",
        unit="share",
        reduction=Reduction.TOKEN_MEAN,
        panels=("routing",),
        label="old to new",
    ),
    Metric(
        "routing/flip_fraction_native",
        "The same for the experts that the routers would have chosen without replay.",
        present="the same, with replay",
        unit="share",
        reduction=Reduction.TOKEN_MEAN,
        panels=("routing",),
        label="without replay",
    ),
    Metric(
        "routing/flip_fraction_first",
        "The routers' own choice after exactly one update, against the old policy (computed tokens of the "
        "second update).",
        present="computed, MoE",
        unit="share",
        reduction=Reduction.TOKEN_MEAN,
    ),
    Metric(
        "routing/flip_fraction_last",
        "The same after all updates but the last (computed tokens of the last update).",
        present="computed, MoE",
        unit="share",
        reduction=Reduction.TOKEN_MEAN,
    ),
    Metric(
        "routing/flip_fraction_sampler",
        "Share of the experts used in the old policy's forward pass that the sampling engine did not use."
        ' 0 with `replay = "sampler"`, `null` if the engine does not report its experts. With `learner.old_logp = '
        '"sampler"` it is over the first mini-batch, and the other flips are against the engine\'s experts.',
        present="computed, MoE",
        unit="share",
        reduction=Reduction.TOKEN_MEAN,
        panels=("routing",),
        label="sampler to learner",
    ),
    Metric(
        "routing/load_entropy",
        "Entropy of how often the old policy's forward pass uses each expert, over prompt and completion "
        "tokens of computed completions, as a share of log E: 1 is an even load. Mean over MoE layers.",
        present="computed, MoE",
        unit="number",
        reduction=Reduction.GATHER,
    ),
    Metric(
        "routing/load_max",
        "The busiest expert's share of the choices, times E: 1 is an even load. Maximum over MoE layers.",
        present="computed, MoE",
        unit="number",
        reduction=Reduction.GATHER,
        panels=("load",),
        label="busiest expert",
    ),
    Metric(
        "routing/load_entropy/L",
        "The entropy of MoE layer L, counted from 0 without dense layers.",
        present="computed, MoE",
        unit="number",
        reduction=Reduction.GATHER,
    ),
    Metric(
        "routing/load_max/L",
        "The busiest expert of MoE layer L.",
        present="computed, MoE",
        unit="number",
        reduction=Reduction.GATHER,
    ),
    Metric(
        "routing/stored_bytes",
        "Memory in bytes of the expert choices that the learner stores while it trains on the batch: those of the old "
        "policy and of the sampler, and with a balance loss those without replay. `time/routing_s` is the time that "
        "they cost.",
        present="computed, MoE",
        unit="count",
        reduction=Reduction.SUM,
    ),
    Metric(
        "routing/sampler_bytes",
        "Bytes of the expert choices that the engine reported with the trained completions; 0 if it reports none.",
        present="computed, MoE",
        unit="count",
        reduction=Reduction.SUM,
    ),
    # Asynchronous sampling: how old a batch is, and what its age costs.
    Metric(
        "lag/steps",
        "Training steps between the weights that sampled the batch and those that train on it. At most "
        "`rollout.max_lag`.",
        present="`rollout.max_lag`",
        unit="count",
        reduction=Reduction.SAME,
        panels=("lag",),
        label="steps",
    ),
    Metric(
        "lag/updates",
        "Optimizer updates between them: those of `lag/steps` training steps. Mean over completions.",
        present="`rollout.max_lag`",
        unit="number",
        reduction=Reduction.COMPLETION_MEAN,
        panels=("lag",),
        label="updates",
    ),
    Metric(
        "lag/token_updates",
        "Age of a sampled token in optimizer updates. Less than `lag/updates`, because newer weights have continued "
        "completions. Mean over tokens.",
        present="`rollout.span_tokens`",
        unit="number",
        reduction=Reduction.TOKEN_MEAN,
        panels=("lag",),
        label="updates, per token",
    ),
    Metric(
        "lag/spans",
        "How many versions of the weights have sampled a completion. Mean over completions.",
        present="`rollout.span_tokens`",
        unit="number",
        reduction=Reduction.COMPLETION_MEAN,
    ),
    Metric(
        "lag/continued_fraction",
        "Share of the completions that were cut and continued with newer weights.",
        present="`rollout.span_tokens`",
        unit="share",
        reduction=Reduction.COMPLETION_MEAN,
    ),
    Metric(
        "lag/dropped",
        "Completions that were dropped because they had not ended after the tokens of all turns.",
        present='`over_lag = "drop"`',
        unit="count",
        reduction=Reduction.SUM,
    ),
    Metric(
        "lag/dropped_fraction",
        "Their share of all completions. The batch has only the shorter ones: `length/`, `reward/` and the advantages "
        "are about these.",
        present='`over_lag = "drop"`',
        unit="share",
        reduction=Reduction.COMPLETION_MEAN,
        panels=("lag-cost",),
        label="dropped completions",
    ),
    Metric(
        "lag/dropped_tokens",
        "Sampled tokens of completions that were dropped, which no step trains on.",
        present='`over_lag = "drop"`',
        unit="count",
        reduction=Reduction.SUM,
    ),
    Metric(
        "lag/dropped_prompts",
        "Problems whose completions were all dropped, so that the step has no group of them.",
        present='`over_lag = "drop"`',
        unit="count",
        reduction=Reduction.SUM,
    ),
    Metric(
        "lag/dropped_correct_fraction",
        "Share of correct completions among those that are left of the groups that have lost some. If it is below "
        "`reward/correct_fraction`, dropping favors easy problems. NaN if no group has lost some and kept others.",
        present='`over_lag = "drop"`',
        unit="share",
        reduction=Reduction.COMPLETION_MEAN,
        panels=("lag-cost",),
        label="correct in groups that lost completions",
    ),
    Metric(
        "lag/NAME/ess",
        "Effective sample size of the computed tokens that are NAME updates old, as a share of their number: "
        "`(sum w)^2 / (N sum w^2)` with `w = pi/mu`, where `pi` is the policy when the token was trained on.",
        present="computed, `rollout.max_lag`",
        unit="share",
        reduction=Reduction.GATHER,
        panels=("lag-cost",),
        label="effective sample size, NAME updates old",
    ),
    Metric(
        "lag/NAME/clip_fraction",
        "Share of these tokens on which the trust region acted.",
        present="computed, `rollout.max_lag`",
        unit="share",
        reduction=Reduction.TOKEN_MEAN,
        panels=("lag-cost",),
        label="clipped tokens, NAME updates old",
    ),
    # Evaluation: measured once for all ranks.
    Metric(
        "eval/unscored",
        "Sampled held-out completions without a verdict; accuracy excludes them.",
        present="evaluation",
        unit="count",
        reduction=Reduction.SAME,
    ),
    Metric(
        "eval/accuracy",
        "Held-out accuracy of sampled completions: the share of correct ones among a problem's "
        "`eval.samples` completions with a verdict, mean over problems that have one. Sampling as in "
        "training (temperature, top-p, top-k), with the same random streams at every evaluation.",
        present="evaluation",
        unit="share",
        reduction=Reduction.SAME,
        panels=("learning",),
        label="held-out, sampled",
        heading="held-out",
        band=("eval/accuracy_low", "eval/accuracy_high"),
    ),
    Metric(
        "eval/accuracy_low",
        "Lower end of its 95 % interval (Wilson, over problems).",
        present="evaluation",
        unit="share",
        reduction=Reduction.SAME,
    ),
    Metric(
        "eval/accuracy_high",
        "Upper end of its 95 % interval.",
        present="evaluation",
        unit="share",
        reduction=Reduction.SAME,
    ),
    Metric(
        "eval/reward",
        "Mean reward of the sampled held-out completions of a problem, mean over problems with a scored one. With "
        "partial credit it moves where accuracy stays at 0 %.",
        present="evaluation",
        unit="number",
        reduction=Reduction.SAME,
        panels=("learning",),
        label="held-out reward",
        heading="held-out reward",
        band=("eval/reward_low", "eval/reward_high"),
        same_as="eval/accuracy",
    ),
    Metric(
        "eval/reward_low",
        "Lower end of its 95 % interval (Student's t, over problems). There is none if all problems have the same mean "
        "reward.",
        present="evaluation",
        unit="number",
        reduction=Reduction.SAME,
    ),
    Metric(
        "eval/reward_high",
        "Upper end of its 95 % interval.",
        present="evaluation",
        unit="number",
        reduction=Reduction.SAME,
    ),
    Metric(
        "eval/length_mean",
        "Mean tokens of the sampled held-out completions.",
        present="evaluation",
        unit="count",
        reduction=Reduction.SAME,
    ),
    Metric(
        "eval/accuracy_greedy",
        "The same accuracy with one greedy completion per problem.",
        present="evaluation, with `eval.greedy`",
        unit="share",
        reduction=Reduction.SAME,
        panels=("learning",),
        label="held-out, greedy",
        band=("eval/accuracy_greedy_low", "eval/accuracy_greedy_high"),
    ),
    Metric(
        "eval/accuracy_greedy_low",
        "Lower end of its 95 % interval (Wilson, over problems).",
        present="evaluation, with `eval.greedy`",
        unit="share",
        reduction=Reduction.SAME,
    ),
    Metric(
        "eval/accuracy_greedy_high",
        "Upper end of its 95 % interval.",
        present="evaluation, with `eval.greedy`",
        unit="share",
        reduction=Reduction.SAME,
    ),
    Metric(
        "eval/NAME/accuracy",
        "The accuracy on one set of `eval.sets`, or on the held-out problems of one source in `data.mix`.",
        present="evaluation, with `eval.sets` or `data.mix`",
        unit="share",
        reduction=Reduction.SAME,
        panels=("sets",),
        label="NAME",
        band=("eval/NAME/accuracy_low", "eval/NAME/accuracy_high"),
    ),
    Metric(
        "eval/NAME/accuracy_low",
        "Lower end of its 95 % interval (Wilson, over problems).",
        present="evaluation, with `eval.sets` or `data.mix`",
        unit="share",
        reduction=Reduction.SAME,
    ),
    Metric(
        "eval/NAME/accuracy_high",
        "Upper end of its 95 % interval.",
        present="evaluation, with `eval.sets` or `data.mix`",
        unit="share",
        reduction=Reduction.SAME,
    ),
    Metric(
        "eval/NAME/accuracy_greedy",
        "The same accuracy with one greedy completion per problem.",
        present="evaluation, with `eval.sets` or `data.mix`, and `greedy`",
        unit="share",
        reduction=Reduction.SAME,
    ),
    Metric(
        "eval/NAME/accuracy_greedy_low",
        "Lower end of its 95 % interval (Wilson, over problems).",
        present="evaluation, with `eval.sets` or `data.mix`, and `greedy`",
        unit="share",
        reduction=Reduction.SAME,
    ),
    Metric(
        "eval/NAME/accuracy_greedy_high",
        "Upper end of its 95 % interval.",
        present="evaluation, with `eval.sets` or `data.mix`, and `greedy`",
        unit="share",
        reduction=Reduction.SAME,
    ),
    Metric(
        "eval/NAME/reward",
        "The mean reward on that set or source.",
        present="evaluation, with `eval.sets` or `data.mix`",
        unit="number",
        reduction=Reduction.SAME,
        panels=("set-rewards",),
        label="NAME",
        band=("eval/NAME/reward_low", "eval/NAME/reward_high"),
        same_as="eval/NAME/accuracy",
    ),
    Metric(
        "eval/NAME/reward_low",
        "Lower end of its 95 % interval (Student's t, over problems).",
        present="evaluation, with `eval.sets` or `data.mix`",
        unit="number",
        reduction=Reduction.SAME,
    ),
    Metric(
        "eval/NAME/reward_high",
        "Upper end of its 95 % interval.",
        present="evaluation, with `eval.sets` or `data.mix`",
        unit="number",
        reduction=Reduction.SAME,
    ),
    Metric(
        "eval/NAME/length_mean",
        "Mean tokens of the sampled completions of that set or source.",
        present="evaluation, with `eval.sets` or `data.mix`",
        unit="count",
        reduction=Reduction.SAME,
    ),
    Metric(
        "eval/NAME/unscored",
        "Sampled completions of that set or source without a verdict; accuracy excludes them.",
        present="evaluation, with `eval.sets` or `data.mix`",
        unit="count",
        reduction=Reduction.SAME,
    ),
)
"""`metrics.jsonl`, in the order of the documentation."""

TIMINGS = (
    Metric(
        "time/wait_s",
        "Waiting for the batch of this step. Sampling and scoring run at the same time as the steps before.",
        present="`rollout.max_lag`",
        unit="seconds",
        reduction=Reduction.MAX,
        panels=("phases",),
        label="waiting for a batch",
    ),
    Metric(
        "time/rollout_s",
        "Sampling, including refills.",
        present="step ≥ 1",
        unit="seconds",
        reduction=Reduction.MAX,
        panels=("phases",),
        label="sampling",
    ),
    Metric(
        "time/reward_s",
        "Waiting for scores, including refills.",
        present="step ≥ 1",
        unit="seconds",
        reduction=Reduction.MAX,
        panels=("phases",),
        label="scoring",
    ),
    Metric(
        "time/learn_s",
        "Old and reference log-probs, forward and backward passes, updates.",
        present="step ≥ 1",
        unit="seconds",
        reduction=Reduction.MAX,
        panels=("phases",),
        label="training",
    ),
    Metric(
        "time/compile_s",
        "The part of `time/learn_s` that `torch.compile` takes (`model.compile`): most of it in the first step of a "
        "process, less if an earlier run has filled the cache.",
        present="if layers were compiled",
        unit="seconds",
        reduction=Reduction.MAX,
    ),
    Metric(
        "time/routing_s",
        "The part of `time/learn_s` that recording and replaying experts takes: unpacking those of the sampler, "
        "storing and forcing choices, counting flips, and the forward pass that measures flips after a single update. "
        "Time of the host: kernels on a GPU may still be running.",
        present="trained, MoE",
        unit="seconds",
        reduction=Reduction.MAX,
    ),
    Metric(
        "time/eval_s",
        "Evaluation of this step; near 0 without one.",
        present="step ≥ 1",
        unit="seconds",
        reduction=Reduction.MAX,
        panels=("phases",),
        label="evaluation",
    ),
    Metric(
        "time/step_s",
        "The whole step, including evaluation.",
        present="step ≥ 1",
        unit="seconds",
        reduction=Reduction.MAX,
        heading="seconds",
    ),
    # Asynchronous sampling. Times since this process began to collect batches, for the timeline.
    Metric(
        "lag/sample_start_s",
        "When sampling of this step's batch began, in seconds since the process began to collect batches. This and the "
        "next five are absent if a checkpoint has kept the batch.",
        present="`rollout.max_lag`",
        unit="seconds",
        reduction=Reduction.SAME,
    ),
    Metric(
        "lag/sample_end_s",
        "When the batch was sampled and scored.",
        present="`rollout.max_lag`",
        unit="seconds",
        reduction=Reduction.SAME,
    ),
    Metric(
        "lag/rollout_s",
        "Sampling of the batch, including refills, next to training.",
        present="`rollout.max_lag`",
        unit="seconds",
        reduction=Reduction.SAME,
    ),
    Metric(
        "lag/reward_s",
        "Scoring of the batch, including refills, next to training.",
        present="`rollout.max_lag`",
        unit="seconds",
        reduction=Reduction.SAME,
    ),
    Metric(
        "lag/in_flight_updates",
        "The part of `lag/updates` that came while the batch was being sampled and scored.",
        present="`rollout.max_lag`",
        unit="number",
        reduction=Reduction.SAME,
    ),
    Metric(
        "lag/in_queue_updates",
        "The rest: updates while the finished batch waited.",
        present="`rollout.max_lag`",
        unit="number",
        reduction=Reduction.SAME,
    ),
    Metric(
        "lag/turn/NAME/start_s",
        "When the turn with the weights after step NAME began, which sampled a part of the batch.",
        present="`rollout.span_tokens`",
        unit="seconds",
        reduction=Reduction.SAME,
    ),
    Metric(
        "lag/turn/NAME/end_s",
        "When it ended, and what it had finished was scored.",
        present="`rollout.span_tokens`",
        unit="seconds",
        reduction=Reduction.SAME,
    ),
    Metric(
        "lag/learn_start_s",
        "When training on the batch began.",
        present="`rollout.max_lag`",
        unit="seconds",
        reduction=Reduction.SAME,
    ),
    Metric(
        "lag/learn_end_s",
        "When the step's last update was done.",
        present="`rollout.max_lag`",
        unit="seconds",
        reduction=Reduction.SAME,
    ),
    Metric(
        "memory/peak_gb",
        "Peak memory of a process since it started, in GB: memory allocated on a GPU, the resident set on a CPU "
        "(without reward workers and vLLM servers). With several ranks, that of the rank with the most.",
        present="step ≥ 1",
        unit="GB",
        reduction=Reduction.MAX,
    ),
    # Of several ranks. A single process has the same times in `time/...`.
    Metric(
        "memory/mean_gb",
        "The mean of that peak over ranks.",
        present="several ranks",
        unit="GB",
        reduction=Reduction.MEAN,
    ),
    Metric(
        "ranks/rollout_max_s",
        "Sampling time of the slowest rank, for its own share of the completions. The rest of `time/rollout_s` is "
        "spent on gathering weights and on messages.",
        present="several ranks",
        unit="seconds",
        reduction=Reduction.MAX,
    ),
    Metric(
        "ranks/rollout_mean_s",
        "The mean of that time over ranks. If it is far below the maximum, ranks wait for the slowest one.",
        present="several ranks",
        unit="seconds",
        reduction=Reduction.MEAN,
    ),
    Metric(
        "ranks/learn_max_s",
        "Training time of the slowest rank. Ranks wait for each other in every layer, so it does not show which of "
        "them is slow.",
        present="several ranks",
        unit="seconds",
        reduction=Reduction.MAX,
    ),
    Metric(
        "ranks/learn_mean_s",
        "The mean of that time over ranks.",
        present="several ranks",
        unit="seconds",
        reduction=Reduction.MEAN,
    ),
    Metric(
        "rank/NAME/rollout_s",
        "Sampling time of one rank, whose number is NAME, for its own share of the completions; 0 if vLLM samples.",
        present="several ranks",
        unit="seconds",
        reduction=Reduction.GATHER,
        panels=("rank-sampling",),
        label="rank NAME",
    ),
    Metric(
        "rank/NAME/learn_s",
        "Training time of one rank, including the time that it waits for the others.",
        present="several ranks",
        unit="seconds",
        reduction=Reduction.GATHER,
    ),
    Metric(
        "rank/NAME/memory_gb",
        "Peak memory of one rank since it started, in GB.",
        present="several ranks",
        unit="GB",
        reduction=Reduction.GATHER,
        panels=("rank-memory",),
        label="rank NAME",
    ),
    # Not in metrics.jsonl, because a resumed run finds scores in the cache that the first run had to ask for.
    Metric(
        "service/FUNCTION/requests",
        "Completions that a reward function sent to its model or endpoint, in the step and its evaluation. Step 1 "
        "includes the evaluation before training.",
        present="if a reward asks a model or an endpoint",
        unit="count",
        reduction=Reduction.SUM,
    ),
    Metric(
        "service/FUNCTION/cached",
        "Completions whose score was in the cache, or that share the request of an equal completion.",
        present="if a reward asks a model or an endpoint",
        unit="count",
        reduction=Reduction.SUM,
    ),
    Metric(
        "service/FUNCTION/retries",
        "Further tries after an error of the endpoint or a reply without a grade, for completions that got an answer.",
        present="if a reward asks a model or an endpoint",
        unit="count",
        reduction=Reduction.SUM,
    ),
    Metric(
        "service/FUNCTION/not_cached",
        "Scores that could not be written to the cache. A resumed run asks for them again.",
        present="if a reward asks a model or an endpoint",
        unit="count",
        reduction=Reduction.SUM,
    ),
    Metric(
        "service/FUNCTION/latency_s",
        "Mean time from the first request for a completion to its score, including retries.",
        present="if the model or endpoint was asked",
        unit="seconds",
        reduction=Reduction.MAX,
    ),
)
"""`timings.jsonl`."""


def metrics_of(panel: Panel) -> Iterator[Metric]:
    """The metrics that a panel shows."""
    return (metric for metric in (*METRICS, *TIMINGS) if panel.id in metric.panels)


def named(metric: Metric, keys: Iterable[str]) -> Iterator[Metric]:
    """The metric itself or, if its key contains NAME, one for each name among `keys`."""
    if "NAME" not in metric.key:
        yield metric
        return
    pattern = re.compile("([^/]+)".join(map(re.escape, metric.key.split("NAME"))))
    for name in (found[1] for key in keys if (found := pattern.fullmatch(key))):
        low, high = (end.replace("NAME", name) for end in metric.band or ("", ""))
        yield replace(
            metric,
            key=metric.key.replace("NAME", name),
            label=metric.label.replace("NAME", name),
            band=(low, high) if metric.band else None,
            same_as=metric.same_as.replace("NAME", name),
        )


def defined_keys() -> set[str]:
    """The keys of all metrics. Upper-case parts stand for a name."""
    return {metric.key for metric in (*METRICS, *TIMINGS)}


def heading(key: str) -> str:
    """The heading of one metric."""
    return next(metric.heading for metric in headed() if metric.key == key)


def headed() -> Iterator[Metric]:
    """The metrics that are shown without a panel."""
    return (metric for metric in (*METRICS, *TIMINGS) if metric.heading)
