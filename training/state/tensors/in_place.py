"""Live tensors: whether a kept tensor fits, and how it is put there without replacing any tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch

from ....checkpoint.format.tensor_table import Piece
from ....resilience.errors import LayoutError

Nested = dict[str, Any]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of the tensor that lies here: a DTensor's own part, any other tensor as it is. It may require gradients."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():  # with gradients, torch would record an operation: ten times as slow
        return tensor.to_local()


def whole(tensors: Iterable[Any]) -> bool:
    """Return whether all tensors lie here as they are, by their types alone."""
    return not any(hasattr(kind, "to_local") for kind in set(map(type, tensors)))


def misfit(where: str, live: torch.Tensor, piece: Piece) -> str:
    """Return why the kept piece does not fit; empty: it does."""
    shape, dtype = tuple(live.shape), str(live.dtype).removeprefix("torch.")
    if (shape, dtype) == (piece.shape, piece.dtype):
        return ""
    return f"{where}: the snapshot holds {piece.dtype} {piece.shape}, this run has {dtype} {shape}"


def fits(where: str, live: torch.Tensor, piece: Piece) -> None:
    if why := misfit(where, live, piece):
        raise LayoutError(f"{why}; it was taken with another model or another parallel layout")


def put(live: torch.Tensor, kept: torch.Tensor) -> None:
    """Copy `kept` into `live`, if it is not there already."""
    there = (
        live.data_ptr() == kept.data_ptr() != 0 and live.stride() == kept.stride()
    )  # 0: a subclass that hides its memory
    if not there:
        with torch.no_grad():
            _once(live).copy_(_once(kept, live))


def _once(tensor: torch.Tensor, expanded: torch.Tensor | None = None) -> torch.Tensor:
    """Return each number in memory once, if the tensor (or `expanded`) is an expanded one. An expanded tensor can't be written to as a
    whole."""
    lies = tensor if expanded is None else expanded
    if 0 not in lies.stride():
        return tensor
    return tensor[tuple(slice(0, 1 if stride == 0 else None) for stride in lies.stride())]


def update(live: MutableMapping[str, Any], kept: Mapping[str, Any]) -> None:
    """Put `kept` into `live`, tensors in place where possible."""
    for key, value in kept.items():
        if torch.is_tensor(value) and torch.is_tensor(live.get(key)) and local(live[key]).shape == value.shape:
            put(local(live[key]), value)
        else:
            live[key] = value


def plain(values: Mapping[str, Any]) -> Nested:
    """Return the values that a snapshot can hold. The others (functions, modules) are the script's to build again."""
    return {key: value for key, value in values.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(_is_plain(v) for v in value)
    if type(value) is dict:
        return all(type(k) in (str, int) and _is_plain(v) for k, v in value.items())
    return value is None or type(value) in (bool, int, float, str, bytes) or torch.is_tensor(value)
