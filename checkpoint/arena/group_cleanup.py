"""After a worker group ends, makes its ranks' slots agree on the snapshots that remain, before the next group starts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from .arena import Slot
from .slot_header import State, complete


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
