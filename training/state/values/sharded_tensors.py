"""Tensors that are spread over ranks (DTensor) among the script's values, such as an average of FSDP2's weights. Each rank keeps its own
part.

A live one with the same mesh and placements is filled in place. A new one is made on the mesh of a parameter of the Session.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..tensors.in_place import local, put
from .array_views import Content, Unsavable
from .class_adapters import NotFound


def is_sharded(kind: Any) -> bool:
    return hasattr(kind, "to_local")


def save_sharded(tensor: Any) -> Content:
    """Return this rank's part, and how the tensor is spread. Raises Unsavable for pending sums, and for parts that are not consecutive or
    not row-major."""
    own = local(tensor).detach()
    if not own.is_contiguous():
        raise Unsavable("its part on this rank is not row-major: keep its .contiguous()")
    return {"data": own, "requires_grad": tensor.requires_grad, **_spread(tensor)}


def restore_sharded(content: Content, live: Any, others: Iterable[torch.Tensor]) -> Any:
    """Return `live`, filled, if it fits; otherwise a new tensor. live: a tensor that no other value of the state uses; None: there is none.
    others: tensors of the Session, on whose mesh a new one is made. Raises NotFound if none has such a mesh."""
    spread = {key: content[key] for key in ("shape", "placements", "mesh")}
    if (
        is_sharded(type(live))
        and live.grad_fn is None
        and live.dtype == content["data"].dtype
        and _spread(live) == spread
    ):
        put(local(live), content["data"])
        return live if live.requires_grad == content["requires_grad"] else live.requires_grad_(content["requires_grad"])
    meshes = (each.device_mesh for each in others if is_sharded(type(each)))
    mesh = next((mesh for mesh in meshes if _about(mesh) == content["mesh"]), None)
    if mesh is None:
        raise NotFound(
            f"it holds a DTensor on a mesh of {content['mesh'][0]} ranks, and no model of the Session has such a mesh: keep its .to_local()"
        )
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placements = [Replicate() if each is None else Shard(each) for each in content["placements"]]
    shape = torch.Size(content["shape"])
    data = content["data"].detach().clone().to(mesh.device_type)
    stride = torch.empty(shape, device="meta").stride()
    made: Any = DTensor.from_local(data, mesh, placements, run_check=False, shape=shape, stride=stride)
    return made.requires_grad_(content["requires_grad"])


def _spread(tensor: Any) -> Content:
    """Return the whole shape, where the tensor is cut, and the mesh. For each dimension of the mesh: which dimension of the tensor is cut
    over it. None: not cut, each rank has all of it."""
    return {
        "shape": list(tensor.shape),
        "placements": [_placement(each) for each in tensor.placements],
        "mesh": _about(tensor.device_mesh),
    }


def _placement(placement: Any) -> int | None:
    if placement.is_replicate():
        return None
    if type(placement).__name__ != "Shard":
        raise Unsavable(f"it is placed as {placement}: keep its .full_tensor()")
    return int(placement.dim)


def _about(mesh: Any) -> list[Any]:
    return [list(mesh.shape), list(mesh.mesh_dim_names or ()), mesh.device_type]
