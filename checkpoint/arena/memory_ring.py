"""Which older snapshots memory keeps beside the newest: one for each octave of ages, the last of which begins at a reach. Pure.

    periods   p, 2p, 4p … P, the longest no less than the reach; one fewer than there are places
    marks     of each period the last two multiples that the newest step has passed: of all periods together as many as there are places
    kept      for each mark the newest step that is held and not later than it

So what is kept is between q and 2q steps old for each period q (and as much older as snapshots are apart), and the newest multiple grows
into each next place. Marks lie at fixed steps, whatever is held: ranks that have lost different steps keep the same ones again as soon as
new marks are passed, with nothing to remember and no word to each other.
"""

from __future__ import annotations

from collections.abc import Collection

AT_WORK = 3
"""Slots that are no places of the ring: one sealed, one being staged, one being written to disk."""
REACH_STEPS = 100


def kept(held: Collection[int], slots: int, reach_steps: int) -> set[int]:
    """Of the steps `held` that can be gone back to, those that `slots` slots are to go on holding for their age, the newest aside.

    No more than there are slots beyond AT_WORK. Where nothing is as old as a mark, the oldest stands in for it: it will be.
    """
    if not held:
        return set()
    found = set()
    for mark in marks(max(held), slots - AT_WORK, reach_steps):
        found.add(max((step for step in held if step <= mark), default=min(held)))
    return found


def marks(newest: int, places: int, reach_steps: int) -> set[int]:
    """Multiples of the periods that `newest` has passed; one place keeps the last multiple of the reach alone."""
    if places < 2:
        return {newest // reach_steps * reach_steps} if places == 1 else set()
    octaves = range(places - 1)
    shortest = -(-reach_steps // 2 ** octaves[-1])
    periods = [shortest << octave for octave in octaves]
    return {(newest // period - back) * period for period in periods for back in (0, 1)}
