"""A MUSA device without hardware: torch's device type `musa` (PrivateUse1), whose tensors keep their data in CPU tensors.

    import torch_musa        # as with the real one, `torch.musa` and the backend `mccl` are there afterwards

Factories, `.to("musa")`, autograd, nn, optimizers and collectives (carried by gloo) work; each rank sees one device. An operation on a
musa tensor unwraps it, computes on the CPU, and wraps what comes out. Everything is synchronous, random numbers come from the CPU's
generator, and there is no C++ DistributedDataParallel.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten = torch.ops.aten
_ACROSS = {
    aten._to_copy.default,
    aten.copy_.default,
    aten._copy_from.default,
    aten.index.Tensor,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
"""What may have tensors of both kinds among its arguments; for the rest that is an error, as it is on hardware."""

_used_in = 0
"""Process in which the device was first used: as on hardware, a child of that one may not use it."""


class MusaTensor(torch.Tensor):
    """A tensor on the device; `raw` is the CPU tensor behind it."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor, requires_grad: bool = False) -> MusaTensor:
        _use()
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device=torch.device("musa", 0),
            requires_grad=requires_grad,
        )
        made.raw = raw
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl


def _use() -> None:
    global _used_in
    _used_in = _used_in or os.getpid()
    if _used_in != os.getpid():
        raise RuntimeError("Cannot re-initialize MUSA in forked subprocess")


def _on_musa(device: Any) -> bool:
    return device is not None and torch.device(device).type == "musa"


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`func` on the CPU tensors behind `args`, its results on the device where its operands or its `device` were."""
    behind: dict[int, MusaTensor] = {}

    def unwrap(value: Any) -> Any:
        if isinstance(value, MusaTensor):
            behind[id(value.raw)] = value
            return value.raw
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == "musa" else value

    wanted = kwargs.get("device")
    raw_args, raw_kwargs = tree_map(unwrap, args), tree_map(unwrap, kwargs)
    raw_kwargs.pop("non_blocking", None)
    if func not in _ACROSS and behind:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(not isinstance(tensor, MusaTensor) and tensor.dim() > 0 for tensor in tensors):
            raise RuntimeError(f"Expected all tensors to be on the same device, but found cpu and musa in {func}")
    result = func(*raw_args, **raw_kwargs)
    if func is aten.copy_.default:
        return args[0]
    if not (_on_musa(wanted) or (behind and wanted is None)):
        return result.clone() if func is aten._to_copy.default and id(result) in behind else result

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, MusaTensor):
            return value
        if id(value) in behind:  # in place
            return behind[id(value)]
        return MusaTensor(value.clone() if any(value is arg for arg in raw_args) else value)

    return tree_map(wrap, result)


def _built_on_the_host(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch's C++ constructors do not come to Python: build on the CPU, then move."""

    def build(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if not _on_musa(device):
            return original(data, *args, device=device, **kwargs)
        return original(data, *args, device="cpu", **kwargs).to(device)

    return build


class Mccl(dist.ProcessGroup):
    """The backend `mccl`: gloo on the CPU tensors behind."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "mccl"


def _carried(name: str) -> Callable[..., Any]:
    def collective(self: Mccl, *args: Any, **kwargs: Any) -> Any:
        raw = tree_map(lambda value: value.raw if isinstance(value, MusaTensor) else value, (args, kwargs))
        return getattr(self.gloo, name)(*raw[0], **raw[1])

    return collective


for _name in (
    "allreduce",
    "broadcast",
    "allgather",
    "_allgather_base",
    "_reduce_scatter_base",
    "barrier",
    "send",
    "recv",
):
    setattr(Mccl, _name, _carried(_name))


def _module() -> types.ModuleType:
    musa = types.ModuleType("torch.musa")
    vars(musa).update(
        is_available=lambda: True,
        is_initialized=lambda: _used_in == os.getpid(),
        _is_in_bad_fork=lambda: _used_in not in (0, os.getpid()),
        _lazy_init=lambda: None,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        synchronize=lambda device=None: _use(),
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        manual_seed=torch.default_generator.manual_seed,
        manual_seed_all=torch.default_generator.manual_seed,
    )
    return musa


_setup_privateuseone_for_python_backend("musa", backend_module=_module())
sys.modules["torch.musa"] = torch.musa
_fallback = torch.library.Library("_", "IMPL")
_fallback.fallback(lambda operation, *args, **kwargs: _run(operation, args, kwargs), "PrivateUse1")
for _name in ("tensor", "as_tensor"):
    setattr(torch, _name, _built_on_the_host(getattr(torch, _name)))
dist.Backend.register_backend("mccl", lambda *group: Mccl(*group), devices=["musa", "cpu"])
