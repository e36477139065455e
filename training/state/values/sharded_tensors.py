"""Tensors among the script's values that are sharded over ranks (DTensor), such as an average of FSDP2's weights. Each rank saves its own
part of such a tensor.

A live tensor with the same mesh and placements is filled in place. Without such a live tensor, a new tensor is created on the mesh of a
parameter of the Session.
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
    """Return this rank's part and the tensor's layout. Raises Unsavable for partial sums, and for a part that is not consecutive or not
    row-major."""
    own = local(tensor).detach()
    if not own.is_contiguous():
        raise Unsavable("its part on this rank is not row-major: keep its .contiguous()")
    return {"data": own, "requires_grad": tensor.requires_grad, **_spread(tensor)}


def restore_sharded(content: Content, live: Any, others: Iterable[torch.Tensor]) -> Any:
    """Return `live`, filled, if it fits; otherwise a new tensor. live: None, or a tensor that no other value of the state uses. others:
    tensors of the Session. A new tensor is created on a mesh of theirs. Raises NotFound if none of them has that mesh."""
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
    """Return the whole shape, the placements, and the mesh. A placement is the dimension of the tensor that is sharded over one dimension
    of the mesh. None: each rank has all of that dimension."""
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
