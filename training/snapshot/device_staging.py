"""A snapshot of a state on a device, handed over: what is on the CPU is copied here and now, the rest as `offload` does it.

What the forward pass writes goes first; what only an optimizer's step writes goes behind it, since that step can be made to wait.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from ...checkpoint.arena.arena import Slot, View
from ...checkpoint.arena.staging import Stager
from ...checkpoint.format.tensor_table import Layout, Piece
from .. import device
from ..state.optimizers.optimizers import Optimizers
from ..state.sources import Modules, Source
from .device_copy import Job, Offload

Sides: TypeAlias = tuple[tuple[Piece, ...], list[int], list[int], list[int]]
"""Of a layout, which pieces are on the CPU, which of the others the forward pass writes, and which only the optimizer."""


class HandingOver:
    def __init__(self, stager: Stager, sources: Mapping[str, Source]) -> None:
        self._stager, self._sources = stager, sources
        self._hooked = any(isinstance(source, Optimizers) for source in sources.values())
        """An optimizer's step can be waited for."""
        self._sides: Sides = ((), [], [], [])
        self._written: list[tuple[bool, frozenset[str]]] = []
        """By what of the models the forward pass writes, they were divided."""

    def begin(
        self, offload: Offload, slot: Slot, view: View, leaves: Sequence[Any], layout: Layout, state: Mapping[str, Any]
    ) -> Job:
        """state: as it was collected, by source; leaves: its tensors, in the order of the layout's pieces."""
        models = [(source, state[name]) for name, source in self._sources.items() if isinstance(source, Modules)]
        written = [(model.gathered, model.buffers) for model, _ in models]
        if self._sides[0] is not layout.pieces or self._written != written:
            self._written = written
            steady = {id(tensor) for name, source in self._sources.items() for tensor in _steady(source, state[name])}
            self._sides = _divided(leaves, layout, steady if self._hooked else ())
        _, here, early, late = self._sides
        self._stager.stage(leaves, layout, view, here)
        self._stager.runs(layout, view.memory)  # whatever it held before, its gaps are zero
        strips = offload.plan(layout)
        judged = (tensor for model, collected in models for tensor in model.judged(collected))
        job = Job(
            slot=slot,
            view=view,
            early=[(index, (leaves[index], strips[index])) for index in early],
            late=((index, (leaves[index], strips[index])) for index in late),
            checked=[tensor for tensor in judged if tensor.device.type != "cpu"],
        )
        offload.start(job)
        return job


def _divided(leaves: Sequence[Any], layout: Layout, steady: Collection[int]) -> Sides:
    """steady: ids of the tensors that nothing but an optimizer's step writes, where that can be waited for."""
    away = [index for index, leaf in enumerate(leaves) if torch.is_tensor(leaf) and device.kinds([leaf])]
    late = [index for index in away if id(leaves[index]) in steady]
    return layout.pieces, sorted(set(range(len(leaves))) - set(away)), sorted(set(away) - set(late)), late


def _steady(source: Source, collected: Any) -> list[torch.Tensor]:
    """What of a source's `collected` state nothing writes but an optimizer's step."""
    return source.steady(collected) if isinstance(source, (Modules, Optimizers)) else []
