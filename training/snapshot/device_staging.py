"""Start the copy of a state on a device. The part on the CPU is copied immediately, the rest by `Offload`.

Tensors that the forward pass writes are copied first. Tensors that only an optimizer's step writes follow, because a hook can make that
step wait.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from ...checkpoint.arena.arena import Slot, View
from ...checkpoint.arena.staging import Stager
from ...checkpoint.format.tensor_table import Layout, Piece
from ..state.optimizers.optimizers import Optimizers
from ..state.sources import Modules, Source
from .attempt import Job
from .device_copy import Offload

Sides: TypeAlias = tuple[tuple[Piece, ...], list[int], list[int], list[int]]
"""A layout's pieces, then three lists of indices: pieces on the CPU, pieces that the forward pass writes, and pieces that only the
optimizer writes."""


class HandingOver:
    def __init__(self, stager: Stager, sources: Mapping[str, Source]) -> None:
        self._stager, self._sources = stager, sources
        self._hooked = any(isinstance(source, Optimizers) for source in sources.values())
        """Whether there is an optimizer whose step can be made to wait."""
        self._sides: Sides = ((), [], [], [])
        self._written: list[tuple[bool, frozenset[str]]] = []
        """The tensors that the forward pass writes in each model, as of the last division into `_sides`."""

    def begin(
        self, offload: Offload, slot: Slot, view: View, leaves: Sequence[Any], layout: Layout, state: Mapping[str, Any]
    ) -> Job:
        """Start the snapshot and return its job. state: as collected, by source. leaves: its tensors, in the order of the layout's
        pieces."""
        models = [(source, state[name]) for name, source in self._sources.items() if isinstance(source, Modules)]
        written = [(model.gathered, model.buffers) for model, _ in models]
        if self._sides[0] is not layout.pieces or self._written != written:
            self._written = written
            sources = ((state[name], each) for name, each in self._sources.items())
            stepped = [(told, each) for told, each in sources if isinstance(each, Modules | Optimizers)]
            steady = {id(tensor) for told, each in stepped for tensor in each.steady(told)}
            self._sides = _divided(leaves, layout, steady if self._hooked else (), offload.device)
        _, here, early, late = self._sides
        self._stager.stage(leaves, layout, view, here)
        self._stager.runs(layout, view.memory)  # fill the gaps with zeros, whatever they contained before
        strips = offload.plan(layout)
        judged = (tensor for model, collected in models for tensor in model.judged(collected))
        job = Job(
            slot=slot,
            view=view,
            early=[(index, (leaves[index], strips[index])) for index in early],
            late=((index, (leaves[index], strips[index])) for index in late),
            checked=[tensor for tensor in judged if tensor.device == offload.device],
        )
        offload.start(job)
        return job


def _divided(leaves: Sequence[Any], layout: Layout, steady: Collection[int], where: torch.device) -> Sides:
    """Return the layout's pieces, divided. steady: ids of tensors that only an optimizer's step writes, if that step can be made to
    wait. where: the device to offload. What lies elsewhere is copied as on the CPU."""
    away = [index for index, leaf in enumerate(leaves) if torch.is_tensor(leaf) and leaf.device == where]
    late = [index for index in away if id(leaves[index]) in steady]
    return layout.pieces, sorted(set(range(len(leaves))) - set(away)), sorted(set(away) - set(late)), late
