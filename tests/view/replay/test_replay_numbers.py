"""The numbers of a replay against autograd through the public loss, and their invariants."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_runs import rebuild_step
from torch import Tensor

import gspo
from gspo.context import LearnContext
from gspo.errors import ConfigError
from gspo.learner.batch import TrainBatch, selection_seed
from gspo.objectives.advantage import batch_whitened
from gspo.objectives.objective import Objective, ObjectiveWarning, settings_of
from gspo.types import Group
from gspo.view.replay import gradients
from gspo.view.replay.candidates import Candidate, candidates, for_rewards
from gspo.view.replay.coefficients import MiniBatchView, coefficients
from gspo.view.replay.gradients import Direction, Gram, gram
from gspo.view.replay.measure import ReplayNumbers, _view, effective_count, measure
from gspo.view.replay.rebuild import load_reference
from gspo.view.replay.source import open_run
from gspo.view.replay.sweep import parse_sweep

STEP = 2
INDEX = 2
SWEEPS = ["clip_high=1e-6..1:9", "clip_low=1e-6..1:9", "kl=1e-4..100:5", "entropy=1e-4..100:5"]


@dataclass
class Snapshot:
    """The session's run at the weights of the last mini-batch of step 2."""

    learner: LearnContext
    groups: Any
    batch: TrainBatch
    reference: Any
    view: MiniBatchView
    found: list[Candidate]
    numbers: ReplayNumbers
    inner: Gram
    """Of the candidates, in their order."""
    sketch: Gram
    """The same, from a count sketch."""
    independent: list[tuple[Tensor, float, dict[str, float]]] = field(default_factory=list)


@pytest.fixture(scope="session")
def at(run: Path) -> Snapshot:
    """Everything is computed inside the callback, because the update that follows changes the weights."""
    snapshots: list[Snapshot] = []

    def before_update(learner: LearnContext, recorded: Any, batch: TrainBatch, index: int) -> None:
        if index != INDEX:
            return
        reference, _ = load_reference(open_run(run), None)
        found, more = (candidates(learner.config, learner.objective, text)[0] for text in ("all", "gspo+entropy=0.01"))
        found += more[1:]
        groups = recorded.rollouts.groups
        view = _view(learner, groups, batch, index, STEP, reference)
        by_candidate = [coefficients(c.objective, view) for c in found]
        directions = [Direction(logp_N=c.logp_N, entropy_N=c.entropy_N) for c in by_candidate]
        sweeps = [parse_sweep(text) for text in SWEEPS]
        numbers = measure(learner, groups, batch, index, step=STEP, found=found, sweeps=sweeps, reference=reference)
        snapshot = Snapshot(
            learner=learner,
            groups=groups,
            batch=batch,
            reference=reference,
            view=view,
            found=found,
            numbers=numbers,
            inner=gram(learner.policy, batch, index, directions),
            sketch=sketched_gram(learner, batch, directions),
        )
        snapshot.independent += [independent(snapshot, c.objective) for c in found]
        snapshots.append(snapshot)

    rebuild_step(run, STEP, before_update)
    return snapshots[0]


def sketched_gram(learner: LearnContext, batch: TrainBatch, directions: list[Direction]) -> Gram:
    before, gradients.BUCKETS = gradients.BUCKETS, 1 << 14
    try:
        return gram(learner.policy, batch, INDEX, directions, exact_bytes=0)
    finally:
        gradients.BUCKETS = before


# ------------------------------------------------------------------------------------------------- reference


def mixed_group(group: Group) -> bool:
    return len({score.reward for score in group.scores}) > 1


def independent(at: Snapshot, objective: Objective) -> tuple[Tensor, float, dict[str, float]]:
    """(gradient, loss, statistics) with padded tensors, the public functions and one backward pass."""
    model = at.learner.policy.model
    rows = sorted(r for micro in at.batch.plan.updates[INDEX] for r in micro.sequence_ids)
    samples = at.view.samples
    mixed = {s.group for s in samples if mixed_group(at.groups[s.group])}
    trainable = [i for i, s in enumerate(samples) if objective.keep == "all" or s.group in mixed]
    in_mini_batch = [i for i in trainable if i in rows]
    ids = [list(s.prompt.token_ids) + list(s.completion.token_ids) for s in samples]
    width = max(map(len, ids))
    padded = torch.tensor([row + [0] * (width - len(row)) for row in ids])
    starts = [len(s.prompt.token_ids) for s in samples]
    position = torch.arange(width)
    mask = torch.stack([(position >= s) & (position < len(i)) for s, i in zip(starts, ids, strict=True)])
    temperature = at.batch.temperature

    def logp_of(m: Any) -> tuple[Tensor, Tensor]:
        logits = m(input_ids=padded).logits.float() / temperature
        logp = torch.log_softmax(logits, -1)[:, :-1]
        entropy = torch.nn.functional.pad(-(logp.exp() * logp).sum(-1), (1, 0))
        return torch.nn.functional.pad(logp.gather(-1, padded[:, 1:, None]).squeeze(-1), (1, 0)), entropy

    old = torch.zeros(mask.shape).masked_scatter(mask, at.view.tokens.logp_old_N)
    sampler = torch.zeros(mask.shape)
    for i, s in enumerate(samples):
        sampler[i, mask[i]] = torch.tensor(s.completion.logp_sampler)
    with torch.no_grad():
        ref, _ = logp_of(at.reference)
    advantage = _advantage(objective, samples, trainable, old, ref, mask)
    logp, entropy = logp_of(model)
    inputs = {"logp": logp, "logp_old": old, "advantage": advantage, "mask": mask}
    inputs = {k: v[in_mini_batch] for k, v in inputs.items()}
    extra: dict[str, Any] = {"entropy": entropy[in_mini_batch]}
    if objective.name in ("clip_cov", "kl_cov"):
        seed = selection_seed(at.batch, INDEX)
        extra["selected"] = gspo.select_tokens(objective, **inputs, seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ObjectiveWarning)
        out = gspo.policy_loss(
            objective, **inputs, logp_sampler=sampler[in_mini_batch], logp_ref=ref[in_mini_batch], **extra
        )
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(out.loss, parameters, allow_unused=True)
    flat = [torch.zeros(p.numel()) if g is None else g.flatten() for p, g in zip(parameters, found, strict=True)]
    return torch.cat(flat).double(), float(out.loss.detach()), out.stats


def _advantage(
    objective: Objective, samples: Any, trainable: list[int], old: Tensor, ref: Tensor, mask: Tensor
) -> Tensor:
    """[B, T]; 0 for completions that the objective does not train on."""
    rewards = [_shaped_reward(objective, samples[i]) for i in trainable]
    full = torch.zeros(mask.shape)
    if objective.advantage is not batch_whitened:
        values = gspo.group_advantage(objective, rewards, [samples[i].group for i in trainable])
        for i, value in zip(trainable, values.tolist(), strict=True):
            full[i] = value
        return full
    returns = torch.zeros(mask.shape, dtype=torch.float64)
    for i, reward in zip(trainable, rewards, strict=True):
        for t in mask[i].nonzero().flatten().tolist():
            later = [u for u in mask[i].nonzero().flatten().tolist() if u >= t]
            returns[i, t] = reward - objective.kl * sum(float(old[i, u] - ref[i, u]) for u in later)
    flat = returns[mask]
    return torch.where(mask, (returns - flat.mean()) / flat.std(), 0.0).float()


def _shaped_reward(objective: Objective, sample: Any) -> float:
    reward: float = sample.score.reward
    if "soft_overlong" in objective.shape:
        reward += _soft_overlong(len(sample.completion.token_ids))
    return reward


def _soft_overlong(length: int, limit: int = 10) -> float:
    cache = limit // 5
    return 0.0 if length <= limit - cache else max(-1.0, (limit - cache - length) / cache)


# ------------------------------------------------------------------------------------------------- rows


def test_all_objectives_are_candidates_except_the_one_that_needs_a_critic(at: Snapshot) -> None:
    learner = at.learner
    found, skipped = candidates(learner.config, learner.objective, "all")
    assert {c.label for c in found} == {"gspo (run)", *gspo.objective_names()} - {"ppo_clip"}
    assert [s.label for s in skipped] == ["ppo_clip"]
    assert "from a critic" in skipped[0].reason


def test_objectives_that_a_step_has_no_rewards_for_are_named(at: Snapshot) -> None:
    """A penalty for a call of a tool makes rewards negative, and MaxRL divides by their mean."""
    learner = at.learner
    found, _ = candidates(learner.config, learner.objective, "all")
    assert for_rewards(found, at.groups) == (found, [])
    scores = [replace(s, reward=-0.5) for s in at.groups[0].scores]
    kept, skipped = for_rewards(found, [replace(at.groups[0], scores=scores), *at.groups[1:]])
    assert [(s.label, s.reason) for s in skipped] == [
        ("maxrl", "it needs rewards of 0 or more, and one of this step is -0.5")
    ]
    assert len(kept) == len(found) - 1


def test_all_can_be_combined_with_others_and_nothing_is_computed_twice(at: Snapshot) -> None:
    learner = at.learner
    text = "all,grpo+clip_high=0.1,gspo+clip_low=3e-3+clip_high=4e-3,gspo+clip_high=0.5"
    found, skipped = candidates(learner.config, learner.objective, text)
    assert [c.label for c in found[-2:]] == ["grpo+clip_high=0.1", "gspo+clip_high=0.5"]
    assert len(found) == len(gspo.objective_names()) + 2
    assert [(s.label, s.reason) for s in skipped[1:]] == [
        ("gspo+clip_low=3e-3+clip_high=4e-3", "it is the same as gspo (run)")
    ]


def test_an_objective_of_the_user_can_be_a_candidate(at: Snapshot, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    lines = (
        "import gspo",
        "from gspo.objectives.advantage import centered",
        "from gspo.objectives.aggregate import ConstantLength",
        "from gspo.objectives.ratio import token",
        "from gspo.objectives.trust_region import Clip",
        "parts = dict(advantage=centered, ratio=token, aggregate=ConstantLength())",
        "mine = gspo.Objective(name='mine', trust_region=Clip(clip_low=0.2, clip_high=0.2), **parts)",
    )
    file.write_text("\n".join(lines), encoding="utf-8")
    learner = at.learner
    found, _ = candidates(learner.config, learner.objective, f"{file}:mine+clip_high=0.3")
    assert [c.label for c in found] == ["gspo (run)", f"{file}:mine+clip_high=0.3"]
    settings = settings_of(found[1].objective)
    # As in a run, the limit on completions is the constant length.
    assert settings["clip_high"] == 0.3
    assert settings["max_length"] == learner.config.rollout.max_tokens
    with pytest.raises(ConfigError, match=r"no objective 'mine'; .* your own as file.py:name"):
        candidates(learner.config, learner.objective, "mine")


def test_gradients_equal_a_backward_pass_through_the_public_loss(at: Snapshot) -> None:
    """All inner products: the norms and every cosine."""
    rows = torch.stack([g for g, _, _ in at.independent])
    wanted = rows @ rows.T
    scale = wanted.diagonal().sqrt()
    assert (scale > 0).all()
    difference = (at.inner.inner - wanted).abs() / (scale[:, None] * scale[None, :])
    worst = divmod(int(difference.argmax()), len(rows))
    assert float(difference.max()) < 2e-4, [at.found[i].label for i in worst]


def test_losses_and_clip_fractions_equal_those_of_the_public_loss(at: Snapshot) -> None:
    clipping = 0
    for candidate, (_, loss, stats) in zip(at.found, at.independent, strict=True):
        row = next(r for r in at.numbers.rows if r.label == candidate.label)
        assert row.loss == pytest.approx(loss, abs=2e-5, rel=2e-5), row.label
        assert row.clipped_tokens.share == pytest.approx(stats["clip_fraction_tokens"]), row.label
        assert row.clipped_completions.share == pytest.approx(stats["clip_fraction_sequences"]), row.label
        assert row.clipped_tokens.above + row.clipped_tokens.below == pytest.approx(row.clipped_tokens.share)
        clipping += row.clipped_tokens.share > 0
    assert clipping > 3, "clip ranges must act on the batch"


def test_the_runs_own_row_has_the_gradient_norm_of_its_optimizer(run: Path, at: Snapshot) -> None:
    updates = rebuild_step(run, STEP).learned.updates
    assert at.numbers.rows[0].label == "gspo (run)"
    assert at.numbers.grad_norm_in_run == pytest.approx(updates[INDEX].grad_norm, rel=1e-6)
    assert at.numbers.rows[0].cosine == pytest.approx(1.0)


def test_cosines_are_symmetric_and_positive_semidefinite_with_a_unit_diagonal(at: Snapshot) -> None:
    matrix = torch.tensor(at.numbers.cosines, dtype=torch.float64)
    assert torch.equal(matrix, matrix.T)
    assert torch.allclose(matrix.diagonal(), torch.ones(len(matrix), dtype=torch.float64))
    assert float(torch.linalg.eigvalsh(matrix).min()) > -1e-9
    assert [row[0] for row in at.numbers.cosines] == [r.cosine for r in at.numbers.rows]
    order = [r.cosine for r in at.numbers.rows[1:]]
    assert order == sorted(order, key=lambda c: -(c or -2))


def test_weights_are_minus_the_loss_coefficients_summed_over_a_completion(at: Snapshot) -> None:
    """RLOO has the closed form L = -1/B sum_i A_i sum_t logp_t."""
    view = at.view
    candidate = next(c for c in at.found if c.label == "rloo")
    row = next(r for r in at.numbers.rows if r.label == "rloo")
    for index, number in enumerate(sorted(view.rows)):
        advantage = row.advantages[index]
        assert advantage is not None
        length = len(view.samples[number].completion.token_ids)
        assert row.weights[index] == pytest.approx(advantage * length / len(view.rows), abs=1e-7)
        assert row.token_weights[index] == pytest.approx((advantage / len(view.rows),) * 2, abs=1e-7)
    assert candidate.objective.advantage_per == "sequence"


def test_effective_number_of_completions() -> None:
    assert effective_count([1.0, -1.0, 1.0, 0.0]) == pytest.approx(3)
    assert effective_count([5.0, 0.0]) == pytest.approx(1)
    assert effective_count([0.0, 0.0]) == 0
    assert effective_count([3.0, 1.0]) == pytest.approx(16 / 10)


def test_an_objective_that_keeps_only_mixed_groups_trains_on_fewer_completions(at: Snapshot) -> None:
    by_label = {r.label: r for r in at.numbers.rows}
    mixed = sum(mixed_group(at.groups[s.group]) for i, s in enumerate(at.view.samples) if i in at.view.rows)
    assert by_label["dapo"].completions == mixed < by_label["gspo"].completions == len(at.view.rows)
    assert by_label["dapo"].weights.count(None) == len(at.view.rows) - mixed


def test_a_count_sketch_preserves_norms_and_cosines(at: Snapshot) -> None:
    """Within five standard errors; the lower bound shows that the sketch was used at all."""
    sketch: Gram = at.sketch
    error = math.sqrt(2 / (1 << 14))
    assert sketch.standard_error == pytest.approx(error)
    differences = []
    for i in range(len(at.found)):
        assert sketch.norm(i) == pytest.approx(at.inner.norm(i), rel=2.5 * error)
        differences += [(sketch.cosine(i, j) or 0) - (at.inner.cosine(i, j) or 0) for j in range(i)]
    assert 1e-5 < max(map(abs, differences)) < 5 * error


# ------------------------------------------------------------------------------------------------- sweeps


@pytest.fixture
def sweep(at: Snapshot) -> Callable[[str], Any]:
    return lambda setting: next(s for s in at.numbers.sweeps if s.setting == setting)


def test_a_wider_clip_range_never_clips_more(sweep: Callable[[str], Any]) -> None:
    high = sweep("clip_high")
    low = sweep("clip_low")
    for points, side, other in ((high.points, "above", "below"), (low.points, "below", "above")):
        shares = [getattr(p.clipped_tokens, side) for p in points]
        assert shares == sorted(shares, reverse=True)
        assert shares[0] > 0 == shares[-1]
        assert len({getattr(p.clipped_tokens, other) for p in points}) == 1, "the other side must not change"
        effective_completions = [p.effective_completions for p in points]
        assert effective_completions[-1] > effective_completions[0]
    assert (high.own, low.own) == (4e-3, 3e-3)


def test_a_growing_penalty_decreases_the_cosine_to_the_run(sweep: Callable[[str], Any]) -> None:
    for setting in ("kl", "entropy"):
        result = sweep(setting)
        cosines = [p.cosine for p in result.points]
        assert cosines == sorted(cosines, reverse=True)
        assert cosines[0] > 0.99 > 0.7 > cosines[-1]
        assert result.own == 0
        assert {p.clipped_tokens for p in result.points} == {result.points[0].clipped_tokens}


def test_values_of_a_sweep_are_log_spaced() -> None:
    values = parse_sweep("clip_high = 1e-4 .. 1e-1 : 4").values
    assert values == pytest.approx((1e-4, 1e-3, 1e-2, 1e-1))
    assert values[-1] == 1e-1
    assert len(parse_sweep("tau_pos=1..2").values) == 13
    assert parse_sweep("max_length=1..4:9").values == (1, 2, 3, 4)
