"""The metrics and rollout records of a step. `record/metric_definitions.py` defines every metric.

In: the results of collecting and learning, of one rank. Out: metrics that carry how they are reduced over ranks, and
records that are ready to be written. Invariant: nothing here depends on the clock. Unscored completions are counted,
but excluded from every mean.
"""

from __future__ import annotations

import base64
import math
import statistics
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor

from gspo.config import RolloutConfig
from gspo.evaluation import Evaluation
from gspo.learner.optimizer import Update
from gspo.learner.result import LearnResult
from gspo.learner.routing_replay import RoutingStats
from gspo.objectives.loss import loss_statistics
from gspo.objectives.objective import Objective
from gspo.objectives.ratio import MAX_LOG_RATIO
from gspo.objectives.rounding import root_mean_square, rounding_noise
from gspo.objectives.samples import drop_reason
from gspo.objectives.sequences import Sequences
from gspo.record.columns import answer_and_columns
from gspo.redact import known_secrets, redacted
from gspo.reduction import Family, Gather, Max, Mean, Reduced, Same, Sum, std
from gspo.rollout.gather import CollectResult
from gspo.types import Completion, ConversationEnd, Group, Sampling, Score, Status, StopReason

NAN = float("nan")
EXTREME = math.log(2)
"""Log-ratio from which the mismatch of a token is extreme: the probabilities differ by more than a factor of 2."""
LONG = 16
"""Completions shorter than this are never called repetitive."""


def step_metrics(
    objective: Objective, collected: CollectResult, learned: LearnResult | None, sampling: Sampling | None = None
) -> dict[str, Reduced]:
    """All metrics of a step, except its timings and its evaluation. `sampling` adds those of its controls."""
    untrained: dict[str, Reduced] = {"tokens/trained": Sum(0), "samples/trained": Sum(0)}
    reasons = drop_reasons(objective, collected, learned)
    return {
        **_sampling_metrics(collected),
        **(_control_metrics(collected, sampling) if sampling else {}),
        "samples/dropped/KIND": _counts(reasons),
        **(_training_metrics(objective, learned) if learned else untrained),
    }


def lag_metrics(
    collected: CollectResult, learned: LearnResult | None, *, step: int, updates: int, settings: RolloutConfig
) -> dict[str, Reduced]:
    """How old a batch was when `step` and `updates` optimizer steps were done, and what its age costs."""
    assert collected.weights is not None
    completions = [c for group in collected.rollouts.sampled for c in group.completions]
    return {
        "lag/steps": Same(step - collected.weights),
        "lag/updates": Mean.of([updates - c.version for c in completions]),
        **(_span_metrics(completions, updates) if settings.span_tokens else {}),
        **(_drop_metrics(collected) if settings.over_lag == "drop" else {}),
        **(_by_age(learned, updates) if learned is not None and learned.computed_N.any() else {}),
    }


def _span_metrics(completions: Sequence[Completion], updates: int) -> dict[str, Reduced]:
    """How many weights have sampled a completion, and how old its tokens are."""
    parts = [part for c in completions for part in c.sampled_by_version]
    return {
        "lag/token_updates": Mean(sum((updates - version) * n for version, n in parts), sum(n for _, n in parts)),
        "lag/spans": Mean.of([len(c.segments) for c in completions]),
        "lag/continued_fraction": Mean.of([len(c.segments) > 1 for c in completions]),
    }


def _drop_metrics(collected: CollectResult) -> dict[str, Reduced]:
    """How many completions were dropped, and how hard their problems are by the rest of their groups."""
    dropped, groups = collected.dropped, collected.rollouts.sampled
    prompts = {c.prompt_id for c in dropped}
    left = [score.correct for g in groups if g.prompt.id in prompts for score in g.scores if score.correct is not None]
    total = len(dropped) + sum(len(group.completions) for group in groups)
    return {
        "lag/dropped": Sum(len(dropped)),
        "lag/dropped_fraction": Mean(len(dropped), total),
        "lag/dropped_tokens": Sum(sum(c.tokens for c in dropped)),
        "lag/dropped_prompts": Sum(len(prompts - {group.prompt.id for group in groups})),
        "lag/dropped_correct_fraction": Mean.of(left),
    }


def _by_age(learned: LearnResult, updates: int) -> dict[str, Reduced]:
    """Effective sample size and clipping of the computed tokens, by their age in updates."""
    tokens = learned.tokens
    parts = [part for s in learned.samples for part in s.completion.sampled_by_version]
    version_P, count_P = torch.tensor(parts, device=learned.computed_N.device).unbind(1)
    age_N = (updates - version_P).repeat_interleave(count_P)
    ages = sorted(set(age_N.tolist()))
    at = {str(age): (age_N == age) & learned.computed_N for age in ages}
    weight_N = (tokens.logp_N - tokens.logp_behavior_N).double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return {
        "lag/NAME/ess": Family({age: Gather(weight_N[at_N], _sample_size) for age, at_N in at.items() if at_N.any()}),
        "lag/NAME/clip_fraction": Family({age: Mean.of(learned.clipped_N[at_N].double()) for age, at_N in at.items()}),
    }


def _sample_size(weights: Tensor) -> float:
    """The effective sample size as a share of the number of samples."""
    return float(weights.mean().square() / weights.square().mean())


def drop_reasons(objective: Objective, collected: CollectResult, learned: LearnResult | None) -> dict[str, int]:
    """Number of completions that were not trained on, by reason, most frequent first."""
    counts = Counter(reason for *_, reason in _completions(objective, collected, learned) if reason)
    return dict((counts + Counter(over_lag=len(collected.dropped))).most_common())


def _completions(
    objective: Objective, collected: CollectResult, learned: LearnResult | None
) -> Iterator[tuple[Group, Completion, Score, int | None, str]]:
    """Every completion with its index among the trained ones (`None` if it is not among them) and its drop reason."""
    trained = {(c.group, c.sample): i for i, c in enumerate(learned.samples)} if learned else {}
    kept = len(collected.rollouts.groups)
    for number, group in enumerate(collected.rollouts.sampled):
        for sample, (c, s) in enumerate(zip(group.completions, group.scores, strict=True)):
            index = trained.get((number, sample))
            # `sampled` lists the groups of the batch first and the discarded ones after them.
            reason = drop_reason(c, s, objective) or ("alone" if number < kept else "uniform")
            yield group, c, s, index, reason if index is None else ""


def _sampling_metrics(collected: CollectResult) -> dict[str, Reduced]:
    groups = collected.rollouts.sampled
    pairs = [(c, s) for g in groups for c, s in zip(g.completions, g.scores, strict=True)]
    scores = [s for _, s in pairs]
    rewards = [s.reward for s in scores if s.reward is not None]
    lengths = [c.sampled_count for c, _ in pairs]
    return {
        "reward/mean": Mean.of(rewards),
        "reward/std": Gather(rewards, lambda r: statistics.pstdev(r) if r else NAN),
        "reward/correct_fraction": Mean.of([s.correct for s in scores if s.correct is not None]),
        "reward/part/NAME": _parts(scores),
        "groups/sampled": Sum(len(groups)),
        "groups/uniform_fraction": Mean.of([g.uniform for g in groups]),
        "groups/discarded": Sum(len(collected.rollouts.discarded)),
        **({} if collected.wanted is None else {"groups/missing": Sum(collected.missing)}),
        "samples/unscored": Sum(sum(s.status is Status.UNSCORED for s in scores)),
        "samples/unscored/KIND": _counts(Counter(s.failure.partition(":")[0] for s in scores if s.failure)),
        "reward/note/FUNCTION/WORD": _notes(scores),
        "length/mean": Mean.of(lengths),
        "length/p10": Gather(lengths, partial(_quantile, 0.1)),
        "length/median": Gather(lengths, partial(_quantile, 0.5)),
        "length/p90": Gather(lengths, partial(_quantile, 0.9)),
        "length/max": Max(max(lengths, default=0)),
        "length/truncated_fraction": Mean.of([c.stop is StopReason.LENGTH for c, _ in pairs]),
        "length/repetitive_fraction": Mean.of([_repetitive(c) for c, _ in pairs]),
        "tokens/generated": Sum(collected.tokens),
        **_decoding(collected),
        **_conversations(pairs),
        **_sources(collected),
        **_difficulty(collected),
    }


def _conversations(pairs: Sequence[tuple[Completion, Score]]) -> dict[str, Reduced]:
    """How conversations with an environment went."""
    found = [c.conversation for c, _ in pairs if c.conversation is not None]
    if not found:
        return {}
    turns = [turn for conversation in found for turn in conversation.turns]
    calls = sum(max(len(turn.calls), turn.failed_calls) for turn in turns)
    given = sum(len(c.token_ids) - c.sampled_count for c, _ in pairs)
    return {
        "conversation/turns": Mean.of([len(conversation.turns) for conversation in found]),
        "conversation/branches": Mean.of([len(c.branches) or 1 for c, _ in pairs if c.conversation is not None]),
        "conversation/call_fraction": Mean.of([any(t.calls for t in c.turns) for c in found]),
        "conversation/failed_call_fraction": Mean(sum(turn.failed_calls for turn in turns), calls),
        "conversation/other_format/NAME": _counts(Counter(t.other_format for t in turns if t.other_format)),
        "conversation/observation_tokens": Mean(given, len(found)),
        "conversation/end/NAME": Family({end: Mean.of([c.end is end for c in found]) for end in ConversationEnd}),
    }


def _sources(collected: CollectResult) -> dict[str, Reduced]:
    """Rewards and shares of each source of a mixture."""
    kept, groups = collected.rollouts.groups, collected.rollouts.sampled
    names = sorted({g.prompt.source for g in groups if g.prompt.source})
    scores = {name: [s for g in groups if g.prompt.source == name for s in g.scores] for name in names}
    prompts = Counter(g.prompt.source for g in groups)
    trained = Counter(g.prompt.source for g in kept)
    rewards = {name: [s.reward for s in scores[name] if s.reward is not None] for name in names}
    correct = {name: [s.correct for s in scores[name] if s.correct is not None] for name in names}
    shares = {name: Mean(prompts[name], len(groups)) for name in names}
    return {
        "source/NAME/reward_mean": Family({name: Mean.of(rewards[name]) for name in names}),
        "source/NAME/correct_fraction": Family({name: Mean.of(correct[name]) for name in names}),
        # A rank without a group of the source has groups all the same, and they belong into the denominator.
        "source/NAME/prompt_fraction": Family(shares, absent=Mean(0, len(groups))),
        "source/NAME/kept_fraction": Family({name: Mean(trained[name], prompts[name]) for name in names}),
    }


def _difficulty(collected: CollectResult) -> dict[str, Reduced]:
    """Which problems were selected by their measured pass rates."""
    if collected.after.difficulty is None:
        return {}
    rates = collected.pass_rates
    return {
        "difficulty/pass_rate": Mean.of(rates),
        "difficulty/skipped_fraction": Mean(collected.skipped, collected.skipped + len(rates)),
        "difficulty/measured_fraction": Same(collected.after.difficulty.measured_fraction),
    }


def _control_metrics(collected: CollectResult, sampling: Sampling) -> dict[str, Reduced]:
    """How often the controls acted that the run uses."""
    completions = [c for g in collected.rollouts.sampled for c in g.completions]
    metrics: dict[str, Reduced] = {}
    if sampling.stop:
        metrics["length/stop_string_fraction"] = Mean.of([c.stop is StopReason.STOP for c in completions])
    if sampling.thinking_budget:
        metrics["length/thinking_cut_fraction"] = Mean.of([c.thinking_cut for c in completions])
    return metrics


def _quantile(q: float, lengths: Sequence[int]) -> float:
    return float(np.quantile(lengths, q)) if lengths else NAN


def _decoding(collected: CollectResult) -> dict[str, Reduced]:
    """How full the decoding batches of the engine were."""
    decoded = collected.decoded
    if decoded is None or not decoded.steps:
        return {}
    tokens = collected.tokens if collected.decoded_tokens is None else collected.decoded_tokens
    conversations = any(c.conversation is not None for g in collected.rollouts.sampled for c in g.completions)
    read = decoded.prefilled + decoded.reused
    return {
        "sampler/decode_steps": Sum(decoded.steps),
        "sampler/running_mean": Mean(tokens, decoded.steps),
        "sampler/idle_fraction": Gather([(tokens, decoded.rows)], _rest),
        **({"conversation/reused_fraction": Mean(decoded.reused, read)} if conversations and read else {}),
    }


def _rest(pairs: Sequence[tuple[int, int]]) -> float:
    """The share that is left of a whole, from pairs of (part, whole)."""
    return 1 - sum(part for part, _ in pairs) / sum(whole for _, whole in pairs)


def _repetitive(completion: Completion) -> bool:
    """Whether one token makes up most of a completion."""
    # By count, not by runs: a loop over two tokens is not what this finds.
    most = max(Counter(completion.sampled_ids).values(), default=0)
    return completion.sampled_count >= LONG and most > 0.8 * completion.sampled_count


def _parts(scores: Sequence[Score]) -> Family:
    """Mean of each reward function, if there are several."""
    names = sorted({name for s in scores for name in s.parts})
    values = {name: [v for s in scores if (v := s.parts.get(name)) is not None] for name in names}
    return Family({name: Mean.of(v) for name, v in values.items()} if len(names) > 1 else {})


def _notes(scores: Sequence[Score]) -> Family:
    """Share of the completions that a reward function has tagged with each note."""
    counts = Counter((name, word) for s in scores for name, words in s.notes.items() for word in set(words))
    shares = {f"{name}/{word}": Mean(n, len(scores)) for (name, word), n in sorted(counts.items())}
    # A rank without the note has completions all the same, and they belong into the denominator.
    return Family(shares, absent=Mean(0, len(scores)))


def _counts(counts: Mapping[str, int]) -> Family:
    return Family({kind: Sum(count) for kind, count in sorted(counts.items())})


def _training_metrics(objective: Objective, learned: LearnResult) -> dict[str, Reduced]:
    metrics: dict[str, Reduced] = {
        # Token weights belong to the update as a whole, so the losses of its ranks add up as those of micro-batches do.
        "loss/policy": Sum(_mean([float(x.policy) for x in learned.losses])),
        "loss/kl": Sum(_mean([float(x.kl) for x in learned.losses])),
        "loss/entropy": Sum(_mean([float(x.entropy) for x in learned.losses])),
        # Over skipped updates, too: a spike must be visible.
        "grad/norm": Same(_mean([u.grad_norm for u in learned.updates])),
        "grad/skipped": Same(sum(not u.applied for u in learned.updates)),
        **_loss_scale(learned.updates),
        "learning_rate": Same(learned.updates[-1].learning_rate),
        "advantage/std": Gather(learned.advantage_B, std),
        "tokens/trained": Sum(len(learned.computed_N)),
        "samples/trained": Sum(len(learned.samples)),
        "learner/uncomputed_fraction": Mean.of((~learned.computed_N).double()),
    }
    metrics |= _shaping(learned) if "soft_overlong" in objective.shape else {}
    if clip_range := objective.trust_region.clip_range:
        metrics |= {"clip/low": Same(clip_range[0]), "clip/high": Same(clip_range[1])}
    # Without a computed token these metrics are absent: a value of 0 would mean something else.
    return metrics | (_computed_metrics(objective, learned) if learned.computed_N.any() else {})


def _computed_metrics(objective: Objective, learned: LearnResult) -> dict[str, Reduced]:
    """Metrics over the completions that were computed."""
    at_N = learned.computed_N.nonzero().squeeze(-1)
    tokens, positions = learned.tokens.take(at_N), learned.positions
    stats = loss_statistics(objective, tokens, learned.ratio_N[at_N], learned.clipped_N[at_N])
    metrics: dict[str, Reduced] = {
        "ratio/ess": Same(_mean([u.ess for u in learned.updates])),
        "ratio/ess_factor": Same(_mean([u.ess_factor for u in learned.updates])),
        "clip/fraction_tokens": stats["clip_fraction_tokens"],
        "clip/fraction_sequences": stats["clip_fraction_sequences"],
        "clip/probability_low": stats["clip_probability_low"],
        "clip/probability_middle": stats["clip_probability_middle"],
        "clip/probability_high": stats["clip_probability_high"],
        "ratio/mean": stats["ratio_mean"],
        "ratio/max": stats["ratio_max"],
        "ratio/token_log_std": stats["ratio_token_log_std"],
        "ratio/sequence_log_std": stats["ratio_sequence_log_std"],
        "ratio/sequence_log_abs_mean": stats["ratio_sequence_log_abs_mean"],
        "ratio/sequence_log_abs_max": stats["ratio_sequence_log_abs_max"],
        "kl/old_new": stats["kl_old_new"],
        **mismatch(learned.log_rho_M),
        "entropy/mean": Mean.of(learned.entropy_M),
        "padding/learner": Mean(positions.empty, positions.computed),
        "padding/saved": Gather([(positions.computed, positions.padded)], _rest),
    }
    metrics |= {"kl/ref": stats["kl_ref"]} if "kl_ref" in stats else {}
    metrics |= _noise(objective, tokens.sequences, learned)
    return metrics | (_routing(learned.routed, len(learned.updates)) if learned.routed else {})


def _loss_scale(updates: Sequence[Update]) -> dict[str, Reduced]:
    """The loss scale of a float16 model."""
    scale = updates[-1].loss_scale
    if scale is None:
        return {}
    return {"grad/loss_scale": Same(scale), "grad/overflows": Same(sum(u.overflows for u in updates))}


def _shaping(learned: LearnResult) -> dict[str, Reduced]:
    """The penalty on long completions."""
    penalties = [float(r.score.reward or 0) - r.reward for r in learned.samples]
    return {
        "reward/length_penalty": Mean.of(penalties),
        "length/penalized_fraction": Mean.of([p > 0 for p in penalties]),
    }


def mismatch(log_rho_M: Tensor) -> dict[str, Reduced]:
    """How far the engine's probabilities mu are from the learner's pi_old, over the tokens that both computed."""
    # In float64: k3 and chi2 are differences of nearly equal numbers, which float32 would round away.
    log_rho_M = log_rho_M.double()
    bounded_M = log_rho_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    rho_M = bounded_M.exp()
    return {
        "mismatch/abs_mean": Mean.of(log_rho_M.abs()),
        "mismatch/abs_max": Max.of(log_rho_M.abs()),
        # Tokens are sampled from mu, so these estimate KL(mu || pi_old), with rho = pi_old / mu.
        "mismatch/k1": Mean(-log_rho_M.sum(), len(log_rho_M)),
        "mismatch/k3": Mean.of(torch.expm1(bounded_M) - log_rho_M),
        "mismatch/chi2": Mean.of(rho_M.square() - 1),
        "mismatch/ess": Gather(rho_M, _sample_size),
        "mismatch/extreme_fraction": Mean.of((log_rho_M.abs() > EXTREME).double()),
    }


def _noise(objective: Objective, sequences: Sequences, learned: LearnResult) -> dict[str, Reduced]:
    """Rounding noise of the importance ratio, if a clip range can act on it; `sequences` are those of computed tokens.

    With one update per batch the ratio is exactly 1, however coarse the rounding, unless it is to the engine's
    log-probs."""
    noise = learned.noise
    if learned.rounding_M is not None and len(learned.updates) > 1:
        noise = rounding_noise(objective, sequences, learned.rounding_M)
    if noise is None:
        return {}
    return {
        "noise/log_ratio": Gather(noise.log_ratio_M, root_mean_square),
        "noise/beyond_clip": Mean.of(noise.beyond_M.double()),
    }


def _routing(routed: RoutingStats, updates: int) -> dict[str, Reduced]:
    """Share of the expert choices that changed, and how evenly the experts are used."""
    # Update 0 uses the weights of the old policy, so its routers choose the old experts: there is nothing to measure.
    # A step of one update is measured after it, which counts as update 1.
    after_N = routed.update_N > 0
    last_N = routed.update_N == max(1, updates - 1)
    metrics: dict[str, Reduced] = {
        "routing/flip_fraction": _flips(routed.flipped_N[after_N], routed.choices),
        "routing/flip_fraction_first": _flips(routed.native_N[routed.update_N == 1], routed.choices),
        "routing/flip_fraction_last": _flips(routed.native_N[last_N], routed.choices),
        "routing/flip_fraction_sampler": _flips(routed.sampler_N[routed.sampler_N >= 0], routed.choices),
    }
    if routed.replayed:
        metrics["routing/flip_fraction_native"] = _flips(routed.native_N[after_N], routed.choices)
    metrics["routing/stored_bytes"] = Sum(routed.stored_bytes)
    metrics["routing/sampler_bytes"] = Sum(routed.sampler_bytes)
    load = routed.load_LE.unsqueeze(0)
    metrics["routing/load_entropy"] = Gather(load, lambda load: float(_load_entropy(load).mean()))
    metrics["routing/load_max"] = Gather(load, lambda load: float(_busiest(load).max()))
    for layer in range(load.shape[1]):
        metrics[f"routing/load_entropy/{layer}"] = Gather(load[:, [layer]], lambda load: float(_load_entropy(load)))
        metrics[f"routing/load_max/{layer}"] = Gather(load[:, [layer]], lambda load: float(_busiest(load)))
    return metrics | ({"loss/balance": Sum(_mean(routed.balance_losses))} if routed.balance_losses else {})


def _flips(counts: Tensor, choices: int) -> Mean:
    return Mean(counts.double().sum(), choices * len(counts))


def _load_entropy(load: Tensor) -> Tensor:
    """By layer, as a share of its maximum; `load` counts choices by rank, layer and expert."""
    share_LE = _load_share(load)
    return torch.special.entr(share_LE).sum(-1) / math.log(share_LE.shape[1])


def _busiest(load: Tensor) -> Tensor:
    """By layer, times the number of experts."""
    share_LE = _load_share(load)
    return share_LE.amax(-1) * share_LE.shape[1]


def _load_share(load: Tensor) -> Tensor:
    # Counts of all ranks are added first, because the mean of entropies is not the entropy of the mean.
    load_LE = load.sum(0)
    return load_LE.double() / load_LE.sum(-1, keepdim=True)


def rollout_records(
    objective: Objective, collected: CollectResult, learned: LearnResult | None, *, routes: bool
) -> Iterator[dict[str, Any]]:
    """One record per completion: whether it was trained on and computed, and its log-probs under sampler, old and new
    policy.

    With `routes`, a record also holds the sampler's experts, which routing replay trained with."""
    by_sequence = _by_sequence(learned) if learned else []
    current, row = None, {}
    for group, c, s, index, reason in _completions(objective, collected, learned):
        if group is not current:
            current, row = group, answer_and_columns(group.prompt)
        record = _completion_record(group, c, s) | row | (_sampler_experts(c) if routes else {})
        if index is None or learned is None:
            yield record | {"trained": False, "drop_reason": reason}
        else:
            reward = float(learned.reward_B[index])
            advantage = float(learned.advantage_B[index])
            yield record | {"trained": True, "shaped_reward": reward, "advantage": advantage, **by_sequence[index]}


def evaluation_records(evaluation: Evaluation, *, name: str = "", most: int | None = None) -> Iterator[dict[str, Any]]:
    """One record per completion of an evaluation, on the evaluation set of this name if it has one: the fields of
    `rollout_records` that do not depend on training. The greedy completion of a problem follows its sampled ones.

    Of more than `most` problems, evenly spaced ones are recorded. They are the same in each evaluation, so that the
    completions of several steps can be compared."""
    count = len(evaluation.groups)
    kept = range(count) if most is None or count <= most else [i * count // most for i in range(most)]
    greedy = evaluation.greedy_groups
    for index in kept:
        row = ({"set": name} if name else {}) | answer_and_columns(evaluation.groups[index].prompt)
        yield from _records_of(evaluation.groups[index], row)
        if greedy is not None:
            yield from _records_of(greedy[index], row | {"greedy": True})


def _records_of(group: Group, more: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for completion, score in zip(group.completions, group.scores, strict=True):
        yield _completion_record(group, completion, score) | more


def _completion_record(group: Group, completion: Completion, score: Score) -> dict[str, Any]:
    return {
        "prompt_id": completion.prompt_id,
        **({"source": group.prompt.source} if group.prompt.source else {}),
        "sample": completion.sample,
        "prompt": group.prompt.text,
        "text": completion.text,
        "token_ids": completion.token_ids,
        # Most completions are sampled entirely, and a list of ones would only make the file larger.
        **({} if all(completion.sampled) else {"sampled": [int(own) for own in completion.sampled]}),
        "stop": completion.stop,
        **({"thinking_cut": True} if completion.thinking_cut else {}),
        **_conversation_record(completion),
        "version": completion.version,
        **({"spans": completion.spans} if completion.spans else {}),
        "status": score.status,
        "reward": score.reward,
        "correct": score.correct,
        "parts": dict(score.parts),
        **({"step_rewards": score.step_rewards} if score.step_rewards else {}),
        "notes": dict(score.notes),
        # The message of an exception may quote an API key.
        "failure": score.failure and redacted(score.failure, known_secrets()),
        "logp_sampler": _exact(completion.logp_sampler),
    }


def _conversation_record(completion: Completion) -> dict[str, Any]:
    """Where the turns of a conversation are, and what the environment made of them."""
    conversation = completion.conversation
    if conversation is None:
        return {}
    turns = [
        {"start": t.start, "end": t.end, "reward": t.reward, "calls": t.calls, "failed_calls": t.failed_calls}
        | ({"other_format": t.other_format} if t.other_format else {})
        for t in conversation.turns
    ]
    branches = [(b.start, b.parent, b.shared) for b in completion.branches]
    return {"turns": turns, "end": conversation.end, **({"branches": branches} if branches else {})}


def _sampler_experts(completion: Completion) -> dict[str, Any]:
    """The expert ids, compressed: there are several per token and layer."""
    routes = completion.routes
    if routes is None:
        return {}
    packed = base64.b64encode(zlib.compress(routes.experts)).decode()
    return {"routes": {"experts": packed, "layers": routes.layers, "top_k": routes.top_k, "width": routes.width}}


def _by_sequence(learned: LearnResult) -> list[dict[str, Any]]:
    """Old and new log-probs, sequence ratio and clipping of each sequence, or that it was not computed."""
    tokens = learned.tokens
    computed_B = (tokens.sequences.sum(learned.computed_N.double()) > 0).tolist()
    ratio_B = tokens.sequences.mean((tokens.logp_N - tokens.logp_old_N).detach()).exp().tolist()
    # Whole tensors are copied to the CPU: indexing single elements on a GPU would wait for each of them.
    old, new = _rounded(tokens.logp_old_N), _rounded(tokens.logp_N)
    ref = None if tokens.logp_ref_N is None else _rounded(tokens.logp_ref_N)
    flipped = learned.routed.flipped_N.tolist() if learned.routed else None
    clipped = learned.clipped_N.int().tolist()
    records: list[dict[str, Any]] = []
    start = 0
    lengths = tokens.sequences.length_B.long().tolist()
    for ratio, length, computed in zip(ratio_B, lengths, computed_B, strict=True):
        end = start + length
        if not computed:
            records.append({"computed": False})
            start = end
            continue
        flags = clipped[start:end]
        records.append(
            {
                "sequence_ratio": ratio,
                "clipped_fraction": sum(flags) / length,
                "clipped_tokens": flags,
                "logp_old": old[start:end],
                "logp_new": new[start:end],
                **({} if ref is None else {"logp_ref": ref[start:end]}),
                **({} if flipped is None else {"flipped_experts": flipped[start:end]}),
            }
        )
        start = end
    return records


def _exact(values: Sequence[float]) -> list[float | None]:
    """The shortest decimals that read back as the same float32, so a replay trains on bitwise identical log-probs.
    `None` for a value that is not finite."""
    # Several times as fast as the text of each number, and a step has thousands of them.
    written = orjson.dumps(np.asarray(values, dtype=np.float32), option=orjson.OPT_SERIALIZE_NUMPY)
    numbers: list[float | None] = orjson.loads(written)
    return numbers


def _rounded(values: Tensor) -> list[float]:
    """Seven decimals, about the precision of float32."""
    rounded: list[float] = values.detach().double().cpu().numpy().round(7).tolist()
    return rounded


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else NAN
