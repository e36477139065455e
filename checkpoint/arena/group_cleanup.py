"""After a worker group ends, makes its ranks' slots agree on the snapshots that remain, before the next group starts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from .arena import Slot
from .slot_header import State, complete


def settle(slots_by_rank: Sequence[Sequence[Slot]], step: int, *, torn: bool = False) -> None:
    """Keep the snapshots up to `step` that the next worker group can go back to, and seal them in every rank's slots. Free every other
    slot. No rank may be alive. torn: another node has lost its part of the snapshots older than `step`. Those that are not on disk yet can
    never be completed there, so the committing node need not wait for them.

    A rank may die after a peer has sealed a step, and before it seals that step itself. Then its own copy remains staged, though all ranks
    had staged the step. Without this function, the ranks would then disagree on the newest sealed step. Moreover, a staged copy is never
    overwritten, because it may still be sealed. Nor are the newest sealed slot and the slot that waits for the disk. So a rank with three
    slots would never find a free slot again.
    """
    headers = [[slot.header() for slot in slots] for slots in slots_by_rank]
    kept = {stamp for stamp in complete(headers, len(headers)) if stamp.step <= step}
    for slot, header in zip(chain(*slots_by_rank), chain(*headers), strict=True):
        unfinished = header.durable and not header.drained and header.step < step
        if not header.whole or header.stamp not in kept or (torn and unfinished):
            slot.free()
        elif header.state is State.STAGED:
            slot.seal()
