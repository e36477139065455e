"""Chooses which older snapshots memory keeps in addition to the newest one: one for each octave of ages (each from an age to twice that
age). The last octave begins at the reach (an age in steps that memory must cover). Pure.

    periods   p, 2p, 4p … P; the longest, P, is at least the reach; there is one period fewer than places (slots for old snapshots)
    marks     the last two multiples of each period that the newest step has passed: as many marks as places
    kept      for each mark, the newest available step that is not later than the mark

So for each period q, one kept snapshot is at least q steps old, and at most 2q steps plus the interval between snapshots. As a snapshot
ages, it serves the mark of each longer period in turn. Marks are at fixed steps, whichever snapshots exist. So ranks that have lost
different snapshots keep snapshots of the same steps again once the training has passed new marks. For this agreement, the ranks need
neither stored state nor communication.
"""

from __future__ import annotations

from collections.abc import Collection

AT_WORK = 3
"""The number of slots that are not part of the ring: one sealed, one being staged, one being written to disk."""
REACH_STEPS = 100


def kept(held: Collection[int], slots: int, reach_steps: int) -> set[int]:
    """Return the steps in `held` that `slots` slots keep for their age, besides the newest step. held: the steps that ranks can go back to.

    The result has at most `slots` - AT_WORK steps. If no step is as old as a mark, the oldest step is kept for that mark, because it will
    reach that age later.
    """
    if not held:
        return set()
    found = set()
    for mark in marks(max(held), slots - AT_WORK, reach_steps):
        found.add(max((step for step in held if step <= mark), default=min(held)))
    return found


def marks(newest: int, places: int, reach_steps: int) -> set[int]:
    """Return the last two multiples of each period that `newest` has passed. With only one place, return the last multiple of the reach."""
    if places < 2:
        return {newest // reach_steps * reach_steps} if places == 1 else set()
    octaves = range(places - 1)
    shortest = -(-reach_steps // 2 ** octaves[-1])
    periods = [shortest << octave for octave in octaves]
    return {(newest // period - back) * period for period in periods for back in (0, 1)}
