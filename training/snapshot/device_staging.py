"""Start the copy of a state on a device. The part on the CPU is copied immediately, the rest by `Offload`.

Tensors that the forward pass writes are copied first. Tensors that only an optimizer's step writes follow, because a hook makes that step
wait. An optimizer is trusted to call the hook once it has done so, and until its step is captured: in the replay of a graph, no hook runs.

A parameter that no optimizer steps may be frozen, or the script may write it anywhere, as it does with a moving average. So such a
parameter follows only as long as its fingerprint stays the same. If it has changed, or if any tensor has changed while it was copied, the
snapshot is given up, and from then on this tensor is copied first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch

from ...checkpoint.arena.arena import Slot, View
from ...checkpoint.arena.staging import Stager
from ...checkpoint.format.tensor_table import Layout, Piece
from ..state.optimizers.optimizers import Optimizers
from ..state.sources import Modules, Source
from .attempt import Job
from .device_copy import Offload

Sides: TypeAlias = tuple[tuple[Piece, ...], list[int], list[int], list[int], list[int], set[int]]
"""A layout's pieces, then indices: pieces on the CPU, pieces that the forward pass writes, pieces that only the optimizer writes,
parameters that no optimizer steps, and the parameters among those before."""


class HandingOver:
    def __init__(self, stager: Stager, sources: Mapping[str, Source]) -> None:
        self._stager, self._sources = stager, sources
        self._sides: Sides = ((), [], [], [], [], set())
        self._divided_by: list[Any] = []
        """The tensors that the forward pass writes in each model, and the optimizers that wait, as of the last division into `_sides`."""
        self._still: dict[str, int | None] = {}
        """Fingerprints of the parameters that no optimizer steps, by name; None: the parameter has changed."""
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
        optimizers = {name: each for name, each in self._sources.items() if isinstance(each, Optimizers)}
        waiting = [name for name, each in optimizers.items() if each.wait(offload.stepped, offload.captured)]
        by = [*((model.gathered, model.buffers) for model, _ in models), waiting]
        self._learn()
        if self._sides[0] is not layout.pieces or self._divided_by != by:
            self._divided_by = by
            self._sides = self._divided(leaves, layout, state, offload.device, waiting)
        _, here, early, late, still, parameters = self._sides
        away = {*early, *late, *still}
        still, late = ([i for i in some if layout.pieces[i].name not in self._free] for some in (still, late))
        known = {index: word for index in still if (word := self._still.get(layout.pieces[index].name)) is not None}
        late = sorted([*late, *known])
        early = sorted(away - {*late})
        self._stager.stage(leaves, layout, view, here)
        self._stager.runs(layout, view.memory)  # fill the gaps with zeros, whatever they contained before
        strips = offload.plan(layout)
        judged = (tensor for model, collected in models for tensor in model.judged(collected))
        # bound now: the script may give a parameter other memory (`p.data = …`) while it is copied
        copies = {index: (leaves[index].detach(), strips[index]) for index in (*early, *late)}
        job = Job(
            slot=slot,
            view=view,
            early=[(index, copies[index]) for index in early],
            late=[(index, copies[index]) for index in late],
            proven=[(index, copies[index]) for index in late if index in parameters],
            checked=[tensor for tensor in judged if tensor.device == offload.device],
            still=still,
            expected=known,
        )
        self._begun.append((job, layout.pieces))
        offload.start(job)
        return job

    def _learn(self) -> None:
        """Learn from complete snapshots which of the parameters that no optimizer steps stay the same, and which tensors the script writes
        at any time."""
        begun, self._begun = self._begun, []
        for job, pieces in begun:
            if not job.over.is_set():
                self._begun.append((job, pieces))
                continue
            for index, word in job.found.items():
                name = pieces[index].name
                self._still[name] = word if self._still.get(name, word) == word else None
            self._free |= {pieces[index].name for index in job.overtaken}

    def _divided(
        self,
        leaves: Sequence[Any],
        layout: Layout,
        state: Mapping[str, Any],
        where: torch.device,
        waiting: Sequence[str],
    ) -> Sides:
        """Return the layout's pieces, divided. where: the device to offload. Tensors elsewhere are copied like tensors on the CPU. waiting:
        the optimizers that wait for copies. Others may step in the replay of a graph, or not call torch's hooks."""
        models = [(state[name], each) for name, each in self._sources.items() if isinstance(each, Modules)]
        optimizers = [(state[name], cast(Optimizers, self._sources[name])) for name in waiting]
        stepped = {id(each) for _, source in optimizers for each in source.stepped()}
        trained = {id(tensor) for told, model in models for tensor in model.steady(told, stepped)}
        steady = trained | {id(tensor) for told, source in optimizers for tensor in source.steady(told)}
        others = {id(t) for told, model in models if not model.gathered for t in model.parameters(told)} - steady
        if not optimizers:
            steady, others = set(), set()
        away = [index for index, leaf in enumerate(leaves) if torch.is_tensor(leaf) and leaf.device == where]
        late, still = ([index for index in away if id(leaves[index]) in ids] for ids in (steady, others))
        here = sorted(set(range(len(leaves))) - set(away))
        parameters = {index for index in late if id(leaves[index]) in trained}
        return layout.pieces, here, sorted(set(away) - {*late, *still}), late, still, parameters
