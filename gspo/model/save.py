"""Writing a model in the Hugging Face layout, also one whose weights are sharded over ranks.

In: a policy. Out: a directory that transformers and vLLM load; with LoRA only the adapter, in the layout of peft.
Invariant: the leader never holds a whole copy of a sharded model. It gathers the weights of one file, writes it, and
frees them. If writing fails, the ranks stay in step: they gather what is left for nobody.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from gspo.errors import RankError
from gspo.model import adapter
from gspo.model.load import Policy
from gspo.model.sharding import full, is_sharded
from gspo.ranks.group import ONE, Ranks

FILE_BYTES = 1 << 30
"""A file of a sharded model has at most this many bytes of weights, unless one decoder layer has more."""
_FILE = "model.safetensors"
_UNLIMITED = 1 << 62

Check = Callable[[str, Tensor], None]
"""What is called with every weight before it is written."""


def save_model(policy: Policy, folder: Path, ranks: Ranks = ONE, check: Check = lambda name, weight: None) -> None:
    """Write weights, config and tokenizer. With several ranks, the followers must run `whole_weights` meanwhile."""
    model = policy.model
    with gathered_weights(policy, ranks) as weights, disk_errors():
        if adapter.adapted(model):
            adapter.save(model, folder, dict(_checked(weights, check)))
        elif any(map(is_sharded, model.parameters())):
            _save_file_by_file(model, folder, _checked(weights, check))
        else:
            for _ in _checked(weights, check):
                pass
            model.save_pretrained(folder)
    with disk_errors():
        policy.tokenizer.save_pretrained(folder)


@contextmanager
def gathered_weights(policy: Policy, ranks: Ranks) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Inside, the leader iterates over the weights as whole tensors, or over some of them. The followers gather all of
    them in the meantime."""
    failure = None
    with ranks.together("gather_weights"):
        weights = whole_weights(policy, ranks)
        try:
            yield weights
        except RankError:
            raise
        except Exception as error:
            failure = error
        for _ in weights:
            pass
    if failure is not None:
        raise failure


def whole_weights(policy: Policy, ranks: Ranks) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model, or of its adapters, as whole tensors, layer by layer. All ranks must exhaust it. A device
    holds one whole tensor at a time."""
    named = trained_weights(policy)
    with ranks.peers_answer():
        for name in (name for unit in _units(policy.model) for name in unit):
            if name in named:
                whole = full(named[name].detach())
                yield name, whole.cpu() if ranks.several else whole


def trained_weights(policy: Policy) -> dict[str, Tensor]:
    """The parameters of a model, or of its adapters, by name. They may be sharded."""
    adapters = adapter.adapted(policy.model)
    return {name: p for name, p in policy.model.named_parameters() if p.requires_grad or not adapters}


@contextmanager
def disk_errors() -> Iterator[None]:
    """Turn the disk errors of libraries into `OSError`: tokenizers raises a bare `Exception`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, SafetensorError) or "(os error " in str(error):
            raise OSError(str(error)) from error
        raise


def _checked(weights: Iterator[tuple[str, Tensor]], check: Check) -> Iterator[tuple[str, Tensor]]:
    for name, weight in weights:
        check(name, weight)
        yield name, weight


def _units(model: Any) -> list[list[str]]:
    """The names of weights and buffers, in groups whose weights must be in the same file: transformers may store
    several of them as one tensor, such as the experts of a layer, but none of different layers."""
    paths = {path for path, module in model.named_modules() if path and isinstance(module, FSDPModule)}
    units: dict[str, list[str]] = {}
    for name in model.state_dict():
        parts = name.split(".")
        path = next((p for i in range(len(parts)) if (p := ".".join(parts[:i])) in paths), "")
        units.setdefault(path, []).append(name)
    return list(units.values())


def _save_file_by_file(model: Any, folder: Path, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Write a sharded model."""
    named = dict(model.named_parameters())
    plain = {name: tensor for name, tensor in model.state_dict().items() if not is_sharded(tensor)}
    # A sharded tensor that is not among the parameters is the second name of a tied weight.
    tensors = plain | named
    files = _files([[name for name in unit if name in tensors] for unit in _units(model)], tensors)
    index: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        values = {name: next(weights)[1] if name in named else plain[name] for name in names}
        part = folder if len(files) == 1 else folder / "part"
        # Through transformers, because names and shapes in a file may differ from those in memory.
        model.save_pretrained(part, state_dict=values, max_shard_size=_UNLIMITED)
        del values
        if part == folder:
            return
        file = folder / f"model-{number:05d}-of-{len(files):05d}.safetensors"
        for path in part.iterdir():
            path.replace(file if path.name == _FILE else folder / path.name)
        part.rmdir()
        with safe_open(file, framework="pt") as saved:
            index |= dict.fromkeys(saved.keys(), file.name)
    content = {"metadata": {"total_size": sum(map(_bytes, tensors.values()))}, "weight_map": index}
    (folder / f"{_FILE}.index.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _files(units: list[list[str]], tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Which weights each file has."""
    files: list[list[str]] = [[]]
    room = FILE_BYTES
    for names in units:
        size = sum(_bytes(tensors[name]) for name in names)
        if size > room and files[-1]:
            files.append([])
            room = FILE_BYTES
        files[-1] += names
        room -= size
    return files


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
