"""Checksums of an epoch's first batches, saved with the position in the data. The checksums show whether a repeated epoch begins with the
same batches. Also the contents of a value in a loader, which show whether the value must be packed again.

A sampler's batches are lists of indexes, and the checksum covers them completely. A batch from a loader may be large: the checksum covers
its structure, its shapes and some of its elements.
"""

from __future__ import annotations

import zlib
from collections import UserDict, deque
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from operator import is_
from typing import Any

import numpy as np
import torch

from ...checkpoint.format.pytree_walk import PLAIN
from ..state.values.array_views import is_plain_tensor

_ELEMENTS = 64
"""The most elements of an array, a tensor or a list that a checksum covers, spread over the whole value."""
_LEAVES = 128
"""The most parts of a batch that a checksum covers."""
_DEEP = 4
"""The deepest nesting in a batch that a checksum covers."""
_TEXT = 256
_CONTAINERS = frozenset((list, tuple, set, frozenset, deque, dict))
_GOLDEN = 0.6180339887498949
"""The golden ratio. The fractional parts of its multiples are spread evenly between 0 and 1."""


class Contents:
    """Everything in a value of containers and arrays at one moment. A comparison takes a fraction of the time that packing takes."""

    def __init__(self, value: Any, most: int) -> None:
        """most: the most parts, and words in arrays, that are covered."""
        self.known = False
        """Whether everything in the value is covered."""
        self._objects, self._figures, level = [value], list[Any](), [value]
        while level:
            inner: list[Any] = []
            for each in level:
                kind = type(each)
                if kind in PLAIN:  # the same object always has the same value
                    continue
                if kind in _CONTAINERS:
                    most -= len(each) * (1 + (kind is dict))
                elif kind is np.ndarray or (kind is torch.Tensor and is_plain_tensor(each)):
                    most -= each.nbytes // 8
                else:
                    return
                if most < 0:
                    return
                if kind in _CONTAINERS:
                    self._figures.append(len(each))
                    inner += each
                    inner += each.values() if kind is dict else ()
                elif (found := _whole(each)) is not None:
                    self._figures.append(found)
                else:
                    return
            self._objects += inner
            level = inner
        self.known = True

    def same(self, other: Contents) -> bool:
        """Whether both are of the same value, unchanged. Containers and plain values are compared by identity."""
        if not self.known or not other.known or len(self._objects) != len(other._objects):
            return False
        return all(map(is_, self._objects, other._objects)) and self._figures == other._figures


def _whole(value: Any) -> tuple[Any, ...] | None:
    """Return all of an array or tensor; None if numpy can't read it."""
    try:
        array = value.numpy() if is_plain_tensor(value) else value
        return (
            None
            if type(array) is torch.Tensor or array.dtype.hasobject
            else (array.dtype, array.shape, array.tobytes())
        )
    except (TypeError, RuntimeError):  # bfloat16, for example
        return None


class Checksums:
    """Checksums of the first batches of an epoch. A loader reads ahead, so the checksums may cover more batches than the loop has used."""

    def __init__(self) -> None:
        self._last = 0
        self._number = 0
        self._ahead: deque[tuple[int, int]] = deque([(0, 0)])

    def add(self, figure: int) -> None:
        """Add the next batch. figure: the batch's checksum."""
        self._last, self._number = hash((self._last, figure)), self._number + 1
        self._ahead.append((self._number, self._last))

    def after(self, used: int) -> int | None:
        """Return the checksum of the first `used` batches; None if fewer were added. The checksums of fewer than `used` batches are
        deleted."""
        while self._ahead and self._ahead[0][0] < used:
            self._ahead.popleft()
        return self._ahead[0][1] if self._ahead and self._ahead[0][0] == used else None


def of_indexes(batch: Any) -> int:
    """Return a checksum of a sampler's batch. A restart gives the same checksum, because hashes of numbers do not change."""
    if type(batch) is list and batch and isinstance(batch[0], (int, np.integer)):
        try:
            return hash(tuple(batch))
        except TypeError:
            pass
    return of_batch(batch)


def of_batch(batch: Any) -> int:
    figure = 0
    for leaf in islice(_leaves(batch, _DEEP), _LEAVES):
        figure = zlib.crc32(leaf, figure)
    return figure


def _leaves(thing: Any, deep: int) -> Iterator[bytes]:
    kind = type(thing)
    if kind in PLAIN:
        text = thing if isinstance(thing, bytes) else (thing if kind is str else repr(thing)).encode(errors="replace")
        yield b"%d " % len(text) + text[:_TEXT]
    elif isinstance(thing, (torch.Tensor, np.ndarray)):
        yield from _of_tensor(thing) if isinstance(thing, torch.Tensor) else _of_array(thing)
    else:
        yield kind.__name__.encode()
        parts = _parts(thing) if deep else []
        yield b"%d" % len(parts)
        for part in parts if len(parts) <= _ELEMENTS else [parts[at] for at in _places(len(parts))]:
            yield from _leaves(part, deep - 1)


def _parts(thing: Any) -> list[Any]:
    """Return the parts that a checksum covers, without calling code that may belong to the script. Sets are not covered, because their
    order varies. Of other objects, only tensors, arrays, dicts and lists are covered, because other values may change."""
    if isinstance(thing, UserDict):
        thing = thing.data
    if isinstance(thing, dict):
        return [part for _, part in sorted(dict.items(thing), key=lambda item: repr(item[0]))]
    if isinstance(thing, (list, tuple, deque)):
        return [*thing]
    held = getattr(thing, "__dict__", None)
    if isinstance(held, dict) and not callable(thing):
        return [held[name] for name in sorted(held) if isinstance(held[name], (torch.Tensor, np.ndarray, dict, list))]
    return []


def _of_tensor(tensor: torch.Tensor) -> Iterator[bytes]:
    """Yield the bytes that a checksum covers. Of a tensor on a device, only the dtype and shape are covered, so that nothing waits for the
    device."""
    yield f"{tensor.dtype} {[*tensor.shape]}".encode()
    if not (tensor.is_cpu and tensor.layout is torch.strided and tensor.numel()):
        return
    try:
        plain = tensor.detach().as_subclass(torch.Tensor)
        some = (
            plain.reshape(-1) if tensor.numel() <= _ELEMENTS else plain.take(torch.from_numpy(_places(tensor.numel())))
        )
        yield some.view(torch.uint8).numpy().tobytes()
    except (RuntimeError, TypeError, NotImplementedError):  # raised by a quantized or complex tensor, for example
        return


def _of_array(array: Any) -> Iterator[bytes]:
    yield f"{array.dtype} {array.shape}".encode()
    some = array.reshape(-1) if array.size <= _ELEMENTS else array.flat[_places(array.size)]
    if array.dtype.hasobject:
        yield from (leaf for each in some.tolist() for leaf in _leaves(each, 0))
    else:
        yield some.tobytes()


@lru_cache(maxsize=64)
def _places(number: int) -> Any:
    return ((np.arange(1, _ELEMENTS + 1) * _GOLDEN % 1) * number).astype(np.int64)
