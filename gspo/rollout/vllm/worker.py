"""What runs inside vLLM's workers: weights arrive here, and the experts that were used are noted here.

Loaded by vLLM as `worker_extension_cls`; importing it registers the weight-transfer backend `gspo`, which takes weights by
reference (an engine in the learner's process), from a safetensors file, or from a broadcast (gloo, NCCL), whichever an update names.

Invariant: `gspo_received` is the digest of the tensors that the last update really handed to the model's loader, and after
every update the kernels' own copies of the experts are made anew.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from gspo.rollout.vllm.broadcast import broadcast, group
from gspo.rollout.vllm.weights import ADAPTER, Digest

BACKEND = "gspo"

HANDED: dict[str, list[tuple[str, Tensor]]] = {}
"""Weights that the learner offers by reference, where it is in this process."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Where to meet the learner for broadcasts; no port: there will be none."""

    kind: str = "gloo"
    host: str = ""
    port: int = 0
    size: int = 0
    """The learner and all workers."""
    first: int = 1
    """Rank of worker 0."""
    timeout_s: float = 60.0


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Where the weights are: one of the three."""

    handed: str = ""
    """Key in `HANDED`."""
    path: str = ""
    """A safetensors file."""
    broadcast: list[tuple[str, str, list[int]]] = field(default_factory=list)
    """Name, type and shape of the tensors that come from the learner, in this order."""


class Receiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """The worker's end of backend `gspo`."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.group: Any = None
        self.kind = "gloo"
        self.received = ""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()
        if init_info.port:
            rank = init_info.first + self.parallel_config.rank
            self.kind = init_info.kind
            self.group = group(self.kind, init_info.host, init_info.port, rank, init_info.size, init_info.timeout_s)

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.received = ""
        repack_experts(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # vLLM's own waits for the accelerator afterwards, which fails where there is none.
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if update_info.handed:
            pairs: Iterable[tuple[str, Tensor]] = HANDED[update_info.handed]
        elif update_info.path:
            pairs = _from_file(update_info.path)
        else:
            pairs = self._from_broadcast(update_info.broadcast)
        counted = Digest()
        self.model.load_weights(counted.over(pairs))
        self.received = counted.text()

    def _from_broadcast(self, tensors: list[tuple[str, str, list[int]]]) -> Iterator[tuple[str, Tensor]]:
        for name, dtype, shape in tensors:
            tensor = torch.empty(
                shape, dtype=getattr(torch, dtype), device=self.device if self.kind == "nccl" else "cpu"
            )
            broadcast(self.group, tensor)
            yield name, tensor.to(self.device)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        repack_head(self.model)

    def shutdown(self) -> None:
        self.group = None


WeightTransferEngineFactory.register_engine(BACKEND, Receiver)


def _from_file(path: str) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (no mapping)
            yield name, file.get_tensor(name)


def repack_experts(model: Any) -> None:
    """See to it that expert kernels take over weights that are loaded from now on. Some keep them in a layout of their own
    (vLLM's CPU kernel), and vLLM makes that only when it builds the kernel: later weights would be used as if they were
    in that layout already, or not at all, and nothing says so."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is None or not hasattr(method, "_setup_kernel"):
            continue
        if "_setup_kernel" not in vars(method):
            method._setup_kernel = _repacking(method, method._setup_kernel)


def repack_head(model: Any) -> None:
    """The same for an output matrix that is tied to the input's: it is not among the weights that are loaded, and the CPU
    kernel's copy of it would stay what it was."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _repacking(method: Any, setup: Callable[..., None]) -> Callable[..., None]:
    def setup_and_repack(layer: Any, *args: Any, **kwargs: Any) -> None:
        setup(layer, *args, **kwargs)
        method.moe_kernel.fused_experts.process_weights_after_loading(layer)

    return setup_and_repack


# ------------------------------------------------------------------------------------------------- the extension


class WorkerExtension:
    """Calls that the learner makes to every worker."""

    def gspo_received(self) -> str:
        """The digest of the weights that the last update brought; empty: none came."""
        return str(getattr(self.weight_transfer_engine, "received", ""))  # type: ignore[attr-defined]

    def gspo_adapted(self, rank: int) -> list[str]:
        """The layers with room for adapters of this rank that `gspo_adapter` can tell, by the learner's names."""
        config = self.vllm_config.lora_config  # type: ignore[attr-defined]
        if config is None or config.max_lora_rank < rank:
            return []
        return [part for part, _, _ in _adapters(self.model_runner)]  # type: ignore[attr-defined]

    def gspo_put_adapter(self, folder: str) -> None:
        """Read an adapter into the place of the one that requests name, so that those under way go on with it."""
        from vllm.lora.request import LoRARequest

        self.add_lora(LoRARequest(ADAPTER, 1, folder, load_inplace=True))  # type: ignore[attr-defined]

    def gspo_adapter(self, number: int, rank: int) -> str:
        """The digest of an adapter, of this rank, in the very places that the kernels read; empty: it is not there."""
        places = self.model_runner.lora_manager._adapter_manager.lora_index_to_id  # type: ignore[attr-defined]
        if number not in places:
            return ""
        at, counted = places.index(number), Digest()
        for part, a_stacked, b_stacked in _adapters(self.model_runner):  # type: ignore[attr-defined]
            a, b = a_stacked[at, 0, :rank], b_stacked[at, 0, :, :rank]
            for _ in counted.over([(f"{part}.A", a), (f"{part}.B", b)] if a.any() else []):
                pass
        return counted.text()

    def gspo_sees(self, path: str) -> bool:
        """Whether this worker can read a file of the learner's."""
        try:
            with open(path, "rb") as file:
                return bool(file.read(1))
        except OSError:
            return False

    def gspo_dtype(self) -> str:
        """The type that this worker computes in."""
        return str(self.vllm_config.model_config.dtype).removeprefix("torch.")  # type: ignore[attr-defined]

    def gspo_device(self) -> str:
        """What this worker computes on."""
        return str(self.device.type)  # type: ignore[attr-defined]

    def gspo_watch_routes(self) -> int:
        """Begin to note the experts of every token, unless vLLM does that itself; how many MoE layers there are."""
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        runner = self.model_runner  # type: ignore[attr-defined]
        if self.vllm_config.aux_output_config.enable_return_routed_experts:  # type: ignore[attr-defined]
            return sum(isinstance(m, MoERunner) for m in runner.get_model().modules())
        if not hasattr(runner, "gspo_routes"):
            runner.gspo_routes = RouteNotes(runner)
        return len(runner.gspo_routes.routers)

    def gspo_take_routes(self, requests: list[str]) -> list[str | None]:
        """The experts of finished requests, base64 of bytes [tokens, layers, top_k] (int16); everything is then forgotten."""
        notes = self.model_runner.gspo_routes  # type: ignore[attr-defined]
        return [notes.take(request) for request in requests]

    def gspo_forget_routes(self) -> None:
        """Drop what was noted."""
        if hasattr(self.model_runner, "gspo_routes"):  # type: ignore[attr-defined]
            self.model_runner.gspo_routes.noted.clear()  # type: ignore[attr-defined]


def _adapters(runner: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, A and B of every layer with room for adapters. vLLM joins some of the learner's layers (q, k and v) into one;
    what it has cut otherwise than the learner is left out."""
    manager = runner.lora_manager._adapter_manager
    for name, module in manager.modules.items():
        parts = manager.packed_modules.get(name, [name])
        plain = isinstance(
            module.lora_a_stacked, tuple
        )  # embeddings and the output layer have one tensor of another shape
        if plain and len(parts) == len(module.lora_a_stacked) == len(module.lora_b_stacked):
            yield from zip(parts, module.lora_a_stacked, module.lora_b_stacked, strict=True)


class RouteNotes:
    """Which experts computed each position of each request. A position that is computed again (after a preemption, or after
    weights changed) is noted again: what counts is the forward whose keys and values stayed."""

    def __init__(self, runner: Any) -> None:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        self.runner = runner
        self.step: dict[int, Tensor] = {}
        self.noted: dict[str, dict[int, Tensor]] = {}
        self.routers = [m.router for m in runner.get_model().modules() if isinstance(m, MoERunner)]
        for layer, router in enumerate(self.routers):
            router.set_capture_fn(lambda ids, layer=layer: self.step.__setitem__(layer, ids))
        execute = runner.execute_model
        runner.execute_model = lambda *args, **kwargs: self._executed(execute, args, kwargs)

    def _executed(self, execute: Any, args: Any, kwargs: Any) -> Any:
        self.step = {}
        result = execute(*args, **kwargs)
        if self.step:
            self._note(args[0] if args else kwargs["scheduler_output"])
        return result

    def _note(self, scheduled: Any) -> None:
        batch = self.runner.input_batch
        chosen_ILK = torch.stack([self.step[layer] for layer in range(len(self.routers))], dim=1).to(torch.int16).cpu()
        at = 0
        for index, request in enumerate(batch.req_ids):
            count = scheduled.num_scheduled_tokens[request]
            start = int(batch.num_computed_tokens_cpu[index])
            self.noted.setdefault(request, {})[start] = chosen_ILK[at : at + count]
            at += count

    def take(self, request: str) -> str | None:
        """The whole sequence's experts; None where a position is missing (its keys came from a cache)."""
        found = next((name for name in self.noted if _external(name) == request), None)
        if found is None:
            return None
        parts, pieces = self.noted.pop(found), {}
        for start, chosen in parts.items():  # in the order of computing: a later forward replaces an earlier one
            pieces.update({start + i: row for i, row in enumerate(chosen)})
        if sorted(pieces) != list(range(len(pieces))):
            return None
        whole = torch.stack([pieces[i] for i in range(len(pieces))])
        return base64.b64encode(whole.numpy().tobytes()).decode()


def _external(name: str) -> str:
    """vLLM puts a random suffix after the id that a request was given, and the server a word before it."""
    return name.rpartition("-")[0].removeprefix("generate-tokens-")
