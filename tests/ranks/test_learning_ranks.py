"""Two and four ranks with sharded weights (FSDP2, gloo) learn as one process: objectives, turns, MoE, LoRA, replay."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from learning_rank import BROKEN, CASES, CONTEXT_CASES

from gspo.learner.plan import make_plan
from gspo.model.micro_batch import TokenSequence
from gspo.ranks.group import Ranks

Saved = Callable[[str, tuple[int, int], int], dict[str, Any]]
"""(case, (ranks, context_parallel), rank) -> what this rank has written."""
PROGRAM = Path(__file__).with_name("learning_rank.py")
FAST = {
    (1, 1): (
        "gspo",
        "dapo",
        "clip_cov",
        "reinforce_pp",
        "kl",
        "uniform",
        "drift",
        "padded",
        "branches",
        "lora",
        "moe replay",
        "moe balance",
    ),
}
"""Cases of the fast tests by layout. The slow tests have all, also on four ranks and with context parallelism."""
FAST[2, 1] = FAST[1, 1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """What the ranks of a layout have written; they run when it is first asked for."""
    folder = tmp_path_factory.mktemp("ranks")
    done: set[tuple[tuple[int, int], bool]] = set()

    def read(name: str, layout: tuple[int, int], rank: int) -> dict[str, Any]:
        fast = name in BROKEN or name in FAST.get(layout, ())
        if (layout, fast) not in done:
            cases = CASES if layout[1] == 1 else CONTEXT_CASES
            chosen = [case for case in cases if (case in FAST.get(layout, ())) == fast]
            _run(folder, *layout, [*chosen, *(BROKEN if fast and layout[1] == 1 else ())])
            done.add((layout, fast))
        file = folder / f"{name}-{layout[0]}-{layout[1]}-{rank}.pt"
        values: dict[str, Any] = torch.load(file, weights_only=True)
        return values

    return read


def _run(folder: Path, count: int, context: int, cases: Sequence[str]) -> None:
    arguments = [str(count), str(context), folder, *cases]
    for store in folder.glob(f"store-{count}-{context}"):
        store.unlink()  # of an earlier set of cases
    children = [
        subprocess.Popen([sys.executable, PROGRAM, str(rank), *arguments], stderr=subprocess.PIPE, text=True)
        for rank in range(count)
    ]
    for child in children:
        _, errors = child.communicate(timeout=900)
        assert child.returncode == 0, errors[-3000:]


def _layouts() -> pytest.MarkDecorator:
    """Cases and layouts (ranks x context_parallel)."""
    plain = [(name, (count, 1)) for name in CASES for count in (2, 4)]
    divided = [(name, layout) for name in CONTEXT_CASES for layout in ((2, 2), (4, 2))]
    params = [
        pytest.param(
            name,
            layout,
            marks=[] if name in FAST.get(layout, ()) else [pytest.mark.slow],
            id=f"{name}-{layout[0]}x{layout[1]}",
        )
        for name, layout in (*plain, *divided)
    ]
    return pytest.mark.parametrize(("name", "layout"), params)


@_layouts()
def test_gradients_are_those_of_one_process(saved: Saved, name: str, layout: tuple[int, int]) -> None:
    one, several = saved(name, (1, 1), 0)["gradients"], saved(name, layout, 0)["gradients"]
    assert sum(float(gradient.norm()) for gradient in one) > 0.1
    # Later optimizer steps start from weights that already differ by rounding.
    tolerances = (1e-6, *(3e-6 for _ in one[1:]))
    for expected, found, tolerance in zip(one, several, tolerances, strict=True):
        assert float((found - expected).norm()) <= tolerance * float(expected.norm())


@_layouts()
def test_every_rank_knows_what_all_ranks_computed(saved: Saved, name: str, layout: tuple[int, int]) -> None:
    one = saved(name, (1, 1), 0)
    # With a single update, each rank measures the flips that it causes in one of its own micro-batches.
    sampled = {"routing flipped_N", "routing native_N", "routing update_N"} if name == "moe one update" else set()
    for rank in range(layout[0]):
        found = saved(name, layout, rank)
        for key in one.keys() - {"gradients"} - sampled:
            torch.testing.assert_close(found[key], one[key], rtol=1e-4, atol=1e-5, equal_nan=True, msg=key)


def test_a_loss_that_is_not_finite_on_one_rank_is_so_on_all(saved: Saved) -> None:
    """So that all of them skip the update."""
    for layout in ((1, 1), (2, 1)):
        for rank in range(layout[0]):
            assert sorted(saved("broken", layout, rank)["finite"].tolist()) == [False, True]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_ranks_share_the_tokens_of_every_update_and_run_equally_many_forwards(count: int, packed: bool) -> None:
    rng = random.Random(count)
    prompts = [tuple(rng.choices(range(9), k=rng.randint(1, 8))) for _ in range(10)]
    rows = [
        TokenSequence(prompt_ids=prompt, completion_ids=tuple(rng.choices(range(9), k=rng.randint(1, 30))))
        for prompt in prompts
        for _ in range(4)
    ]
    options: dict[str, Any] = {"mini_batches": 3, "token_budget": 60, "pad_id": 0, "seed": "", "packed": packed}
    options |= {"groups": [i // 4 for i in range(40)], "uncomputed": range(0, 40, 3)}
    one = make_plan(rows, **options)
    plans = [make_plan(rows, **options, ranks=Ranks(rank=rank, count=count)) for rank in range(count)]
    for update, computed in enumerate(one.computed_ids):
        assert len({len(plan.updates[update]) for plan in plans}) == 1
        found = [s for plan in plans for micro in plan.updates[update] for s in micro.sequence_ids]
        assert sorted(found) == sorted(computed)
        assert torch.equal(torch.cat([plan.own_at_N(update) for plan in plans]).sort().values, one.at_N(update))
        sizes = [sum(rows[s].length for m in plan.updates[update] for s in m.sequence_ids) for plan in plans]
        # No sequence is split, so a rank may have up to one sequence, and one prompt, more than its part.
        assert max(sizes) - min(sizes) <= 2 * (max(row.length for row in rows) + 8)
    assert all(plan.sequence_ids == one.sequence_ids for plan in plans)


def test_an_update_with_fewer_sequences_than_ranks_has_empty_forwards() -> None:
    rows = [TokenSequence(prompt_ids=(1,), completion_ids=(2, 3)), TokenSequence(prompt_ids=(4,), completion_ids=(5,))]
    ranks = [Ranks(rank=rank, count=4) for rank in range(4)]
    plans = [make_plan(rows, [0, 1], mini_batches=1, token_budget=9, pad_id=0, seed="", ranks=r) for r in ranks]
    assert [len(plan.updates[0]) for plan in plans] == [1] * 4
    assert sum(len(plan.updates[0][0].at_N) for plan in plans) == 3
    assert min(len(plan.updates[0][0].at_N) for plan in plans) == 0
    assert min(plan.updates[0][0].input_ids.numel() for plan in plans) > 0
