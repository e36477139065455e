"""Values that a rank shares with its data loader's workers.

The rank restores them before it starts workers. A worker must not restore them: it would write the values from after its own last batch,
while the other workers read them.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ...checkpoint.format.pytree_walk import PLAIN
from ..state.values import ctypes_values
from ..state.values.ctypes_values import is_c, size_of
from ..state.values.packing import MAPPINGS

_FEW = 256
"""The most values in a container that is searched for shared values or generators."""
_LARGE = 128
"""The least number of bytes of a shared value that counts as a cache. A smaller value counts as a counter."""
_ELEMENTS = (torch.Tensor, np.ndarray)


def within(value: Any) -> Iterator[Any]:
    """Yield the value and everything in its containers, each container once: a container may contain itself."""
    waiting, met = [value], {id(value)}
    while waiting:
        yield (each := waiting.pop())
        kind = type(each)
        if (kind in (list, tuple) or kind in MAPPINGS) and len(each) <= _FEW:
            new = [part for part in (each.values() if kind in MAPPINGS else each) if id(part) not in met]
            met.update(map(id, new))
            waiting += new


def is_shared(value: Any) -> bool:
    """Return whether other processes see changes of the value, or of a part of it."""
    return type(value) not in PLAIN and any(map(_is_shared, within(value)))


def _is_shared(value: Any) -> bool:
    kind = type(value)
    if kind in PLAIN:
        return False
    if is_c(kind):
        return hasattr(value, "_wrapper") or hasattr(value, "get_obj")
    if isinstance(value, torch.Tensor):
        return value.is_cpu and value.layout is torch.strided and value.is_shared()
    return isinstance(value, np.ndarray) and _lies_in_shared(value)


def is_counter(value: Any) -> bool:
    """Return whether the value is shared, and so small that its bytes can be compared at each batch."""
    kind = type(value)
    small = (size_of(value) if is_c(kind) else value.nbytes if isinstance(value, _ELEMENTS) else _LARGE) < _LARGE
    return small and is_shared(value)


def bytes_of(counter: Any) -> bytes:
    if is_c(type(counter)):
        return ctypes_values.bytes_of(counter)
    array = counter.detach().numpy() if isinstance(counter, torch.Tensor) else counter
    return bytes(array.tobytes())


def _lies_in_shared(array: Any) -> bool:
    """Return whether the array lies in the memory of `multiprocessing.Array`, of `SharedMemory` or of a file."""
    base = array.base
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return isinstance(base, mmap.mmap) or (base is not None and is_c(type(base)) and _is_shared(base))
