"""Two ranks with sharded weights (FSDP2, gloo) compute the updates of one rank, and can exchange states with it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_learner import CASES, SETTINGS, Rank, build, plan
from torch import Tensor

from gspo.learner.forward import plan_logprobs

pytestmark = pytest.mark.slow  # whole runs in several processes

EXACT = [name for name, case in CASES.items() if case.dtype == torch.float32]
Saved = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """What one rank and two ranks have written."""
    folder = tmp_path_factory.mktemp("ranks")
    one = Rank(0, 1, folder)
    for name in CASES:
        one.run(name)
    program = [sys.executable, str(Path(__file__).with_name("sharded_learner.py"))]
    children = [
        subprocess.Popen([*program, str(rank), "2", str(folder), *CASES], stderr=subprocess.PIPE) for rank in (0, 1)
    ]
    for child in children:
        _, errors = child.communicate(timeout=600)
        assert child.returncode == 0, errors.decode()[-3000:]
    return lambda name, rank=0: torch.load(folder / f"{name}-{rank}.pt", weights_only=False)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("stage", ["", "-resumed"], ids=["from the start", "resumed"])
def test_gradient_norm_and_weights_are_those_of_one_rank(saved: Saved, name: str, stage: str) -> None:
    one, two = saved(f"{name}-1{stage}"), saved(f"{name}-2{stage}")
    for (update, gradient), (expected, whole) in zip(two["updates"], one["updates"], strict=True):
        assert update.applied == expected.applied
        assert update.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
        assert update.grad_norm > SETTINGS.max_grad_norm, "clipping must act on the norm of all ranks"
        assert update.ess == pytest.approx(expected.ess, rel=1e-9)
        assert update.ess < 0.9
        assert update.learning_rate == pytest.approx(SETTINGS.learning_rate * update.ess**0.5, rel=1e-9)
        assert distance(gradient, whole) < 1e-4
    assert distance(two["weights"], one["weights"]) < 1e-4
    assert distance(two["state"], one["state"]) < 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("stage", ["", "-resumed"], ids=["from the start", "resumed"])
def test_16_bit_shards_have_float32_gradients_and_masters(saved: Saved, stage: str, dtype: str) -> None:
    one, two = saved(f"{dtype}-1{stage}"), saved(f"{dtype}-2{stage}")
    # The first update only: AdamW turns rounding of a small gradient into a full step, so later ones differ.
    (update, gradient), (expected, whole) = two["updates"][0], one["updates"][0]
    assert update.grad_norm == pytest.approx(expected.grad_norm, rel=0.02)
    assert {g.dtype for g in gradient.values()} == {torch.float32}
    assert distance(gradient, whole) < 0.05
    for name, weight in two["weights"].items():
        assert weight.dtype == getattr(torch, dtype)
        assert torch.equal(weight, two["state"][f"master/{name}"].to(weight.dtype)), name


def test_ranks_agree_on_the_loss_scale(saved: Saved) -> None:
    mine, other = saved("float16-2", 0), saved("float16-2", 1)
    first = mine["updates"][0][0]
    assert first.overflows > 0
    assert first.applied
    assert [u.loss_scale for u, _ in mine["updates"]] == [u.loss_scale for u, _ in other["updates"]]
    assert torch.equal(mine["state"]["loss_scale"], other["state"]["loss_scale"])


def test_log_probs_of_parts_of_a_plan_add_up_to_those_of_the_whole() -> None:
    model, whole = build(CASES["tied"], seed=0), plan()
    parts = [replace(whole, updates=tuple(micros[rank::2] for micros in whole.updates)) for rank in (0, 1)]
    first, second, expected = (plan_logprobs(model, p, 0.7, torch.device("cpu")) for p in (*parts, whole))
    for values in zip(first, second, expected, strict=True):
        assert torch.equal(values[0] + values[1], values[2])


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_see_the_same(saved: Saved, name: str) -> None:
    first, second = saved(f"{name}-2", 0), saved(f"{name}-2", 1)
    assert [update for update, _ in first["updates"]] == [update for update, _ in second["updates"]]
    for key in ("weights", "state"):
        assert all(torch.equal(value, second[key][n]) for n, value in first[key].items()), key


@pytest.mark.parametrize("name", CASES)
def test_the_state_of_one_rank_loads_on_two_and_back(saved: Saved, name: str) -> None:
    """Every tensor is bitwise the same after one rank has written it, two have loaded and written it."""
    written, loaded = saved(f"{name}-1"), saved(f"{name}-2-loaded")
    for key in ("weights", "state"):
        assert written[key].keys() == loaded[key].keys()
        assert all(torch.equal(value, loaded[key][n]) for n, value in written[key].items()), key
    assert saved(f"{name}-2")["state"].keys() == written["state"].keys()


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative distance of a tensor."""
    assert found.keys() == expected.keys()
    return max(float((found[n] - e).norm() / e.norm().clamp(min=1e-9)) for n, e in expected.items())
