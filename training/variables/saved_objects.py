"""The objects that the Session saves. The search for state that no snapshot contains leaves them out."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any

from ...checkpoint.format.pytree_walk import PLAIN
from ..data.batches import Batches
from .script_objects import reached

_OF_DATA, _LONGEST = 30_000, 2048
"""The most objects of the loop's data that are recognized, and the most parts of a container that is searched for them. A dataset's list of
samples may have millions of parts."""
_NEAR = 30_000
"""The most objects of the Session among which a changed value of the loader is looked for, which takes 0.1 s."""


class Saved:
    def __init__(self, held: Collection[Any], most: int) -> None:
        """held: what the Session was given, and its `Batches`. most: the most objects of the former that are recognized."""
        data = [each for each in held if isinstance(each, Batches)]
        holders = [holder for each in data for holder in each.own.holders]
        places = {id(holder.thing) for holder in holders}
        of_the_data = [value for holder in holders for value in holder.saved()]
        libraries = {id(holder.thing): holder.thing for holder in holders if holder.whole and not holder.told}
        others = [each for each in held if not isinstance(each, Batches)]
        self.things = {**reached(of_the_data, _OF_DATA, _LONGEST, places), **libraries, **reached(others, most)}
        """The objects that snapshots contain in full, by id."""
        self.searched = {id(holder.thing) for holder in holders if holder.whole and holder.told} - self.things.keys()
        """Ids of the script's objects in the loop's data. The loop's data saves their attributes, but not all: a trainer's `collate`
        brings the trainer, and thus its models, which may be trained."""

    def has(self, owner: Any, part: Any) -> bool:
        """Whether snapshots contain an attribute of `owner` with the value `part`."""
        return id(owner) in self.things or (
            id(owner) in self.searched and (type(part) in PLAIN or id(part) in self.things)
        )


def is_within(known: int, given: Iterable[Any]) -> bool:
    """Whether the object with this id is one of the given objects, or in one of them."""
    with suppress(Exception):  # another thread may change one of these objects meanwhile
        return known in reached(given, _NEAR)
    return False
