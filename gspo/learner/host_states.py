"""Master weights and moments in host memory, from where each update streams them through the GPU.

In: the weights to train, and gradients on the device. Out: updated weights. Invariant: updates are computed on the
device of the weights, with the same rule as without offload, so this changes memory and time, not the result.

States are in page-locked memory. An update copies a part of a weight's state to the device, updates it there and copies
it back. Two streams copy the next and the previous part meanwhile, because the copies take much longer than the update.
On a CPU the same code runs without streams.
"""

from __future__ import annotations

import mmap
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gspo.learner.weight_states import BLOCK, AdamW, DeviceStates, State, part

LANES = 3
"""Parts on the device at a time: one arrives, one is updated, one leaves."""
PART = 1 << 25
"""Entries of a part. With float32 moments, the parts on the device take 1.2 GB."""


@dataclass
class _Lane:
    """Buffers on the device for a part at a time, and the events that its copies and its update wait for."""

    buffers: State
    loaded: Any
    updated: Any
    stored: Any
    on_host: State = field(default_factory=dict)

    def load(self, on_host: State) -> None:
        self.on_host = on_host
        for key, tensor in on_host.items():
            self.buffers[key][: len(tensor)].copy_(tensor, non_blocking=True)

    def store(self) -> None:
        for key, tensor in self.on_host.items():
            tensor.copy_(self.buffers[key][: len(tensor)], non_blocking=True)

    def tensor(self, key: str) -> Tensor:
        return self.buffers[key][: len(self.on_host[key])]


class HostStates(DeviceStates):
    """The same in host memory, except for float32 weights, which have no master."""

    def __init__(self, weights: Mapping[str, Tensor], rule: AdamW, *, part_size: int = PART) -> None:
        assert part_size % BLOCK == 0
        self._device = next(iter(weights.values())).device
        self._locked: dict[int, Tensor] = {}
        self._part_size = part_size
        super().__init__(weights, rule)
        # The callback holds the tensors: memory must not be freed while it is locked.
        weakref.finalize(self, _unlock, self._locked).atexit = False

    @torch.no_grad()
    def update(self, gradients: Mapping[str, Tensor], rate: float) -> None:
        self._add_moments(list(gradients))
        streams = torch.get_device_module(self._device)
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            self._stream_parts(gradients, rate, streams)
        for name in gradients:
            self.moments[name]["step"].add_(1)

    def _stream_parts(self, gradients: Mapping[str, Tensor], rate: float, streams: Any) -> None:
        loading, storing, computing = streams.Stream(), streams.Stream(), streams.current_stream()
        lanes = self._lanes(list(gradients), streams)
        # The buffers may be memory that work in progress still reads.
        loading.wait_stream(computing)
        for index, (name, start, stop) in enumerate(self._parts(gradients)):
            lane = lanes[index % LANES]
            with streams.stream(loading):
                loading.wait_event(lane.stored)
                lane.load(self._on_host(name, start, stop))
                lane.loaded.record(loading)
            computing.wait_event(lane.loaded)
            self._update_part(name, start, stop, gradients[name], lane, rate)
            lane.updated.record(computing)
            with streams.stream(storing):
                storing.wait_event(lane.updated)
                lane.store()
                lane.stored.record(storing)
        # Whoever reads the states next does so on the host.
        computing.wait_stream(storing)
        streams.synchronize()

    def _update_part(self, name: str, start: int, stop: int, gradient: Tensor, lane: _Lane, rate: float) -> None:
        weight = self.weights[name].detach().view(-1)[start:stop]
        master = lane.tensor("master") if self.has_master(name) else weight
        moments = {key: lane.tensor(key) for key in lane.on_host if key != "master"}
        # A copy: all parts of a weight belong to the same update.
        moments["step"] = self.moments[name]["step"].clone()
        self._rule.update([master], [gradient.contiguous().view(-1)[start:stop]], [moments], rate)
        if master is not weight:
            weight.copy_(master)

    def _parts(self, gradients: Mapping[str, Tensor]) -> Iterator[tuple[str, int, int]]:
        for name in gradients:
            count = self.weights[name].numel()
            for start in range(0, count, self._part_size):
                yield name, start, min(start + self._part_size, count)

    def _on_host(self, name: str, start: int, stop: int) -> State:
        state = part(self.moments[name], start, stop)
        if self.has_master(name):
            state["master"] = self.masters[name].view(-1)[start:stop]
        return state

    def _lanes(self, names: list[str], streams: Any) -> list[_Lane]:
        """Buffers that are large enough for every part."""
        lengths: dict[str, tuple[int, torch.dtype]] = {}
        for name in names:
            first = self._on_host(name, 0, min(self._part_size, self.weights[name].numel()))
            for key, tensor in first.items():
                lengths[key] = (max(len(tensor), lengths.get(key, (0,))[0]), tensor.dtype)
        return [
            _Lane(
                {key: torch.empty(n, dtype=dtype, device=self._device) for key, (n, dtype) in lengths.items()},
                *(streams.Event() for _ in range(3)),
            )
            for _ in range(LANES)
        ]

    def _kept(self, tensor: Tensor) -> Tensor:
        on_host = _own_pages(tensor)
        if self._device.type == "cuda" and _lock(on_host):
            self._locked[on_host.data_ptr()] = on_host
        return on_host

    def _release(self, tensor: Tensor) -> None:
        locked = self._locked.pop(tensor.data_ptr(), None)
        if locked is not None:
            _unlock({tensor.data_ptr(): locked})


def _own_pages(tensor: Tensor) -> Tensor:
    """A copy in host memory that shares no page with anything else, because whole pages are locked.

    PyTorch's own page-locked memory is rounded up to powers of two, which can waste half of it."""
    pages = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A forked process needs none of it, and to copy the page tables of 100 GB takes seconds.
    pages.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(pages, dtype=tensor.dtype).view(tensor.shape).copy_(tensor.detach())


def _lock(tensor: Tensor) -> bool:
    """Lock the pages of a tensor, so that copies to the device do not block. False if that is not possible."""
    code = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
    if code:
        warnings.warn(
            f"learner.optimizer_offload: host memory cannot be page-locked (CUDA error {code}), so copies to the GPU "
            "are slower",
            stacklevel=2,
        )
    return not code


def _unlock(tensors: Mapping[int, Tensor]) -> None:
    for address in tensors:
        torch.cuda.cudart().cudaHostUnregister(address)
