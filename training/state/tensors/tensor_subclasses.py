"""Split a tensor into the ordinary tensors that it consists of, in the same memory. A DTensor consists of its local part. A subclass that
wraps tensors (torchao's quantized tensors, jagged tensors) consists of each wrapped tensor. Transformer Engine's float8 tensors consist of
their numbers and scales. The transposed copy of a float8 tensor is not saved: Transformer Engine creates it anew after a restore. Any other
subclass gives its own bytes. A tensor without bytes raises an error with its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ....checkpoint.arena.staging import refusal
from .in_place import local

_ORDINARY = frozenset((torch.Tensor, torch.nn.Parameter))
_FLOAT8 = (
    *(f"_{usage}{what}" for usage in ("", "rowwise_", "columnwise_") for what in ("data", "scale_inv")),
    "_amax_rowwise",
    "_amax_columnwise",
)
"""The attributes of Transformer Engine's float8 tensors that are their state."""


def ordinary(tensors: Mapping[str, torch.Tensor], called: Callable[[str], str] = str) -> dict[str, torch.Tensor]:
    """Return ordinary tensors by name. A part of a wrapping tensor has the name of the whole, a dot, and its own name. The tensors may
    require gradients. called: returns a name as messages show it. Raises SnapshotError for a tensor that can't be saved, or could not be
    restored in place."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if type(tensor) in _ORDINARY:
            found[name] = tensor
        else:
            _take_apart(name, tensor, found, called)
    return found


def all_ordinary(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return whether all tensors are ordinary, judged by their types alone."""
    return _ORDINARY.issuperset(map(type, tensors.values()))


def _take_apart(name: str, tensor: torch.Tensor, found: dict[str, torch.Tensor], called: Callable[[str], str]) -> None:
    if isinstance(tensor, (UninitializedBuffer, UninitializedParameter)):
        raise refusal(called(name), tensor, "has no shape yet. Run one forward pass before the Session")
    here = local(tensor)
    if here is not tensor:
        _take_apart(name, here, found, called)
    elif type(tensor) in _ORDINARY:
        found[name] = tensor
    elif parts := _float8_parts(tensor):
        found.update({f"{name}.{part}": each for part, each in parts.items()})
    elif hasattr(tensor, "__tensor_flatten__"):
        for part in tensor.__tensor_flatten__()[0]:
            _take_apart(f"{name}.{part}", getattr(tensor, part), found, called)
    elif tensor.layout is torch.strided and not tensor.is_nested and _has_memory(tensor):
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            found[name] = tensor.detach().as_subclass(torch.Tensor)
    elif tensor.device.type not in ("cpu", "meta"):  # the code that copies it to memory can read it
        found[name] = tensor
    else:
        raise refusal(
            called(name),
            tensor,
            "hides its bytes. Don't give it to the Session, or keep the tensors that it consists of",
        )


def _float8_parts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if not type(tensor).__module__.startswith("transformer_engine"):
        return {}
    left_out = "_columnwise_" if _copied_by_columns(tensor) else "\0"
    parts = {part: getattr(tensor, part, None) for part in _FLOAT8 if not part.startswith(left_out)}
    return {part: each for part, each in parts.items() if torch.is_tensor(each)}


def forget_copies(tensor: Any) -> None:
    """Delete the transposed copy of a restored float8 tensor, so that Transformer Engine creates it anew when needed."""
    tensor = local(tensor)
    if hasattr(tensor, "_transpose_invalid"):
        tensor._transpose_invalid = True
    if _copied_by_columns(tensor):
        tensor.update_usage(rowwise_usage=True, columnwise_usage=False)


def _copied_by_columns(tensor: Any) -> bool:
    """Return whether the columns of a block-scaled tensor are a copy of its rows. Transformer Engine creates and drops this copy as
    needed."""
    return getattr(tensor, "_is_2D_scaled", False) and torch.is_tensor(getattr(tensor, "_rowwise_data", None))


def only(tensor: torch.Tensor, called: str) -> torch.Tensor:
    """Return the one ordinary tensor that the tensor consists of. Raises SnapshotError if there is none, or several: a restart could not
    rebuild such a tensor."""
    if type(tensor) in _ORDINARY:
        return tensor
    found = ordinary({called: tensor})
    if called not in found:
        raise refusal(called, tensor, "consists of several tensors, and a restart could not create it again")
    return found[called]


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        return not tensor.numel() or tensor.untyped_storage().data_ptr() != 0
    except RuntimeError:  # a wrapper has no storage
        return False
