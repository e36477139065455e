"""The shared memory that holds snapshots. State flows rank → slot → drain process, and back into a rank.

The agent owns this memory (one memfd per slot). So a snapshot survives the rank that staged it, but no snapshot survives the agent.
`slot.py` implements one slot (the memory for one rank's part of one snapshot); this module chooses among a rank's slots.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain

from ...resilience.errors import MachineError
from ...resilience.ipc.shared_memory import memory
from .memory_ring import REACH_STEPS
from .slot import Slot, View
from .slot_header import Header, State, complete, overwrite_order

__all__ = ["Header", "RankArena", "Slot", "State", "View", "complete", "create", "paths"]

HUNG_S = 30.0
"""If a rank finds no slot to overwrite for this many seconds, it assumes that a reader of its slots hangs."""


def create(ranks: int, slots: int) -> list[list[int]]:
    """Return file descriptors of `slots` empty slots for each of `ranks` local ranks. The caller must keep them open."""
    return [[memory(f"mt-resilient-{rank}-{slot}") for slot in range(slots)] for rank in range(ranks)]


def paths(fds: Sequence[Sequence[int]], agent_pid: int) -> list[list[str]]:
    """Return the paths at which other processes of the same user open the slots, nested as `fds` is."""
    return [[f"/proc/{agent_pid}/fd/{fd}" for fd in row] for row in fds]


class RankArena:
    """The slots of one local rank, as the rank itself sees them."""

    def __init__(self, paths: Sequence[str], turn: str = "", reach_steps: int = REACH_STEPS) -> None:
        """turn: the lock file of `Slot`. reach_steps: age, in steps, of the oldest snapshot to keep if there are more than the least number
        of slots (`memory_ring.kept`)."""
        self.slots = [Slot(path, turn) for path in paths]
        self._reach_steps = reach_steps
        self._none_since_s: float | None = None

    def claim(
        self, wanted: Header, table: bytes, among: Collection[Slot] | None = None, *, now_s: float = 0.0
    ) -> tuple[Slot, View] | None:
        """Return a slot of `among` (None: any slot), prepared for the snapshot that `wanted` describes. Return None if readers lock every
        slot that may be overwritten. now_s: monotonic seconds; without it, no reader is ever assumed to hang.

        Raises MachineError if there is not enough memory for any of these slots. The next snapshot may try again.
        """
        scarce: MachineError | None = None
        hung = self._none_since_s is not None and now_s - self._none_since_s > HUNG_S
        for index in overwrite_order([slot.header() for slot in self.slots], self._reach_steps, hung=hung):
            slot = self.slots[index]
            try:
                view = slot.begin(wanted, table) if among is None or slot in among else None
            except MachineError as error:
                scarce, view = error, None  # another slot may be large enough already
            if view is not None:
                self._none_since_s = None
                return slot, view
        if scarce:
            raise scarce
        if self._none_since_s is None:
            self._none_since_s = now_s
        return None

    def holding(self, step: int, course: tuple[int, ...] = ()) -> Slot | None:
        """Return the slot that contains all of this rank's part of `step`. If two slots do, return the one of the newest lineage. course:
        generation and number of rewinds that the snapshot must have; empty: any."""
        held = [(slot.header(), slot) for slot in self.slots]
        fitting = [(header.stamp, slot) for header, slot in held if header.held and header.step == step]
        fitting = [(stamp, slot) for stamp, slot in fitting if course in ((), stamp[:2])]
        return max(fitting, key=lambda item: item[0])[1] if fitting else None

    def seal(self, step: int, *, live: bool = False) -> bool:
        """Seal `step`. live: only ranks that are alive now can go back to the step. Return False if no slot contains the step (any
        more)."""
        slot = self.holding(step)
        if slot is not None:
            slot.seal(live=live or slot.header().state is State.LIVE)
        return slot is not None

    def drop_after(self, step: int) -> None:
        """Free all slots with a step later than `step`. The job went back to `step` and will compute different steps from there."""
        for slot in self.slots:
            if slot.header().step > step:
                slot.free()

    def close(self) -> None:
        for slot in self.slots:
            slot.close()


def settle(
    slots_by_rank: Sequence[Sequence[Slot]], step: int, course: tuple[int, ...] = (), *, torn: bool = False
) -> None:
    """Keep the snapshots up to `step` that the next worker group can go back to, and seal them in every rank's slots. Free every other
    slot. No rank may be alive. course: generation and number of rewinds of the snapshot from which that group starts; it cannot go back to
    snapshots of later lineages. Empty: any lineage. torn: another node has lost its part of the snapshots older than `step`. If such a
    snapshot is not on disk yet, it can never be completed there, so the committing node need not wait for it.

    A rank may die after a peer has sealed a step, and before it seals that step itself. The dead rank's own copy then remains staged,
    though all ranks had staged the step. Without this function, the ranks would then disagree on the newest sealed step. Moreover, a rank
    with three slots would never find a free slot again. A rank never overwrites a staged copy (it may still be sealed), the newest sealed
    slot, or the slot that waits for the disk.
    """
    headers = [[slot.header() for slot in slots] for slots in slots_by_rank]
    whole = complete(headers, len(headers))
    kept = {stamp for stamp in whole if stamp.step <= step and (not course or stamp <= (*course, step))}
    for slot, header in zip(chain(*slots_by_rank), chain(*headers), strict=True):
        unfinished = header.durable and not header.drained and header.step < step
        if not header.whole or header.stamp not in kept or (torn and unfinished):
            slot.free()
        elif header.state is State.STAGED:
            slot.seal()
