"""The numbers of a replay against autograd through the public loss, and what must hold of them whatever they are."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from made_runs import rebuilt
from torch import Tensor

import gspo
from gspo.context import LearnContext
from gspo.learner.batch import TrainBatch, selection_seed
from gspo.objectives.advantage import batch_whitened
from gspo.objectives.objective import Objective, ObjectiveWarning
from gspo.types import Group
from gspo.view.replay import gradients
from gspo.view.replay.candidates import Candidate, candidates
from gspo.view.replay.coefficients import View, coefficients
from gspo.view.replay.gradients import Direction, Gram, gram
from gspo.view.replay.measure import ReplayNumbers, _view, effective, look
from gspo.view.replay.rebuild import load_reference
from gspo.view.replay.source import open_run
from gspo.view.replay.sweep import parse_sweep

STEP, INDEX = 2, 2
SWEEPS = ["clip_high=1e-6..1:9", "clip_low=1e-6..1:9", "kl=1e-4..100:5", "entropy=1e-4..100:5"]


@dataclass
class At:
    """The run of the session, at the weights of the last mini-batch of step 2."""

    learner: LearnContext
    groups: Any
    batch: TrainBatch
    reference: Any
    view: View
    found: list[Candidate]
    numbers: ReplayNumbers
    inner: Gram
    """Of the candidates, in their order."""
    sketch: Gram
    """The same, folded."""
    independent: list[tuple[Tensor, float, dict[str, float]]] = field(default_factory=list)


@pytest.fixture(scope="session")
def at(run: Path) -> At:
    """Everything is computed at once, because the weights move on afterwards; the last mini-batch's are kept."""
    kept: list[At] = []

    def see(learner: LearnContext, recorded: Any, batch: TrainBatch, index: int) -> None:
        if index != INDEX:
            return
        reference, _ = load_reference(open_run(run), None)
        found, more = (candidates(learner.config, learner.objective, text)[0] for text in ("all", "gspo+entropy=0.01"))
        found += more[1:]
        groups = recorded.gathered.groups
        view = _view(learner, groups, batch, index, STEP, reference)
        made = [coefficients(c.objective, view) for c in found]
        directions = [Direction(logp_N=m.logp_N, entropy_N=m.entropy_N) for m in made]
        numbers = look(
            learner, groups, batch, index, step=STEP, found=found, sweeps=[parse_sweep(s) for s in SWEEPS], reference=reference,
        )  # fmt: skip
        kept.append(
            At(learner=learner, groups=groups, batch=batch, reference=reference, view=view, found=found, numbers=numbers,
               inner=gram(learner.policy, batch, index, directions), sketch=folded(learner, batch, directions))
        )  # fmt: skip
        kept[0].independent += [independent(kept[0], c.objective) for c in found]

    rebuilt(run, STEP, see)
    return kept[0]


def folded(learner: LearnContext, batch: TrainBatch, directions: list[Direction]) -> Gram:
    before, gradients.BUCKETS = gradients.BUCKETS, 1 << 14
    try:
        return gram(learner.policy, batch, INDEX, directions, held_bytes=0)
    finally:
        gradients.BUCKETS = before


# ------------------------------------------------------------------------------------------------- an independent way


def mixed_group(group: Group) -> bool:
    return len({score.reward for score in group.scores}) > 1


def independent(at: At, objective: Objective) -> tuple[Tensor, float, dict[str, float]]:
    """(gradient, loss, statistics) by padded tensors, the public functions and one backward through the whole model."""
    model, rows = at.learner.policy.model, sorted(r for micro in at.batch.plan.updates[INDEX] for r in micro.rows)
    replies, mixed = at.view.replies, {r.group for r in at.view.replies if mixed_group(at.groups[r.group])}
    counts = [i for i, r in enumerate(replies) if objective.keep == "all" or r.group in mixed]
    mine = [i for i in counts if i in rows]
    ids = [list(r.prompt.token_ids) + list(r.completion.token_ids) for r in replies]
    width = max(map(len, ids))
    padded = torch.tensor([row + [0] * (width - len(row)) for row in ids])
    starts = [len(r.prompt.token_ids) for r in replies]
    place = torch.arange(width)
    mask = torch.stack([(place >= s) & (place < len(i)) for s, i in zip(starts, ids, strict=True)])
    temperature = at.batch.temperature

    def logp_of(m: Any) -> tuple[Tensor, Tensor]:
        logits = m(input_ids=padded).logits.float() / temperature
        logp = torch.log_softmax(logits, -1)[:, :-1]
        entropy = torch.nn.functional.pad(-(logp.exp() * logp).sum(-1), (1, 0))
        return torch.nn.functional.pad(logp.gather(-1, padded[:, 1:, None]).squeeze(-1), (1, 0)), entropy

    old = torch.zeros(mask.shape).masked_scatter(mask, at.view.tokens.logp_old_N)
    sampler = torch.zeros(mask.shape)
    for i, r in enumerate(replies):
        sampler[i, mask[i]] = torch.tensor(r.completion.logp_sampler)
    with torch.no_grad():
        ref, _ = logp_of(at.reference)
    advantage = _advantage(objective, replies, counts, old, ref, mask)
    logp, entropy = logp_of(model)
    part = {"logp": logp, "logp_old": old, "advantage": advantage, "mask": mask}
    part = {k: v[mine] for k, v in part.items()}
    extra: dict[str, Any] = {"entropy": entropy[mine]}
    if objective.name in ("clip_cov", "kl_cov"):
        extra["selected"] = gspo.select_tokens(objective, **part, seed=selection_seed(at.batch, INDEX))  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ObjectiveWarning)
        out = gspo.policy_loss(objective, **part, logp_sampler=sampler[mine], logp_ref=ref[mine], **extra)
    found = torch.autograd.grad(out.loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
    flat = [torch.zeros(p.numel()) if g is None else g.flatten() for p, g in zip(model.parameters(), found, strict=True)]  # fmt: skip
    return torch.cat(flat).double(), float(out.loss.detach()), out.stats


def _advantage(objective: Objective, replies: Any, counts: list[int], old: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
    """[B, T]; replies that do not count keep 0."""
    rewards = [replies[i].score.reward + (_soft_overlong(len(replies[i].completion.token_ids)) if objective.shape == "soft_overlong" else 0.0) for i in counts]  # fmt: skip
    full = torch.zeros(mask.shape)
    if objective.advantage is not batch_whitened:
        values = gspo.group_advantage(objective, rewards, [replies[i].group for i in counts])
        for i, value in zip(counts, values.tolist(), strict=True):
            full[i] = value
        return full
    returns = torch.zeros(mask.shape, dtype=torch.float64)
    for i, reward in zip(counts, rewards, strict=True):
        for t in mask[i].nonzero().flatten().tolist():
            later = [u for u in mask[i].nonzero().flatten().tolist() if u >= t]
            returns[i, t] = reward - objective.kl * sum(float(old[i, u] - ref[i, u]) for u in later)
    flat = returns[mask]
    return torch.where(mask, (returns - flat.mean()) / flat.std(), 0.0).float()


def _soft_overlong(length: int, limit: int = 10) -> float:
    cache = limit // 5
    return 0.0 if length <= limit - cache else max(-1.0, (limit - cache - length) / cache)


# ------------------------------------------------------------------------------------------------- rows


def test_every_row_of_the_table_is_there_but_the_one_that_needs_a_critic(at: At) -> None:
    learner = at.learner
    found, left_out = candidates(learner.config, learner.objective, "all")
    assert {c.label for c in found} == {"gspo (run)", *gspo.objective_names()} - {"ppo_clip"}
    assert [x.label for x in left_out] == ["ppo_clip"]
    assert "from outside" in left_out[0].reason


def test_all_may_stand_among_others_and_nothing_is_computed_twice(at: At) -> None:
    learner = at.learner
    text = "all,grpo+clip_high=0.1,gspo+clip_low=3e-3+clip_high=4e-3,gspo+clip_high=0.5"
    found, left_out = candidates(learner.config, learner.objective, text)
    assert [c.label for c in found[-2:]] == ["grpo+clip_high=0.1", "gspo+clip_high=0.5"]
    assert len(found) == 18 + 2
    assert [(x.label, x.reason) for x in left_out[1:]] == [
        ("gspo+clip_low=3e-3+clip_high=4e-3", "it is the same as gspo (run)")
    ]


def test_gradients_are_those_of_a_backward_through_the_public_loss(at: At) -> None:
    """All inner products: the norms and every cosine."""
    rows = torch.stack([g for g, _, _ in at.independent])
    wanted = rows @ rows.T
    scale = wanted.diagonal().sqrt()
    assert (scale > 0).all()
    difference = (at.inner.inner - wanted).abs() / (scale[:, None] * scale[None, :])
    worst = divmod(int(difference.argmax()), len(rows))
    assert float(difference.max()) < 2e-4, [at.found[i].label for i in worst]


def test_losses_and_clip_shares_are_those_of_the_public_loss(at: At) -> None:
    acted = 0
    for candidate, (_, loss, stats) in zip(at.found, at.independent, strict=True):
        row = next(r for r in at.numbers.rows if r.label == candidate.label)
        assert row.loss == pytest.approx(loss, abs=2e-5, rel=2e-5), row.label
        assert row.clipped_tokens.share == pytest.approx(stats["clip_fraction_tokens"]), row.label
        assert row.clipped_replies.share == pytest.approx(stats["clip_fraction_sequences"]), row.label
        assert row.clipped_tokens.above + row.clipped_tokens.below == pytest.approx(row.clipped_tokens.share)
        acted += row.clipped_tokens.share > 0
    assert acted > 3, "the batch is one on which ranges act"


def test_the_runs_own_row_is_the_gradient_its_optimiser_found(run: Path, at: At) -> None:
    updates = rebuilt(run, STEP).learned.updates
    assert at.numbers.rows[0].label == "gspo (run)"
    assert at.numbers.grad_norm_in_run == pytest.approx(updates[INDEX].grad_norm, rel=1e-6)
    assert at.numbers.rows[0].cosine == pytest.approx(1.0)


def test_cosines_are_symmetric_ones_on_the_diagonal_and_a_gram_matrix(at: At) -> None:
    matrix = torch.tensor(at.numbers.cosines, dtype=torch.float64)
    assert torch.equal(matrix, matrix.T)
    assert torch.allclose(matrix.diagonal(), torch.ones(len(matrix), dtype=torch.float64))
    assert float(torch.linalg.eigvalsh(matrix).min()) > -1e-9
    assert [row[0] for row in at.numbers.cosines] == [r.cosine for r in at.numbers.rows]
    order = [r.cosine for r in at.numbers.rows[1:]]
    assert order == sorted(order, key=lambda c: -(c or -2))


def test_weights_are_minus_the_loss_coefficients_summed_over_a_reply(at: At) -> None:
    """By finite differences of the public loss: all of a reply's log-probabilities moved alike."""
    view, candidate = at.view, next(c for c in at.found if c.label == "rloo")
    row = next(r for r in at.numbers.rows if r.label == "rloo")
    for place, number in enumerate(sorted(view.rows)):
        advantage = row.advantages[place]
        assert advantage is not None
        # rloo: L = -1/B sum_i A_i sum_t logp_t
        length = len(view.replies[number].completion.token_ids)
        assert row.weights[place] == pytest.approx(advantage * length / len(view.rows), abs=1e-7)
        assert row.token_weights[place] == pytest.approx((advantage / len(view.rows),) * 2, abs=1e-7)
    assert candidate.objective.per == "sequence"


def test_effective_replies() -> None:
    assert effective([1.0, -1.0, 1.0, 0.0]) == pytest.approx(3)
    assert effective([5.0, 0.0]) == pytest.approx(1)
    assert effective([0.0, 0.0]) == 0
    assert effective([3.0, 1.0]) == pytest.approx(16 / 10)


def test_a_row_that_keeps_mixed_groups_sees_fewer_replies(at: At) -> None:
    by_label = {r.label: r for r in at.numbers.rows}
    mixed = sum(mixed_group(at.groups[r.group]) for i, r in enumerate(at.view.replies) if i in at.view.rows)
    assert by_label["dapo"].replies == mixed < by_label["gspo"].replies == len(at.view.rows)
    assert by_label["dapo"].weights.count(None) == len(at.view.rows) - mixed


def test_a_gradient_folded_by_a_random_hash_keeps_norms_and_cosines(at: At) -> None:
    """Within five standard errors of what is promised, and not for the reason that nothing was folded."""
    sketch: Gram = at.sketch
    error = math.sqrt(2 / (1 << 14))
    assert sketch.standard_error == pytest.approx(error)
    gaps = []
    for i in range(len(at.found)):
        assert sketch.norm(i) == pytest.approx(at.inner.norm(i), rel=2.5 * error)
        gaps += [(sketch.cosine(i, j) or 0) - (at.inner.cosine(i, j) or 0) for j in range(i)]
    assert 1e-5 < max(map(abs, gaps)) < 5 * error


# ------------------------------------------------------------------------------------------------- sweeps


@pytest.fixture
def sweep(at: At) -> Callable[[str], Any]:
    return lambda setting: next(s for s in at.numbers.sweeps if s.setting == setting)


def test_a_wider_range_clips_no_more(sweep: Callable[[str], Any]) -> None:
    high, low = sweep("clip_high"), sweep("clip_low")
    for points, side, other in ((high.points, "above", "below"), (low.points, "below", "above")):
        shares = [getattr(p.clipped_tokens, side) for p in points]
        assert shares == sorted(shares, reverse=True)
        assert shares[0] > 0 == shares[-1]
        assert len({getattr(p.clipped_tokens, other) for p in points}) == 1, "the other side is left alone"
        effective_replies = [p.effective_replies for p in points]
        assert effective_replies[-1] > effective_replies[0]
    assert (high.own, low.own) == (4e-3, 3e-3)


def test_a_growing_penalty_turns_the_gradient_away_from_the_runs(sweep: Callable[[str], Any]) -> None:
    for setting in ("kl", "entropy"):
        swept = sweep(setting)
        cosines = [p.cosine for p in swept.points]
        assert cosines == sorted(cosines, reverse=True)
        assert cosines[0] > 0.99 > 0.7 > cosines[-1]
        assert swept.own == 0
        assert {p.clipped_tokens for p in swept.points} == {swept.points[0].clipped_tokens}


def test_values_of_a_sweep_are_even_in_the_logarithm() -> None:
    values = parse_sweep("clip_high = 1e-4 .. 1e-1 : 4").values
    assert values == pytest.approx((1e-4, 1e-3, 1e-2, 1e-1))
    assert values[-1] == 1e-1
    assert len(parse_sweep("tau_pos=1..2").values) == 13
    assert parse_sweep("max_length=1..4:9").values == (1, 2, 3, 4)
