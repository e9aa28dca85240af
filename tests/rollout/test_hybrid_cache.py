"""Models with recurrent layers decode with a cache: their states follow the rows, and log-probs equal the learner's."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from families import BASE, EXPERTS, Digits
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from gspo.learner.forward import plan_logprobs
from gspo.learner.plan import make_plan
from gspo.model.micro_batch import TokenSequence
from gspo.model.routing import find_routers
from gspo.rollout.engine import EngineContext, GenerateOptions
from gspo.rollout.engines import local
from gspo.rollout.local import states
from gspo.types import Prompt, Sampling

CUDA = torch.cuda.is_available()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not CUDA, reason="needs a GPU"))]
MIXED = {"layer_types": ["linear_attention", "full_attention"]}
DELTA = {
    **{"head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **MIXED,
}
MOE = {**EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 16}
MAMBA = {
    **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1},
    **{"mamba_chunk_size": 8, "mamba_d_ssm": 64},
}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": ("qwen3_next", {**DELTA, **MOE}),
    "qwen3.5": ("qwen3_5_text", DELTA),
    "qwen3.5-moe": ("qwen3_5_moe_text", {**DELTA, **MOE}),
    "olmo-hybrid": ("olmo_hybrid", MIXED),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"], "block_ff_dim": 24}),
    "falcon-h1": ("falcon_h1", {**MAMBA, "head_dim": 8}),
    "bamba": ("bamba", {**MAMBA, "attn_layer_indices": [1]}),
    "granite-4, hybrid": (
        "granitemoehybrid",
        {**MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 24},
    ),
    "jamba": (
        "jamba",
        {
            **{"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_expand": 2},
            **{"mamba_dt_rank": 4, "use_mamba_kernels": False, "num_experts": 2},
        },
    ),
}


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron-h": (
        "nemotron_h",
        {
            **{"hybrid_override_pattern": "M*", "mamba_num_heads": 4, "mamba_head_dim": 16},
            **{"ssm_state_size": 8, "n_groups": 1, "chunk_size": 8},
        },
    ),
}


def build(name: str, device: str = "cpu") -> Any:
    kind, fields = {**HYBRIDS, **REFUSED}[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**BASE, "bos_token_id": 1, **fields})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().to(device)


def ids_of(row: int, length: int) -> tuple[int, ...]:
    return tuple((7 * row + 3 * j + j * j + 2) % 50 for j in range(length))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", HYBRIDS)
@torch.no_grad()
def test_states_follow_rows_that_are_admitted_and_moved(name: str, device: str) -> None:
    """Rows of different and equal lengths, one without a prefix; rows leave and others take their slots."""
    model = build(name, device)
    whole = [ids_of(row, 26) for row in range(7)]
    plain = [model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0] for ids in whole]
    state = states.cache_state(model, slots=4, limit=26)
    assert isinstance(state, states.HybridCacheState)
    live: list[tuple[int, int]] = []  # sequence, position

    def admit(*prompts: tuple[int, int]) -> None:
        state.prefill([whole[row][:length] for row, length in prompts])
        at = torch.arange(len(prompts), device=device)
        state.admit(len(live), at, max(length for _, length in [*live, *prompts]) + 1)
        live.extend(prompts)

    def step() -> None:
        position_R = torch.tensor([position for _, position in live], device=device)
        input_R = torch.tensor([whole[row][position] for row, position in live], device=device)
        logits_RV, _ = state.step(input_R, position_R, int(position_R.max()) + 1)
        expected_RV = torch.stack([plain[row][position] for row, position in live])
        torch.testing.assert_close(logits_RV, expected_RV, rtol=1e-4, atol=1e-4)
        live[:] = [(row, position + 1) for row, position in live]

    def leave(hole: int) -> None:
        """The last row moves to the hole."""
        source, target = (torch.tensor([i], device=device) for i in (len(live) - 1, hole))
        state.move(source, target, max(position for _, position in live))
        live[hole] = live[-1]
        live.pop()

    admit((0, 12), (1, 5), (2, 5), (3, 0))
    for _ in range(3):
        step()
    leave(1)
    leave(0)
    step()
    admit((4, 9), (5, 2))
    for _ in range(4):
        step()
    leave(2)
    admit((6, 0))
    for _ in range(4):
        step()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", HYBRIDS)
def test_log_probs_of_completions_equal_the_learners(name: str, device: str) -> None:
    model = build(name, device)
    routers = find_routers(model) if name == "qwen3-next" else None
    context = EngineContext(model=model, tokenizer=Digits(), stop_ids=(1,), routers=routers)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="engine 'local' recomputes")
        warnings.filterwarnings("ignore", message="engine 'local' decodes without CUDA graphs")
        engine = local.build(context, slots=3, prefill_tokens=16)
        assert engine.cached
    prompts = [Prompt(id=f"p/{n}", content="", text="", token_ids=ids_of(i, n)) for i, n in enumerate((1, 8, 3, 8))]
    sampling = Sampling(max_tokens=12)
    options = GenerateOptions(
        samples=2, sampling=sampling, seed=1, stream="train/0", version=0, routes=routers is not None
    )
    groups = engine.generate(prompts, options)
    done = [(prompt, completion) for prompt, group in zip(prompts, groups, strict=True) for completion in group]
    assert len({len(completion.token_ids) for _, completion in done}) > 1, "no row was replaced"
    rows = [TokenSequence(prompt_ids=p.token_ids, completion_ids=c.token_ids) for p, c in done]
    plan = make_plan(rows, range(len(rows)), mini_batches=1, token_budget=100, pad_id=0, seed="", packed=False)
    logp_N, _ = plan_logprobs(model, plan, 1.0, torch.device(device))
    sampled_N = torch.tensor([logp for _, c in done for logp in c.logp_sampler])
    torch.testing.assert_close(logp_N.cpu(), sampled_N, rtol=0, atol=1e-4)
    if routers is not None:
        for prompt, completion in done:
            assert completion.routes is not None
            assert torch.equal(routes_of(routers, completion.routes), plain_routes(model, routers, prompt, completion))


def routes_of(routers: Any, packed: Any) -> Tensor:
    return routers.unpack(packed).long().sort(-1).values


@torch.no_grad()
def plain_routes(model: Any, routers: Any, prompt: Prompt, completion: Any) -> Tensor:
    """The experts of a plain forward. The last token has none, because nothing follows it."""
    ids = (prompt.token_ids + completion.token_ids)[:-1]
    with routers.watch() as trace:
        model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
    return trace.used_ILK.cpu().long().sort(-1).values


def test_the_trial_finds_a_state_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3.5")
    assert states.obstacle_to_cache(model) is None
    monkeypatch.setattr(states._HybridCache, "put_state", lambda self, key, first, state: None)
    assert states.obstacle_to_cache(model) is not None


def test_a_model_whose_steps_compute_something_else_is_refused() -> None:
    """In transformers 5.19, log-probs of this model with its own cache are off by 4e-4."""
    assert "limits the time steps" in str(states.obstacle_to_cache(build("nemotron-h")))


def test_models_without_recurrent_layers_have_no_recurrent_state() -> None:
    assert states.hybrid_layers(AutoConfig.for_model("qwen3", **BASE)) is None
    assert states.hybrid_layers(AutoConfig.for_model("gpt_oss", **BASE)) is None
