"""Live tensors: check whether a saved tensor fits, and copy it into a live tensor without replacing any tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch

from ....checkpoint.format.tensor_table import Piece
from ....resilience.errors import LayoutError

Nested = dict[str, Any]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor; any other tensor is returned unchanged. The result may require gradients."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():  # with gradients, torch would record an operation, which takes ten times as long
        return tensor.to_local()


def whole(tensors: Iterable[Any]) -> bool:
    """Return whether no tensor is a DTensor, judged by type alone."""
    return not any(hasattr(kind, "to_local") for kind in set(map(type, tensors)))


def misfit(where: str, live: torch.Tensor, piece: Piece) -> str:
    """Return the reason why the saved piece does not fit; empty if it fits."""
    shape, dtype = tuple(live.shape), str(live.dtype).removeprefix("torch.")
    if (shape, dtype) == (piece.shape, piece.dtype):
        return ""
    return f"{where}: the snapshot holds {piece.dtype} {piece.shape}, this run has {dtype} {shape}"


def fits(where: str, live: torch.Tensor, piece: Piece) -> None:
    if why := misfit(where, live, piece):
        raise LayoutError(f"{why}; the snapshot was taken with another model or another parallel layout")


def put(live: torch.Tensor, kept: torch.Tensor) -> None:
    """Copy `kept` into `live`, unless it lies there already."""
    # 0: a subclass that hides its memory
    if not (live.data_ptr() == kept.data_ptr() != 0 and live.stride() == kept.stride()):
        with torch.no_grad():
            _once(live).copy_(_once(kept, live))


def _once(tensor: torch.Tensor, expanded: torch.Tensor | None = None) -> torch.Tensor:
    """Return a view with each number in memory once, if the tensor (or `expanded`) is an expanded tensor, which can't be written to as a
    whole."""
    lies = tensor if expanded is None else expanded
    if 0 not in lies.stride():
        return tensor
    return tensor[tuple(slice(0, 1 if stride == 0 else None) for stride in lies.stride())]


def update(live: MutableMapping[str, Any], kept: Mapping[str, Any]) -> None:
    """Put the values of `kept` into `live`. Tensors of the same shape are filled in place."""
    for key, value in kept.items():
        if torch.is_tensor(value) and torch.is_tensor(live.get(key)) and local(live[key]).shape == value.shape:
            put(local(live[key]), value)
        else:
            live[key] = value


def plain(values: Mapping[str, Any]) -> Nested:
    """Return the values that a snapshot can store. The script must create the others (functions, modules) again."""
    return {key: value for key, value in values.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(_is_plain(v) for v in value)
    if type(value) is dict:
        return all(type(k) in (str, int) and _is_plain(v) for k, v in value.items())
    return value is None or type(value) in (bool, int, float, str, bytes) or torch.is_tensor(value)
