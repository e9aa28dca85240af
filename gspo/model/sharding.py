"""Parameters that may be sharded over ranks: DTensors, as FSDP2's `fully_shard` makes them.

In: a model, or tensors of a model or of an optimizer. Out: the model sharded, whole tensors, or a whole tensor sharded
like another one. Invariant: a plain tensor is returned as it is, so a model on one rank costs nothing and computes the
same bits. What is whole is the same on all ranks, and every rank must ask for it, because it takes a collective. Ranks
add up their gradients: per-token loss weights belong to the whole optimizer step, so a mean would be wrong.

Collectives here are those of `torch.distributed`. DTensors use functional ones by themselves (`full_tensor`, norms), of
which about one in 100,000 ends its process with a segmentation fault (torch 2.13, gloo).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from gspo.model.partial import decoder_layers, parts_of
from gspo.ranks.group import all_gather


def shard(model: Any, ranks: int) -> None:
    """Shard the parameters of a model over the ranks: each decoder layer by itself, and the rest together.

    Adapters must be in the model before, or ranks would not add up their gradients. 4-bit weights are frozen and not
    sharded: every rank has all of them. Of a model that was read in parts, one layer at a time is whole meanwhile."""
    layers, parts = decoder_layers(model), parts_of(model)
    if parts is not None:
        parts.finish(model)
    options: dict[str, Any] = {
        "mesh": init_device_mesh(model.device.type, (ranks,)),
        # Gradients of 16-bit weights are added up in float32.
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
        "ignored_params": {p for p in model.parameters() if not p.is_floating_point()},
    }
    # The outputs of a model are a view of a larger tensor. Nothing here changes them in place.
    warnings.filterwarnings("ignore", message=".*FSDP2-wrapped module.*returned a view tensor")
    for unit in (*layers, model):
        if parts is not None:
            parts.take(unit)
        fully_shard(unit, **options)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no other


def synchronize_gradients(model: Any, now: bool) -> None:
    """Whether ranks add up their gradients in the next backward pass, or later, with those of further micro-batches."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)


@contextmanager
def gathered(model: Any) -> Iterator[None]:
    """Inside, every rank holds whole weights, so that it can run forwards that other ranks do not run."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            # First, because a layer whose forward was interrupted (by a stop request, or without memory) would stay
            # whole otherwise, on this rank alone, and the next collective would not fit those of the others.
            unit.set_reshard_after_forward(True, recurse=False)
            unit.reshard()
            # The LM head and the embeddings belong to the model itself. The loss uses them after the forward.
            unit.set_reshard_after_forward(unit is not model, recurse=False)


def reshard(model: Any) -> None:
    """Free the embeddings and the LM head, which stay gathered after a forward for the loss and the backward pass, if
    there is none."""
    if isinstance(model, FSDPModule):
        model.reshard()


def is_sharded(tensor: Tensor) -> bool:
    """Whether each rank holds a part of the tensor."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """The whole tensor. Gradients that ranks compute for it add up in the sharded one."""
    if not isinstance(tensor, DTensor):
        return tensor
    whole: Tensor = _Whole.apply(tensor.to_local(), tensor.device_mesh, len(tensor))
    return whole


class _Whole(torch.autograd.Function):
    """The rows of all ranks. As `fully_shard` divides them, each rank has equally many, but for the last ones."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, mesh: Any, rows: int) -> Tensor:
        each = -(-rows // mesh.size())
        ctx.mesh, ctx.begin, ctx.own = mesh, each * mesh.get_local_rank(), len(own)
        padded = torch.cat([own, own.new_empty(each - len(own), *own.shape[1:])]) if len(own) < each else own
        return all_gather(padded, mesh.size(), mesh.get_group())[:rows]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # Ranks compute different gradients, of their own micro-batches.
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.mesh.get_group())
        return total[ctx.begin : ctx.begin + ctx.own], None, None


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of all tensors together, which are sharded or not; the same on all ranks."""
    norm = torch.nn.utils.get_total_norm([local(tensor) for tensor in tensors])
    mesh = next((tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)), None)
    if mesh is None:
        return norm
    square = norm.double().square()  # in float32, the square of a large norm would be infinite
    dist.all_reduce(square, group=mesh.get_group())
    return square.sqrt().to(norm.dtype)


def sharded_like(whole: Tensor, like: Tensor) -> Tensor:
    """A tensor that every rank has, sharded like another one, on its device. It may be sharded already."""
    whole = whole.to(like.device)
    if isinstance(whole, DTensor) or not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def module_class(module: Any) -> type:
    """The class of a module before it was sharded."""
    # `fully_shard` gives a module a class of its own, with the bases FSDPModule and the class that it had.
    kind = type(module)
    return kind.__bases__[1] if issubclass(kind, FSDPModule) else kind
