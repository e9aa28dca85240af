"""Low-rank adapters (LoRA, arXiv:2106.09685) with `peft`, injected into a model in place.

In: a transformers model and a `LoraConfig`, or a folder with a saved adapter. Out: the same model object, in which the
chosen linear layers compute `W x + (alpha / rank) B A x`; only A and B are trained. Invariant: B starts at 0, so the
model starts as the base model, and with its adapters disabled it is bitwise identical to it. The model's class does not
change, so all other code reads the model as before.

An MoE model may store all experts of a layer in one tensor. Each expert then has an A and a B of its own, and peft
wraps the module that holds the tensor, once per adapted tensor: the wrappers are nested.

A saved adapter has peft's own format, `adapter_config.json` and `adapter_model.safetensors`: plain peft can load it.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from gspo.config import LoraConfig
from gspo.errors import ConfigError
from gspo.model import quantization as quantized
from gspo.model.quantization import linear_layers
from gspo.model.sharding import full, sharded_like

NAME = "default"
SETTINGS = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""The prefix of parameter names in peft's own files."""


def adapted(model: Any) -> bool:
    """Whether a model has adapters."""
    return hasattr(model, "peft_config")


def base_of(path: str) -> str | None:
    """The base model of the adapter in a folder; None if the folder holds no adapter."""
    file = Path(path).expanduser() / SETTINGS
    # A model that is built from scratch has no path, and an empty one would be the current directory.
    if not path or not file.is_file():
        return None
    try:
        base = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError):
        base = None
    if not base or not isinstance(base, str):
        raise ConfigError(
            f"model.path: {file}: does not name the base model of the adapter; set base_model_name_or_path in it"
        )
    return base


def quantization_of(path: str) -> str:
    """The `model.quantize` of the run that trained the adapter in a folder; empty if its base model was not
    quantized."""
    file = Path(path).expanduser() / "trainer.json"
    if base_of(path) is None or not file.is_file():
        return ""
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["settings"].get("model.quantize", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"model.path: {file}: cannot be read; the checkpoint is incomplete, use another") from None


def attach(model: Any, config: LoraConfig, *, base: str, seed: int) -> None:
    """Inject fresh adapters into the model `base`. A is initialized from the seed on the CPU, so that it is the same on
    every device."""
    _check_peft()
    from peft import LoraConfig as Settings
    from peft import inject_adapter_in_model

    settings = Settings(
        r=config.rank,
        lora_alpha=config.alpha or 2 * config.rank,
        # Dropout would make the learner's probabilities differ from the sampler's.
        lora_dropout=0.0,
        target_modules=targets(model, config),
        target_parameters=expert_targets(model) if config.experts else None,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )
    # The run's own random state must not depend on how many adapters are made.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Not `get_peft_model`: that would wrap the model in another class.
        inject_adapter_in_model(settings, model, NAME, low_cpu_mem_usage=model.device.type == "meta")
    _match_dtype(model)


def attach_saved(model: Any, folder: Path) -> LoraConfig:
    """Inject a saved adapter into its base model for further training; its settings, with alpha and targets filled
    in."""
    _check_peft()
    from peft import LoraConfig as Settings
    from peft import inject_adapter_in_model

    settings = Settings.from_pretrained(str(folder))
    # peft saves adapters for inference, which would freeze them.
    settings.inference_mode = False
    special = settings.lora_dropout or settings.bias != "none" or settings.modules_to_save or settings.use_dora
    special = special or getattr(settings, "lora_bias", False) or settings.fan_in_fan_out
    experts = sorted(settings.target_parameters or ())
    if settings.peft_type != "LORA" or special or (experts and experts != _expert_tensors(model)):
        raise ConfigError(
            f"model.path: {folder / SETTINGS}: only plain LoRA of linear layers, and of all experts or none, without "
            "dropout and biases, is supported; merge the adapter into its model with peft, and give the merged model"
        )
    inject_adapter_in_model(settings, model, NAME)
    _match_dtype(model)
    reload_weights(model, folder)
    kinds = settings.target_modules or ()
    return LoraConfig(
        rank=settings.r,
        alpha=settings.lora_alpha,
        targets=(kinds,) if isinstance(kinds, str) else tuple(sorted(kinds)),
        experts=bool(experts),
    )


@torch.no_grad()
def reload_weights(model: Any, folder: Path) -> None:
    """Replace the weights of the model's adapters by those of a saved adapter of the same layers."""
    weights = _weights(model)
    saved = _saved_weights(model, folder)
    for key, weight in weights.items():
        weight.copy_(sharded_like(saved[key], weight))


def has_weights(model: Any, folder: Path) -> bool:
    """Whether the model's adapters are bitwise those of a saved adapter of the same layers."""
    saved = _saved_weights(model, folder)
    return all(torch.equal(saved[key], weight.cpu()) for key, weight in _weights(model).items())


def _saved_weights(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    saved = load_file(folder / WEIGHTS)
    weights = _weights(model)
    if saved.keys() != weights.keys() or any(saved[k].shape != w.shape for k, w in weights.items()):
        base = model.peft_config[NAME].base_model_name_or_path
        raise ConfigError(
            f"model.path: {folder / WEIGHTS}: does not fit {type(model).__name__} of {base}; "
            "give the model it was trained on"
        )
    return saved


def save(model: Any, folder: Path, whole: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write the adapter without the base model. `whole` are its weights by parameter name, if the model is sharded."""
    folder.mkdir(parents=True, exist_ok=True)
    model.peft_config[NAME].save_pretrained(str(folder))
    weights = _weights(model) if whole is None else {_file_name(name): weight for name, weight in whole.items()}
    save_file({key: weight.detach().contiguous() for key, weight in weights.items()}, folder / WEIGHTS)


@contextmanager
def adapters_disabled(model: Any) -> Iterator[None]:
    """Inside, the model computes without its adapters."""
    adapted_layers = list(layers(model).values())
    for layer in adapted_layers:
        # Not peft's `enable_adapters(False)`: that also clears `requires_grad`, and with it gradients that are wanted.
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in adapted_layers:
            layer._disable_adapters = False


@torch.no_grad()
def merge(model: Any) -> None:
    """Merge the adapters into the weights and remove them. The sum is computed in float32 and rounded once."""
    for path, layer in layers(model).items():
        base = layer.get_base_layer()
        base = quantized.dequantize_layer(base, torch.float32) if quantized.is_quantized(base) else base
        weight = getattr(base, tensor_name(layer))
        weight.data = merged_weight(layer, weight).to(model.dtype)
        parent, _, name = path.rpartition(".")
        if name != "base_layer":  # an inner wrapper of experts goes with the outer one, which comes first
            setattr(model.get_submodule(parent), name, base)
    quantized.dequantize(model)
    del model.peft_config
    # Otherwise transformers would save an adapter instead of the model.
    model._hf_peft_config_loaded = False
    model.requires_grad_(True)


@torch.no_grad()
def merged_weight(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """W + (alpha / rank) B A of an adapted layer, in float32; with experts, of each of them. W is a whole tensor, A and
    B may be sharded, and then all ranks must call this."""
    a, b = full(layer.lora_A[NAME].weight).float(), full(layer.lora_B[NAME].weight).float()
    if weight.dim() == 2:
        return weight.float() + layer.scaling[NAME] * (b @ a)
    # peft stores the factors of all experts in two matrices: A as [experts * rank, in], B as [out, rank * experts].
    count = weight.shape[0]
    change = b.reshape(len(b), -1, count).permute(2, 0, 1) @ a.reshape(count, -1, a.shape[1])
    # What peft calls out is the last axis of the weight, unless it has swapped the two.
    swapped = getattr(layer, "_did_swap_in_out_features", False)
    return weight.float() + layer.scaling[NAME] * (change if swapped else change.mT)


def tensor_name(layer: Any) -> str:
    """The name of the tensor that a layer adapts."""
    return getattr(layer, "parameter_name", "weight")


def targets(model: Any, config: LoraConfig) -> list[str]:
    """The layers that get adapters, by the last parts of their names."""
    adaptable = _adaptable(model)
    for name in config.targets:
        if name not in adaptable:
            raise ConfigError(_target_error(model, name, adaptable))
    chosen = sorted(set(config.targets) or adaptable)
    if not chosen:
        raise ConfigError(
            f"model.lora.rank: {type(model).__name__} has no linear layers that can have adapters; set it to 0"
        )
    widest = max(
        min(m.in_features, m.out_features) for path, m in linear_layers(model) if path.rpartition(".")[2] in chosen
    )
    if config.rank > widest:
        raise ConfigError(
            f"model.lora.rank: {config.rank} is more than the rank of any layer ({widest}), so the adapters would be "
            "larger than the layers; 8 to 64 is usual"
        )
    return chosen


def expert_targets(model: Any) -> list[str]:
    """The tensors of experts that get adapters. Raises if the model has none."""
    tensors = _expert_tensors(model)
    if not tensors:
        what = "stores its experts as linear layers, which always get adapters" if _has_experts(model) else "has none"
        raise ConfigError(f"model.lora.experts: {type(model).__name__} {what}; leave it out")
    return tensors


def _expert_tensors(model: Any) -> list[str]:
    """Tensors that hold all experts of a layer, by the last two parts of their names."""
    names = (name.split(".")[-2:] for name, weight in model.named_parameters() if weight.dim() == 3)
    return sorted({".".join(parts) for parts in names if parts[0] == "experts"})


def _has_experts(model: Any) -> bool:
    return any("experts" in path.split(".") for path, _ in linear_layers(model))


def _adaptable(model: Any) -> set[str]:
    """All linear layers that can have adapters, by the last parts of their names, without names that other layers
    share: peft selects layers by name."""
    included = [path for path, _ in linear_layers(model)]
    others = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name not in included
    }
    return {path.rpartition(".")[2] for path in included} - others


def _target_error(model: Any, name: str, adaptable: set[str]) -> str:
    there = f"there are: {', '.join(sorted(adaptable))}"
    last = name.rpartition(".")[2]
    if any(n.rpartition(".")[2] == last for n, m in model.named_modules() if m is model.get_output_embeddings()):
        return (
            f"model.lora.targets: {name!r} is the LM head, which gets no adapter, because log-probs are computed from "
            f"its plain weight; {there}"
        )
    if any(n.rpartition(".")[2] == last and p.dim() == 3 for n, p in model.named_parameters()):
        return (
            f"model.lora.targets: {name!r} holds all experts of a layer in one tensor; for adapters of these, set "
            f"model.lora.experts = true; {there}"
        )
    close = difflib.get_close_matches(name, adaptable, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"model.lora.targets: {type(model).__name__} has no linear layer {name!r}{hint}; {there}"


def _check_peft() -> None:
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "model.lora: adapters need the peft package; run: pip install peft, or set model.lora.rank = 0"
        )


def layers(model: Any) -> dict[str, Any]:
    """The layers that have adapters, by path."""
    return {path: module for path, module in model.named_modules() if hasattr(module, "lora_A")}


def is_adapter_parameter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def _match_dtype(model: Any) -> None:
    """Convert adapters to the model's dtype; 4-bit base weights have no floating-point dtype to copy."""
    for weight in _weights(model).values():
        weight.data = weight.data.to(model.dtype)


def _weights(model: Any) -> dict[str, torch.Tensor]:
    """The weights of the adapters, by their names in peft's files."""
    named = model.named_parameters()
    return {_file_name(name): weight for name, weight in named if is_adapter_parameter(name)}


def _file_name(name: str) -> str:
    """The name in peft's files of a parameter of an adapter."""
    return _PREFIX + name.replace(f".{NAME}.", ".")
