"""The tape of this rank: record the state of a step into the arena, seal it, go back to it.

State → leaves → slot; and slot, or the durable snapshot, → leaves → the same live state.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import catalog
from ..checkpoint.arena import RankArena, State
from ..checkpoint.restore import open_rank
from ..checkpoint.staging import Stager, plan, unstage
from ..checkpoint.tensors import Table
from ..checkpoint.tree import flatten, unflatten
from ..resilience.clock import sleep
from ..resilience.errors import LayoutError, MachineError, SnapshotError
from . import device
from .attach import Attachment
from .state import Modules, Randomness, Source

RANDOMNESS = "randomness"
_PAUSES_S = (0.5, 1.0, 2.0, 4.0)
"""Between tries to read a snapshot from storage that fails; then the gang starts again, as often as the budget allows."""


class Unrestorable(SnapshotError):
    """The state that the agent chose cannot be restored by this rank: the agent rejects it and chooses another one."""

    def __init__(self, step: int, path: str, why: str) -> None:
        super().__init__(f"cannot restore step {step}: {why}")
        self.farewell = {"kind": "snapshot", "step": step, "path": path}


class Unreadable(MachineError):
    """Storage does not give the state that the agent chose; it may be as sound as ever, and is kept."""

    def __init__(self, step: int, why: str) -> None:
        super().__init__(f"cannot read the snapshot of step {step}: {why}")
        self.farewell = {"kind": "unreadable", "step": step}


class Tape:
    def __init__(self, attachment: Attachment, sources: Mapping[str, Source]) -> None:
        self._at = attachment
        self._arena = RankArena(attachment.handoff.arena[attachment.local_rank], turn=attachment.handoff.arena[0][0])
        self._stager = Stager()
        kinds = {t.device.type for s in sources.values() if isinstance(s, Modules) for t in s.tensors().values()}
        self._randomness = Randomness(kinds)
        self._sources: dict[str, Source] = {**sources, RANDOMNESS: self._randomness}
        self._kept_randomness: Any = None
        self.rewinds = 0

    def record(self, step: int, durable: bool) -> bool:
        """Stage the state after `step` steps, if it is not there; complete on return. False, counted on the page, when no slot or no
        memory is free."""
        held = self._arena.holding(step)
        if held is not None:  # the loop leaves at the very step that it has just recorded
            if durable:
                held.want_durable()
            return True
        state = {name: source.collect() for name, source in self._sources.items()}
        skeleton, leaves = flatten(state, torch.is_tensor)
        table = plan(skeleton, leaves)
        try:
            claimed = self._arena.claim(
                generation=self._at.handoff.generation,
                rewinds=self.rewinds,
                step=step,
                rank=self._at.rank,
                world=self._at.world,
                durable=durable,
                table=table.to_json(),
                payload_bytes=table.payload_bytes,
            )
        except MachineError:
            self._at.page.starved += 1
            claimed = None
        if claimed is None:
            self._at.page.skipped += 1
            return False
        slot, payload = claimed
        device.synchronize(tensor for _, tensor in leaves if torch.is_tensor(tensor))
        self._stager.stage(leaves, table, payload)
        slot.staged()
        self._at.page.snapshots += 1
        return True

    def seal(self, step: int) -> None:
        """All ranks hold `step`, and its figures are finite."""
        self._arena.seal(step)

    def newest_sealed(self) -> int | None:
        """The same on all ranks: a seal is given by all, and the newest sealed slot is never overwritten."""
        sealed = [h.step for h in (slot.header() for slot in self._arena.slots) if h.state is State.SEALED]
        return max(sealed, default=None)

    def go_back(self, step: int) -> None:
        """Fill the live state with that of `step`, from the arena or else from disk. Raises Unrestorable, Unreadable or LayoutError."""
        slot = self._arena.holding(step)
        if slot is not None:
            with slot.reading() as view:
                if view is not None and view.header.rank == self._at.rank and view.header.world == self._at.world:
                    self._restore(Table.from_json(view.table), view.payload)
                    self._arena.drop_after(step)
                    return
        for pause_s in (*_PAUSES_S, 0.0):
            try:
                self._restore_durable(step)
                break
            except (MachineError, OSError) as error:
                if not pause_s:
                    raise Unreadable(step, str(error)) from error
                sleep(pause_s)
        self._arena.drop_after(step)

    def _restore_durable(self, step: int) -> None:
        """From disk. Raises Unrestorable, LayoutError, and what storage raises."""
        snapshot = _durable(Path(self._at.handoff.snapshots), step)
        try:
            self._restore(*open_rank(snapshot, self._at.rank, self._at.world))
        except SnapshotError as error:
            raise Unrestorable(step, str(snapshot), str(error)) from error

    def _restore(self, table: Table, payload: memoryview) -> None:
        kept = unflatten(table.skeleton, unstage(table, payload))
        if kept.keys() != self._sources.keys():
            raise LayoutError(f"the snapshot holds {', '.join(kept)}; this script registers {', '.join(self._sources)}")
        for name, source in self._sources.items():
            source.restore(kept[name])
        self._kept_randomness = _copied(kept[RANDOMNESS])

    def restore_randomness(self) -> None:
        """Once more, right before the first step: building data iterators after a restore draws from the CPU generator."""
        if self._kept_randomness is not None:
            self._randomness.restore(self._kept_randomness)
            self._kept_randomness = None


def _durable(root: Path, step: int) -> Path:
    for attempt in catalog.durable(root):
        if attempt.stamp.step == step:
            return attempt.under(root)
    raise MachineError(f"no committed snapshot of step {step} is under {root} any more")


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()}
    return value.clone() if torch.is_tensor(value) else value
