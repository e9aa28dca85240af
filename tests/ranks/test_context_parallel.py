"""Context parallelism: the parts of a micro-batch, the exchange of heads, what is refused, and a run."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from families import SMOKE
from learning_rank import Case, config_of
from torch import Tensor

from gspo.build import check_ranks, policy_for, tokenizer_for
from gspo.errors import ConfigError
from gspo.learner.plan import make_plan
from gspo.model.context_parallel import HeadExchange, check_context_parallel, with_part
from gspo.model.micro_batch import MicroBatch, TokenSequence, micro_batch
from gspo.ranks.context import ContextGroup
from gspo.ranks.group import ONE, Ranks


def sequences(count: int) -> list[TokenSequence]:
    rng = random.Random(count)
    prompts = [tuple(rng.choices(range(9), k=rng.randint(1, 8))) for _ in range(count // 2)]
    return [
        TokenSequence(
            prompt_ids=prompts[i // 2],
            completion_ids=tuple(rng.choices(range(9), k=rng.randint(1, 13))),
            excluded_ids=(3,),
            excluded_for=2,
        )
        for i in range(count)
    ]


def parts_of(whole: MicroBatch, size: int) -> list[MicroBatch]:
    return [with_part(whole, ContextGroup(size=size, rank=rank)).own for rank in range(size)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_token_is_in_one_part(size: int, packed: bool) -> None:
    rows = sequences(6)
    whole = micro_batch(rows, range(6), 0, packed)
    tokens = whole.input_ids.numel()
    parts = parts_of(whole, size)
    assert {part.input_ids.shape for part in parts} == {(1, -(-tokens // size))}

    def joined(name: str) -> Tensor:
        return torch.stack([getattr(part, name)[0] for part in parts], dim=1).flatten()

    for name in ("input_ids", "input_at", "times"):
        assert torch.equal(joined(name)[:tokens], getattr(whole, name).flatten())
    assert bool((joined("input_at")[tokens:] == -1).all())
    assert not joined("times")[tokens:].any()
    order = torch.cat([part.at_N for part in parts]).argsort()
    expected = whole.at_N.argsort()
    for name in ("at_N", "target_N", "sequence_N"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts])[order], getattr(whole, name)[expected])
    outputs = [part.output_N * size + rank for rank, part in enumerate(parts)]
    assert torch.equal(torch.cat(outputs)[order], whole.output_N[expected])
    assert whole.excluded is not None
    excluded = [part.at_N[part.excluded.rows] for part in parts if part.excluded is not None]
    assert torch.equal(torch.cat(excluded).sort().values, whole.at_N[whole.excluded.rows].sort().values)


def test_a_part_may_have_no_token_at_all() -> None:
    whole = micro_batch([TokenSequence(prompt_ids=(1,), completion_ids=(2,))], [0], 0, packed=True)
    parts = parts_of(whole, 4)
    assert [len(part.at_N) for part in parts] == [1, 0, 0, 0]
    assert [int(part.times.sum()) for part in parts] == [1, 1, 0, 0]


def test_the_ranks_of_a_group_have_the_same_micro_batches() -> None:
    rows = sequences(20)
    options: dict[str, Any] = {"mini_batches": 2, "token_budget": 60, "pad_id": 0, "seed": "", "packed": True}
    groups = [i // 2 for i in range(20)]

    def plan(rank: int, count: int, size: int) -> Any:
        context = ContextGroup(size=size, rank=rank % size) if size > 1 else None
        return make_plan(rows, groups, **options, ranks=Ranks(rank=rank, count=count, context=context))

    for rank in range(6):
        of_group, alone = plan(rank, 6, 3), plan(rank // 3, 2, 1)
        assert [[m.sequence_ids for m in u] for u in of_group.updates] == [
            [m.sequence_ids for m in u] for u in alone.updates
        ]
    for update in range(2):
        computed = torch.cat([plan(rank, 6, 3).own.own_at_N(update) for rank in range(6)])
        assert torch.equal(computed.sort().values, plan(0, 1, 1).at_N(update))


@dataclass(frozen=True, kw_only=True)
class Threads(ContextGroup):
    """A context group of threads, for forwards."""

    barrier: threading.Barrier
    sent: list[Any]

    def exchange(self, parts: Tensor) -> Tensor:
        self.sent[self.rank] = parts
        self.barrier.wait(timeout=60)
        received = torch.stack([other[self.rank] for other in self.sent])
        self.barrier.wait(timeout=60)
        return received


@pytest.mark.parametrize(("size", "heads", "kv_heads"), [(2, 4, 4), (2, 4, 2), (4, 4, 2), (3, 6, 2), (4, 12, 6)])
def test_exchanged_heads_attend_as_all_heads_do(size: int, heads: int, kv_heads: int) -> None:
    tokens, width, values = 11, 5, 3
    torch.manual_seed(0)
    query, key = torch.randn(1, heads, tokens, width), torch.randn(1, kv_heads, tokens, width)
    value, sink = torch.randn(1, kv_heads, tokens, values), torch.randn(heads)

    def attend(query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None) -> Tensor:
        assert sink is not None
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return output.transpose(1, 2) * sink[:, None]

    barrier, sent = threading.Barrier(size), [None] * size
    missing = -tokens % size

    def run(rank: int) -> Tensor:
        exchange = HeadExchange(
            context=Threads(size=size, rank=rank, barrier=barrier, sent=sent),
            tokens=tokens,
        )
        filled = (torch.nn.functional.pad(t, (0, 0, 0, missing), value=9.0) for t in (query, key, value))
        return exchange(attend, *(t[:, :, rank::size] for t in filled), sink)

    with ThreadPoolExecutor(size) as pool:
        outputs = list(pool.map(run, range(size)))
    found = torch.stack(outputs, dim=2).flatten(1, 2)
    torch.testing.assert_close(found[:, :tokens], attend(query, key, value, sink))


@pytest.mark.parametrize(("count", "context"), [(1, 2), (2, 3), (6, 4)])
def test_ranks_that_cannot_form_groups_are_refused(count: int, context: int) -> None:
    config = config_of(Case(settings={"learner.context_parallel": str(context)}))
    with pytest.raises(ConfigError, match=r"learner\.context_parallel: .* cannot form groups"):
        check_ranks(config, Ranks(count=count))


def test_ranks_that_form_groups_are_accepted() -> None:
    config = config_of(Case(settings={"learner.context_parallel": "2"}))
    check_ranks(config, Ranks(count=4))
    check_ranks(config_of(Case()), ONE)


def test_compiled_layers_are_refused() -> None:
    config = config_of(Case(settings={"learner.context_parallel": "2", "model.compile": "on"}))
    with pytest.raises(ConfigError, match=r"model\.compile: .* learner\.context_parallel = 1"):
        check_ranks(config, Ranks(count=2))


def test_heads_that_cannot_be_divided_are_refused() -> None:
    config = config_of(Case())
    model = policy_for(config, tokenizer_for(config)).model
    with pytest.raises(ConfigError, match=r"learner\.context_parallel: the 4 attention heads .* 3 ranks; set it to 1"):
        check_context_parallel(model, ContextGroup(size=3, rank=0))


@pytest.mark.filterwarnings("ignore:training pads sequences")
def test_models_whose_attention_cannot_be_replaced_are_refused() -> None:
    model = SMOKE["qwen3-next"].model()
    with pytest.raises(ConfigError, match=r"layers other than full and sliding-window attention; set it to 1"):
        check_context_parallel(model, ContextGroup(size=2, rank=0))


RECIPE = """
steps = 2
model = {build = "tiny_moe", device = "cpu"}
cold_start = {steps = 2, batch = 5, check_every = 2}
data = {task = "sorting", held_out = 4}
rollout = {prompts = 3, group_size = 4, max_tokens = 9}
objective = {kl = 0.01}
learner = {mini_batches = 2, learning_rate = 1e-3}
routing = {replay = "old"}
eval = {every = 0}
reward = {functions = ["score.py:score"]}
"""
SCORE = """
def score(completions, **_):
    return [float(sum(map(ord, text)) % 2) for text in completions]
"""


@pytest.mark.slow
def test_a_run_has_the_metrics_of_one_process(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "score.py").write_text(SCORE)
    steps = []
    for name, options in {"one": [], "two": ["--nproc", "2", "--learner.context_parallel=2"]}.items():
        command = [sys.executable, "-m", "gspo", "train", "recipe.toml", f"--run-dir={name}", *options]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
        assert ended.returncode == 0, ended.stderr[-3000:]
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        steps.append([row for row in map(json.loads, lines) if row.get("step")])
    assert len(steps[0]) == 2
    for one, two in zip(*steps, strict=True):
        names = ("loss/", "grad/", "ratio/", "clip/", "kl/", "entropy", "reward/")
        keys = [key for key, value in one.items() if key.startswith(names) and value is not None]
        assert one["grad/norm"] > 0
        assert {key: two[key] for key in keys} == pytest.approx({key: one[key] for key in keys}, rel=1e-4, abs=1e-5)
