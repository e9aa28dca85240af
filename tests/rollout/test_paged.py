"""Decoding with a paged KV cache: the completions of plain decoding, for any batch and any number of blocks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from types import FunctionType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import CUDA, INTERPRETED, run_interpreted
from paged_cases import (
    DEVICE,
    EOS,
    LENGTHS,
    SAMPLING,
    VOCABULARY,
    Letters,
    assert_same,
    controls_of,
    decode_paged,
    decode_plain,
    model_of,
    prompt_of,
    queue_of,
)
from torch import Tensor

from gspo.errors import KernelWarning, NumericalError
from gspo.model.routing import find_routers
from gspo.rollout.engine import (
    DecodeStats,
    EngineContext,
    ExtendOptions,
    Extension,
    GenerateOptions,
    begun,
    controls_for,
)
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.local import decoder, kernels, paged
from gspo.rollout.local.blocks import BLOCK_SIZE, BlockAllocator, blocks_for
from gspo.rollout.local.cuda_graphs import CudaGraphs
from gspo.rollout.local.decoder import Decoder, float32_logits, obstacle_to_paging
from gspo.rollout.local.sampling import GREEDY, DecodeResult, sample_from_logits, uniform
from gspo.rollout.local.slots import INPUT, KEY, LIVE, POSITION, SAMPLED, Slots, make_slots
from gspo.types import Sampling, StopReason

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}
MOE = {**SIZES, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
PLAIN = {
    "qwen3": ("qwen3", {**SIZES, "head_dim": 16}),
    "qwen3, head size not a power of two": ("qwen3", {**SIZES, "head_dim": 24}),
    "qwen3_moe": ("qwen3_moe", MOE),
    "llama": ("llama", SIZES),
    "qwen2 (biases)": ("qwen2", SIZES),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of(*PLAIN["qwen3_moe"])


@pytest.fixture(scope="module")
def plain_completions(model: Any) -> Callable[[int], DecodeResult]:
    """What plain decoding gives for the module's model, computed once for each limit."""
    return cache(lambda max_tokens: decode_plain(model, sampling=Sampling(max_tokens=max_tokens)))


@pytest.mark.parametrize("name", PLAIN)
def test_completions_match_plain_decoding(name: str) -> None:
    model = model_of(*PLAIN[name])
    assert obstacle_to_paging(model) is None
    ours = decode_paged(model)
    assert len({len(ids) for ids in ours.token_ids}) > 1, "completions of several lengths"
    assert_same(ours, decode_plain(model))


def test_an_attention_class_from_remote_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other = model_of(*PLAIN["qwen3"])
    monkeypatch.setattr(type(other.model.layers[0].self_attn), "__module__", "remote_code")
    assert "not a class of transformers" in (obstacle_to_paging(other) or "")


def test_the_trial_detects_attention_that_does_more(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = type(model.model.layers[0].self_attn)
    whole = attention.forward

    def more(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer, weights = whole(self, *args, **kwargs)
        return 1.5 * answer, weights

    monkeypatch.setattr(attention, "forward", more)
    assert "different logits" in (obstacle_to_paging(model) or "")


def test_experts_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The products of all experts together, as on a GPU."""
    model = model_of(*PLAIN["qwen3_moe"], dtype=torch.float32)
    theirs = decode_plain(model)
    monkeypatch.setattr(decoder, "grouped_products", lambda model: True)
    monkeypatch.setattr(decoder, "grouped_mm", _one_by_one)
    assert_same(decode_paged(model), theirs)


def _one_by_one(x: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
    starts = [0, *offs.tolist()]
    return torch.cat([x[a:b] @ weight[e] for e, (a, b) in enumerate(pairwise(starts))])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"slots": 1}, marks=pytest.mark.slow),
        {"slots": 24, "prefill_tokens": 4000},
        {"slots": 24, "prefill_tokens": 1},
    ],
)
def test_the_number_of_slots_does_not_change_completions(
    model: Any, options: dict[str, int], plain_completions: Callable[[int], DecodeResult]
) -> None:
    assert_same(decode_paged(model, **options), plain_completions(90))


@pytest.mark.parametrize("blocks", [pytest.param(10, marks=pytest.mark.slow), 13, 33])
def test_preemption_does_not_change_completions(
    model: Any, blocks: int, plain_completions: Callable[[int], DecodeResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted: list[int] = []
    preempt = paged.PagedBatch._preempt

    def counting(self: Any) -> None:
        before = len(self.waiting)
        preempt(self)
        preempted.append(len(self.waiting) - before)

    monkeypatch.setattr(paged.PagedBatch, "_preempt", counting)
    sampling = Sampling(max_tokens=150)
    assert_same(decode_paged(model, sampling=sampling, blocks=blocks, slots=12), plain_completions(150))
    assert blocks > 13 or any(preempted), "a completion had to be preempted"


CONTROLS: dict[str, dict[str, Any]] = {
    "stop": {"stop": ("BC", "Z", "DEF")},
    "min_tokens": {"min_tokens": 40},
    "thinking": {"thinking_budget": 20, "thinking_end": "Q"},
    "all": {"stop": ("BC", "Z"), "min_tokens": 10, "thinking_budget": 20, "thinking_end": "Q"},
}


@pytest.mark.parametrize(
    "options",
    [{}, *(pytest.param(options, marks=pytest.mark.slow) for options in ({"slots": 3}, {"blocks": 10, "slots": 12}))],
    ids=str,
)
@pytest.mark.parametrize("name", CONTROLS)
def test_controls_act_as_in_plain_decoding(model: Any, name: str, options: dict[str, int]) -> None:
    sampling = Sampling(max_tokens=60, **CONTROLS[name])
    routers = find_routers(model)
    ours = decode_paged(model, sampling=sampling, routers=routers, **options)
    theirs = decode_plain(model, sampling=sampling, routers=routers)
    assert_same(ours, theirs)
    assert [r and r.experts for r in ours.routes] == [r and r.experts for r in theirs.routes]
    lengths = [len(prompt_of(n).token_ids) for n in sorted(LENGTHS, reverse=True) for _ in range(3)]
    for n, ids, routes in zip(lengths, ours.token_ids, ours.routes, strict=True):
        assert routes is not None
        assert len(routes.experts) == (n + len(ids) - 1) * routes.layers * routes.top_k * routes.width
    assert (StopReason.STOP in {end.stop for end in ours.ends}) == bool(sampling.stop)
    assert {end.cut for end in ours.ends} == ({True, False} if sampling.thinking_budget else {False})


@pytest.mark.parametrize("name", ["plain", *(pytest.param(n, marks=pytest.mark.slow) for n in CONTROLS)])
@pytest.mark.parametrize("is_paged", [True, False])
def test_completions_continue_where_they_were_cut(
    model: Any, name: str, is_paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled in parts of different lengths at the same time, they are what they are if sampled at once."""
    sampling = Sampling(max_tokens=60, **CONTROLS.get(name, {}))
    routers = find_routers(model)
    context = EngineContext(model=model, tokenizer=Letters(), stop_ids=(EOS,), routers=routers)
    engine = LocalEngine(context, slots=5, prefill_tokens=100)
    engine.paged = is_paged
    prompts = [prompt_of(n) for n in LENGTHS]
    groups: list[Any] = [begun(prompt, 3, 1) for prompt in prompts]
    options: dict[str, Any] = {"sampling": sampling, "seed": 1, "version": 1, "routes": True}
    for part in ((20, 7), (15, 60), (60, 60)):
        extensions = [
            Extension(prompt=prompt, completions=tuple(group), stream="train/0", tokens=part[i % 2])
            for i, (prompt, group) in enumerate(zip(prompts, groups, strict=True))
        ]
        groups = engine.extend(extensions, ExtendOptions(**options))
        if part == (20, 7):
            lengths = [{len(c.token_ids) for c in group if c.stop is StopReason.CUT} for group in groups]
            assert all(found <= {part[i % 2]} for i, found in enumerate(lengths))
            assert sum(map(len, lengths)) > len(LENGTHS) // 2
    engine.paged = False
    whole = engine.generate(prompts, GenerateOptions(samples=3, stream="train/0", **options))
    for group, expected in zip(groups, whole, strict=True):
        for a, b in zip(group, expected, strict=True):
            assert replace(a, logp_sampler=(), routes=None) == replace(b, logp_sampler=(), routes=None)
            assert a.logp_sampler == pytest.approx(b.logp_sampler, abs=2e-5)
            assert a.routes == b.routes


def test_stop_strings_end_rows_early(model: Any) -> None:
    """A row is finished soon after its stop string, not when it reaches the limit."""

    def run(*stop: str) -> DecodeResult:
        context = EngineContext(model=None, tokenizer=Letters(), stop_ids=())
        sampling = Sampling(max_tokens=200, stop=stop)
        queue = queue_of([3], 3, sampling)
        controls = controls_for(context, sampling)
        with torch.no_grad():
            return paged.PagedBatch(model, queue, controls, slots=8, prefill_tokens=100).run()

    late = run("nowhere")
    assert late.decoded.steps >= 200
    soon = run(*(text[40:46] for text in Letters().batch_decode(late.token_ids)))
    assert [end.length for end in soon.ends] == [46, 46, 46]
    assert soon.decoded.steps < 46 + 2 * paged.STOP_EVERY


def test_all_blocks_are_freed(model: Any) -> None:
    queue = queue_of(LENGTHS, 3)
    with torch.no_grad():
        run = paged.PagedBatch(model, queue, controls_of(SAMPLING), slots=8, prefill_tokens=100)
        count = run.blocks.available
        run.run()
    assert run.blocks.available == count
    assert run.bucket == 8
    assert not run.prompt_blocks


def test_a_group_prefills_its_prompt_once_and_shares_full_blocks(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    prefill = Decoder.prefill
    monkeypatch.setattr(
        Decoder,
        "prefill",
        lambda self, prompts, blocks: (read.extend(map(len, prompts)), prefill(self, prompts, blocks))[1],
    )
    sampling = Sampling(max_tokens=10)
    queue = queue_of([2 * BLOCK_SIZE + 5], 6, sampling)
    with torch.no_grad():
        run = paged.PagedBatch(model, queue, controls_of(sampling), slots=6, prefill_tokens=1000)
        run._admit()
    assert read == [2 * BLOCK_SIZE + 4]
    rows = [row for row in run.rows if row is not None]
    assert len(rows) == 6
    assert len({tuple(row.blocks[:2]) for row in rows}) == 1, "full blocks are shared"
    assert len({row.blocks[2] for row in rows}) == 6, "each row has its own last block"


def test_the_end_of_the_queue_is_decoded_in_smaller_batches(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "BATCH_SIZES", (1, 2, 4, 8))
    sizes: list[int] = []
    step = paged.PagedBatch._step
    if not CUDA:
        monkeypatch.setattr(paged.PagedBatch, "_step", lambda self, rows: (sizes.append(rows), step(self, rows))[1])
    sampling = Sampling(max_tokens=400)
    ours, theirs = decode_paged(model, slots=24, sampling=sampling), decode_plain(model, sampling=sampling)
    assert_same(ours, theirs)
    tokens = sum(map(len, ours.token_ids))
    assert theirs.decoded.rows == tokens, "no row idles"
    assert ours.decoded.rows > tokens, "a finished row idles until the host polls it"
    if not CUDA:
        prefilled = sum(LENGTHS) - len(LENGTHS)
        assert ours.decoded == DecodeStats(steps=len(sizes), rows=sum(sizes), prefilled=prefilled)
        assert sizes == sorted(sizes, reverse=True)
        assert {24, 8, 4} <= set(sizes)


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.7}])
def test_every_sampling_mode(model: Any, changes: dict[str, Any]) -> None:
    sampling = Sampling(max_tokens=40, **changes)
    assert_same(decode_paged(model, sampling=sampling), decode_plain(model, sampling=sampling))


def test_experts_match_plain_decoding(model: Any) -> None:
    routers = find_routers(model)
    ours, theirs = decode_paged(model, routers=routers), decode_plain(model, routers=routers)
    assert_same(ours, theirs)
    assert all(r is not None for r in ours.routes)
    assert ours.routes == theirs.routes


def test_diverged_weights_are_an_error() -> None:
    model = model_of(*PLAIN["qwen3"])
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(NumericalError, match="NaN"):
        decode_paged(model)


def test_logits_are_not_rounded_to_the_precision_of_the_weights() -> None:
    hidden, weight = torch.randn(5, 64).bfloat16().to(DEVICE), torch.randn(300, 64).bfloat16().to(DEVICE)
    exact = hidden.double() @ weight.double().T
    found = float32_logits(hidden, weight)
    assert found.dtype == torch.float32
    assert float((found - exact).abs().max()) < 1e-4 * float(exact.abs().max())


# --- KV cache blocks ---


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "free"]), st.integers(0, 6)), max_size=60))
def test_a_block_is_free_exactly_when_it_has_no_reference(actions: list[tuple[str, int]]) -> None:
    allocator = BlockAllocator(12)
    owners: list[list[int]] = [[]]
    for action, number in actions:
        held = owners[number % len(owners)]
        if action == "allocate":
            available = allocator.available
            blocks = allocator.allocate(number)
            assert (blocks is None) == (number > available)
            owners.append(blocks or [])
        elif action == "share":
            allocator.share(held)
            owners.append(list(held))
        else:
            allocator.free(held)
            held.clear()
        used = {block for held in owners for block in held}
        assert 0 not in used
        assert allocator.available == 11 - len(used)


def test_blocks_for_tokens() -> None:
    assert [blocks_for(n) for n in (0, 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE)] == [0, 1, 1, 2, 3]


# --- CUDA graphs ---


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_a_step_that_cannot_be_captured_runs_eagerly_with_a_warning() -> None:
    x = torch.zeros(1, device=DEVICE)

    def step(rows: int) -> None:
        x.add_(float(x.sum() * 0 + rows))  # waits for the device

    launch = CudaGraphs(step)
    launch(2)
    with pytest.warns(RuntimeWarning, match="without CUDA graphs"):
        launch(2)
    launch(2)
    assert float(x) == 6


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_decoding_uses_cuda_graphs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(*PLAIN[name], dtype=torch.bfloat16)
    captured: list[int] = []
    capture = CudaGraphs._capture
    monkeypatch.setattr(CudaGraphs, "_capture", lambda self, rows: (captured.append(rows), capture(self, rows))[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode_paged(model, slots=24, prefill_tokens=4000, routers=find_routers(model))
    assert captured[0] == 24


def test_a_failing_kernel_is_reported_as_a_bug(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> Tensor:
        raise ValueError("num_warps must be a power of 2")

    broken = FunctionType(broken.__code__, {"__name__": kernels.kernels_for(DEVICE).__name__, "ValueError": ValueError})
    monkeypatch.setattr(kernels.kernels_for(DEVICE), "rms_norm", broken)
    with pytest.warns(KernelWarning, match="Qwen3MoeForCausalLM; please report"):
        assert "num_warps" in (obstacle_to_paging(model) or "")


# --- The Triton kernels: on a GPU, else in Triton's interpreter, which must be enabled before Triton is imported ---


def test_triton_kernels_in_the_interpreter() -> None:
    run_interpreted(__file__)


on_triton = pytest.mark.skipif(not (CUDA or INTERPRETED), reason="run by the test above")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def filled(rows: int, width: int, seed: int = 0) -> Slots:
    """Rows at various positions, in scattered blocks, some of them not live."""
    generator = torch.Generator().manual_seed(seed)
    slots = make_slots(rows, width, 20, DEVICE, None)
    position = torch.randint(width * BLOCK_SIZE, (rows,), generator=generator)
    position[:3] = torch.tensor([0, BLOCK_SIZE - 1, width * BLOCK_SIZE - 1])[:rows]
    slots.state[POSITION] = position
    slots.state[LIVE] = torch.randint(4, (rows,), generator=generator) > 0
    slots.state[LIVE, :3] = 1
    slots.state[KEY] = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    slots.state[SAMPLED] = torch.randint(20, (rows,), generator=generator)
    slots.table_SW.copy_(1 + torch.randperm(rows * width, generator=generator).view(rows, width))
    return slots


def both_kernels() -> tuple[Any, Any]:
    from gspo.rollout.local import kernels_triton

    return kernels, kernels_triton


@on_triton
@pytest.mark.parametrize("size", [32, 48])
def test_norm_and_gate_on_triton(size: int) -> None:
    plain, fused = both_kernels()
    x, weight = random(7, 1, size), random(size, seed=1)
    torch.testing.assert_close(fused.rms_norm(x, weight, 1e-6), plain.rms_norm(x, weight, 1e-6))
    torch.testing.assert_close(fused.silu_mul(x, x.flip(0)), plain.silu_mul(x, x.flip(0)))
    for ours, theirs in zip(*(k.add_rms_norm(x, x.flip(0), weight, 1e-6) for k in (fused, plain)), strict=True):
        torch.testing.assert_close(ours, theirs)


@on_triton
def test_kernels_write_into_wider_rows_on_triton() -> None:
    plain, fused = both_kernels()
    x, weight, buffer = random(7, 1, 48), random(48, seed=1), torch.zeros(7, 64, device=DEVICE)
    out = buffer[:, None, :48]
    fused.rms_norm(x, weight, 1e-6, out=out)
    torch.testing.assert_close(buffer[:, :48], plain.rms_norm(x, weight, 1e-6)[:, 0])
    fused.add_rms_norm(x, x.flip(0), weight, 1e-6, out=out)
    torch.testing.assert_close(buffer[:, :48], plain.add_rms_norm(x, x.flip(0), weight, 1e-6)[1][:, 0])
    both = random(7, 96, seed=2)
    fused.silu_mul_halves(both, out=buffer[:, :48])
    torch.testing.assert_close(buffer[:, :48], plain.silu_mul_halves(both))
    assert not buffer[:, 48:].any()


@on_triton
@pytest.mark.parametrize("size", [1, 48, 300, 768, 1408, 5000])
def test_every_expert_width_can_be_launched_on_triton(size: int) -> None:
    """The interpreter ignores the number of warps; a compiled launch accepts only powers of two."""
    plain, fused = both_kernels()
    assert fused._warps(size) in (1, 2, 4, 8)
    x = random(3, 2 * size)
    torch.testing.assert_close(fused.silu_mul_halves(x), plain.silu_mul_halves(x))


@on_triton
@pytest.mark.parametrize(("rows", "chosen", "experts"), [(1, 1, 3), (9, 4, 8), (700, 8, 64)])
def test_experts_on_triton(rows: int, chosen: int, experts: int) -> None:
    plain, fused = both_kernels()
    expert = random(rows, experts).topk(chosen).indices
    (row, place, ends), theirs = fused.group_by_expert(expert, experts), plain.group_by_expert(expert, experts)
    assert all(torch.equal(a, b) for a, b in zip((row, place, ends), theirs, strict=True))
    assert torch.equal(expert.flatten().sort().values, expert.flatten()[place.flatten().argsort()])
    x, weight = random(rows * chosen, 48, seed=1), random(rows, chosen, seed=2)
    torch.testing.assert_close(fused.silu_mul_halves(x), plain.silu_mul_halves(x))
    expected = torch.stack([(x[place[r]] * weight[r][:, None]).sum(0) for r in range(rows)])
    torch.testing.assert_close(fused.combine_experts(x, place, weight), expected)
    torch.testing.assert_close(plain.combine_experts(x, place, weight), expected)


@on_triton
@pytest.mark.parametrize("with_norms", [True, False])
@pytest.mark.parametrize(("queries", "heads", "size"), [(4, 2, 16), (6, 2, 24), (3, 3, 32)])
def test_rope_and_store_on_triton(with_norms: bool, queries: int, heads: int, size: int) -> None:
    slots = filled(9, 3)
    given = [random(9, n * size, seed=n + i) for i, n in enumerate((queries, heads, heads))]
    angle = random(9, size // 2, seed=5).repeat(1, 2)
    norms = (random(size, seed=6), random(size, seed=7)) if with_norms else None
    shape = (28, heads, BLOCK_SIZE, size)
    caches = [(torch.zeros(shape, device=DEVICE), torch.zeros(shape, device=DEVICE)) for _ in range(2)]
    queries_RHD = [
        k.rope_and_store(slots, *given, (angle.cos(), angle.sin()), norms, 1e-6, cache)
        for k, cache in zip(both_kernels(), caches, strict=True)
    ]
    torch.testing.assert_close(queries_RHD[1], queries_RHD[0])
    for ours, theirs in zip(caches[1], caches[0], strict=True):
        torch.testing.assert_close(ours[1:], theirs[1:])
        assert ours[1:].abs().sum() > 0


@on_triton
@pytest.mark.parametrize(("heads", "size", "value_size"), [(2, 16, 16), (3, 24, 8)])
def test_store_on_triton(heads: int, size: int, value_size: int) -> None:
    slots = filled(9, 3)
    # Not contiguous, as the attention modules of transformers hand them over.
    key, value = random(heads, 9, size).transpose(0, 1), random(heads, 9, value_size, seed=1).transpose(0, 1)
    caches = [tuple(torch.zeros(28, heads, BLOCK_SIZE, n, device=DEVICE) for n in (size, value_size)) for _ in range(2)]
    for k, pair in zip(both_kernels(), caches, strict=True):
        k.store(slots, key, value, pair)
    for ours, theirs in zip(caches[1], caches[0], strict=True):
        assert torch.equal(ours[1:], theirs[1:])
        assert ours[1:].abs().sum() > 0


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window in a block": {"window": 5},
    "window of a block": {"window": BLOCK_SIZE},
    "window beyond a block": {"window": BLOCK_SIZE + 7},
    "window beyond the row": {"window": 1000},
    "soft cap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "all": {"window": 70, "softcap": 1.5, "sinks": True},
}


@on_triton
@pytest.mark.parametrize("programs", [1, 1000])
@pytest.mark.parametrize(
    ("name", "queries", "heads", "size", "value_size"),
    [
        ("plain", 4, 2, 16, 16),
        ("plain", 6, 2, 24, 24),
        ("plain", 32, 1, 16, 16),
        ("plain", 4, 4, 24, 16),
        *((name, 4, 2, 24, 16) for name in OPTIONS),
    ],
)
def test_attention_on_triton(
    programs: int, name: str, queries: int, heads: int, size: int, value_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, fused = both_kernels()
    monkeypatch.setattr(fused, "PROGRAMS", programs)
    monkeypatch.setattr(fused, "SPLIT_BLOCKS", 2)
    if name == "all":
        # As large heads have.
        monkeypatch.setattr(fused, "_tile", lambda *_: (16, 2))
    slots = filled(6, 3)
    options = {"window": None, "softcap": None, "sinks": False, **OPTIONS[name]}
    sink = random(queries, seed=4) if options.pop("sinks") else None
    cache = (random(19, heads, BLOCK_SIZE, size), random(19, heads, BLOCK_SIZE, value_size, seed=1))
    query = random(6, queries, size, seed=2)
    expected = plain.paged_attention(slots, query, cache, 0.3, **options, sink_H=sink)
    found = fused.paged_attention(slots, query, cache, 0.3, **options, sink_H=sink)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    assert not expected[slots.state[LIVE] == 0].any()
    # Against a formula without blocks and kernels.
    row, head = 2, queries - 1
    keys, values = (store[slots.table_SW[row].long(), head // (queries // heads)].flatten(0, 1) for store in cache)
    length = int(slots.state[POSITION, row]) + 1
    start = max(0, length - (options["window"] or length))
    score = 0.3 * keys[start:length] @ query[row, head]
    if options["softcap"]:
        score = options["softcap"] * (score / options["softcap"]).tanh()
    if sink is not None:
        score = torch.cat([score, sink[head : head + 1]])
    weight = score.softmax(0)[: length - start]
    torch.testing.assert_close(
        expected[row].view(queries, value_size)[head], weight @ values[start:length], atol=2e-6, rtol=1e-5
    )


@on_triton
def test_blocks_before_the_window_are_not_read_on_triton() -> None:
    for k in both_kernels():
        slots = filled(6, 3)
        slots.state[POSITION], slots.state[LIVE] = 3 * BLOCK_SIZE - 1, 1
        cache = (random(19, 2, BLOCK_SIZE, 16), random(19, 2, BLOCK_SIZE, 16, seed=1))
        query = random(6, 4, 16, seed=2)
        expected = k.paged_attention(slots, query, cache, 0.3, window=BLOCK_SIZE)
        if k is not kernels:
            slots.table_SW[:, :2] = 10**6  # no such block
        assert torch.equal(k.paged_attention(slots, query, cache, 0.3, window=BLOCK_SIZE), expected)


@on_triton
@pytest.mark.parametrize(
    ("size", "value_size", "itemsize", "tile"),
    [
        (128, 128, 2, (64, 3)),
        (64, 64, 2, (64, 3)),
        (256, 256, 2, (64, 2)),
        (512, 512, 2, (32, 2)),
        (512, 512, 4, (16, 2)),
    ],
)
def test_large_heads_have_small_tiles_on_triton(size: int, value_size: int, itemsize: int, tile: Any) -> None:
    _, fused = both_kernels()
    assert fused._tile(itemsize * (size + value_size), fused.SHARED_MEMORY) == tile


@on_triton
@pytest.mark.parametrize("vocabulary", [5, 4096, 9001])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sampling_on_triton(vocabulary: int, temperature: float) -> None:
    plain, fused = both_kernels()
    slots, sampling = filled(40, 2), Sampling(max_tokens=5, temperature=temperature)
    logits = 3 * random(40, vocabulary, seed=4)
    (ours, our_logp), (theirs, their_logp) = (k.sample_tokens(slots, logits, sampling) for k in (fused, plain))
    assert float((ours == theirs).float().mean()) > 0.97, "rounding may decide between two neighboring tokens"
    torch.testing.assert_close(our_logp[ours == theirs], their_logp[ours == theirs], atol=2e-6, rtol=1e-5)
    exact = (logits / temperature).log_softmax(-1).gather(1, ours[:, None])[:, 0]
    torch.testing.assert_close(our_logp, exact, atol=2e-6, rtol=1e-5)


@on_triton
def test_greedy_rows_among_sampled_ones_on_triton() -> None:
    plain, fused = both_kernels()
    slots, sampling = filled(40, 2), Sampling(max_tokens=5, greedy_last=True)
    slots.state[KEY, ::4] = GREEDY
    logits = 3 * random(40, 4096, seed=4)
    for kernels_ in (plain, fused):
        token, logp = kernels_.sample_tokens(slots, logits, sampling)
        assert torch.equal(token[::4], logits.argmax(-1)[::4])
        assert not logp[::4].any()
        assert (logp[1::4] < 0).all()


@on_triton
def test_a_token_of_probability_zero_is_never_sampled_on_triton() -> None:
    _, fused = both_kernels()
    slots = filled(64, 2)
    logits = torch.full((64, 5000), -1e4, device=DEVICE)
    logits[:, [3, 4095, 4999]] = random(64, 3)
    beyond = torch.cat([torch.full((64, 4096), -torch.inf, device=DEVICE), logits], 1)
    assert torch.equal(
        fused.sample_tokens(slots, beyond, Sampling(max_tokens=5))[0] - 4096,
        fused.sample_tokens(slots, logits, Sampling(max_tokens=5))[0],
    )
    token, logp = fused.sample_tokens(slots, logits, Sampling(max_tokens=5))
    assert set(token.tolist()) == {3, 4095, 4999}
    assert logp.isfinite().all()
    expected = sample_from_logits(logits, Sampling(max_tokens=5), uniform(slots.state[KEY], slots.state[SAMPLED]))[0]
    assert torch.equal(token, expected)


@on_triton
def test_nan_logits_are_reported_on_triton() -> None:
    _, fused = both_kernels()
    logits = random(3, 5000)
    logits[1, 4500] = float("nan")
    token, logp = fused.sample_tokens(filled(3, 2), logits, Sampling(max_tokens=5))
    assert logp.isnan().tolist() == [False, True, False]
    assert int(token.min()) >= 0
    assert int(token.max()) < 5000


@on_triton
@pytest.mark.parametrize("stop_ids", [[], [3], [1, 3, 4]])
def test_bookkeeping_on_triton(stop_ids: list[int]) -> None:
    given, stops = filled(30, 2), torch.tensor(stop_ids, dtype=torch.int64, device=DEVICE)
    token, logp = torch.arange(30, device=DEVICE) % 6, random(30)
    made = []
    for k in both_kernels():
        slots = Slots(
            state=given.state.clone(),
            table_SW=given.table_SW,
            token_ST=given.token_ST.clone(),
            logp_ST=given.logp_ST.clone(),
            routes_STLK=None,
        )
        k.advance(slots, token, logp, stops, 10)
        made.append(slots)
    assert torch.equal(made[0].state, made[1].state)
    live = given.state[LIVE] > 0
    assert torch.equal(made[0].token_ST[live], made[1].token_ST[live])
    assert torch.equal(made[0].logp_ST[live], made[1].logp_ST[live])
    assert torch.equal(made[0].state[INPUT][live], token[live])


@settings(deadline=None, max_examples=10)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 10**6))
@on_triton
def test_random_numbers_on_triton(key: int, index: int) -> None:
    """With equal logits, the token is the random number itself."""
    _, fused = both_kernels()
    slots = make_slots(1, 1, 4, DEVICE, None)
    slots.state[KEY], slots.state[SAMPLED] = key, index
    token, _ = fused.sample_tokens(slots, torch.zeros(1, 4096, device=DEVICE), Sampling(max_tokens=5))
    expected = float(uniform(slots.state[KEY], slots.state[SAMPLED])) * 4096
    assert abs(int(token) + 0.5 - expected) <= 0.5 + 1e-9
