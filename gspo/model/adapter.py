"""Low-rank adapters (LoRA, arXiv:2106.09685) through `peft`, put into a model in place.

In: a transformers model and a `LoraConfig`, or a folder with a saved adapter. Out: the same model object, in which the chosen
linear layers compute `W x + (alpha / rank) B A x`; only A and B are trained. Invariant: B begins at 0, so the model begins as
the one that was given, and with its adapters switched off it is that one, to the bit. The model's class stays what it was,
and everything that reads it reads it as before.

A saved adapter is peft's own format, `adapter_config.json` and `adapter_model.safetensors`: plain peft loads it.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from gspo.config import LoraConfig
from gspo.errors import ConfigError
from gspo.model import quantization as quantized
from gspo.model.quantization import linear_layers

NAME = "default"
SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""What plain peft puts before the names of a model's parameters."""


def adapted(model: Any) -> bool:
    """Whether a model has adapters."""
    return hasattr(model, "peft_config")


def base_of(path: str) -> str | None:
    """The model that the adapter in a folder belongs to; None: the folder holds no adapter."""
    file = Path(path).expanduser() / SETTINGS
    if not file.is_file():
        return None
    try:
        base = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError):
        base = None
    if not base or not isinstance(base, str):
        raise ConfigError(
            f"model.path: {file}: does not say which model the adapter belongs to; set base_model_name_or_path in it"
        )
    return base


def trained_beside(path: str) -> str:
    """The `model.quantize` of the run that a folder's adapter is of; empty if the weights beside it were whole."""
    file = Path(path).expanduser() / "trainer.json"
    if base_of(path) is None or not file.is_file():
        return ""
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["settings"].get("model.quantize", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"model.path: {file}: cannot be read; the checkpoint is not whole") from None


def attach(model: Any, config: LoraConfig, *, base: str, seed: int) -> None:
    """Put fresh adapters into the model `base`; A is drawn by the seed, on the CPU, so that every device begins alike."""
    _check_peft()
    from peft import LoraConfig as Settings
    from peft import inject_adapter_in_model

    settings = Settings(
        r=config.rank,
        lora_alpha=config.alpha or 2 * config.rank,
        lora_dropout=0.0,
        target_modules=targets(model, config),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(settings, model, NAME, low_cpu_mem_usage=model.device.type == "meta")
    _settle_precision(model)


def attach_saved(model: Any, folder: Path) -> tuple[int, float, set[str]]:
    """Put a saved adapter into its model, ready to be trained further; its rank, alpha and kinds of layer."""
    _check_peft()
    from peft import LoraConfig as Settings
    from peft import inject_adapter_in_model

    settings = Settings.from_pretrained(str(folder))
    settings.inference_mode = False
    special = settings.lora_dropout or settings.bias != "none" or settings.modules_to_save or settings.use_dora
    special = special or getattr(settings, "lora_bias", False) or settings.fan_in_fan_out
    if settings.peft_type != "LORA" or special or settings.target_parameters:
        raise ConfigError(
            f"model.path: {folder / SETTINGS}: only plain LoRA of linear layers, without dropout and biases, can be used here; merge it into its model with peft, and give that"
        )
    inject_adapter_in_model(settings, model, NAME)
    _settle_precision(model)
    saved, weights = load_file(folder / WEIGHTS), _weights(model)
    if saved.keys() != weights.keys() or any(saved[k].shape != w.shape for k, w in weights.items()):
        raise ConfigError(
            f"model.path: {folder / WEIGHTS}: does not fit {type(model).__name__} of {settings.base_model_name_or_path}; give the model it was trained on"
        )
    with torch.no_grad():
        for key, weight in weights.items():
            weight.copy_(saved[key])
    kinds = settings.target_modules or ()
    return settings.r, settings.lora_alpha, {kinds} if isinstance(kinds, str) else set(kinds)


def save(model: Any, folder: Path) -> None:
    """Write the adapter alone."""
    folder.mkdir(parents=True, exist_ok=True)
    model.peft_config[NAME].save_pretrained(str(folder))
    save_file({key: w.detach().contiguous() for key, w in _weights(model).items()}, folder / WEIGHTS)


@contextmanager
def switched_off(model: Any) -> Iterator[None]:
    """Inside, the model is the one that the adapters were put into."""
    off = list(layers(model).values())
    for layer in off:
        layer._disable_adapters = (
            True  # peft's own way also switches `requires_grad`, and with it gradients that are wanted
        )
    try:
        yield
    finally:
        for layer in off:
            layer._disable_adapters = False


@torch.no_grad()
def merge(model: Any) -> None:
    """Add the adapters to the weights and take them out: a plain model again. The sum is made in float32 and rounded once."""
    for path, layer in layers(model).items():
        whole = layer.get_base_layer()
        whole = quantized.plain(whole, torch.float32) if quantized.is_small(whole) else whole
        whole.weight.data = joined(layer, whole.weight).to(model.dtype)
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, whole)
    quantized.restore(model)
    del model.peft_config
    model._hf_peft_config_loaded = False
    model.requires_grad_(True)


@torch.no_grad()
def joined(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """W + (alpha / rank) B A of an adapted layer, in float32."""
    return weight.float() + layer.scaling[NAME] * (
        layer.lora_B[NAME].weight.float() @ layer.lora_A[NAME].weight.float()
    )


def targets(model: Any, config: LoraConfig) -> list[str]:
    """The last parts of the names of the layers that get adapters."""
    possible = _possible(model)
    for name in config.targets:
        if name not in possible:
            raise ConfigError(_refusal(model, name, possible))
    chosen = sorted(set(config.targets) or possible)
    if not chosen:
        raise ConfigError(
            f"model.lora.rank: {type(model).__name__} has no linear layers that adapters could be put into; set it to 0"
        )
    widest = max(
        min(m.in_features, m.out_features) for path, m in linear_layers(model) if path.rpartition(".")[2] in chosen
    )
    if config.rank > widest:
        raise ConfigError(
            f"model.lora.rank: {config.rank} is more than any of the layers has ({widest}), so the adapters would be larger than what they adapt; 8 to 64 is usual"
        )
    return chosen


def _possible(model: Any) -> set[str]:
    """The last parts of the names of all linear layers that may be adapted; none that is also another layer's."""
    kept = [path for path, _ in linear_layers(model)]
    others = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name not in kept
    }
    return {path.rpartition(".")[2] for path in kept} - others


def _refusal(model: Any, name: str, possible: set[str]) -> str:
    there = f"there are: {', '.join(sorted(possible))}"
    last = name.rpartition(".")[2]
    if any(n.rpartition(".")[2] == last for n, m in model.named_modules() if m is model.get_output_embeddings()):
        return f"model.lora.targets: {name!r} is the output layer, which gets no adapter: log-probabilities are computed from its plain weight; {there}"
    if any(n.rpartition(".")[2] == last and p.dim() == 3 for n, p in model.named_parameters()):
        return (
            f"model.lora.targets: {name!r} holds all experts of a layer in one tensor, which gets no adapter; {there}"
        )
    close = difflib.get_close_matches(name, possible, n=1)
    return f"model.lora.targets: {type(model).__name__} has no linear layer {name!r}{f' (did you mean {close[0]}?)' if close else ''}; {there}"


def _check_peft() -> None:
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "model.lora: adapters need the peft package; run: pip install peft, or set model.lora.rank = 0"
        )


def layers(model: Any) -> dict[str, Any]:
    """The layers that have adapters, by their paths."""
    return {path: module for path, module in model.named_modules() if hasattr(module, "lora_A")}


def is_adapters(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def _settle_precision(model: Any) -> None:
    """Adapters in the precision of the model, also beside weights in 4 bits, which have none."""
    for weight in _weights(model).values():
        weight.data = weight.data.to(model.dtype)


def _weights(model: Any) -> dict[str, torch.Tensor]:
    """The adapters' weights by the names that plain peft gives them."""
    return {
        _PREFIX + name.replace(f".{NAME}.", "."): weight
        for name, weight in model.named_parameters()
        if is_adapters(name)
    }
