"""Going back: the live state of a rank is filled with a kept one, from a slot, from disk, or from another job's snapshot.

table → tensors made ready (`Preparing`) → bytes into the live tensors → the small values into their sources
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from ...checkpoint.arena.fill import destinations, fill
from ...checkpoint.backend.paths import Attempt
from ...checkpoint.backend.place import Place
from ...checkpoint.durable import catalog, commit
from ...checkpoint.durable.load import chunks, open_rank
from ...checkpoint.format.pytree import unflatten
from ...checkpoint.format.pytree_walk import flatten
from ...checkpoint.format.sharding import Part
from ...checkpoint.format.tensor_table import Table
from ...resilience.clock import sleep
from ...resilience.errors import LayoutError, MachineError, SnapshotError
from ...resilience.inprocess.tally import COURSE, RANDOMNESS
from ..state.optimizers.optimizers import Optimizers
from ..state.rng import Alone
from ..state.sources import Preparing, Source, Unfilled, put_back
from .restore_resharded import parts_of, restore_elsewhere

"""Name of the source that the generators are."""
_PAUSES_S = (0.5, 1.0, 2.0, 4.0)
"""Between tries to read a snapshot from storage that fails; then the worker group starts again, as often as the budget allows."""


class Unrestorable(SnapshotError):
    """The state that the agent chose cannot be restored by this rank: the agent rejects it and chooses another one."""

    def __init__(self, step: int, snapshot: str, why: str) -> None:
        """snapshot: its name; empty for one in memory."""
        super().__init__(f"cannot restore step {step}: {why}")
        self.farewell = {"kind": "snapshot", "step": step, "snapshot": snapshot}


class Unreadable(MachineError):
    """Storage does not give the state that the agent chose; it may be as sound as ever, and is kept."""

    def __init__(self, step: int, why: str) -> None:
        super().__init__(f"cannot read the snapshot of step {step}: {why}")
        self.farewell = {"kind": "unreadable", "step": step}


class Restorer:
    def __init__(self, sources: Mapping[str, Source], alone: Alone, rank: int, world: int) -> None:
        self._sources: dict[str, Source] = {**sources, RANDOMNESS: alone}
        self._randomness = alone.generators
        self._rank, self._world = rank, world
        self._kept_randomness: Any = None

    def from_store(self, root: Place, step: int) -> None:
        """What this very rank has written of `step`; where the job had another number of ranks then, its part of the whole. Storage that
        fails is asked again for a while. Raises Unrestorable, Unreadable, LayoutError or FormatError."""

        def ask() -> None:
            snapshot = _durable(root, step)
            try:
                if commit.read_commit(snapshot).world == self._world:
                    self._from_own(snapshot)
                else:
                    self._from_elsewhere(snapshot)
            except SnapshotError as error:
                raise Unrestorable(step, snapshot.name, str(error)) from error

        _patiently(step, ask)

    def start_from(self, snapshot: Place) -> int:
        """Of another job, whatever its parallel layout; its step. Raises as `from_store` does."""
        attempt = Attempt.parse(snapshot.name)
        assert attempt
        step = attempt.stamp.step

        def ask() -> None:
            try:
                try:
                    self._from_own(snapshot, parts_of(self._sources))
                except Unfilled:
                    raise
                except LayoutError:
                    self._from_elsewhere(snapshot)
            except SnapshotError as error:
                raise Unrestorable(step, "", f"{snapshot}: {error}") from error

        _patiently(step, ask)
        return step

    def _from_own(self, snapshot: Place, parts: Mapping[str, Sequence[Part]] = MappingProxyType({})) -> None:
        """parts: where live tensors lie now; where one has lain elsewhere, LayoutError is raised."""
        with commit.reading(snapshot):
            manifest = open_rank(snapshot, self._rank, self._world)
            for piece in manifest.table.pieces:
                if piece.name in parts and tuple(parts[piece.name]) != piece.parts:
                    raise LayoutError(f"{piece.name} was another part of the whole when {snapshot} was taken")
            content = chunks(snapshot, manifest)
            self.fill(manifest.table, lambda into: fill(manifest.table, into, content, manifest.words()))

    def _from_elsewhere(self, snapshot: Place) -> None:
        with commit.reading(snapshot):
            restore_elsewhere(snapshot, self._sources, alone={RANDOMNESS}, optional={COURSE})

    def fill(self, table: Table, bring: Callable[[dict[str, torch.Tensor]], None]) -> None:
        """Let `bring` fill the live tensors in place, and hand the rest to the sources. What does not fit is found before anything is
        touched: LayoutError. What a source then has against its values, all the same: Unfilled."""
        described = table.described()
        if described.keys() != self._sources.keys():
            raise LayoutError(
                f"the snapshot holds {', '.join(described)}; this script registers {', '.join(self._sources)}"
            )
        preparing = {name: source for name, source in self._sources.items() if isinstance(source, Preparing)}
        for name in sorted(preparing, key=lambda name: isinstance(preparing[name], Optimizers)):
            preparing[name].prepare(described[name])  # optimizers last: they have the parameters of models
        _, live = flatten({name: source.collect() for name, source in preparing.items()}, torch.is_tensor)
        leaves = destinations(table, dict(live))
        bring(leaves)
        kept = unflatten(table.skeleton, leaves)
        put_back(self._sources, kept)
        self._kept_randomness = kept[RANDOMNESS]

    def restore_randomness(self) -> None:
        """Once more, right before the first step: building data iterators after a restore draws from the CPU generator."""
        if self._kept_randomness is not None:
            self._randomness.restore(self._kept_randomness)
            self._kept_randomness = None


def _patiently(step: int, ask: Callable[[], None]) -> None:
    """What storage, or memory, does not give now is asked for again; then Unreadable. Only what was read and found wrong is damage."""
    for pause_s in (*_PAUSES_S, 0.0):
        try:
            ask()
            return
        except (MachineError, OSError, MemoryError) as error:
            if not pause_s:
                raise Unreadable(step, str(error) or "there is no memory for it") from error
            sleep(pause_s)


def _durable(root: Place, step: int) -> Place:
    for attempt in catalog.look(root).durable:
        if attempt.stamp.step == step:
            return attempt.under(root)
    raise MachineError(f"no committed snapshot of step {step} is under {root} any more")
