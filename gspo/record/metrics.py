"""The metrics and rollout records of a step. `record/registry.py` defines every metric.

In: the results of collecting and learning. Out: flat dictionaries that are ready to be written. Invariant: nothing here
depends on the clock. Unscored completions are counted, but excluded from every mean.
"""

from __future__ import annotations

import base64
import math
import statistics as st
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo.learner.result import LearnResult
from gspo.learner.routing_replay import RoutingStats
from gspo.objectives.loss import statistics
from gspo.objectives.objective import Objective
from gspo.objectives.ratio import MAX_LOG_RATIO
from gspo.objectives.rounding import rounding_noise
from gspo.objectives.samples import drop_reason
from gspo.redact import known_secrets, redacted
from gspo.rollout.gather import CollectResult
from gspo.types import Completion, Group, Score, Status, StopReason

NAN = float("nan")
EXTREME = math.log(2)
"""Log-ratio from which the mismatch of a token is extreme: the probabilities differ by more than a factor of 2."""
LONG = 16
"""Completions shorter than this are never called repetitive."""


def step_metrics(objective: Objective, collected: CollectResult, learned: LearnResult | None) -> dict[str, Any]:
    """All metrics of a step, except its timings and its evaluation."""
    learning = _training_metrics(objective, learned) if learned else {"tokens/trained": 0, "samples/trained": 0}
    reasons = reasons_left_out(objective, collected, learned)
    kinds = {f"samples/left_out/{kind.replace(' ', '_')}": count for kind, count in sorted(reasons.items())}
    return _sampling_metrics(collected) | kinds | learning


def reasons_left_out(objective: Objective, collected: CollectResult, learned: LearnResult | None) -> dict[str, int]:
    """Number of completions that were not trained on, by reason, most frequent first."""
    return dict(Counter(reason for *_, reason in _completions(objective, collected, learned) if reason).most_common())


def _completions(
    objective: Objective, collected: CollectResult, learned: LearnResult | None
) -> Iterator[tuple[Group, Completion, Score, int | None, str]]:
    """Every completion with its index among the trained ones (`None` if it is not among them) and its drop reason."""
    trained = {(c.group, c.sample): i for i, c in enumerate(learned.samples)} if learned else {}
    kept = len(collected.gathered.groups)
    for number, group in enumerate(collected.gathered.sampled):
        for sample, (c, s) in enumerate(zip(group.completions, group.scores, strict=True)):
            index = trained.get((number, sample))
            reason = drop_reason(c, s, objective) or ("alone" if number < kept else "not mixed")
            yield group, c, s, index, reason if index is None else ""


def _sampling_metrics(collected: CollectResult) -> dict[str, Any]:
    groups = collected.gathered.sampled
    pairs = [(c, s) for g in groups for c, s in zip(g.completions, g.scores, strict=True)]
    rewards = [s.reward for _, s in pairs if s.reward is not None]
    lengths = [c.sampled_count for c, _ in pairs]
    correct = [s.correct for _, s in pairs if s.correct is not None]
    return {
        "reward/mean": _mean(rewards),
        "reward/std": st.pstdev(rewards) if rewards else NAN,
        "reward/correct_fraction": _mean(correct),
        **_parts(pairs),
        "groups/sampled": len(groups),
        "groups/uniform_fraction": _mean([g.uniform for g in groups]),
        "groups/discarded": len(collected.gathered.discarded),
        "samples/unscored": sum(s.status is Status.UNSCORED for _, s in pairs),
        **_failures([s for _, s in pairs]),
        **_notes([s for _, s in pairs]),
        "length/mean": _mean(lengths),
        **_quantiles(lengths),
        "length/max": max(lengths, default=0),
        "length/truncated_fraction": _mean([c.stop is StopReason.LENGTH for c, _ in pairs]),
        "length/repetitive_fraction": _mean([_repetitive(c) for c, _ in pairs]),
        "tokens/generated": collected.tokens,
        **_decoding(collected),
    }


def _quantiles(lengths: Sequence[int]) -> dict[str, float]:
    names = {"length/p10": 0.1, "length/median": 0.5, "length/p90": 0.9}
    return {name: float(np.quantile(lengths, q)) if lengths else NAN for name, q in names.items()}


def _decoding(collected: CollectResult) -> dict[str, Any]:
    """How full the decoding batches of the engine were."""
    decoded = collected.decoded
    if decoded is None or not decoded.steps:
        return {}
    return {
        "sampler/steps": decoded.steps,
        "sampler/live_mean": collected.tokens / decoded.steps,
        "padding/sampler": 1 - collected.tokens / decoded.rows,
    }


def _repetitive(completion: Completion) -> bool:
    """Whether one token makes up most of a completion."""
    most = max(Counter(completion.sampled_ids).values(), default=0)
    return completion.sampled_count >= LONG and most > 0.8 * completion.sampled_count


def _parts(pairs: Sequence[tuple[Completion, Score]]) -> dict[str, float]:
    names = sorted({name for _, s in pairs for name in s.parts})
    if len(names) < 2:
        return {}
    values = {name: [v for _, s in pairs if (v := s.parts.get(name)) is not None] for name in names}
    return {f"reward/part/{name}": _mean(v) for name, v in values.items()}


def _failures(scores: Sequence[Score]) -> dict[str, int]:
    """Number of unscored completions, by kind of failure."""
    kinds = Counter(s.failure.partition(":")[0] for s in scores if s.failure)
    return {f"samples/unscored/{kind}": kinds[kind] for kind in sorted(kinds)}


def _notes(scores: Sequence[Score]) -> dict[str, float]:
    """Share of the completions that a reward function has tagged with each note."""
    counts = Counter((name, word) for s in scores for name, words in s.notes.items() for word in set(words))
    return {f"reward/note/{name}/{word}": n / len(scores) for (name, word), n in sorted(counts.items())}


def _training_metrics(objective: Objective, learned: LearnResult) -> dict[str, Any]:
    stats = statistics(objective, learned.tokens, learned.ratio_N, learned.clipped_N)
    applied = [u for u in learned.updates if u.applied]
    metrics = {
        "loss/policy": _mean([float(x.policy) for x in learned.losses]),
        "loss/kl": _mean([float(x.kl) for x in learned.losses]),
        "loss/entropy": _mean([float(x.entropy) for x in learned.losses]),
        "grad/norm": _mean([u.grad_norm for u in learned.updates]),
        "grad/skipped": len(learned.updates) - len(applied),
        "learning_rate": learned.updates[-1].learning_rate,
        "clip/fraction_tokens": stats["clip_fraction_tokens"],
        "clip/fraction_sequences": stats["clip_fraction_sequences"],
        "ratio/mean": stats["ratio_mean"],
        "ratio/max": stats["ratio_max"],
        "ratio/token_log_std": stats["ratio_token_log_std"],
        "ratio/sequence_log_std": stats["ratio_sequence_log_std"],
        "kl/old_new": stats["kl_old_new"],
        **mismatch(learned.log_rho_M),
        "entropy/mean": float(learned.entropy_M.mean()),
        "advantage/std": float(learned.advantage_B.std(correction=0)),
        "tokens/trained": len(learned.ratio_N),
        "samples/trained": len(learned.samples),
        "padding/learner": learned.positions.empty / learned.positions.computed,
        "padding/saved": 1 - learned.positions.computed / learned.positions.padded,
    }
    metrics |= _shaping(learned) if objective.shape == "soft_overlong" else {}
    if clip_range := objective.trust_region.clip_range:
        metrics |= {"clip/low": clip_range[0], "clip/high": clip_range[1]}
    metrics |= {"kl/ref": stats["kl_ref"]} if "kl_ref" in stats else {}
    metrics |= _noise(objective, learned)
    return metrics | (_routing(learned.routed) if learned.routed else {})


def _shaping(learned: LearnResult) -> dict[str, float]:
    """The penalty on long completions."""
    penalties = [float(r.score.reward or 0) - r.reward for r in learned.samples]
    return {"reward/length_penalty": _mean(penalties), "length/punished_fraction": _mean([p > 0 for p in penalties])}


def mismatch(log_rho_M: Tensor) -> dict[str, float]:
    """How far the engine's probabilities mu are from the learner's pi_old, over the tokens that both computed."""
    # In float64: k3 and chi2 are differences of nearly equal numbers, which float32 would round away.
    log_rho_M = log_rho_M.double()
    rho_M = log_rho_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return {
        "mismatch/abs_mean": float(log_rho_M.abs().mean()),
        "mismatch/abs_max": float(log_rho_M.abs().max()),
        "mismatch/k1": -float(log_rho_M.mean()),
        "mismatch/k3": float((torch.expm1(log_rho_M.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) - log_rho_M).mean()),
        "mismatch/chi2": float((rho_M.square() - 1).mean()),
        "mismatch/ess": float(rho_M.mean().square() / rho_M.square().mean()),
        "mismatch/extreme_fraction": float((log_rho_M.abs() > EXTREME).double().mean()),
    }


def _noise(objective: Objective, learned: LearnResult) -> dict[str, float]:
    """Rounding noise of the importance ratio, if a clip range can act on it.

    With one update per batch the ratio is exactly 1, however coarse the rounding."""
    if learned.rounding_N is None or len(learned.updates) < 2:
        return {}
    noise = rounding_noise(objective, learned.tokens.sequences, learned.rounding_N)
    return {} if noise is None else {"noise/log_ratio": noise.log_ratio, "noise/beyond_clip": noise.beyond_clip}


def _routing(routed: RoutingStats) -> dict[str, Any]:
    """Share of the expert choices that changed, and how evenly the experts are used."""
    # Update 0 uses the weights of the old policy, so its routers choose the old experts: there is nothing to measure.
    after_N = routed.update_N > 0
    sampler = routed.sampler_N[routed.sampler_N >= 0]
    first = routed.native_N[routed.update_N == 1]
    last = routed.native_N[routed.update_N == routed.update_N.max()]
    metrics = {
        "routing/flip_fraction": _share(routed.flipped_N[after_N], routed.choices),
        "routing/flip_fraction_first": _share(first, routed.choices),
        "routing/flip_fraction_last": _share(last, routed.choices),
        "routing/flip_fraction_sampler": _share(sampler, routed.choices),
    }
    if routed.replayed:
        metrics["routing/flip_fraction_native"] = _share(routed.native_N[after_N], routed.choices)
    share_LE = routed.load_LE.double() / routed.load_LE.sum(-1, keepdim=True)
    entropy_L = torch.special.entr(share_LE).sum(-1) / math.log(share_LE.shape[1])
    busiest_L = share_LE.amax(-1) * share_LE.shape[1]
    metrics |= {"routing/load_entropy": float(entropy_L.mean()), "routing/load_max": float(busiest_L.max())}
    for layer, (entropy, busiest) in enumerate(zip(entropy_L.tolist(), busiest_L.tolist(), strict=True)):
        metrics |= {f"routing/load_entropy/{layer}": entropy, f"routing/load_max/{layer}": busiest}
    return metrics | ({"loss/balance": _mean(routed.balance_losses)} if routed.balance_losses else {})


def _share(counts: Tensor, of: int) -> float:
    return float(counts.double().mean() / of) if len(counts) else NAN


def rollout_records(
    objective: Objective, collected: CollectResult, learned: LearnResult | None, *, routes: bool
) -> Iterator[dict[str, Any]]:
    """One record per completion: whether it was trained on, and its log-probs under sampler, old and new policy.

    With `routes`, a record also holds the sampler's experts, which routing replay trained with."""
    by_sequence = _by_sequence(learned) if learned else []
    for group, c, s, index, reason in _completions(objective, collected, learned):
        record = _completion_record(group, c, s) | (_sampler_experts(c) if routes else {})
        if index is None or learned is None:
            yield record | {"trained": False, "left_out": reason}
        else:
            reward = float(learned.reward_B[index])
            advantage = float(learned.advantage_B[index])
            yield record | {"trained": True, "shaped_reward": reward, "advantage": advantage, **by_sequence[index]}


def _completion_record(group: Group, completion: Completion, score: Score) -> dict[str, Any]:
    return {
        "prompt_id": completion.prompt_id,
        "sample": completion.sample,
        "prompt": group.prompt.text,
        "text": completion.text,
        "token_ids": completion.token_ids,
        **({} if all(completion.sampled) else {"sampled": [int(own) for own in completion.sampled]}),
        "stop": completion.stop,
        "version": completion.version,
        **({"spans": completion.spans} if completion.spans else {}),
        "status": score.status,
        "reward": score.reward,
        "correct": score.correct,
        "parts": dict(score.parts),
        "notes": dict(score.notes),
        "failure": score.failure and redacted(score.failure, known_secrets()),
        "logp_sampler": _exact(completion.logp_sampler),
    }


def _sampler_experts(completion: Completion) -> dict[str, Any]:
    """The expert ids, compressed: there are several per token and layer."""
    routes = completion.routes
    if routes is None:
        return {}
    packed = base64.b64encode(zlib.compress(routes.experts)).decode()
    return {"routes": {"experts": packed, "layers": routes.layers, "top_k": routes.top_k, "width": routes.width}}


def _by_sequence(learned: LearnResult) -> list[dict[str, Any]]:
    """Old and new log-probs, sequence ratio and clipping of each sequence."""
    tokens = learned.tokens
    ratio_B = tokens.sequences.mean((tokens.logp_N - tokens.logp_old_N).detach()).exp().tolist()
    ref = None if tokens.logp_ref_N is None else tokens.logp_ref_N.tolist()
    flipped = learned.routed.flipped_N.tolist() if learned.routed else None
    old = tokens.logp_old_N.tolist()
    new = tokens.logp_N.tolist()
    clipped = learned.clipped_N.tolist()
    records = []
    start = 0
    for ratio, length in zip(ratio_B, tokens.sequences.length_B.long().tolist(), strict=True):
        end = start + length
        flags = [int(c) for c in clipped[start:end]]
        records.append(
            {
                "sequence_ratio": ratio,
                "clipped_fraction": sum(flags) / length,
                "clipped_tokens": flags,
                "logp_old": _rounded(old[start:end]),
                "logp_new": _rounded(new[start:end]),
                **({} if ref is None else {"logp_ref": _rounded(ref[start:end])}),
                **({} if flipped is None else {"flipped_experts": flipped[start:end]}),
            }
        )
        start = end
    return records


def _exact(values: Sequence[float]) -> list[float]:
    """The shortest decimals that read back as the same float32, so a replay trains on bitwise identical log-probs."""
    return [float(str(v)) for v in np.asarray(values, dtype=np.float32)]


def _rounded(values: Sequence[float]) -> list[float]:
    """Seven decimals, about the precision of float32."""
    return [round(v, 7) for v in values]


def _mean(values: Sequence[float | bool | None]) -> float:
    present = [float(v) for v in values if v is not None]
    return sum(present) / len(present) if present else NAN
