"""A rank's snapshots in memory (`Tape`): record the state of a step into a slot of shared memory, seal it, and restore it.

Recording: state → leaves → slot. Restoring: slot, or snapshot on disk → leaves → the same live state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from ...checkpoint.arena.arena import Slot, State
from ...checkpoint.arena.fill import fill
from ...checkpoint.arena.slot import table_of
from ...checkpoint.arena.slot_header import Header
from ...checkpoint.arena.staging import Stager
from ...checkpoint.backend import place
from ...checkpoint.format.pytree import unflatten
from ...checkpoint.format.tensor_table import Layout, Table
from ...resilience.clock import monotonic_s, sleep
from ...resilience.errors import MachineError, SnapshotError, StateError
from ...resilience.inprocess.tally import RANDOMNESS, Held, Judgement, Wanted
from ...resilience.text import formatting
from .. import device
from ..attach.attach import Attachment
from ..attach.rank_stderr import say
from ..state.optimizers.accumulated_gradients import Halfway
from ..state.optimizers.optimizers import Optimizers
from ..state.rng import Alone, Randomness, generator_devices
from ..state.sources import Modules, Source, collected, parameters_finite, shard_again, tensors_of
from ..state.values.value_source import Packed
from . import early_memory
from .attempt import Attempt
from .device_copy import Offload
from .device_staging import HandingOver
from .reachable import Reachable
from .restore import Restorer, Unrestorable
from .restore_resharded import parts_of, trained_of
from .snapshot_pace import Pace, uncollected

_SEVERAL = "the models are on {}: the loop waits while a snapshot is copied, and the agent can't see whether the devices make progress"
_RETRY_S = 0.05
"""Seconds between two checks for a free slot, if a snapshot may wait for one."""


class Tape:
    def __init__(self, attachment: Attachment, sources: Mapping[str, Source], pace: Pace) -> None:
        """pace: gets the measured costs of recording."""
        self._at, self._pace = attachment, pace
        handoff = attachment.handoff
        self._arena = early_memory.arena(attachment)
        self.reachable = Reachable(self._arena, handoff.snapshots, handoff.unusable)
        self._stager = Stager()
        models = {name: source for name, source in sources.items() if isinstance(source, Modules)}
        self.devices = device.devices(t for name, model in models.items() for t in tensors_of(name, model))
        """The devices that hold the models; empty: the CPU."""
        self.device = self.devices[0] if len(self.devices) == 1 else None
        """The device that is followed, and whose state is copied while the loop continues."""
        if len(self.devices) > 1 and attachment.rank == 0:
            say(_SEVERAL.format(formatting.listed(self.devices)))
        self._offload = Offload(self.device, self._arena) if self.device else None
        self.alone = Alone(Randomness(generator_devices(sources.values(), self.devices)))
        self._sources: dict[str, Source] = {**sources, RANDOMNESS: self.alone}
        self._handing_over = HandingOver(self._stager, self._sources)
        self.restorer = Restorer(sources, self.alone, attachment.rank, attachment.world)
        self._attempts: list[Attempt] = []
        """The two latest attempts."""
        self.unsettled = False
        """Whether some rank does not know the outcome of these attempts yet."""
        self._recorded = self._proved = False
        self._complaint = ""
        """The last reported reason why the state could not be saved."""
        self._layouts: dict[Slot, tuple[Layout, bytes]] = {}
        """The layout and table that this process itself put into each slot, and that need no further check."""
        self._objects: dict[Slot, dict[str, Any]] = {}
        """The objects that made up the models and optimizers when each slot was filled, by slot."""
        self.rewinds, self.owed = 0, Wanted.NOWHERE
        """`owed`: where to put a snapshot that is due and that no attempt in progress will provide."""

    # -- recording ---------------------------------------------------------------------------------------------------------

    @property
    def held(self) -> tuple[Held, Held]:
        """The progress of this rank's newest attempt, and of its previous attempt."""
        newest, earlier = [*(attempt.held for attempt in reversed(self._attempts)), Held.WHOLE, Held.WHOLE][:2]
        return newest, earlier

    @property
    def finite(self) -> bool:
        """Whether the latest snapshots have shown no NaN or Inf in the parameters."""
        return self._offload is None or all(attempt.job is None or attempt.job.finite for attempt in self._attempts)

    def settle(self, judgement: Judgement) -> None:
        """Apply the outcome on which all ranks agree: seal each of the latest attempts, or abandon it."""
        if not self.unsettled:
            return
        for attempt, held in zip(reversed(self._attempts), (judgement.newest, judgement.earlier), strict=False):
            if attempt.settled or held is Held.UNDER_WAY:
                continue
            attempt.settled = True
            if held in (Held.WHOLE, Held.IN_PLACE):
                if held is Held.IN_PLACE:
                    self._keep_the_last_one()
                self._arena.seal(attempt.step, live=held is Held.IN_PLACE)
                if attempt.job is not None:
                    self._pace.waited(attempt.job.delayed_s())
                continue
            if attempt.job is not None:
                attempt.job.give_up()
            if (slot := self._arena.holding(attempt.step)) and slot.header().state is State.STAGED:
                slot.free()
            # A state that can't be saved is not tried again at each step: the next snapshot that is due tries it.
            if held is not Held.UNSAVABLE:
                self.owed = max(self.owed, attempt.wanted)
        self.unsettled = not all(attempt.settled for attempt in self._attempts)

    def may_record(self) -> bool:
        """Whether the next attempt may begin: at most one is unsettled. All ranks get the same answer, because all know the same
        outcomes."""
        return len(self._attempts) < 2 or self._attempts[-2].settled

    def record(self, step: int, wanted: Wanted, *, finite: bool = True, patience_s: float = 0.0) -> bool:
        """Start a snapshot of the state after `step` steps, unless it exists. Return whether this rank's parameters on the CPU are finite.
        Copies from a device continue after the return (`finish` waits for them). A rank misses the snapshot if `finite` is False, if
        wrappers accumulate gradients internally, or if it gets no slot or memory within `patience_s` seconds. The rank's page (its block of
        shared memory) counts misses."""
        shard_again(self._sources)
        first, self._recorded, self._pace.last = not self._recorded, True, step
        attempt, durable = Attempt(step, wanted), wanted is Wanted.ON_DISK
        self._attempts, self.unsettled = [*self._attempts[-1:], attempt], True
        if durable and not 0 <= self._at.page.durable_step <= step:
            self._at.page.durable_step = step
        self.owed = Wanted.NOWHERE if wanted >= self.owed else self.owed
        before = next((each for each in self._attempts[:-1] if each.step == step), attempt)
        attempt.job = before.job if before.job and before.job.coming else None
        held = attempt.job.slot if attempt.job else self._arena.holding(step)
        if held is not None:  # the loop ends at the step that it has just recorded
            attempt.bound = before.bound
            if durable:
                held.want_durable()
            return finite
        began_s, attempt.missed = monotonic_s(), True
        while finite and attempt.missed:
            try:
                with uncollected():
                    state = {name: collected(name, source) for name, source in self._sources.items()}
                    # Parameters on the device to offload are checked during the copy, so that the loop need not wait.
                    here = [torch.device("cpu"), *(() if self._offload else self.devices)]
                    finite = parameters_finite(self._sources, state, here)
                    attempt.missed = not (finite and self._begin(attempt, state))
            except Halfway:
                self._at.page.skipped += 1
                return finite
            except SnapshotError as error:
                if first:  # before the first step nothing is lost yet, and the user can fix the script
                    raise StateError(str(error)) from None
                attempt.unsavable = True
                self._at.page.skipped += 1
                self._complain(
                    str(error),
                    "Training goes on without new snapshots. A fault now costs all steps since the last snapshot",
                )
                break
            if finite and attempt.missed and monotonic_s() - began_s > patience_s:
                self._at.page.skipped += 1
                return finite
            if finite and attempt.missed:
                sleep(_RETRY_S)
        if finite:
            self._pace.recorded(monotonic_s() - began_s)
        return finite

    def _complain(self, why: str, meaning: str) -> None:
        """Report once, with the reason, that the state can't be saved any more, or only for this process. Training continues."""
        self._at.page.unsaved = why
        if why != self._complaint:
            self._complaint = why
            say(f"{why}. {meaning}")

    def _keep_the_last_one(self) -> None:
        """Request that the newest sealed snapshot is written to disk, because no later snapshot can be restored after a restart."""
        sealed = [found.stamp for slot in self._arena.slots if (found := slot.header()).state is State.SEALED]
        if sealed:
            self.keep(max(sealed).step)

    def keep(self, step: int) -> None:
        """Request that the snapshot of `step` is written to disk, if it is in memory."""
        slot = self._arena.holding(step) if step >= 0 else None
        if slot is not None and not slot.header().durable:
            slot.want_durable()

    def _begin(self, attempt: Attempt, state: Mapping[str, Any]) -> bool:
        remade = {name: source for name, source in self._sources.items() if isinstance(source, Modules | Optimizers)}
        attempt.bound = next((source.bound for source in remade.values() if source.bound), "")
        where = Wanted.NOWHERE if attempt.bound else attempt.wanted
        layout, encoded, leaves = self._stager.plan(
            state, torch.is_tensor, lambda: parts_of(self._sources), lambda: trained_of(self._sources)
        )
        if not self._proved:
            self._prove(Table.of(layout, encoded), leaves)
        described = Header(
            generation=self._at.handoff.generation,
            rewinds=self.rewinds,
            step=attempt.step,
            rank=self._at.rank,
            world=self._at.world,
            durable=where is Wanted.ON_DISK,
            marked=self._at.handoff.copies and where is not Wanted.NOWHERE,
            pieces=len(layout.pieces),
            payload_bytes=layout.payload_bytes,
        )
        ready = None if self._offload is None else self._offload.room(described, len(encoded), self._pace.stride)
        try:
            claimed = self._arena.claim(described, encoded, among=ready, now_s=monotonic_s())
        except MachineError:
            self._at.page.starved += 1
            claimed = None
        if self._offload is not None and self._offload.memory.starved and claimed is None:
            self._at.page.starved += 1
            self._offload.memory.starved = False
        if claimed is None:
            return False
        slot, view = claimed
        self._layouts[slot] = layout, encoded
        self._objects[slot] = {name: source.objects() for name, source in remade.items()}
        if self._offload is None:
            self._stager.stage(leaves, layout, view)
            slot.staged()
        else:
            attempt.job = self._handing_over.begin(self._offload, slot, view, leaves, layout, state)
        self._at.page.snapshots += 1
        self._at.page.unsaved = self._at.page.unsaved if attempt.bound else ""
        if attempt.bound:
            self._complain(
                attempt.bound,
                "Snapshots from now on serve rewinds in place only. A restart of the ranks returns to a snapshot from before this change",
            )
        return True

    def _prove(self, table: Table, leaves: Sequence[Any]) -> None:
        """Check that the first snapshot gives back the same values. Tensors' bytes are not checked here, because fingerprints check them
        each time. Raises SnapshotError if a value differs."""
        named = {piece.name: leaf for piece, leaf in zip(table.pieces, leaves, strict=True)}
        kept = unflatten(table.skeleton, named, array=lambda leaf: leaf)
        for name, source in self._sources.items():
            if isinstance(source, Packed):
                source.prove(kept[name])
        self._proved = True

    def finish(self) -> None:
        """Wait until each attempt is complete or missed."""
        if self._offload is not None:
            self._offload.finish()

    def close(self) -> None:
        """Copy nothing any more: the loop has ended."""
        if self._offload is not None:
            self._offload.close()

    # -- going back --------------------------------------------------------------------------------------------------------

    def go_back(self, step: int, left: str = "", course: tuple[int, ...] = ()) -> None:
        """Fill the live state with the state of `step`, from memory or disk. left: name of the snapshot, if it is one that an earlier order
        set aside. course: generation and number of rewinds of the snapshot, so that all ranks restore the same one; empty: this rank's
        newest. Raises Unrestorable, Unreadable or LayoutError."""
        self.finish()
        shard_again(self._sources)
        # an ordered snapshot that is now abandoned is taken again
        self.owed = max([self.owed, *(each.wanted for each in self._attempts if each.step > step or not each.settled)])
        self._attempts, self.unsettled, self._pace.last = [], False, step
        slot = None if left else self._arena.holding(step, course)
        if slot is None or not self._from_slot(slot):
            handoff = self._at.handoff
            self.restorer.from_store(place.at(handoff.snapshots), step, left, handoff.unusable, course)
        self._arena.drop_after(step)
        self.reachable.went_back(step, (self._at.handoff.generation, self.rewinds), course)

    def _from_slot(self, slot: Slot) -> bool:
        """Restore from memory. Return False if the slot does not contain this rank's state. Free a damaged slot: the next generation then
        restores this step from other storage, or another step."""
        offload = self._offload
        with slot.reading() as view:
            if view is None or (view.header.rank, view.header.world) != (self._at.rank, self._at.world):
                return False
            try:
                known, encoded = self._layouts.get(slot, (None, b""))
                same = known is not None and encoded == view.table
                table = Table.of(known, encoded) if known is not None and same else table_of(view.header, view.table)
                for name, objects in self._objects[slot].items() if same else ():
                    cast(Modules | Optimizers, self._sources[name]).put_back(objects)
                if offload is None:
                    self.restorer.fill(table, lambda into: fill(table, into, view.chunks(), view.fingerprints))
                else:
                    self.restorer.fill(table, lambda into: offload.fill(slot, view, table, into))
            except SnapshotError as error:
                slot.free()
                raise Unrestorable(view.header.step, "", f"its copy in memory is damaged: {error}") from error
        return True
