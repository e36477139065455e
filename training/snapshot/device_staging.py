"""Start the copy of a state on a device. The part on the CPU is copied immediately, the rest by `Offload`.

Tensors that the forward pass writes are copied first. Tensors that only an optimizer's step writes follow, because a hook can make that
step wait. A parameter that no optimizer steps may be frozen, or the script may write it anywhere, as it does with a moving average. So such
a parameter follows only as long as its fingerprint stays the same. If it has changed, its snapshot is given up, and from then on it is
copied first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from ...checkpoint.arena.arena import Slot, View
from ...checkpoint.arena.staging import Stager
from ...checkpoint.format.tensor_table import Layout, Piece
from ..state.optimizers.optimizers import Optimizers
from ..state.sources import Modules, Source
from .attempt import Job
from .device_copy import Offload

Sides: TypeAlias = tuple[tuple[Piece, ...], list[int], list[int], list[int], list[int]]
"""A layout's pieces, then four lists of indices: pieces on the CPU, pieces that the forward pass writes, pieces that only the optimizer
writes, and parameters that no optimizer steps."""

_PROVING = 3
"""The first snapshots of a process, and those after a capture, which prove that nothing is written while it is copied. Each proof costs the
loop a few milliseconds: one kernel for each tensor, which reads it."""


class HandingOver:
    def __init__(self, stager: Stager, sources: Mapping[str, Source]) -> None:
        self._stager, self._sources = stager, sources
        self._hooked = any(isinstance(source, Optimizers) for source in sources.values())
        """Whether there is an optimizer whose step can be made to wait."""
        self._sides: Sides = ((), [], [], [], [])
        self._written: list[tuple[bool, frozenset[str]]] = []
        """The tensors that the forward pass writes in each model, as of the last division into `_sides`."""
        self._still: dict[str, int | None] = {}
        """Fingerprints of the parameters that no optimizer steps, by name; None: the parameter has changed."""
        self._proving = _PROVING
        """The number of further snapshots that show whether the script writes tensors while they are copied."""
        self._free: set[str] = set()
        """The names of tensors that the script writes at any time, also while they are copied."""
        self._begun: list[tuple[Job, tuple[Piece, ...]]] = []
        """Snapshots from which nothing was learned yet."""

    def begin(
        self, offload: Offload, slot: Slot, view: View, leaves: Sequence[Any], layout: Layout, state: Mapping[str, Any]
    ) -> Job:
        """Start the snapshot and return its job. state: as collected, by source. leaves: its tensors, in the order of the layout's
        pieces."""
        models = [(source, state[name]) for name, source in self._sources.items() if isinstance(source, Modules)]
        written = [(model.gathered, model.buffers) for model, _ in models]
        if offload.captured:
            offload.captured, self._proving = False, _PROVING
        self._learn()
        if self._sides[0] is not layout.pieces or self._written != written:
            self._written = written
            self._sides = self._divided(leaves, layout, state, offload.device)
        _, here, early, late, still = self._sides
        away = {*early, *late, *still}
        still, late = ([i for i in some if layout.pieces[i].name not in self._free] for some in (still, late))
        known = {index: word for index in still if (word := self._still.get(layout.pieces[index].name)) is not None}
        late = sorted([*late, *known])
        early = sorted(away - {*late})
        self._stager.stage(leaves, layout, view, here)
        self._stager.runs(layout, view.memory)  # fill the gaps with zeros, whatever they contained before
        strips = offload.plan(layout)
        judged = (tensor for model, collected in models for tensor in model.judged(collected))
        job = Job(
            slot=slot,
            view=view,
            early=[(index, (leaves[index], strips[index])) for index in early],
            late=((index, (leaves[index], strips[index])) for index in late),
            proving=self._proving > 0,
            checked=[tensor for tensor in judged if tensor.device == offload.device],
            still=still,
            expected=known,
        )
        self._begun.append((job, layout.pieces))
        self._proving = max(0, self._proving - 1)
        offload.start(job)
        return job

    def _learn(self) -> None:
        """Learn from complete snapshots which of the parameters that no optimizer steps stay the same, and which tensors the script writes
        at any time."""
        for job, pieces in self._begun:
            if not job.over.is_set():
                continue
            for index, word in job.found.items():
                name = pieces[index].name
                self._still[name] = word if self._still.get(name, word) == word else None
            if job.overtaken:
                self._free |= {pieces[index].name for index in job.overtaken}
                self._proving = _PROVING
        self._begun = [each for each in self._begun if not each[0].over.is_set()]

    def _divided(self, leaves: Sequence[Any], layout: Layout, state: Mapping[str, Any], where: torch.device) -> Sides:
        """Return the layout's pieces, divided. where: the device to offload. Tensors elsewhere are copied like tensors on the CPU."""
        models = [(state[name], each) for name, each in self._sources.items() if isinstance(each, Modules)]
        optimizers = [(state[name], each) for name, each in self._sources.items() if isinstance(each, Optimizers)]
        stepped = {id(each) for _, source in optimizers for each in source.stepped()}
        steady = {id(tensor) for told, model in models for tensor in model.steady(told, stepped)}
        steady |= {id(tensor) for told, source in optimizers for tensor in source.steady(told)}
        others = {id(t) for told, model in models if not model.gathered for t in model.parameters(told)} - steady
        if not self._hooked:
            steady, others = set(), set()
        away = [index for index, leaf in enumerate(leaves) if torch.is_tensor(leaf) and leaf.device == where]
        late, still = ([index for index in away if id(leaves[index]) in ids] for ids in (steady, others))
        here = sorted(set(range(len(leaves))) - set(away))
        return layout.pieces, here, sorted(set(away) - {*late, *still}), late, still
