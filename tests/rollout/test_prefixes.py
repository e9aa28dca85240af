"""The KV cache of conversations between their turns: what is sampled does not change, and nothing is left behind."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from paged_cases import EOS, VOCABULARY, Letters, model_of

from gspo.errors import ConfigError
from gspo.model.kernels.packed_attention import NAME
from gspo.model.routing import find_routers
from gspo.rollout.engine import DecodeStats, EngineContext, GenerateOptions
from gspo.rollout.engines import local
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.local import paged
from gspo.rollout.local.blocks import BLOCK_SIZE, blocks_for
from gspo.rollout.local.prefixes import KeptPrefix, PrefixStore
from gspo.types import Completion, Prompt, Sampling, StopReason

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}
MOE = {**SIZES, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "use_sliding_window": True}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", MOE),
    "qwen3, windows": ("qwen3", {**SIZES, **WINDOW}),
    "gemma2 (soft caps, windows)": ("gemma2", {**SIZES, "sliding_window": 9, "query_pre_attn_scalar": 16}),
    "gpt_oss (sinks)": ("gpt_oss", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}),
}
KINDS = pytest.mark.parametrize("is_paged", [True, False], ids=["paged", "dense"])
SAMPLING = Sampling(max_tokens=12)


def engine_of(model: Any, *, is_paged: bool, keep_gb: float = 1.0, **options: Any) -> LocalEngine:
    context = EngineContext(model=model, tokenizer=Letters(), stop_ids=(EOS,), routers=find_routers(model))
    engine = LocalEngine(context, **{"slots": 5, "prefill_tokens": 64, **options}, keep_gb=keep_gb)
    engine.paged = is_paged
    return engine


def observation(completion: Completion, turn: int) -> tuple[int, ...]:
    """What the model is given after a turn: of another length for each."""
    count = 1 + (len(completion.token_ids) + 3 * turn) % 7
    return tuple(1 + (completion.token_ids[0] + 5 * i + turn) % (VOCABULARY - 1) for i in range(count))


class Talk:
    """Conversations of some turns with an engine."""

    def __init__(self, engine: LocalEngine, lengths: Sequence[int] = (70, 3, 64, 1, 9)) -> None:
        self.engine = engine
        self.ids = {f"c{n}": tuple((5 * n + 3 * j + 2) % VOCABULARY for j in range(n)) for n in lengths}
        self.turns: list[list[Completion]] = []
        self.costs: list[DecodeStats] = []

    def turn(self, version: int = 1, sampling: Sampling = SAMPLING, routes: bool = False) -> list[Completion]:
        prompts = [
            Prompt(id=f"{name}/{len(self.turns)}", content="", text="", token_ids=ids, conversation=name)
            for name, ids in self.ids.items()
        ]
        before = self.engine.decoded
        options = GenerateOptions(
            samples=1, sampling=sampling, seed=0, stream="train/1", version=version, routes=routes
        )
        groups = self.engine.generate(prompts, options)
        self.costs.append(self.engine.decoded - before)
        done = [completion for (completion,) in groups]
        for name, completion in zip(self.ids, done, strict=True):
            self.ids[name] += completion.token_ids + observation(completion, len(self.turns))
        self.turns.append(done)
        return done


def talked(engine: LocalEngine, turns: int = 3, **options: Any) -> Talk:
    talk = Talk(engine)
    for _ in range(turns):
        talk.turn(**options)
    return talk


def assert_same_turns(ours: Talk, theirs: Talk) -> None:
    for a, b in zip(ours.turns, theirs.turns, strict=True):
        for one, other in zip(a, b, strict=True):
            assert replace(one, logp_sampler=()) == replace(other, logp_sampler=())
            assert one.logp_sampler == pytest.approx(other.logp_sampler, abs=2e-5)


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of(*FAMILIES["qwen3_moe"])


@pytest.mark.parametrize("name", FAMILIES)
@KINDS
def test_turns_are_the_same_and_only_new_tokens_are_computed(name: str, is_paged: bool) -> None:
    model = model_of(*FAMILIES[name])
    model.set_attn_implementation(NAME)  # sdpa ignores soft caps
    routed = find_routers(model) is not None
    ours = talked(engine_of(model, is_paged=is_paged), routes=routed)
    theirs = talked(engine_of(model, is_paged=is_paged, keep_gb=0), routes=routed)
    # Experts, too: those of a reused token are from the turn that computed it, which had the same weights.
    assert_same_turns(ours, theirs)
    for turn, (cost, whole) in enumerate(zip(ours.costs, theirs.costs, strict=True)):
        assert cost.prefilled + cost.reused == whole.prefilled
        assert whole.reused == 0
        # The last token of a turn is read with the observation; that of the observation is the first input of decoding.
        observed = [len(observation(c, turn - 1)) for c in ours.turns[turn - 1]]
        assert cost.prefilled == (sum(observed) if turn else whole.prefilled)


@KINDS
def test_what_is_kept_is_what_is_used(model: Any, is_paged: bool) -> None:
    ours, theirs = (Talk(engine_of(model, is_paged=is_paged)) for _ in range(2))
    for talk in (ours, theirs):
        talk.turn()
    for kept in ours.engine.prefixes._kept.values():
        for keys, values in kept.pairs.values():
            keys.zero_(), values.zero_()
    assert [c.token_ids for c in ours.turn()] != [c.token_ids for c in theirs.turn()]


@KINDS
def test_a_rewritten_history_shares_the_tokens_before_the_change(model: Any, is_paged: bool) -> None:
    ours, theirs = (Talk(engine_of(model, is_paged=is_paged, keep_gb=keep)) for keep in (1.0, 0.0))
    for talk in (ours, theirs):
        talk.turn()
        for name, ids in talk.ids.items():
            changed = len(ids) // 2
            talk.ids[name] = (*ids[:changed], 1 + ids[changed] % (VOCABULARY - 1), *ids[changed + 1 :])
        shared = [len(ids) // 2 for ids in talk.ids.values()]
        talk.turn()
        talk.turn()
    assert_same_turns(ours, theirs)
    assert ours.costs[1].reused == sum(shared)
    assert ours.costs[2].reused > ours.costs[1].reused


@KINDS
def test_other_weights_use_nothing(model: Any, is_paged: bool) -> None:
    talk = Talk(engine_of(model, is_paged=is_paged))
    talk.turn(version=1)
    kept = [weakref.ref(t) for k in talk.engine.prefixes._kept.values() for pair in k.pairs.values() for t in pair]
    assert all(ref() is not None for ref in kept)
    talk.turn(version=2)
    assert talk.costs[1].reused == 0
    assert all(ref() is None for ref in kept)
    talk.engine.sync(3)
    assert len(talk.engine.prefixes) == 0


@KINDS
def test_prefixes_without_experts_are_not_used_where_they_are_needed(model: Any, is_paged: bool) -> None:
    ours = Talk(engine_of(model, is_paged=is_paged))
    ours.turn(routes=False)
    ours.turn(routes=True)
    assert ours.costs[1].reused == 0
    ours.turn(routes=True)
    assert ours.costs[2].reused > 0


@KINDS
def test_conversations_that_end_leave_nothing(model: Any, is_paged: bool) -> None:
    talk = talked(engine_of(model, is_paged=is_paged), turns=2)
    store = talk.engine.prefixes
    kept = {name: [weakref.ref(t) for pair in k.pairs.values() for t in pair] for name, k in store._kept.items()}
    assert kept.keys() == talk.ids.keys()
    talk.engine.end_conversations(["c70", "c3", "unknown"])
    assert all(all((ref() is None) == (name in ("c70", "c3")) for ref in refs) for name, refs in kept.items())
    assert store.bytes == sum(k.bytes for k in store._kept.values()) > 0
    talk.engine.end_conversations(list(talk.ids))
    assert (len(store), store.bytes) == (0, 0)
    assert all(ref() is None for refs in kept.values() for ref in refs)
    again = talked(engine_of(model, is_paged=is_paged), turns=1)
    again.engine.close()
    assert again.engine.prefixes.bytes == 0


def test_prompts_of_no_conversation_are_not_kept(model: Any) -> None:
    engine = engine_of(model, is_paged=True)
    prompt = Prompt(id="p", content="", text="", token_ids=(1, 2, 3))
    engine.generate([prompt], GenerateOptions(samples=3, sampling=SAMPLING, seed=0, stream="train/1", version=1))
    assert len(engine.prefixes) == 0


@KINDS
def test_short_memory_drops_the_oldest_and_changes_nothing(model: Any, is_paged: bool) -> None:
    whole = talked(engine_of(model, is_paged=is_paged), turns=2)
    limit = whole.engine.prefixes.bytes // 2
    ours = talked(engine_of(model, is_paged=is_paged, keep_gb=limit / 1e9))
    assert_same_turns(ours, talked(engine_of(model, is_paged=is_paged, keep_gb=0)))
    assert 0 < ours.engine.prefixes.bytes <= limit
    assert 0 < ours.costs[2].reused < ours.costs[2].prefilled + ours.costs[2].reused
    # The same conversations are dropped when the run is repeated.
    again = talked(engine_of(model, is_paged=is_paged, keep_gb=limit / 1e9))
    assert again.turns == ours.turns
    assert again.costs == ours.costs


def test_a_repeated_run_is_bitwise_the_same(model: Any) -> None:
    one, other = (talked(engine_of(model, is_paged=True), routes=True) for _ in range(2))
    assert one.turns == other.turns


@KINDS
def test_batches_do_not_change_turns(model: Any, is_paged: bool) -> None:
    ours = talked(engine_of(model, is_paged=is_paged, slots=2, prefill_tokens=1000))
    assert_same_turns(ours, talked(engine_of(model, is_paged=is_paged, keep_gb=0)))


def test_preempted_rows_and_blocks(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few blocks, rows are preempted as they are without keeping, and every block is free in the end."""
    batches: list[paged.PagedBatch] = []
    whole = paged.PagedBatch.__init__

    def few_blocks(self: Any, model: Any, queue: Any, *args: Any, **options: Any) -> None:
        whole(self, model, queue, *args, **options, blocks=2 + 2 * blocks_for(queue.positions))
        batches.append(self)

    monkeypatch.setattr(paged.PagedBatch, "__init__", few_blocks)
    preempted: list[int] = []
    preempt = paged.PagedBatch._preempt
    monkeypatch.setattr(paged.PagedBatch, "_preempt", lambda self: (preempted.append(1), preempt(self))[1])
    long = Sampling(max_tokens=40)
    ours, theirs = (Talk(engine_of(model, is_paged=True, keep_gb=keep), range(40, 45)) for keep in (1.0, 0.0))
    for _ in range(2):
        ours.turn(sampling=long)
    assert preempted
    for _ in range(2):
        theirs.turn(sampling=long)
    assert_same_turns(ours, theirs)
    for batch in batches:
        assert batch.blocks.available == 1 + 2 * batch.width
    assert ours.costs[1].reused > 0


@KINDS
def test_what_was_sampled_after_a_stop_string_is_not_reused(model: Any, is_paged: bool) -> None:
    sampling = Sampling(max_tokens=40, stop=("B", "Z", "D"))
    ours = talked(engine_of(model, is_paged=is_paged), sampling=sampling)
    assert_same_turns(ours, talked(engine_of(model, is_paged=is_paged, keep_gb=0), sampling=sampling))
    assert any(c.stop is StopReason.STOP for c in ours.turns[0])
    assert ours.costs[1].reused > 0


@KINDS
def test_kept_prefixes_give_way_when_memory_runs_out(
    model: Any, is_paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the engine samples fewer completions at a time."""
    talk = Talk(engine_of(model, is_paged=is_paged))
    talk.turn()
    decode = LocalEngine._decode
    seen: list[tuple[bool, int]] = []

    def short(self: Any, model: Any, queue: Any, controls: Any, routers: Any, reuse: Any) -> Any:
        seen.append((reuse.store is not None, len(self.prefixes)))
        if reuse.store is not None:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return decode(self, model, queue, controls, routers, reuse)

    monkeypatch.setattr(LocalEngine, "_decode", short)
    talk.turn()
    assert seen == [(True, 0), (False, 0)]
    assert talk.engine.slots == 5
    assert talk.costs[1].reused == 0


def test_a_model_that_cannot_continue_keeps_nothing(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial finds it, a warning says so, and the turns are right."""
    monkeypatch.setattr(local, "obstacle_to_keeping", lambda model: "it forgets")
    with pytest.warns(RuntimeWarning, match="prefills conversations again in each turn, which is slower: it forgets"):
        ours = talked(engine_of(model, is_paged=False))
    assert sum(cost.reused for cost in ours.costs) == 0
    assert len(ours.engine.prefixes) == 0
    assert_same_turns(ours, talked(engine_of(model, is_paged=False, keep_gb=0)))


@pytest.mark.parametrize("value", [-1, True, "4", float("inf"), float("nan")])
def test_a_limit_that_is_no_size_is_refused(model: Any, value: Any) -> None:
    context = EngineContext(model=model, tokenizer=Letters(), stop_ids=(EOS,))
    with pytest.raises(ConfigError, match="keep_gb: must be a number, at least 0"):
        local.build(context, keep_gb=value)


def kept_of(tokens: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    return {0: (torch.zeros(1, tokens, 2), torch.zeros(1, tokens, 2))}


def test_the_store_drops_conversations_whose_turn_is_longest_ago() -> None:
    store = PrefixStore(limit=10 * 16)
    for name in ("a", "b", "c"):
        store.put(name, kept_of(3))
        store.describe(name, (1, 2, 3), None)
    assert store.bytes == 9 * 16
    store.put("a", kept_of(4))  # its next turn makes it the latest
    store.describe("a", (1, 2, 3, 4), None)
    store.put("d", kept_of(2))
    store.describe("d", (5, 6), None)
    assert store.take("b", (1, 2, 3), routed=False) is None
    store.describe("b", (1, 2, 3), None)  # what was dropped before its tokens were known
    assert store.take("b", (1, 2, 3), routed=False) is None
    found = store.take("c", (1, 2, 9, 9), routed=False)
    assert found is not None
    assert (found.token_ids, found.bytes) == ((1, 2), 2 * 16)
    assert store.take("d", (6,), routed=False) is None
    store.put("e", kept_of(11))  # larger than the limit
    assert len(store) == 1
    store.give_way(-1)
    assert (len(store), store.bytes) == (0, 0)


def test_a_store_grows_no_further_than_there_is_room() -> None:
    store = PrefixStore(limit=1000)
    store.put("a", kept_of(3))
    store.give_way(3 * 16)
    store.put("b", kept_of(3))
    assert len(store) == 2
    store.put("c", kept_of(3))
    assert store.bytes == 6 * 16
    store.give_way(10**9)
    store.put("d", kept_of(40))
    assert store.bytes <= 1000


def test_tokens_must_be_the_same_from_the_start() -> None:
    prefix = KeptPrefix(token_ids=(1, 2, 3), pairs=kept_of(3), routes=torch.arange(3)[:, None, None])
    first = prefix.first(2)
    assert first.token_ids == (1, 2)
    assert first.routes is not None
    assert first.routes.flatten().tolist() == [0, 1]


def test_prompts_are_longer_than_a_block() -> None:
    """The cases above cross blocks."""
    lengths = sorted(len(ids) for ids in Talk(None).ids.values())  # type: ignore[arg-type]
    assert any(a <= BLOCK_SIZE < b for a, b in pairwise(lengths))
