"""Every number that a run writes, once: key, definition, unit, and how it is reduced over ranks.

In: nothing. Out: `METRICS` and `TIMINGS`. `docs/metrics.md` is made from them, and a test compares them with what a run
writes. Upper-case parts of a key stand for a name: `reward/part/NAME`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reduction(StrEnum):
    """How the values of several ranks become one."""

    SAME = "same on all ranks"
    SUM = "sum"
    MAX = "maximum"
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
    """`number`, `count`, `share`, `nats` or `seconds`."""
    reduction: Reduction


METRICS = (
    Metric(
        "step",
        "Number of the training step (rollout batch). 0 is before training.",
        present="always",
        unit="count",
        reduction=Reduction.SAME,
    ),
    Metric(
        "tokens/sampled",
        "Completion tokens sampled since the run started, including this step. Runs are compared by it.",
        present="always",
        unit="count",
        reduction=Reduction.SAME,
    ),
    Metric(
        "reward/mean",
        "Mean reward of the scored sampled completions: the weighted sum of the reward functions, before "
        "length shaping and before a KL penalty in the reward.",
        present="step ≥ 1",
        unit="number",
        reduction=Reduction.COMPLETION_MEAN,
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
        "samples/unscored",
        "Sampled completions without a score. They are in no mean of rewards; lengths and tokens include "
        "all completions.",
        present="step ≥ 1",
        unit="count",
        reduction=Reduction.SUM,
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
        "and `trick` if it uses what programs use to get a reward without solving the problem "
        "([rewards](rewards.md#programs-and-tests)).",
        present="if there are any",
        unit="share",
        reduction=Reduction.COMPLETION_MEAN,
    ),
    Metric(
        "length/mean",
        "Mean tokens per sampled completion, including EOS.",
        present="step ≥ 1",
        unit="count",
        reduction=Reduction.COMPLETION_MEAN,
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
    ),
    Metric(
        "length/max",
        "Maximum.",
        present="step ≥ 1",
        unit="count",
        reduction=Reduction.MAX,
    ),
    Metric(
        "length/truncated_fraction",
        "Share of sampled completions truncated at `rollout.max_tokens`.",
        present="step ≥ 1",
        unit="share",
        reduction=Reduction.COMPLETION_MEAN,
    ),
    Metric(
        "length/repetitive_fraction",
        "Share of sampled completions of 16 tokens or more in which one token makes up more than four fifths.",
        present="step ≥ 1",
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
        reduction=Reduction.COMPLETION_MEAN,
    ),
    Metric(
        "sampler/idle_fraction",
        "Share of the rows of the decoding steps that gave no token of a completion: idle slots, and "
        "preempted sequences. 0 on a CPU, where no idle row is computed.",
        present="engine `local`",
        unit="share",
        reduction=Reduction.COMPLETION_MEAN,
    ),
    Metric(
        "loss/policy",
        "The policy term of the loss, mean over the step's updates. Its value does not measure progress: "
        "for objectives with a ratio it is minus the weighted mean of the advantages at ratio 1, and "
        "centered advantages sum to 0.",
        present="learned",
        unit="number",
        reduction=Reduction.SUM,
    ),
    Metric(
        "loss/kl",
        "The KL term as added to the loss, including its coefficient, mean over updates. 0 without a KL "
        'penalty, or with `kl_in = "reward"`.',
        present="learned",
        unit="number",
        reduction=Reduction.SUM,
    ),
    Metric(
        "loss/entropy",
        "The entropy term as added to the loss: minus the coefficient times the weighted entropy. 0 without a bonus.",
        present="learned",
        unit="number",
        reduction=Reduction.SUM,
    ),
    Metric(
        "grad/norm",
        "Gradient norm before clipping to `learner.max_grad_norm`, mean over updates. `null` if one was not finite.",
        present="learned",
        unit="number",
        reduction=Reduction.SAME,
    ),
    Metric(
        "grad/skipped",
        "Updates of this step that were skipped: loss or gradient not finite, or a gradient spike (`learner.spike`).",
        present="learned",
        unit="count",
        reduction=Reduction.SAME,
    ),
    Metric(
        "learning_rate",
        "Learning rate of the step's last update.",
        present="learned",
        unit="number",
        reduction=Reduction.SAME,
    ),
    Metric(
        "clip/fraction_tokens",
        "Share of trained tokens on which the trust region acted: ratio out of range on the side to which"
        " the advantage pushes (clipping objectives), weight at its cap (`cispo`), token selected "
        "(`clip_cov`, `kl_cov`). 0 for soft objectives (`sapo`, `maspo`, `vespo`) and for objectives "
        "without a bound (`gpg`, `rloo`).",
        present="learned",
        unit="share",
        reduction=Reduction.TOKEN_MEAN,
    ),
    Metric(
        "clip/fraction_sequences",
        "Share of trained completions with at least one such token. With one ratio and one advantage per "
        "completion (`gspo`, `luspo`), a completion is clipped as a whole.",
        present="learned",
        unit="share",
        reduction=Reduction.COMPLETION_MEAN,
    ),
    Metric(
        "clip/low",
        'Lower side of the clip range of this step; it changes only if it was set to `"auto:SHARE"`.',
        present="learned, and the objective has a range",
        unit="number",
        reduction=Reduction.SAME,
    ),
    Metric(
        "clip/high",
        "Upper side.",
        present="learned, and the objective has a range",
        unit="number",
        reduction=Reduction.SAME,
    ),
    Metric(
        "ratio/mean",
        "Mean of the ratio that the trust region uses: over trained completions for `gspo`, `gspo_token`,"
        " `luspo`, over trained tokens for the others. `gmpo`: after its bounds. `vespo`: the product "
        "`pi/mu` of the completion. 1 for `gpg` and `rloo`.",
        present="learned",
        unit="number",
        reduction=Reduction.TOKEN_MEAN,
    ),
    Metric(
        "ratio/max",
        "Maximum of this ratio over trained tokens.",
        present="learned",
        unit="number",
        reduction=Reduction.MAX,
    ),
    Metric(
        "ratio/token_log_std",
        "Standard deviation (population) over trained tokens of `log pi - log pi_old`, for every objective.",
        present="learned",
        unit="number",
        reduction=Reduction.GATHER,
    ),
    Metric(
        "ratio/sequence_log_std",
        "Standard deviation over trained completions of the completion's mean of `log pi - log pi_old`, "
        "for every objective. Independent tokens would make it the token value divided by the root of the"
        " length.",
        present="learned",
        unit="number",
        reduction=Reduction.GATHER,
    ),
    Metric(
        "kl/old_new",
        "Mean over trained tokens of `r - 1 - log r`, `r = pi/pi_old`: how far the updates of this step "
        "moved the policy, in nats per token (KL(pi_old ‖ pi), estimator k3). Never below 0 except for "
        "rounding.",
        present="learned",
        unit="nats",
        reduction=Reduction.TOKEN_MEAN,
    ),
    Metric(
        "mismatch/abs_mean",
        "Mean over trained tokens of `|log rho|`, `rho = pi_old/mu`: how far the engine's log-probs are "
        "from the learner's. With the `local` engine in float32 and without top-p or top-k only rounding "
        'remains. With `learner.old_logp = "sampler"` all mismatch metrics are over the tokens of the '
        "first mini-batch.",
        present="learned",
        unit="number",
        reduction=Reduction.TOKEN_MEAN,
    ),
    Metric(
        "mismatch/abs_max",
        "The maximum. An MoE model with routing flips has a high maximum and a low mean.",
        present="learned",
        unit="number",
        reduction=Reduction.MAX,
    ),
    Metric(
        "mismatch/k1",
        "Mean of `-log rho`: the plain estimate of KL(mu ‖ pi_old); may be below 0.",
        present="learned",
        unit="nats",
        reduction=Reduction.TOKEN_MEAN,
    ),
    Metric(
        "mismatch/k3",
        "Mean of `rho - 1 - log rho`: a nonnegative estimate of the same.",
        present="learned",
        unit="nats",
        reduction=Reduction.TOKEN_MEAN,
    ),
    Metric(
        "mismatch/chi2",
        "Mean of `rho^2 - 1`: the variance that importance weights would add.",
        present="learned",
        unit="number",
        reduction=Reduction.TOKEN_MEAN,
    ),
    Metric(
        "mismatch/ess",
        "Effective sample size of these weights, as a share of the tokens: `mean(rho)^2 / mean(rho^2)`. 1"
        " if all weights are equal.",
        present="learned",
        unit="share",
        reduction=Reduction.GATHER,
    ),
    Metric(
        "mismatch/extreme_fraction",
        "Share of tokens to which engine and learner assign probabilities more than a factor of two apart.",
        present="learned",
        unit="share",
        reduction=Reduction.TOKEN_MEAN,
    ),
    Metric(
        "noise/log_ratio",
        "Root mean square of `log pi_old - log mu` if the `local` engine sampled with the learner's own "
        "weights, so that only rounding separates the two: per completion (mean over its tokens) for "
        "objectives that clip completions, per token for the others. The effect of rounding on a ratio "
        "([precision.md](precision.md)).",
        present="learned, the objective has a range, two or more updates, engine `local` without top-p and top-k",
        unit="number",
        reduction=Reduction.GATHER,
    ),
    Metric(
        "noise/beyond_clip",
        "Share of trained completions (or tokens) whose ratio this difference alone would move out of the clip range.",
        present="the same",
        unit="share",
        reduction=Reduction.COMPLETION_MEAN,
    ),
    Metric(
        "entropy/mean",
        "Mean entropy of `pi_old` at the trained tokens (of the first mini-batch with `learner.old_logp ="
        ' "sampler"`), in nats.',
        present="learned",
        unit="nats",
        reduction=Reduction.TOKEN_MEAN,
    ),
    Metric(
        "advantage/std",
        "Standard deviation (population) of the advantages of trained completions. For z-scores of groups"
        " of G scored completions it is the root of (G-1)/G times the share of completions in groups that"
        " are not uniform, including penalties in the reward.",
        present="learned",
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
        "samples/dropped/KIND",
        "Sampled completions that were not trained on, by reason: `unscored`, `overlong` (truncated, with"
        ' `shape = "overlong_filter"`), `empty`, `alone` (no other trainable completion in its group), '
        "`uniform` (its group was discarded).",
        present="if there are any",
        unit="count",
        reduction=Reduction.SUM,
    ),
    Metric(
        "padding/learner",
        "Share of the positions of a pass over the batch that are padding: 0 for models that support packing.",
        present="learned",
        unit="share",
        reduction=Reduction.COMPLETION_MEAN,
    ),
    Metric(
        "padding/saved",
        "Share of the positions that a pass over the batch saves compared with one row per completion, "
        "with its prompt, padded to the longest of its update: by packing, and by storing a prompt once "
        "per group.",
        present="learned",
        unit="share",
        reduction=Reduction.COMPLETION_MEAN,
    ),
    Metric(
        "reward/length_penalty",
        "Mean over trained completions of what length shaping subtracts from the reward.",
        present='learned, `shape = "soft_overlong"`',
        unit="number",
        reduction=Reduction.COMPLETION_MEAN,
    ),
    Metric(
        "length/penalized_fraction",
        "Share of trained completions with a length penalty.",
        present="the same",
        unit="share",
        reduction=Reduction.COMPLETION_MEAN,
    ),
    Metric(
        "kl/ref",
        "Mean over trained tokens of `r - 1 - log r`, `r = pi_ref/pi`: distance from the reference in "
        "nats per token (KL(pi ‖ pi_ref), estimator k3, whatever `kl_estimator` is).",
        present="learned, and the objective has a KL penalty",
        unit="nats",
        reduction=Reduction.TOKEN_MEAN,
    ),
    Metric(
        "loss/balance",
        "The auxiliary load-balancing loss as added to the loss, including its coefficient, mean over "
        "updates. An even load gives the coefficient itself; all tokens on the same experts give up to "
        "E/top-k times that.",
        present="learned, and `routing.balance_loss` is set",
        unit="number",
        reduction=Reduction.SUM,
    ),
    Metric(
        "routing/flip_fraction",
        "Share of the experts used in a learning forward pass that the old policy's forward pass did not "
        "use for the same token, over trained tokens of the updates after the first. 0 with replay, which"
        " proves that it took effect. With one update it is measured by one more forward pass over its "
        "first micro-batch, after the update.",
        present="learned, MoE",
        unit="share",
        reduction=Reduction.TOKEN_MEAN,
    ),
    Metric(
        "routing/flip_fraction_native",
        "The same for the experts that the routers would have chosen without replay.",
        present="the same, with replay",
        unit="share",
        reduction=Reduction.TOKEN_MEAN,
    ),
    Metric(
        "routing/flip_fraction_first",
        "The routers' own choice after exactly one update, against the old policy (trained tokens of the "
        "second update).",
        present="learned, MoE",
        unit="share",
        reduction=Reduction.TOKEN_MEAN,
    ),
    Metric(
        "routing/flip_fraction_last",
        "The same after all updates but the last (trained tokens of the last update).",
        present="learned, MoE",
        unit="share",
        reduction=Reduction.TOKEN_MEAN,
    ),
    Metric(
        "routing/flip_fraction_sampler",
        "Share of the experts used in the old policy's forward pass that the sampling engine did not use."
        ' 0 with `replay = "sampler"`, `null` if the engine does not report its experts.',
        present="learned, MoE",
        unit="share",
        reduction=Reduction.TOKEN_MEAN,
    ),
    Metric(
        "routing/load_entropy",
        "Entropy of how often the old policy's forward pass uses each expert, over prompt and completion "
        "tokens of trained completions, as a share of log E: 1 is an even load. Mean over MoE layers.",
        present="learned, MoE",
        unit="number",
        reduction=Reduction.GATHER,
    ),
    Metric(
        "routing/load_max",
        "The busiest expert's share of the choices, times E: 1 is an even load. Maximum over MoE layers.",
        present="learned, MoE",
        unit="number",
        reduction=Reduction.GATHER,
    ),
    Metric(
        "routing/load_entropy/L",
        "The entropy of MoE layer L, counted from 0 without dense layers.",
        present="learned, MoE",
        unit="number",
        reduction=Reduction.GATHER,
    ),
    Metric(
        "routing/load_max/L",
        "The busiest expert of MoE layer L.",
        present="learned, MoE",
        unit="number",
        reduction=Reduction.GATHER,
    ),
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
    ),
)
"""`metrics.jsonl`, in the order of the documentation."""

TIMINGS = (
    Metric(
        "time/rollout_s", "Sampling, including refills.", present="step ≥ 1", unit="seconds", reduction=Reduction.MAX
    ),
    Metric(
        "time/reward_s",
        "Waiting for scores, including refills.",
        present="step ≥ 1",
        unit="seconds",
        reduction=Reduction.MAX,
    ),
    Metric(
        "time/learn_s",
        "Old and reference log-probs, forward and backward passes, updates.",
        present="step ≥ 1",
        unit="seconds",
        reduction=Reduction.MAX,
    ),
    Metric(
        "time/eval_s",
        "Evaluation of this step; near 0 without one.",
        present="step ≥ 1",
        unit="seconds",
        reduction=Reduction.MAX,
    ),
    Metric(
        "time/step_s",
        "The whole step, including evaluation.",
        present="step ≥ 1",
        unit="seconds",
        reduction=Reduction.MAX,
    ),
)
"""`timings.jsonl`."""
