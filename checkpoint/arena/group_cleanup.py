"""What a worker group has left in the arena when it ended, made the same for all of its ranks before the next one starts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from .arena import Slot
from .slot_header import State, complete


def settle(slots_by_rank: Sequence[Sequence[Slot]], step: int, *, torn: bool = False) -> None:
    """Keep what the next worker group can go back to, up to `step`, sealed in every rank; free all else. No rank may be alive. torn:
    another node has lost its part of what is older than `step`: what of it is not on disk yet never will be, and whoever commits it need
    not wait.

    A rank that dies after a peer has sealed and before it has sealed itself leaves its copy staged, though all had staged it. Left so, the
    ranks no longer agree on the newest sealed step. And what is staged may be sealed yet, so it is not overwritten: beside the newest
    sealed slot and one that waits for the disk, a rank with three slots has none left for good.
    """
    headers = [[slot.header() for slot in slots] for slots in slots_by_rank]
    kept = {stamp for stamp in complete(headers, len(headers)) if stamp.step <= step}
    for slot, header in zip(chain(*slots_by_rank), chain(*headers), strict=True):
        unfinished = header.durable and not header.drained and header.step < step
        if not header.whole or header.stamp not in kept or (torn and unfinished):
            slot.free()
        elif header.state is State.STAGED:
            slot.seal()
