"""The ordinary tensors that a tensor consists of, in the same memory: of a DTensor its local part, of a subclass that wraps others
(torchao's quantized ones, jagged ones) each of them, of any other subclass the same bytes. What has no bytes is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ....checkpoint.arena.staging import refusal
from .in_place import local

_ORDINARY = frozenset((torch.Tensor, torch.nn.Parameter))


def ordinary(tensors: Mapping[str, torch.Tensor], called: Callable[[str], str] = str) -> dict[str, torch.Tensor]:
    """By name; the parts of one that wraps others by its name, a dot, and theirs. They may require gradients. called: what a name is in a
    message. Raises SnapshotError for what cannot be saved, or could not be put back in place."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if type(tensor) in _ORDINARY:
            found[name] = tensor
        else:
            _take_apart(name, tensor, found, called)
    return found


def all_ordinary(tensors: Mapping[str, torch.Tensor]) -> bool:
    """By their types alone."""
    return _ORDINARY.issuperset(map(type, tensors.values()))


def _take_apart(name: str, tensor: torch.Tensor, found: dict[str, torch.Tensor], called: Callable[[str], str]) -> None:
    if isinstance(tensor, (UninitializedBuffer, UninitializedParameter)):
        raise refusal(called(name), tensor, "has no shape yet. Run one forward pass before the Session")
    here = local(tensor)
    if here is not tensor:
        _take_apart(name, here, found, called)
    elif type(tensor) in _ORDINARY:
        found[name] = tensor
    elif hasattr(tensor, "__tensor_flatten__"):
        for part in tensor.__tensor_flatten__()[0]:
            _take_apart(f"{name}.{part}", getattr(tensor, part), found, called)
    elif tensor.layout is torch.strided and not tensor.is_nested and _has_memory(tensor):
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            found[name] = tensor.detach().as_subclass(torch.Tensor)
    elif tensor.device.type not in ("cpu", "meta"):  # what copies it knows how
        found[name] = tensor
    else:
        raise refusal(called(name), tensor, "hides its bytes. Leave it out, or keep what it is made of")


def only(tensor: torch.Tensor, called: str) -> torch.Tensor:
    """The one ordinary tensor that it is. Raises SnapshotError where it is none, or several: a restart could not make the whole."""
    if type(tensor) in _ORDINARY:
        return tensor
    found = ordinary({called: tensor})
    if called not in found:
        raise refusal(called, tensor, "is made of several tensors, and a restart could not make it again")
    return found[called]


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        return not tensor.numel() or tensor.untyped_storage().data_ptr() != 0
    except RuntimeError:  # a wrapper has none
        return False
