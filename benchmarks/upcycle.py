"""Upcycle a dense model: an MoE checkpoint whose experts are copies of the dense model's MLP.

    python benchmarks/upcycle.py HuggingFaceTB/SmolLM2-135M-Instruct smollm2-moe --experts 8 --top-k 2
    gspo train RECIPE --model.path=smollm2-moe

In: a Llama, Qwen2 or Qwen3 model (directory, hub name or .gguf file). Out: a Mixtral, Qwen2-MoE or Qwen3-MoE directory
that transformers, vLLM and gspo load. Invariants: gate weights add up to 1, so with `--noise 0` the logits are those of
the dense model, whatever the router chooses, and this is checked before anything is written; the same seed gives the
same router and the same noise; a weight that the MoE model has no place for is an error.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gspo.config import ModelConfig
from gspo.errors import ConfigError
from gspo.model.load import Policy, load_policy, load_tokenizer
from gspo.model.save import save_model

KINDS = {"llama": "mixtral", "qwen2": "qwen2_moe", "qwen3": "qwen3_moe"}
"""The MoE model with the attention of each dense one."""
TOLERANCE = 1e-3
"""Largest difference of a log-prob in float32 that is rounding."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2, help="experts per token")
    parser.add_argument("--router-std", type=float, default=0.02, help="standard deviation of the router's weights")
    parser.add_argument(
        "--noise",
        type=float,
        default=0.0,
        help="noise on each expert's weights, as a share of the standard deviation of the weight. Without it experts "
        "are equal, and which one the router chooses makes no difference until training separates them",
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not 1 <= options.top_k <= options.experts:
        parser.error(f"--top-k: must be from 1 to the number of experts, not {options.top_k}")
    if options.out.exists():
        parser.error(f"{options.out} exists; choose another directory")
    try:
        config = ModelConfig(path=options.model, dtype="float32", device="cpu")
        dense = load_policy(config, load_tokenizer(config), seed=0)
        moe = upcycled(
            dense.model,
            experts=options.experts,
            top_k=options.top_k,
            router_std=options.router_std,
            noise=options.noise,
            seed=options.seed,
        )
    except ConfigError as error:
        parser.error(str(error))
    difference = largest_difference(dense.model, moe)
    print(f"{size(dense.model):.1f}M parameters -> {size(moe):.1f}M; log-probs differ by at most {difference:.2g}")
    if options.noise == 0 and difference > TOLERANCE:
        sys.exit("with equal experts the model must be the dense one; nothing was written")
    save_model(Policy(model=moe, tokenizer=dense.tokenizer, device=dense.device), options.out)
    return 0


@torch.no_grad()
def upcycled(dense: Any, *, experts: int, top_k: int, router_std: float, noise: float, seed: int) -> Any:
    """The MoE model of a dense one, in its precision."""
    from transformers import AutoModelForCausalLM

    moe = AutoModelForCausalLM.from_config(moe_config(dense.config, experts, top_k), dtype=dense.dtype).eval()
    moe.generation_config = dense.generation_config
    given, random = dict(dense.named_parameters()), torch.Generator().manual_seed(seed)
    for name, weight in moe.named_parameters():
        parent, _, last = name.rpartition(".")
        if parent.endswith(".mlp.experts"):
            of = parent.removesuffix("experts")
            parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
            copied = torch.cat([given.pop(f"{of}{part}.weight") for part in parts])
            scale = noise * copied.float().std()
            for expert in weight:
                expert.copy_(copied + scale * normal(copied, random) if noise else copied)
        elif name in given:
            weight.copy_(given.pop(name))
        elif parent.endswith(".shared_expert.down_proj"):
            # Qwen2-MoE cannot do without a shared expert. This one adds nothing at the start.
            nn.init.zeros_(weight)
        else:
            weight.copy_(router_std * normal(weight, random))
    if given:
        raise ConfigError(f"{moe.config.model_type} has no place for {min(given)}, so it cannot continue this model")
    return moe


def moe_config(dense: Any, experts: int, top_k: int) -> Any:
    """The sizes of the dense model, with these experts in every layer."""
    from transformers import AutoConfig

    if dense.model_type not in KINDS:
        raise ConfigError(f"{dense.model_type} models cannot be upcycled; these can: {', '.join(KINDS)}")
    kind = KINDS[dense.model_type]
    # Qwen3-MoE reads a head_dim that is not among its defaults.
    known = AutoConfig.for_model(kind).to_dict().keys() | {"head_dim"}
    own = {key: value for key, value in dense.to_dict().items() if key in known and key != "model_type"}
    if kind == "mixtral":
        own["num_local_experts"] = experts
    else:
        own |= {"num_experts": experts, "moe_intermediate_size": dense.intermediate_size, "norm_topk_prob": True}
        own |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    if kind == "qwen2_moe":
        own["shared_expert_intermediate_size"] = 16
    return AutoConfig.for_model(kind, **own | {"num_experts_per_tok": top_k, "architectures": None})


def normal(like: Tensor, random: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=random).to(like.dtype)


@torch.no_grad()
def largest_difference(one: Any, other: Any) -> float:
    """Between the log-probs of two models, on random tokens."""
    random = torch.Generator().manual_seed(0)
    token_BT = torch.randint(one.config.vocab_size, (2, 64), generator=random)
    a, b = (model(input_ids=token_BT).logits.float().log_softmax(-1) for model in (one, other))
    return float((a - b).abs().max())


def size(model: Any) -> float:
    """Millions of parameters."""
    return sum(weight.numel() for weight in model.parameters()) / 1e6


if __name__ == "__main__":
    sys.exit(main())
