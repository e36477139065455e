"""Which older snapshots memory keeps beside the newest: one for each octave of ages. The last octave begins at the reach. Pure.

    periods   p, 2p, 4p … P, the longest no less than the reach; one fewer than there are places
    marks     the last two multiples of each period that the newest step has passed: in all as many as there are places
    kept      for each mark, the newest step that is held and not later than the mark

So for each period q, a kept snapshot is between q and 2q steps old, plus the distance between snapshots. As the newest multiple ages, it
moves into each next place. Marks lie at fixed steps, whatever is held. So ranks that have lost different steps keep the same ones again as
soon as they pass new marks. They need not remember anything or communicate.
"""

from __future__ import annotations

from collections.abc import Collection

AT_WORK = 3
"""Slots that do not belong to the ring: one sealed, one being staged, one being written to disk."""
REACH_STEPS = 100


def kept(held: Collection[int], slots: int, reach_steps: int) -> set[int]:
    """Return those of the steps `held` that `slots` slots keep for their age, besides the newest. held: steps that ranks can go back to.

    They are no more than the slots beyond AT_WORK. If no step is as old as a mark, the oldest stands in for it: it will be that old one
    day.
    """
    if not held:
        return set()
    found = set()
    for mark in marks(max(held), slots - AT_WORK, reach_steps):
        found.add(max((step for step in held if step <= mark), default=min(held)))
    return found


def marks(newest: int, places: int, reach_steps: int) -> set[int]:
    """Return the multiples of the periods that `newest` has passed. If there is one place, return only the last multiple of the reach."""
    if places < 2:
        return {newest // reach_steps * reach_steps} if places == 1 else set()
    octaves = range(places - 1)
    shortest = -(-reach_steps // 2 ** octaves[-1])
    periods = [shortest << octave for octave in octaves]
    return {(newest // period - back) * period for period in periods for back in (0, 1)}
