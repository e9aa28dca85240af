"""The contract of a conversation, for every engine that samples its turns: tokens, log-probs, experts, versions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from branch_ids import branch_ids
from conversations import END, TOKENIZER, written
from needs import needs_vllm
from simulated_vllm import SimulatedVllm
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from gspo import config as settings
from gspo.environment.setup import RunEnvironment
from gspo.model.routing import find_routers
from gspo.rollout.engine import EngineContext, GenerateOptions, build_engine
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.engines.vllm import VllmEngine
from gspo.types import Completion, Prompt, Sampling

GAME = """
from gspo.environment import Environment

class Game(Environment):
    def step(self, message):
        return "say " + str(len(message["content"])), float(len(message["content"])), False
"""
REWRITES = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + "
    "(m['content'] | lower if m['role'] == 'assistant' else m['content']) }}"
    "{% if m['role'] == 'assistant' %}{{ '<end>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def small_model() -> Any:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        initializer_range=0.2,
        max_position_embeddings=512,
        eos_token_id=END,
    )
    return Qwen3MoeForCausalLM(config).eval()


class _Policy:
    tokenizer = TOKENIZER
    stop_ids = (END,)
    position_limit = 512


@pytest.fixture(
    scope="module",
    params=["local", "local, paged", "vllm, simulated", pytest.param("vllm", marks=pytest.mark.vllm)],
)
def engine(request: Any) -> Iterator[Any]:
    if request.param == "vllm":
        needs_vllm()
    model = small_model()
    context = EngineContext(model=model, tokenizer=TOKENIZER, stop_ids=(END,), routers=find_routers(model))
    name, _, kind = request.param.partition(", ")
    built = VllmEngine(context, SimulatedVllm(model)) if kind == "simulated" else build_engine(name, context, {})
    if kind == "paged":
        built.paged = True
    yield model, built
    built.close()


def conversations_of(
    engine: Any, folder: Path, sampling: Sampling, version: int = 4
) -> list[tuple[Prompt, Completion]]:
    environment = {"name": f"{written(folder, GAME)}:Game", "max_turns": 4, "patience_s": 600.0}
    tree = {"model": {"build": "tiny_dense"}, "data": {"task": "addition"}, "environment": environment}
    config = settings.override(tree, [], where="test")
    opened = RunEnvironment(config)
    try:
        rows = [
            Prompt(id=f"train/{i}", content=text, text=text, token_ids=(1,))
            for i, text in enumerate(("one", "question"))
        ]
        prompts = opened.open(rows, TOKENIZER)
        groups = opened.engine(engine, _Policy()).generate(  # type: ignore[arg-type]
            prompts,
            GenerateOptions(
                samples=2,
                sampling=sampling,
                seed=0,
                stream="train/1",
                version=version,
                routes=engine.reports_routes,
            ),
        )
    finally:
        opened.close()
    return [(prompt, done) for prompt, group in zip(prompts, groups, strict=True) for done in group]


@pytest.mark.parametrize("template", ["plain", "rewriting"])
def test_a_conversation_is_what_the_model_was_asked(
    engine: Any, template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, samples = engine
    if template == "rewriting":
        monkeypatch.setattr(TOKENIZER, "chat_template", REWRITES)
    # A model that was not trained hardly ever ends a turn by itself.
    before = samples.decoded
    found = conversations_of(samples, tmp_path, Sampling(max_tokens=150, temperature=0.9, stop=tuple("abcdefghijkl")))
    if isinstance(samples, LocalEngine):
        # Later turns read what earlier ones have computed, and nothing is left when the conversations are over.
        assert (samples.decoded - before).reused > 0
        assert len(samples.prefixes) == 0
    for prompt, done in found:
        assert done.conversation is not None
        assert done.conversation.failure is None
        # Log-probs are those of a plain forward over exactly these tokens, branch by branch.
        paths = branch_ids(prompt.token_ids, done)
        ends = [*(b.start for b in done.branches[1:]), len(done.token_ids)]
        logp: list[float] = []
        start = 0
        for path, end in zip(paths, ends, strict=True):
            with torch.no_grad():
                log_TV = (model(torch.tensor([path])).logits[0].float() / 0.9).log_softmax(-1)
            first = len(path) - (end - start)
            own = [i for i in range(first, len(path)) if not done.sampled or done.sampled[start + i - first]]
            logp += [float(log_TV[i - 1, path[i]]) for i in own]
            start = end
        torch.testing.assert_close(torch.tensor(done.logp_sampler), torch.tensor(logp), atol=1e-4, rtol=1e-4)
        assert done.version == 4
        assert done.spans == ()
        if done.routes is not None:
            each = done.routes.layers * done.routes.top_k * done.routes.width
            assert len(done.routes.experts) == each * (len(prompt.token_ids) + len(done.token_ids) - 1)
        # The environment read the turns as they are in the tokens.
        for turn in done.conversation.turns:
            ids = done.token_ids[turn.start : turn.end]
            assert str(TOKENIZER.decode(ids)).removesuffix("<end>") == turn.text
            assert turn.reward is None or turn.reward == len(turn.text.strip())
    assert any(len(done.conversation.turns) > 2 for _, done in found if done.conversation)
    assert any(done.branches for _, done in found) == (template == "rewriting")
