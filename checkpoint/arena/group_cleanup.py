"""Makes what a worker group left in the arena when it ended the same for all of its ranks, before the next group starts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from .arena import Slot
from .slot_header import State, complete


def settle(slots_by_rank: Sequence[Sequence[Slot]], step: int, *, torn: bool = False) -> None:
    """Keep the snapshots up to `step` that the next worker group can go back to, sealed in every rank; free all else. No rank may be alive.
    torn: another node has lost its part of the snapshots older than `step`. Those not on disk yet never will be, and the node that commits
    need not wait for them.

    A rank may die after a peer has sealed a step and before it has sealed the step itself. Then its copy stays staged, though all ranks had
    staged it. Left so, the ranks would disagree on the newest sealed step. A staged copy is not overwritten either, because it may be
    sealed yet. With the newest sealed slot and one that waits for the disk, a rank with three slots would have none left for good.
    """
    headers = [[slot.header() for slot in slots] for slots in slots_by_rank]
    kept = {stamp for stamp in complete(headers, len(headers)) if stamp.step <= step}
    for slot, header in zip(chain(*slots_by_rank), chain(*headers), strict=True):
        unfinished = header.durable and not header.drained and header.step < step
        if not header.whole or header.stamp not in kept or (torn and unfinished):
            slot.free()
        elif header.state is State.STAGED:
            slot.seal()
