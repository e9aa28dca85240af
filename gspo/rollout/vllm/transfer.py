"""The learner's side of a weight transfer to a server.

In: the model's weights, or its base weights once and then its LoRA adapter. Out: an update that the server's workers
(`worker.py`) have applied. There are three transfers, chosen by asking the workers: `file` if they can read what the
learner writes (shared memory if it fits, else the temporary directory), otherwise a broadcast: `nccl` if both sides
have GPUs, `gloo` over TCP if not. Invariant: a file is written once for all servers and deleted afterwards. An
adapter is always sent as a file. Weights are written or broadcast one tensor at a time, so that those of a sharded
model are never in memory together.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from gspo.errors import WeightSyncError
from gspo.ranks.environment import free_port
from gspo.rollout.vllm import adapter
from gspo.rollout.vllm.broadcast import broadcast, process_group
from gspo.rollout.vllm.http import Client, Fault
from gspo.rollout.vllm.policy import LearnerPolicy, Pairs
from gspo.rollout.vllm.tensor_file import write_tensors
from gspo.rollout.vllm.transfer_folder import probe, transfer_folder
from gspo.rollout.vllm.weights import ADAPTER, Part, digest


class Offer:
    """One version of the weights, for all servers."""

    def __init__(self, policy: LearnerPolicy, label: str, *, adapters: bool = False) -> None:
        self.label = label
        self.policy = policy
        self.adapters = adapters
        self.part = Part.BASE if adapters else Part.MERGED
        self.digest = ""
        """The digest of the weights, once they were sent."""
        self._folder: str | None = None
        self._adapter: str | None = None

    @property
    def path(self) -> str:
        """The weights as a file, written on first use."""
        if self._folder is None:
            self._folder = transfer_folder(self.policy.size(self.part))
            file, shapes = Path(self._folder, "weights.safetensors"), self.policy.shapes(self.part)
            self.send(lambda pairs: write_tensors(file, shapes, pairs))
        return os.path.join(self._folder, "weights.safetensors")

    @property
    def adapter(self) -> str:
        """The adapter as a folder, written on first use."""
        if self._adapter is None:
            self._adapter = adapter.write(self.policy.model, self.adapter_weights)
        return self._adapter

    @cached_property
    def adapter_weights(self) -> dict[str, Tensor]:
        """The weights of the adapter."""
        return self.policy.adapter()

    def send(self, take: Callable[[Pairs], object]) -> None:
        """Pass the weights to `take`, one tensor at a time."""
        self.digest = self.policy.send(self.part, take)

    def close(self) -> None:
        """Delete the files."""
        for folder in (self._folder, self._adapter):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
        self._folder = self._adapter = None

    def metadata(self) -> list[tuple[str, str, list[int]]]:
        shapes = self.policy.shapes(self.part)
        return [(name, str(dtype).removeprefix("torch."), list(shape)) for name, dtype, shape in shapes]


def send(offer: Offer, client: Client, *, transfer: str, workers: int, timeout_s: float) -> None:
    """Update a server to the offered weights. Running requests pause meanwhile and continue with the new weights."""
    # keep: running requests stay in memory. The other modes abort them or wait for them.
    client.post("/pause?mode=keep", timeout_s=timeout_s)
    try:
        if offer.adapters:
            _send_adapter(offer, client, transfer, workers, timeout_s)
        else:
            _send_weights(offer, client, offer.label, transfer, workers, timeout_s)
        client.post("/reset_prefix_cache", timeout_s=timeout_s)  # cached keys and values belong to the old weights
    finally:
        # Also after a failure: a paused server would hold its requests until their deadline.
        client.post("/resume", timeout_s=timeout_s)


def _send_adapter(offer: Offer, client: Client, transfer: str, workers: int, timeout_s: float) -> None:
    """Send the base weights if the server holds others, then the adapter. Until its digest is verified, completions
    carry a label that is not trusted."""
    label = f"{offer.label} without its adapter"
    client.post("/update_weight_version", {"new_version": label}, timeout_s=timeout_s)
    base = offer.policy.base_digest()
    if any(found != base for found in client.workers("gspo_received", timeout_s=timeout_s)):
        _send_weights(offer, client, label, transfer, workers, timeout_s)
    if not _has_adapter(client, timeout_s):
        named = {"lora_name": ADAPTER, "lora_path": offer.adapter}
        client.post("/v1/load_lora_adapter", named, timeout_s=timeout_s, plain=True)
    client.workers("gspo_put_adapter", offer.adapter, timeout_s=timeout_s)
    arrived = client.workers("gspo_adapter", 1, adapter.lora_rank(offer.policy.model), timeout_s=timeout_s)
    sent = digest(adapter.kernel_weights(offer.policy.model, offer.adapter_weights))
    if any(found != sent for found in arrived):
        raise WeightSyncError(f"engine 'vllm': the adapter that arrived at {client.address} differs from the learner's")
    client.post("/update_weight_version", {"new_version": offer.label}, timeout_s=timeout_s)


def _has_adapter(client: Client, timeout_s: float) -> bool:
    """Whether requests can select the adapter by its name. Once loaded, it is updated in place."""
    try:
        return ADAPTER in [model["id"] for model in client.get("/v1/models", timeout_s=timeout_s)["data"]]
    except (KeyError, TypeError) as error:
        raise Fault(f"{client.address}/v1/models: not the response of a vLLM: {error}") from error


def _send_weights(offer: Offer, client: Client, label: str, transfer: str, workers: int, timeout_s: float) -> None:
    transfer = choose_transfer(offer, client, timeout_s) if transfer == "auto" else transfer
    if transfer == "file":
        client.post("/init_weight_transfer_engine", {"init_info": {}}, timeout_s=timeout_s)
        _update(client, label, {"path": offer.path}, timeout_s)
    else:
        _broadcast(offer, client, label, transfer, workers, timeout_s)
    arrived = client.workers("gspo_received", timeout_s=timeout_s)
    if any(found != offer.digest for found in arrived):
        raise WeightSyncError(f"engine 'vllm': the weights that arrived at {client.address} differ from the learner's")


def choose_transfer(offer: Offer, client: Client, timeout_s: float) -> str:
    """The best transfer to a server."""
    with probe(offer.policy.size(offer.part)) as path:
        if can_read(client, path, timeout_s):
            return "file"
    devices = [*client.workers("gspo_device", timeout_s=timeout_s), offer.policy.model.device.type]
    return "nccl" if all(device == "cuda" for device in devices) else "gloo"


def can_read(client: Client, path: str, timeout_s: float) -> bool:
    """Whether all workers of a server can read a file of this machine."""
    return all(result == "True" for result in client.workers("gspo_sees", path, timeout_s=timeout_s))


def _update(
    client: Client, label: str, info: dict[str, Any], timeout_s: float, meanwhile: Callable[[], None] | None = None
) -> None:
    """vLLM's three calls of an update; `meanwhile` runs while the second one waits for it."""
    try:
        client.post("/start_weight_update", timeout_s=timeout_s)
    except Fault:  # an earlier update was interrupted
        with suppress(Fault):
            client.post("/finish_weight_update", timeout_s=timeout_s)
        client.post("/start_weight_update", timeout_s=timeout_s)
    if meanwhile is None:
        client.post("/update_weights", {"update_info": info}, timeout_s=timeout_s)
    else:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.post, "/update_weights", {"update_info": info}, timeout_s=timeout_s)
            try:
                meanwhile()
            finally:
                waiting.result()
    client.post("/finish_weight_update", {"weight_version": label}, timeout_s=timeout_s)


def _broadcast(offer: Offer, client: Client, label: str, kind: str, workers: int, timeout_s: float) -> None:
    host = _own_address(client)
    # Another machine connects to it, so it must be free on all interfaces.
    port = free_port("0.0.0.0")
    size = 1 + workers
    rendezvous = {"kind": kind, "host": host, "port": port, "size": size, "timeout_s": timeout_s}
    # Both sides must join at the same time: the call returns only when the group exists.
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(
            client.post, "/init_weight_transfer_engine", {"init_info": rendezvous}, timeout_s=timeout_s
        )
        try:
            group = process_group(kind, host, port, 0, size, timeout_s)
        except RuntimeError as error:
            raise Fault(f"{client.address}: cannot form a {kind} process group with it: {error}") from error
        finally:
            # In `finally`, so that the server's own error is raised, which says more than ours.
            joined.result()

    def send_all(pairs: Pairs) -> None:
        for _, tensor in pairs:
            try:
                broadcast(group, (tensor if kind == "nccl" else tensor.cpu()).contiguous())
            except RuntimeError as error:
                raise Fault(f"{client.address}: the broadcast failed: {error}") from error

    _update(client, label, {"broadcast": offer.metadata()}, timeout_s, meanwhile=lambda: offer.send(send_all))


def _own_address(client: Client) -> str:
    """This machine's address as the server sees it."""
    host, _, port = client.address.rpartition(":")
    # Connecting a UDP socket sends nothing; it only selects the outgoing interface.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])
