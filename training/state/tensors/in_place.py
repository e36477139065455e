"""What lies in memory, live: whether what was kept fits, and putting it there without replacing any tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch

from ....checkpoint.format.tensor_table import Piece
from ....resilience.errors import LayoutError

Nested = dict[str, Any]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What of it lies here: a DTensor's own part, anything else as it is. It may require gradients."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():  # with gradients that would be an operation, and ten times as slow
        return tensor.to_local()


def whole(tensors: Iterable[Any]) -> bool:
    """Whether all of them lie here as they are, by their types alone."""
    return not any(hasattr(kind, "to_local") for kind in set(map(type, tensors)))


def misfit(where: str, live: torch.Tensor, piece: Piece) -> str:
    """Why what was kept does not fit; empty where it does."""
    shape, dtype = tuple(live.shape), str(live.dtype).removeprefix("torch.")
    if (shape, dtype) == (piece.shape, piece.dtype):
        return ""
    return f"{where}: the snapshot holds {piece.dtype} {piece.shape}, this run has {dtype} {shape}"


def fits(where: str, live: torch.Tensor, piece: Piece) -> None:
    if why := misfit(where, live, piece):
        raise LayoutError(f"{why}; it was taken with another model or another parallel layout")


def put(live: torch.Tensor, kept: torch.Tensor) -> None:
    """`kept` into `live`, if it is not there already."""
    there = (
        live.data_ptr() == kept.data_ptr() != 0 and live.stride() == kept.stride()
    )  # 0: a subclass that hides its memory
    if not there:
        with torch.no_grad():
            _once(live).copy_(_once(kept, live))


def _once(tensor: torch.Tensor, expanded: torch.Tensor | None = None) -> torch.Tensor:
    """Each number in its memory once, where it (or `expanded`) is an expanded one: nothing may be written to it as a whole."""
    lies = tensor if expanded is None else expanded
    if 0 not in lies.stride():
        return tensor
    return tensor[tuple(slice(0, 1 if stride == 0 else None) for stride in lies.stride())]


def update(live: MutableMapping[str, Any], kept: Mapping[str, Any]) -> None:
    """`kept` into `live`, tensors in place where there are some."""
    for key, value in kept.items():
        if torch.is_tensor(value) and torch.is_tensor(live.get(key)) and local(live[key]).shape == value.shape:
            put(local(live[key]), value)
        else:
            live[key] = value


def plain(values: Mapping[str, Any]) -> Nested:
    """Without what a snapshot cannot hold (functions, modules): such things are the script's to build again."""
    return {key: value for key, value in values.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(_is_plain(v) for v in value)
    if type(value) is dict:
        return all(type(k) in (str, int) and _is_plain(v) for k, v in value.items())
    return value is None or type(value) in (bool, int, float, str, bytes) or torch.is_tensor(value)
