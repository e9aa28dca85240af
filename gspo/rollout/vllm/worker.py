"""The code inside vLLM's workers: it receives weights and records experts.

In: weights by reference (vLLM in the learner's process), from a safetensors file, or from a broadcast (gloo, NCCL),
whichever an update names. Out: the digest of what arrived, and the experts of finished requests. vLLM loads this module
as `worker_extension_cls`; importing it registers the weight-transfer backend `gspo`. Invariant: `gspo_received` is the
digest of the tensors that the last update passed to the model's loader, and after every update the kernels' own copies
of the experts are rebuilt.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
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

from gspo.rollout.vllm.broadcast import broadcast, process_group
from gspo.rollout.vllm.weights import ADAPTER, Digest

BACKEND = "gspo"

OFFERED: dict[str, Iterator[tuple[str, Tensor]]] = {}
"""Weights that a learner in this process offers by reference, one at a time, by key."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The rendezvous with the learner for broadcasts; without a port there are no broadcasts."""

    kind: str = "gloo"
    host: str = ""
    port: int = 0
    size: int = 0
    """World size: the learner and all workers."""
    first: int = 1
    """Rank of worker 0."""
    timeout_s: float = 60.0


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Where the weights are: one of the three."""

    handed: str = ""
    """Key in `OFFERED`."""
    path: str = ""
    """A safetensors file."""
    broadcast: list[tuple[str, str, list[int]]] = field(default_factory=list)
    """Name, dtype and shape of the tensors that the learner broadcasts, in this order."""


class Receiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """The worker's side of backend `gspo`."""

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
            self.group = process_group(
                self.kind, init_info.host, init_info.port, rank, init_info.size, init_info.timeout_s
            )

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.received = ""
        # Before the reload, which sets the kernels up again.
        repack_experts(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # vLLM's own method always synchronizes the accelerator afterwards, which fails if there is none.
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if update_info.handed:
            pairs: Iterator[tuple[str, Tensor]] = OFFERED[update_info.handed]
        elif update_info.path:
            pairs = _from_file(update_info.path)
        else:
            pairs = self._from_broadcast(update_info.broadcast)
        digest = Digest()
        # The digest is computed from what the loader takes, so a tensor that it skips is missing.
        self.model.load_weights(digest.track(pairs))
        self.received = digest.text()

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
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            yield name, file.get_tensor(name)


def repack_experts(model: Any) -> None:
    """Make MoE kernels repack weights that are loaded from now on.

    Some kernels (vLLM's CPU kernel) keep the weights in a layout of their own, and vLLM converts them only when it
    builds the kernel. Later weights would be read as if they were already in that layout, or ignored, without any
    error."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is None or not hasattr(method, "_setup_kernel"):
            continue
        if "_setup_kernel" not in vars(method):
            method._setup_kernel = _with_repack(method, method._setup_kernel)


def repack_head(model: Any) -> None:
    """The same for an LM head that is tied to the embedding. It is not among the loaded weights, and the CPU kernel's
    copy of it would keep the old values."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _with_repack(method: Any, setup: Callable[..., None]) -> Callable[..., None]:
    def setup_and_repack(layer: Any, *args: Any, **kwargs: Any) -> None:
        setup(layer, *args, **kwargs)
        method.moe_kernel.fused_experts.process_weights_after_loading(layer)

    return setup_and_repack


# --- The worker extension ---


class WorkerExtension:
    """Methods that the learner calls on every worker."""

    def gspo_received(self) -> str:
        """The digest of the weights of the last update; empty if none arrived."""
        return str(getattr(self.weight_transfer_engine, "received", ""))  # type: ignore[attr-defined]

    def gspo_adapted(self, rank: int) -> list[str]:
        """The layers with room for adapters of this rank that `gspo_adapter` can verify, by the learner's names."""
        config = self.vllm_config.lora_config  # type: ignore[attr-defined]
        if config is None or config.max_lora_rank < rank:
            return []
        return [part for part, _, _ in _adapters(self.model_runner)]  # type: ignore[attr-defined]

    def gspo_put_adapter(self, folder: str) -> None:
        """Load an adapter in place of the one that requests select, so that running requests continue with it."""
        from vllm.lora.request import LoRARequest

        self.add_lora(LoRARequest(ADAPTER, 1, folder, load_inplace=True))  # type: ignore[attr-defined]

    def gspo_adapter(self, number: int, rank: int) -> str:
        """The digest of an adapter of this rank, from the buffers that the kernels read; empty if it is not loaded."""
        places = self.model_runner.lora_manager._adapter_manager.lora_index_to_id  # type: ignore[attr-defined]
        if number not in places:
            return ""
        at = places.index(number)
        digest = Digest()
        for part, a_stacked, b_stacked in _adapters(self.model_runner):  # type: ignore[attr-defined]
            a, b = a_stacked[at, 0, :rank], b_stacked[at, 0, :, :rank]
            for _ in digest.track([(f"{part}.A", a), (f"{part}.B", b)] if a.any() else []):
                pass
        return digest.text()

    def gspo_sees(self, path: str) -> bool:
        """Whether this worker can read a file of the learner."""
        try:
            with open(path, "rb") as file:
                return bool(file.read(1))
        except OSError:
            return False

    def gspo_dtype(self) -> str:
        """The dtype that this worker computes in."""
        return str(self.vllm_config.model_config.dtype).removeprefix("torch.")  # type: ignore[attr-defined]

    def gspo_device(self) -> str:
        """The type of device that this worker runs on."""
        return str(self.device.type)  # type: ignore[attr-defined]

    def gspo_watch_routes(self) -> int:
        """Start recording the experts of every token, unless vLLM does so itself; the number of MoE layers."""
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        runner = self.model_runner  # type: ignore[attr-defined]
        if self.vllm_config.aux_output_config.enable_return_routed_experts:  # type: ignore[attr-defined]
            return sum(isinstance(m, MoERunner) for m in runner.get_model().modules())
        if not hasattr(runner, "gspo_routes"):
            runner.gspo_routes = RouteLog(runner)
        return len(runner.gspo_routes.routers)

    def gspo_take_routes(self, requests: list[str]) -> list[str | None]:
        """The experts of finished requests, base64 of bytes [tokens, layers, top_k] (int16). They are then dropped."""
        log = self.model_runner.gspo_routes  # type: ignore[attr-defined]
        return [log.take(request) for request in requests]

    def gspo_forget_routes(self) -> None:
        """Drop all recorded experts."""
        if hasattr(self.model_runner, "gspo_routes"):  # type: ignore[attr-defined]
            self.model_runner.gspo_routes.by_request.clear()  # type: ignore[attr-defined]


def _adapters(runner: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, A and B of every layer with room for adapters. vLLM fuses some of the learner's layers (q, k and v) into
    one; layers that it splits differently from the learner are omitted."""
    manager = runner.lora_manager._adapter_manager
    for name, module in manager.modules.items():
        parts = manager.packed_modules.get(name, [name])
        # Embeddings and the LM head have a single tensor of another shape.
        plain = isinstance(module.lora_a_stacked, tuple)
        if plain and len(parts) == len(module.lora_a_stacked) == len(module.lora_b_stacked):
            yield from zip(parts, module.lora_a_stacked, module.lora_b_stacked, strict=True)


class RouteLog:
    """The experts of each position of each request. A position that is recomputed (after a preemption or a weight
    update) is recorded again: the forward whose keys and values stay in the cache is the one that counts."""

    def __init__(self, runner: Any) -> None:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        self.runner = runner
        self.step: dict[int, Tensor] = {}
        self.by_request: dict[str, dict[int, Tensor]] = {}
        self.routers = [m.router for m in runner.get_model().modules() if isinstance(m, MoERunner)]
        for layer, router in enumerate(self.routers):
            # A default argument, because a closure would see the last layer only.
            router.set_capture_fn(lambda ids, layer=layer: self.step.__setitem__(layer, ids))
        execute = runner.execute_model
        runner.execute_model = lambda *args, **kwargs: self._execute(execute, args, kwargs)

    def _execute(self, execute: Any, args: Any, kwargs: Any) -> Any:
        self.step = {}
        result = execute(*args, **kwargs)
        if self.step:
            self._record(args[0] if args else kwargs["scheduler_output"])
        return result

    def _record(self, scheduled: Any) -> None:
        batch = self.runner.input_batch
        # One copy per step for all layers and requests.
        chosen_ILK = torch.stack([self.step[layer] for layer in range(len(self.routers))], dim=1).to(torch.int16).cpu()
        at = 0
        for index, request in enumerate(batch.req_ids):
            count = scheduled.num_scheduled_tokens[request]
            start = int(batch.num_computed_tokens_cpu[index])
            self.by_request.setdefault(request, {})[start] = chosen_ILK[at : at + count]
            at += count

    def take(self, request: str) -> str | None:
        """The experts of the whole sequence; None if a position is missing because its keys came from the prefix
        cache."""
        found = next((name for name in self.by_request if _external_id(name) == request), None)
        if found is None:
            return None
        parts = self.by_request.pop(found)
        pieces: dict[int, Tensor] = {}
        for start, chosen in parts.items():  # in the order of computation: a later forward replaces an earlier one
            pieces.update({start + i: row for i, row in enumerate(chosen)})
        if sorted(pieces) != list(range(len(pieces))):
            return None
        whole = torch.stack([pieces[i] for i in range(len(pieces))])
        return base64.b64encode(whole.numpy().tobytes()).decode()


def _external_id(name: str) -> str:
    """The id that a request was given: vLLM appends a random suffix, and the server prepends a word."""
    return name.rpartition("-")[0].removeprefix("generate-tokens-")
