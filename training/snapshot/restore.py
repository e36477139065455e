"""Fill the live state of a rank from a snapshot: from a slot (shared memory), from disk, or from another job.

table → tensors made ready (`Preparing`) → bytes into the live tensors → the small values into their sources
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from msgspec.structs import replace

from ...checkpoint.arena.fill import destinations, fill
from ...checkpoint.backend import paths
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
from ..attach.attach import ends_the_rank
from ..state.modules.module_source import ATTRIBUTES
from ..state.optimizers.optimizers import Optimizers
from ..state.rng import Alone
from ..state.sources import Preparing, Source, Unfilled, put_back
from ..state.values.array_views import is_part
from .restore_resharded import parts_of, restore_elsewhere

_PAUSES_S = (0.5, 1.0, 2.0, 4.0)
"""Seconds between two attempts to read from failing storage. After the last, the worker group restarts, as often as the budget allows."""


class Unrestorable(SnapshotError):
    """This rank can't restore the state that the agent chose. The agent then rejects this state and chooses another."""

    def __init__(self, step: int, snapshot: str, why: str) -> None:
        """snapshot: the snapshot's name; empty for a snapshot in memory."""
        super().__init__(f"cannot restore step {step}: {why}")
        ends_the_rank(self, kind="snapshot", step=step, snapshot=snapshot)


class Unreadable(MachineError):
    """Storage does not return the state that the agent chose. The state may be intact, so it is kept."""

    def __init__(self, step: int, why: str) -> None:
        super().__init__(f"cannot read the snapshot of step {step}: {why}")
        ends_the_rank(self, kind="unreadable", step=step)


class Restorer:
    def __init__(self, sources: Mapping[str, Source], alone: Alone, rank: int, world: int) -> None:
        self._sources: dict[str, Source] = {**sources, RANDOMNESS: alone}
        self._randomness = alone.generators
        self._rank, self._world = rank, world
        self._kept_randomness: Any = None

    def from_store(
        self, root: Place, step: int, left: str = "", unusable: Collection[str] = (), course: tuple[int, ...] = ()
    ) -> None:
        """Restore this rank's state at `step`. left, course: as in `Tape.go_back`. unusable: as in `Handoff`. If the job then had another
        number of ranks, restore this rank's part of the global state. Retry failing storage for a while. Raises Unrestorable, Unreadable,
        LayoutError or FormatError."""

        def ask() -> None:
            snapshot = root / paths.SNAPSHOTS / left if left else _durable(root, step, unusable, course)
            parts: Sequence[int] | None = None
            try:
                if commit.read_commit(snapshot).world == self._world:
                    parts = [self._rank]
                    self._from_own(snapshot)
                else:
                    self._from_elsewhere(snapshot)
            except SnapshotError as error:
                # The network, the memory or the device of this rank may have changed the bytes. A snapshot that is sound is not set aside.
                problems = catalog.verify(snapshot, parts) if parts else [str(error)]
                if problems:
                    raise Unrestorable(step, snapshot.name, problems[0]) from error
                raise MachineError(f"{error}. Read again, the snapshot is sound") from error

        _patiently(step, ask)

    def start_from(self, snapshot: Place) -> int:
        """Restore a snapshot of another job, in any parallel layout. Return its step. Raises the same errors as `from_store`."""
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
        """Restore this rank's own part. parts: the present parts of live tensors. Raises LayoutError if the snapshot has a different part
        of a tensor."""
        with commit.reading(snapshot):
            manifest = open_rank(snapshot, self._rank, self._world)
            for piece in manifest.table.pieces:
                if piece.name in parts and _places(parts[piece.name]) != _places(piece.parts):
                    raise LayoutError(f"{piece.name} was another part of its global tensor when {snapshot} was taken")
            content = chunks(snapshot, manifest)
            self.fill(manifest.table, lambda into: fill(manifest.table, into, content, manifest.words()))

    def _from_elsewhere(self, snapshot: Place) -> None:
        with commit.reading(snapshot):
            restore_elsewhere(snapshot, self._sources, alone={RANDOMNESS}, optional={COURSE})

    def fill(self, table: Table, bring: Callable[[dict[str, torch.Tensor]], None]) -> None:
        """Let `bring` fill the live tensors in place, then give the other values to the sources (saved objects). Raises LayoutError, before
        any state changes, if something does not fit. Raises Unfilled if a source then still refuses its values."""
        described = table.described()
        if described.keys() != self._sources.keys():
            raise LayoutError(
                f"the snapshot holds {', '.join(described)}; this script gives its Session {', '.join(self._sources)}"
            )
        preparing = {name: source for name, source in self._sources.items() if isinstance(source, Preparing)}
        for name in sorted(preparing, key=lambda name: isinstance(preparing[name], Optimizers)):
            preparing[name].prepare(described[name])  # optimizers last, because they contain the parameters of models
        _, live = flatten({name: source.collect() for name, source in preparing.items()}, torch.is_tensor)
        # An attribute that is a part of a larger memory may be a row of the script's data: the module decides whether to fill it.
        leaves = destinations(table, {name: t for name, t in live if f"/{ATTRIBUTES}/" not in name or not is_part(t)})
        bring(leaves)
        kept = unflatten(table.skeleton, leaves)
        put_back(self._sources, kept)
        self._kept_randomness = kept[RANDOMNESS]

    def restore_randomness(self) -> None:
        """Restore generators again, right before the first step. Building data iterators after a restore draws from the CPU generator."""
        if self._kept_randomness is not None:
            self._randomness.restore(self._kept_randomness)
            self._kept_randomness = None


def _patiently(step: int, ask: Callable[[], None]) -> None:
    """Retry `ask` if storage or memory fails, then raise Unreadable. Only data that was read and is wrong counts as damaged."""
    for pause_s in (*_PAUSES_S, 0.0):
        try:
            ask()
            return
        except (MachineError, OSError, MemoryError) as error:
            if not pause_s:
                raise Unreadable(step, str(error) or "there is no memory for it") from error
            sleep(pause_s)


def _places(parts: Sequence[Part]) -> list[Part]:
    return [replace(part, replica=()) for part in parts]


def _durable(root: Place, step: int, unusable: Collection[str], course: tuple[int, ...]) -> Place:
    found = catalog.look(root)
    if hidden := [why for attempt, why in found.unread.items() if attempt.stamp.step == step]:
        raise MachineError(hidden[0])  # the other ranks may see it, and all must restore the same one
    for attempt in found.durable:
        if attempt.stamp.step == step and course in ((), attempt.stamp[:2]) and str(attempt) not in unusable:
            return attempt.under(root)
    named = f" of generation {course[0]}, rewind {course[1]}," if course else ""
    raise MachineError(f"no committed snapshot of step {step}{named} is under {root} any more")
