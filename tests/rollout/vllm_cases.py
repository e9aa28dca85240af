"""Small models and prompts for the tests of engine `vllm`."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from gspo.model.routing import find_routers
from gspo.rollout.engine import EngineContext, GenerateOptions
from gspo.types import Completion, Prompt, Sampling

VOCABULARY = 256
STOP = 1
ATTEMPTS = 6
"""Updates that are tried until one of them falls into a generation."""


class Numbers:
    """A tokenizer whose text is the token ids."""

    def batch_decode(self, ids: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        return [" ".join(map(str, i)) for i in ids]


def small_moe(dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    """Four layers of eight experts; head size 32 is the smallest that vLLM's CPU attention supports."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "initializer_range": 0.1,
        "max_position_embeddings": 512,
        "norm_topk_prob": True,
        "eos_token_id": STOP,
        "tie_word_embeddings": True,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape | sizes)).to(dtype).eval()


def context_of(model: Any) -> EngineContext:
    return EngineContext(model=model, tokenizer=Numbers(), stop_ids=(STOP,), routers=find_routers(model))


def some_prompts(count: int = 4, length: int = 12) -> list[Prompt]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(2, VOCABULARY, (count, length), generator=generator).tolist()
    return [
        Prompt(id=f"train/{i}", content="", text="", token_ids=tuple(row[: length - i])) for i, row in enumerate(rows)
    ]


def generate(engine: Any, prompts: Sequence[Prompt], **changes: Any) -> list[Completion]:
    settings: dict[str, Any] = {
        "sampling": Sampling(max_tokens=24),
        "seed": 3,
        "stream": "train/1",
        "version": 7,
        "samples": 3,
    }
    groups = engine.generate(prompts, GenerateOptions(**settings | changes))
    return [completion for group in groups for completion in group]


@torch.no_grad()
def differences(model: Any, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> torch.Tensor:
    """|log-prob of the engine - log-prob of the model| for every token."""
    by_id = {p.id: p for p in prompts}
    parts = []
    for completion in completions:
        prompt_ids = by_id[completion.prompt_id].token_ids
        ids = torch.tensor([prompt_ids + completion.token_ids])
        logp = model(ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[len(prompt_ids) - 1 :, 0]
        parts.append((logp - torch.tensor(completion.logp_sampler)).abs())
    return torch.cat(parts)


@torch.no_grad()
def perturb(model: Any, amount: float = 0.02) -> None:
    """Change the policy in place, as an optimizer does."""
    generator = torch.Generator().manual_seed(int(next(model.parameters())._version))
    for p in model.parameters():
        p.add_(amount * torch.randn(p.shape, generator=generator).to(p.dtype))


def wait_until_running(engine: Any, generation: threading.Thread, tokens_before: float) -> None:
    """Wait until the engine's server has sampled tokens of a generation, or the generation has ended."""
    while generation.is_alive() and served_tokens(engine) <= tokens_before:
        time.sleep(0.005)


def served_tokens(engine: Any) -> float:
    """The tokens that the engine's server has sampled since it started, from vLLM's own metrics."""
    (server,) = engine.host.servers
    request = urllib.request.Request(
        f"http://{server.client.address}/metrics", headers={"Authorization": f"Bearer {server.client.token}"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))


def assert_versions_are_reported(
    engine: Any,
    prompts: Sequence[Prompt],
    copy_of_policy: Callable[[], Any],
    change: Callable[[], None],
    *,
    version: int,
    near: float,
) -> None:
    """Change weights during generation: each running completion must report from which token on the new ones were
    used."""
    for now in range(version, version + ATTEMPTS):
        old = copy_of_policy()
        found = change_while_generating(engine, prompts, change, version=now)
        if changed := [c for c in found if c.spans]:
            break
    assert changed, f"no completion was running during any of {ATTEMPTS} updates"
    for completion in changed:
        assert tuple(version for version, _ in completion.spans) == (now, now + 1)
        first = completion.spans[1][1]
        of_old, of_new = (differences(m, prompts, [completion]) for m in (old, engine.context.model))
        assert of_old[:first].max() < near
        assert of_new[first:].max() < near
        assert of_new[:first].max() > 1e-2 if first else True


def change_while_generating(
    engine: Any, prompts: Sequence[Prompt], change: Callable[[], None], *, version: int
) -> list[Completion]:
    """Send changed weights as version + 1 once the first tokens are sampled. A slow machine may still finish all
    completions before the update begins."""
    found: list[Completion] = []
    settings: dict[str, Any] = {"version": version, "samples": 4, "sampling": Sampling(max_tokens=480)}
    generate(engine, prompts, version=version)  # so that the thread sends no weights of its own
    before = served_tokens(engine)
    thread = threading.Thread(target=lambda: found.extend(generate(engine, prompts, **settings)))
    thread.start()
    wait_until_running(engine, thread, before)
    change()
    engine.sync(version + 1)
    thread.join()
    return found
