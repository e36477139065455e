"""Whether tensors hold NaN or Inf, by their sums: one pass at the memory's bandwidth (`isfinite` of each element takes three times as long,
and the norm that cannot overflow ten times, on a CPU).

A sum that overflows is taken for one of them. Of a tensor that is so from the start nobody concludes anything (`Modules.judged`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def sums(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """One number of each that has numbers with a NaN among them, where it lies: float64 of those that have more digits than float32."""
    found = []
    for tensor in tensors:
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        if tensor.is_floating_point():
            found.append(tensor.sum(dtype=torch.float64 if tensor.dtype is torch.float64 else torch.float32))
    return found


def finite(found: Iterable[torch.Tensor]) -> bool:
    """Whether all of `sums` are. They lie on one device."""
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for each in found:
        by_type.setdefault(each.dtype, []).append(each)
    return all(bool(torch.isfinite(torch.stack(alike)).all()) for alike in by_type.values())
