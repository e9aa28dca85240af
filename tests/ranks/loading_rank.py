"""What a rank does that loads a model: it writes the weights after they were sharded, and the most bytes of them that
it has held at the same time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from forked_ranks import patch
from safetensors.torch import save_file

from gspo.config import LoraConfig, ModelConfig
from gspo.model.load import build_model, char_tokenizer, load_policy, load_tokenizer, reload_weights
from gspo.model.partial import Parts, decoder_layers, has_part
from gspo.model.sharding import full, local, shard
from gspo.ranks.group import Ranks

SIZES = {"num_hidden_layers": 8, "tie_word_embeddings": True}
CASES: dict[str, dict[str, Any]] = {
    "moe": {"dtype": "bfloat16", "gradient_checkpointing": True},
    "lora": {"lora": LoraConfig(rank=2)},
}


def save_models(folder: Path) -> None:
    tokenizer = char_tokenizer("0123456789")
    builds = {"moe": "tiny_moe", "lora": "tiny_dense", "another": "tiny_moe"}
    for name, build in builds.items():
        config = ModelConfig(build=build, build_options=SIZES)
        build_model(config, tokenizer, seed=len(name)).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


class Alive:
    """The bytes of a model's weights, and of the parts that a rank keeps of them."""

    def __init__(self) -> None:
        self.read = self.peak = 0
        self.model: Any = None
        self.undo: list[Any] = []

    def watch(self) -> None:
        """Count when a tensor was read, a layer was gathered, and a layer is sharded."""
        wrappers = {"_keep_part": self._reading, "own": self._owning, "_before": self._forward, "take": self._forward}
        for name, wrapper in wrappers.items():
            self.undo.append((name, vars(Parts)[name]))
            patch(Parts, name, wrapper)

    def stop(self) -> None:
        for name, original in self.undo:
            setattr(Parts, name, original)

    def _reading(self, original: Any) -> Any:
        def keep_part(parts: Parts, module: Any, name: str, p: Any) -> Any:
            kept = original(parts, module, name, p)
            if p is not None and not p.is_meta and not has_part(p):
                self.read += _bytes(p if kept is None else kept)
                self.peak = max(self.peak, self.read + _bytes(p))
            return kept

        return keep_part

    def _owning(self, original: Any) -> Any:
        def own(parts: Parts, model: Any) -> None:
            self.model = model
            original(parts, model)

        return own

    def _forward(self, original: Any) -> Any:
        def call(*args: Any) -> None:
            original(*args)
            self.peak = max(self.peak, sum({id(p): _bytes(p) for p in self.model.parameters()}.values()))

        return call


def _bytes(p: Any) -> int:
    part = getattr(p, "own_part", None)
    return int(local(p.detach()).untyped_storage().nbytes() + (0 if part is None else part.nbytes))


def load(name: str, ranks: Ranks, folder: Path) -> None:
    config = ModelConfig(path=str(folder / name), device="cpu", **CASES[name])
    tokenizer = load_tokenizer(config)
    alive = Alive()
    alive.watch()
    policy = load_policy(config, tokenizer, seed=0, ranks=ranks)
    model = policy.model
    layer = sum(p.numel() * p.element_size() for p in decoder_layers(model)[0].parameters())
    everything = sum(p.numel() * p.element_size() for p in model.parameters())
    if ranks.several:
        shard(model, ranks.count)
    alive.stop()
    sizes = {"all": everything, "layer": layer, "outside": everything - SIZES["num_hidden_layers"] * layer}
    file = f"{name}-{ranks.count}-{ranks.rank}"
    torch.save(sizes | {"peak": alive.peak}, folder / f"{file}.pt")
    weights = {key: full(p.detach()).clone() for key, p in model.named_parameters()}
    if name == "moe":  # as a rollback does
        reload_weights(policy, replace(config, path=str(folder / "another")), ranks)
        weights |= {f"reloaded {key}": full(p.detach()).clone() for key, p in model.named_parameters()}
    save_file(weights, folder / f"{file}.safetensors")


def load_all(ranks: Ranks, folder: Path) -> None:
    for name in CASES:
        load(name, ranks, folder)
