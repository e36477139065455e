"""Find the position of each live tensor of a model in a global tensor. The names used don't depend on the layout. Nothing communicates.

Megatron's `sharded_state_dict` gives the layout of parameters and buffers, DTensor gives its placements, and torch's DDP gives its group. A
part is a live tensor's box in the global tensor. A live tensor without parts has no known position, so it can be restored in the same
layout only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ...checkpoint.format.sharding import Part, row_major

_METADATA = {"non_homogeneous_layers": True}
"""Gives every layer a name of its own. Megatron has had this option since 0.12. Without this option, names also depend on options of the
layout."""

WRAPPED = ("module", "_orig_mod")
"""The attribute names under which wrappers keep their only child. "module" is DistributedDataParallel's and Float16Module's, "_orig_mod" is
torch.compile's."""


def model_parts(chunks: Sequence[torch.nn.Module]) -> dict[str, list[Part]]:
    """Return the parts of each live tensor, under its name in `Modules`. Raises ValueError for a tensor whose position can't be
    determined."""
    found: dict[str, list[Part]] = {}
    for index, chunk in enumerate(chunks):
        prefix = f"chunk{index}." if len(chunks) > 1 else ""
        places = places_of(chunk)
        for name, tensor in _tensors(chunk):
            found[prefix + name] = places.get(id(tensor), [])
    return found


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def places_of(chunk: torch.nn.Module) -> dict[int, list[Part]]:
    """Return the parts of each parameter and buffer, by its id."""
    bare, group = chunk, None
    while len(children := dict(bare.named_children())) == 1 and (inner := next(iter(children))) in WRAPPED:
        if isinstance(bare, DistributedDataParallel):  # FSDP has a group too, and its shards are no copies
            group = bare.process_group
        bare = children[inner]
    if hasattr(bare, "sharded_state_dict"):
        return _of_megatron(bare)
    return _of_torch(bare, group)


def _of_torch(bare: torch.nn.Module, group: Any) -> dict[int, list[Part]]:
    """Return the parts of each tensor, by its id. The parts of a DTensor follow from its placements. Plain tensors are equal on all ranks
    of DDP's group, or of the DTensors in the same module, where they may differ by rounding. If a module on several ranks has neither, its
    tensors may differ, so they get no parts."""
    meshes = [_ranks(tensor) for _, tensor in _tensors(bare) if _is_dtensor(tensor)]
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if distributed else 0
    if meshes:
        ranks = max(meshes, key=len)
    elif isinstance(group, torch.distributed.ProcessGroup):
        ranks = torch.distributed.get_process_group_ranks(group)
    elif distributed and torch.distributed.get_world_size() > 1:
        return {}
    else:
        ranks = [rank]
    return {
        id(tensor): [
            _of_dtensor(name, tensor, min(ranks))
            if _is_dtensor(tensor)
            else _whole(name, tuple(tensor.shape), (rank - min(ranks), *([0] if meshes else [])))
        ]
        for name, tensor in _tensors(bare)
    }


def _whole(name: str, shape: tuple[int, ...], replica: tuple[int, ...]) -> Part:
    return Part(name=name, shape=shape, offset=(0,) * len(shape), box=shape, replica=replica)


def _is_dtensor(tensor: torch.Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _ranks(dtensor: Any) -> list[int]:
    return [int(rank) for rank in dtensor.device_mesh.mesh.flatten()]


def _of_dtensor(name: str, tensor: Any, first: int) -> Part:
    """Return the part of the local tensor. first: the model's first rank. A tensor may be sharded over only some of the model's ranks, as
    with FSDP without the tensor-parallel ranks. The ranks outside the tensor's mesh have copies, on meshes without the first rank. A mesh
    does not tell which copies are data-parallel, so none count as such."""
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"{name}: a partial DTensor is an incomplete sum, so it has no position")
    box, offset = sys.modules["torch.distributed.tensor"]._utils.compute_local_shape_and_global_offset(
        tensor.shape, mesh, placements
    )
    if tuple(box) != tuple(tensor.to_local().shape):
        raise ValueError(
            f"{name}: its local shape is {tuple(tensor.to_local().shape)}, and {tuple(box)} by its placements {placements}"
        )
    where = zip(mesh.get_coordinate(), placements, strict=True)
    copies = tuple(index for index, placement in where if placement.is_replicate())
    replica = (*copies, min(_ranks(tensor)) - first, 0)
    return Part(name=name, shape=tuple(tensor.shape), offset=tuple(offset), box=tuple(box), replica=replica)


def _of_megatron(bare: Any) -> dict[int, list[Part]]:
    """Return the parts by tensor id. A leaf of the sharded state dict is a tensor with its position, a factory that makes such leaves, or
    another object."""
    found: dict[int, list[Part]] = {}
    for leaf in _leaves(bare.sharded_state_dict(metadata=dict(_METADATA))):
        if not torch.is_tensor(getattr(leaf, "data", None)):
            continue
        if hasattr(leaf, "build_fn"):
            found[id(leaf.data)] = _of_factory(leaf)
        elif hasattr(leaf, "global_offset"):
            found[id(leaf.data)] = [_of_leaf(leaf, 0, None)]
    return found


def _leaves(node: Any) -> Iterator[Any]:
    if isinstance(node, Mapping):
        for inner in node.values():
            yield from _leaves(inner)
    elif isinstance(node, (list, tuple)):
        for inner in node:
            yield from _leaves(inner)
    else:
        yield node


def _of_leaf(leaf: Any, start: int, strides: tuple[int, ...] | None) -> Part:
    """Return the part of a leaf. start, strides: the position of the leaf's elements in the live tensor. strides=None: row-major."""
    local, lead = tuple(leaf.local_shape), leaf.prepend_axis_num
    if strides is not None and all(a == b or n <= 1 for a, b, n in zip(strides, row_major(local), local, strict=True)):
        strides = None
    return Part(
        name=leaf.key,
        shape=tuple(leaf.global_shape),
        offset=tuple(leaf.global_offset),
        box=(1,) * lead + local,
        replica=leaf.replica_id if isinstance(leaf.replica_id, tuple) else (leaf.replica_id,),
        start=start,
        strides=None if strides is None else (0,) * lead + strides,
        stacked=lead,
        padded=leaf.allow_shape_mismatch,
    )


def _of_factory(factory: Any) -> list[Part]:
    """Return the parts that a factory makes. The leaves of most factories are views of the live tensor, so the leaves' strides give their
    positions. Some factories copy instead: stacked experts are transposed and made contiguous. A factory that copies is given the numbers
    0, 1, 2, …, so that its leaves contain their own positions."""
    live = factory.data.detach()
    leaves, memory = _built(factory, live), live.untyped_storage().data_ptr()
    if not (live.is_contiguous() and all(leaf.data.untyped_storage().data_ptr() == memory for leaf in leaves)):
        live = torch.arange(live.numel(), device="cpu").view(live.shape)
        leaves = _built(factory, live)
        return [_of_leaf(leaf, *_read_off(factory.key, leaf.data)) for leaf in leaves]
    origin = live.storage_offset()
    return [_of_leaf(leaf, leaf.data.storage_offset() - origin, tuple(leaf.data.stride())) for leaf in leaves]


def _built(factory: Any, data: torch.Tensor) -> list[Any]:
    made = list(_leaves(factory.build_fn(factory.key, data, factory.replica_id, None)))
    nested = [inner for leaf in made if hasattr(leaf, "build_fn") for inner in _built(leaf, leaf.data)]
    return nested + [leaf for leaf in made if hasattr(leaf, "global_offset")]


def _read_off(name: str, numbers: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    """Return the start and strides of a tensor whose elements are their own positions. Raises ValueError if no strides match the
    elements."""
    start = int(numbers.flatten()[0]) if numbers.numel() else 0
    strides = tuple(
        int(numbers.select(axis, 1).flatten()[0]) - start if size > 1 else 0 for axis, size in enumerate(numbers.shape)
    )
    expected = torch.tensor(start, device="cpu")
    for size, stride in zip(numbers.shape, strides, strict=True):
        expected = expected[..., None] + torch.arange(size, device="cpu") * stride
    if any(stride < 0 for stride in strides) or not torch.equal(expected.view(numbers.shape), numbers):
        raise ValueError(f"{name}: its factory reorders elements in a way that strides can't describe")
    return start, strides
