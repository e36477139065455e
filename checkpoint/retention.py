"""Which snapshots and which remains of attempts may go. Pure: names in, names out."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .header import Stamp
from .layout import Attempt


def surplus(newest_first: Sequence[Attempt], keep: int) -> list[Attempt]:
    """The committed snapshots beyond the newest `keep`; never the last one, whatever `keep` says."""
    return list(newest_first[max(keep, 1) :])


def dead(uncommitted: Sequence[Attempt], current: Attempt, held: Collection[Stamp]) -> list[Attempt]:
    """The attempts that nobody will ever commit, once the node that commits is at `current` and its arena holds `held`.

    Those of other runs and of lineages that were given up; of this lineage, what is older and has left the arena. What
    is newer than `current` may be another node's that is ahead of this one.
    """

    def is_dead(attempt: Attempt) -> bool:
        if attempt.run != current.run or attempt.stamp[:2] < current.stamp[:2]:
            return True
        return attempt.stamp < current.stamp and attempt.stamp not in held

    return [attempt for attempt in uncommitted if is_dead(attempt)]
