"""The Triton kernels of packed attention: values and gradients of plain attention, for every shape of a packed row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from interpreted import CUDA, INTERPRETED, run_interpreted
from torch import Tensor

from gspo.model.attention_blocks import AttentionBlocks, Blocks, attention_blocks, select
from gspo.model.kernels import packed_attention as attention
from gspo.model.micro_batch import TokenSequence, micro_batch

DEVICE = torch.device("cuda" if CUDA else "cpu")
# The interpreter cannot multiply bfloat16, and computes float32 exactly.
DTYPE = torch.bfloat16 if CUDA else torch.float32
ERROR = 1.5e-2 if CUDA else 1e-5
SIZES = (64, 128) if CUDA else (16, 32)
Groups = Sequence[tuple[int, Sequence[int]]]
UNEVEN: Groups = [(21, (5, 32, 0, 1, 19)), (1, (2, 20)), (18, ()), (16, (16,))]
"""Empty completions, prompts of a single token or without completions, and lengths that are multiples of blocks."""
ROWS: dict[str, Groups] = {
    "uneven": [(4 * p, [4 * c for c in cs]) for p, cs in UNEVEN] if CUDA else UNEVEN,
    "one token": [(1, ())],
    "one completion": [(9, (12,))],
    "long prompt": [(40, (3, 50))],
}


def visible_of(groups: Groups, window: int = 0) -> Tensor:
    """Which keys (columns) each query of the packed row attends to."""
    rows = sum(p + sum(cs) for p, cs in groups)
    visible = torch.zeros(rows, rows, dtype=torch.bool)
    position = torch.zeros(rows, dtype=torch.int64)
    at = 0
    for p, completions in groups:
        prompt = slice(at, at + p)
        visible[prompt, prompt] = True
        position[prompt] = torch.arange(p)
        at += p
        for c in completions:
            own = slice(at, at + c)
            visible[own, own] = True
            visible[own, prompt] = True
            position[own] = torch.arange(p, p + c)
            at += c
    visible &= position[:, None] >= position
    return visible & (position[:, None] - position < window) if window else visible


def plain(query: Tensor, key: Tensor, value: Tensor, scale: float, visible: Tensor) -> Tensor:
    repeat = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(repeat, 1) for t in (key, value))
    score = (scale * query @ key.transpose(2, 3)).masked_fill(~visible.to(query.device), -torch.inf)
    return (score.softmax(-1) @ value).transpose(1, 2)


def inputs_of(rows: int, heads: tuple[int, int], size: int, dtype: torch.dtype = DTYPE) -> list[Tensor]:
    """Views [1, heads, I, size] of projections [I, heads * size], as layers make them."""
    generator = torch.Generator().manual_seed(rows)
    made = [torch.randn(rows, h, size, generator=generator) for h in (heads[0], heads[1], heads[1])]
    return [t.to(DEVICE, dtype).transpose(0, 1).unsqueeze(0) for t in made]


def run(function: Callable[..., Tensor], inputs: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The output, and the gradients of a weighted sum of it."""
    given = [t.to(dtype).requires_grad_() for t in inputs]
    output = function(*given)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(output.shape, generator=generator).to(DEVICE, DTYPE).to(dtype)
    return [output.detach(), *torch.autograd.grad(output, given, weight)]


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernels, in the interpreter with blocks so small that several of all kinds occur."""
    from gspo.model.kernels import packed_attention_triton as kernels

    if not CUDA:
        tiling = kernels.Tiling(
            forward=kernels.Tile(queries=32, keys=16, warps=4, stages=1),
            dq=kernels.Tile(queries=16, keys=32, warps=4, stages=1),
            dkdv=kernels.Tile(queries=16, keys=32, warps=4, stages=1),
        )
        monkeypatch.setitem(kernels.LARGE, 64, tiling)
    return kernels


# --- tables ---


def covered(blocks: Blocks, size: int, rows: int) -> tuple[Tensor, Tensor]:
    """How often each pair of query and key is computed, by tables of queries and by tables of keys."""
    by_queries, by_keys = torch.zeros(2, rows, rows, dtype=torch.int64)
    for first, end, begin, prompt_begin, prompt_end in blocks.queries.tolist():
        last = min(first + size, end)
        by_queries[first:last, begin:end] += 1
        by_queries[first:last, prompt_begin:prompt_end] += 1
    sums = [(number, count) for _, _, number, count in blocks.sums.tolist()]
    assert [number + count for number, count in sums] == [number for number, _ in sums[1:]] + (
        [len(blocks.parts.tolist())] if sums else []
    )
    for first, end, begin, stop in blocks.keys.tolist() + blocks.parts.tolist():
        assert first <= begin < stop
        by_keys[begin:stop, first : min(first + size, end)] += 1
    return by_queries, by_keys


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("min_rows", [16, 512])
def test_blocks_cover_every_pair_once(name: str, min_rows: int) -> None:
    visible = visible_of(ROWS[name])
    made = attention_blocks(ROWS[name], (16, 32), min_rows)
    for size in (16, 32):
        blocks = select(made.entries, made.layout, size)
        for pairs in covered(blocks, size, len(visible)):
            assert (pairs[visible] == 1).all()
            assert (pairs.tril() == visible).all(), "below the diagonal, only pairs of the same sequence"
        if min_rows == 16 and len(visible) > 30:
            parts, whole = blocks.parts.tolist(), blocks.keys.tolist()
            assert parts
            longest = max(stop - begin for _, _, begin, stop in parts + whole)
            assert longest <= max(16, 2 * int(visible.sum()) // 128 + 16)


def test_long_entries_come_first() -> None:
    made = attention_blocks([(512, (960, 64, 500)), (300, (10, 700))])
    for size in (64, 128):
        blocks = select(made.entries, made.layout, size)
        keys_seen = [min(e[0] + size, e[1]) - e[2] + e[4] - e[3] for e in blocks.queries.tolist()]
        rows_seen = [e[3] - e[2] for e in blocks.keys.tolist()]
        for costs in (keys_seen, rows_seen):
            assert all(a >= b for a, b in pairwise(costs))


def test_a_micro_batch_has_the_blocks_of_its_packed_row() -> None:
    groups = [(3, (4, 1)), (2, (6,))]
    rows = [
        TokenSequence(prompt_ids=tuple(range(number, number + p)), completion_ids=(9,) * c)
        for number, (p, cs) in enumerate(groups)
        for c in cs
    ]
    micro = micro_batch(rows, range(len(rows)), 0, True)
    assert micro.packing is not None
    assert micro.position_ids is not None
    made = micro.packing.blocks
    assert made is not None
    expected = attention_blocks(groups)
    assert torch.equal(made.entries, expected.entries)
    assert torch.equal(made.layout, expected.layout)
    positions = micro.position_ids[0]
    assert torch.equal(made.entries[-len(positions) :], positions)
    assert made.entries.dtype == torch.int32
    with pytest.raises(ValueError, match="no tables for blocks of 32"):
        select(made.entries, made.layout, 32)


# --- kernels: on a GPU, else in Triton's interpreter, which must be enabled before Triton is imported ---


def test_triton_kernels_in_the_interpreter() -> None:
    run_interpreted(__file__)


needs_triton = pytest.mark.skipif(not (CUDA or INTERPRETED), reason="run by the test above")


def blocks_of(groups: Groups, min_rows: int = 32) -> AttentionBlocks:
    return attention_blocks(groups, SIZES, min_rows).to(DEVICE)


@needs_triton
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize(("heads", "size"), [((4, 2), 16), ((3, 1), 24), ((2, 2), 64)])
def test_values_and_gradients_on_triton(name: str, heads: tuple[int, int], size: int, kernels: Any) -> None:
    visible = visible_of(ROWS[name])
    blocks = blocks_of(ROWS[name])
    inputs = inputs_of(len(visible), heads, size)
    found = run(lambda *given: attention.shared_prompt_attention(*given, 0.3, blocks), inputs, DTYPE)
    expected = run(lambda *given: plain(*given, 0.3, visible), inputs, torch.float64)
    for ours, exact in zip(found, expected, strict=True):
        assert ours.shape == exact.shape
        if exact.any():
            assert distance(ours, exact) < ERROR
        else:  # a single token has no gradient to its key
            assert ours.abs().max() < 10 * ERROR


@needs_triton
@pytest.mark.parametrize("window", [1, 7, 40])
def test_a_window_on_triton(window: int, kernels: Any) -> None:
    visible = visible_of(ROWS["uneven"], window)
    blocks = blocks_of(ROWS["uneven"])
    inputs = inputs_of(len(visible), (4, 2), 16)
    found = run(lambda *given: attention.shared_prompt_attention(*given, 0.3, blocks, window), inputs, DTYPE)
    expected = run(lambda *given: plain(*given, 0.3, visible), inputs, torch.float64)
    for ours, exact in zip(found, expected, strict=True):
        # With a window of 1, the gradients of queries and keys are 0.
        assert float((ours.double() - exact).norm()) < ERROR * max(float(exact.norm()), float(expected[0].norm()))


@needs_triton
@pytest.mark.parametrize("window", [0, 7])
def test_sinks_on_triton(window: int, kernels: Any) -> None:
    visible = visible_of(ROWS["uneven"], window)
    blocks = blocks_of(ROWS["uneven"])
    sinks = torch.linspace(-1, 2, 4, device=DEVICE).to(DTYPE)
    inputs = [*inputs_of(len(visible), (4, 2), 16), sinks]

    def with_sinks(query: Tensor, key: Tensor, value: Tensor, sink: Tensor) -> Tensor:
        repeat = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(repeat, 1) for t in (key, value))
        score = (0.3 * query @ key.transpose(2, 3)).masked_fill(~visible.to(query.device), -torch.inf)
        logit = sink.view(1, -1, 1, 1).expand(*score.shape[:-1], 1)
        return (torch.cat([score, logit], -1).softmax(-1)[..., :-1] @ value).transpose(1, 2)

    def ours(query: Tensor, key: Tensor, value: Tensor, sink: Tensor) -> Tensor:
        return attention.shared_prompt_attention(query, key, value, 0.3, blocks, window, sink)

    for found, exact in zip(run(ours, inputs, DTYPE), run(with_sinks, inputs, torch.float64), strict=True):
        assert distance(found, exact) < ERROR


@needs_triton
def test_large_scores_on_triton(kernels: Any) -> None:
    visible = visible_of(ROWS["uneven"])
    blocks = blocks_of(ROWS["uneven"])
    inputs = inputs_of(len(visible), (2, 1), 16)
    found = run(lambda *given: attention.shared_prompt_attention(*given, 30.0, blocks), inputs, DTYPE)
    expected = run(lambda *given: plain(*given, 30.0, visible), inputs, torch.float64)
    assert all(part.isfinite().all() for part in found)
    # Gradients are differences of almost equal numbers here, which half precision cannot represent.
    for ours, exact in list(zip(found, expected, strict=True))[: 1 if CUDA else 4]:
        assert distance(ours, exact) < 10 * ERROR


@needs_triton
def test_the_same_as_separate_sequences_on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the tables and block sizes of a run, in half precision, and with keys in another layout than queries."""
    rows = [TokenSequence(prompt_ids=(1,) * 70, completion_ids=(9,) * c) for c in (3, 80, 1)]
    packing = micro_batch(rows, range(3), 0, True).to(DEVICE).packing
    assert packing is not None
    dtype = torch.bfloat16 if CUDA else torch.float16
    query, key, value = inputs_of(len(packing.place_I), (2, 1), 64, dtype)
    inputs = [query, key.contiguous(), value]
    blocks = packing.blocks
    assert blocks is not None
    found = run(lambda *given: attention.shared_prompt_attention(*given, 0.1, blocks), inputs, dtype)
    expected = run(lambda *given: attention._as_rows(*given, 0.1, packing), inputs, torch.float64)
    for ours, exact in zip(found, expected, strict=True):
        assert distance(ours, exact) < 1e-2


@needs_triton
def test_repeated_runs_are_bitwise_identical_on_triton(kernels: Any) -> None:
    blocks = blocks_of(ROWS["long prompt"])
    inputs = inputs_of(len(visible_of(ROWS["long prompt"])), (4, 2), 16)
    first, *others = (
        run(lambda *given: attention.shared_prompt_attention(*given, 0.3, blocks), inputs, DTYPE)
        for _ in range(5 if CUDA else 2)
    )
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@needs_triton
def test_different_dtypes_are_refused_on_triton(kernels: Any) -> None:
    query, key, value = inputs_of(1, (2, 1), 16)
    with pytest.raises(TypeError, match="must be the same"):
        attention.shared_prompt_attention(query, key.double(), value, 0.3, blocks_of(ROWS["one token"]))


@needs_triton
def test_compiled_layers_are_one_graph_for_all_lengths_on_triton(kernels: Any) -> None:
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def layer(x: Tensor, blocks: AttentionBlocks) -> Tensor:
        query, key, value = ((f * x).unflatten(-1, (2, 16)).transpose(1, 2) for f in (1, 2, 3))
        return attention.shared_prompt_attention(query, key, value, 0.3, blocks).flatten(2) + x

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    for groups in ([(20, (3, 10))], [(7, (7, 40))], [(3, (2,))]):
        blocks = blocks_of(groups)
        x = torch.randn(1, len(visible_of(groups)), 32, device=DEVICE).to(DTYPE)
        results = [run(lambda x, f=f, b=blocks: f(x, b), [x], DTYPE) for f in (layer, compiled)]
        for eager, ours in zip(*results, strict=True):
            torch.testing.assert_close(ours, eager)
    assert len(graphs) == 1
