"""Tensors in attributes that have an autograd graph: the hidden state of truncated backpropagation, the last loss.

A backward pass frees the graph, so a script detaches such a tensor before it uses the tensor again. A snapshot stores it detached.
"""

from __future__ import annotations

from operator import is_
from typing import Any

import torch

from ....checkpoint.format.pytree_walk import PLAIN

_MOST_BYTES = 1 << 26
"""The most bytes of all tensors with a graph in a model's attributes. Activations that are kept only for inspection may take gigabytes."""
_LEVELS = 4
_COMPUTED = ("_orig", "_g", "_v")
"""Suffixes that torch's prune, spectral_norm and weight_norm use: they compute `weight` from `weight_orig` in each forward pass."""


class WithoutGraph:
    """Detaches the tensors in attributes, for one snapshot."""

    def __init__(self) -> None:
        self._bytes = 0
        self.met = 0
        """Number of tensors with a graph so far."""

    def of(self, thing: Any, name: str, value: Any) -> tuple[Any, str]:
        """Return two things: the value, with its tensors detached if needed, and the reason why it can't be saved (empty if it can)."""
        if not _may_have(value):
            return value, ""
        before = self._bytes
        found = self._down(value, 0)
        parameters = getattr(thing, "_parameters", {})
        if found is value or any(f"{name}{end}" in parameters for end in _COMPUTED):
            return value, ""
        if self._bytes > _MOST_BYTES:
            self._bytes = before
            return value, "it has an autograd graph, and is large. Keep its .detach()"
        return found, ""

    def _down(self, value: Any, level: int) -> Any:
        if isinstance(value, torch.Tensor):
            if not is_in_graph(value) or is_borrowed(value):
                return value
            self.met += 1
            self._bytes += value.nbytes
            return value.detach()
        if level > _LEVELS or not _may_have(value):
            return value
        held = list(value.values() if type(value) is dict else value)
        found = [self._down(each, level + 1) for each in held]
        if all(map(is_, found, held)):
            return value
        return dict(zip(value, found, strict=True)) if type(value) is dict else type(value)(found)


def is_in_graph(tensor: torch.Tensor) -> bool:
    return tensor.grad_fn is not None


def is_borrowed(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a view of a parameter (FSDP makes such views), is not strided, or has no memory."""
    base = tensor._base if tensor._is_view() else None
    if base is not None and base.is_leaf:
        return True
    return tensor.layout is not torch.strided or (tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0)


def _may_have(value: Any) -> bool:
    kind = type(value)
    if kind in (list, tuple):
        return not PLAIN.issuperset(map(type, value))
    return kind is dict or isinstance(value, torch.Tensor)
