"""Tensors and arrays as values in a snapshot: what is stored besides the elements, and how values that share memory are stored.

A plain tensor or array (dense, row-major, on the CPU, alone in its memory) is stored as it is. For any other, a snapshot also stores the
strides, the device, the dtype or `requires_grad`. Values that share memory are stored as views of that memory, and the memory is stored
once, as bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ....checkpoint.format.pytree import SCALARS
from ..tensors.in_place import put
from . import type_adapters

Content = dict[str, Any]
TENSORS = (torch.Tensor, torch.nn.Parameter)


class Unsavable(Exception):
    """A value can't be saved. The message gives the reason, as the end of a sentence that names the value."""


def address(thing: Any) -> int:
    """Return the address of the memory in which the value lies, and which other values may share. 0: the value has no bytes."""
    if type(thing) is np.ndarray:
        root = root_of(thing)
        return int(root.__array_interface__["data"][0]) if root.nbytes else 0
    found: int = thing.data_ptr()
    offset = thing.storage_offset()
    return found - offset * thing.element_size() if found and offset else found


def is_part(thing: Any) -> bool:
    """Return whether the memory in which the value lies has further bytes, which other values may use."""
    if isinstance(thing, np.ndarray):
        return bool(root_of(thing).nbytes > thing.nbytes)
    return bool(thing.untyped_storage().nbytes() > thing.nbytes)


def root_of(array: Any) -> Any:
    """Return the numpy array at the end of the chain of `base` views."""
    while type(array.base) is np.ndarray:
        array = array.base
    return array


# -- tensors -----------------------------------------------------------------------------------------------------------------


def is_plain_tensor(tensor: Any) -> bool:
    return (
        type(tensor) is torch.Tensor
        and not tensor.requires_grad
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and not tensor.is_nested
        and tensor.is_contiguous()
    )


def overlaps(tensor: Any) -> bool:
    """Return whether several elements of the tensor are the same number in memory."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() > 0 and extent < tensor.numel()


def _about(tensor: Any) -> Content:
    found: Content = {"parameter": type(tensor) is torch.nn.Parameter, "requires_grad": tensor.requires_grad}
    return found if tensor.is_cpu else {**found, "device": str(tensor.device)}


def save_tensor(tensor: Any) -> Content:
    found = {**_about(tensor), "data": tensor.detach()}
    return found if tensor.is_contiguous() else {**found, "strides": list(tensor.stride())}


def restore_tensor(content: Content, live: Any) -> Any:
    """Return `live`, filled, if it fits; otherwise a new tensor. live: None, or a tensor whose memory no other value of the state
    shares."""
    data = content["data"]
    strides = tuple(content["strides"]) if "strides" in content else data.stride()
    if _takes(live, content, data.dtype, data.shape, strides):
        put(live, data)
        return _with(live, content)
    if "strides" not in content:
        return _with(data.detach().to(content.get("device", "cpu")), content)
    made = torch.empty_strided(data.shape, strides, dtype=data.dtype, device=content.get("device", "cpu"))
    return _with(made.copy_(data), content)


def _takes(live: Any, content: Content, dtype: Any, shape: Sequence[int], strides: Sequence[int]) -> bool:
    return (
        type(live) is TENSORS[bool(content.get("parameter"))]
        and live.grad_fn is None
        and (live.dtype, tuple(live.shape), tuple(live.stride())) == (dtype, tuple(shape), tuple(strides))
        and live.layout is torch.strided
        and str(live.device) == content.get("device", "cpu")
    )


def _with(tensor: Any, content: Content) -> Any:
    wanted = bool(content.get("requires_grad"))
    if content.get("parameter") and type(tensor) is not torch.nn.Parameter:
        return torch.nn.Parameter(tensor, wanted)
    return tensor if tensor.requires_grad == wanted else tensor.requires_grad_(wanted)


# -- arrays ------------------------------------------------------------------------------------------------------------------


def is_plain_array(array: Any) -> bool:
    return array.dtype.name in SCALARS and array.dtype.isnative and array.flags.c_contiguous and array.flags.writeable


def save_array(array: Any) -> Content:
    dtype = array.dtype
    compact = np.ascontiguousarray(array).reshape(array.shape)
    known = dtype.name in SCALARS and dtype.isnative
    return {
        "dtype": type_adapters.descr(dtype),
        "shape": list(array.shape),
        "strides": None if array.flags.c_contiguous else list(array.strides),
        "writeable": bool(array.flags.writeable),
        "data": compact if known else np.frombuffer(compact.tobytes(), np.uint8),
    }


def restore_array(content: Content, live: Any) -> Any:
    dtype, shape = type_adapters.dtype_of(content["dtype"]), tuple(content["shape"])
    data = content["data"]
    if data.dtype != dtype:
        data = np.ndarray(shape, dtype, buffer=data.tobytes() or bytes(1))
    data = data.reshape(shape)
    strides = tuple(content["strides"]) if content["strides"] is not None else data.strides
    if takes_array(live, dtype, shape, strides, content["writeable"]) and content["writeable"]:
        live[...] = data
        return live
    lowest = sum(min(0, (size - 1) * stride) for size, stride in zip(shape, strides, strict=True))
    highest = sum(max(0, (size - 1) * stride) for size, stride in zip(shape, strides, strict=True))
    memory = np.zeros(max(1, highest - lowest + dtype.itemsize) if data.size else 1, np.uint8)
    made = np.ndarray(shape, dtype, memory, -lowest, strides)  # type: ignore[arg-type]
    made[...] = data
    made.flags.writeable = content["writeable"]
    return made


def takes_array(live: Any, dtype: Any, shape: Any, strides: Any, writeable: bool = True) -> bool:
    return (
        type(live) is np.ndarray
        and (live.dtype, live.shape, live.strides) == (dtype, shape, strides)
        and live.flags.writeable == writeable
    )


# -- several in one memory ---------------------------------------------------------------------------------------------------


def memory_of(thing: Any) -> Any:
    """Return all bytes of the memory in which a tensor or array lies. Raises Unsavable if an array's memory has gaps, or is read-only."""
    if type(thing) is np.ndarray:
        root = root_of(thing)
        if not (root.flags.c_contiguous or root.flags.f_contiguous) or not root.flags.writeable:
            raise Unsavable(
                "it shares the memory of an array that is read-only or not contiguous. Keep a copy of it instead"
            )
        return np.ndarray(root.nbytes, np.uint8, root.data if root.flags.c_contiguous else root.T.data)
    storage = thing.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=thing.device).set_(storage, 0, (storage.nbytes(),), (1,))


def save_view(thing: Any, memory: Any) -> Content:
    if type(thing) is np.ndarray:
        offset = int(thing.__array_interface__["data"][0]) - address(thing)
        shape, strides, dtype = thing.shape, thing.strides, type_adapters.descr(thing.dtype)
        found: Content = {"writeable": bool(thing.flags.writeable)}
    elif thing.is_conj() or thing.is_neg():
        raise Unsavable("it is a conjugated or negated view of another value: keep its .resolve_conj().resolve_neg()")
    else:
        offset, found = thing.storage_offset() * thing.element_size(), _about(thing)
        shape, strides, dtype = thing.shape, thing.stride(), str(thing.dtype)
    where = {"dtype": dtype, "shape": list(shape), "strides": list(strides), "offset": offset}
    return {"memory": memory, **where, **found}


def restore_view(content: Content, live: Any) -> Any:
    """Return `live` if it is already this view of `memory`; otherwise a new view. `memory` is filled already, and is the memory of `live`
    if `live` fits."""
    memory, shape, strides = content["memory"], tuple(content["shape"]), tuple(content["strides"])
    offset = content["offset"]
    if type(memory) is np.ndarray:
        dtype = type_adapters.dtype_of(content["dtype"])
        place = int(memory.__array_interface__["data"][0]) + offset
        if takes_array(live, dtype, shape, strides, content["writeable"]) and (
            live.__array_interface__["data"][0] == place
        ):
            return live
        made = np.ndarray(shape, dtype, memory, offset, strides)
        made.flags.writeable = content["writeable"]
        return made
    dtype = getattr(torch, content["dtype"].removeprefix("torch."))
    if _takes(live, content, dtype, shape, strides) and live.data_ptr() == memory.data_ptr() + offset:
        return _with(live, content)
    made = torch.empty(0, dtype=dtype, device=memory.device)
    made.set_(memory.untyped_storage(), memory.storage_offset() + offset // made.element_size(), shape, strides)
    return _with(made, content)
