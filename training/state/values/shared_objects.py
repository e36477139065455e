"""Objects that several sources (saved objects) of a Session contain: the first source saves such an object, and the others refer to it.

At each snapshot, all sources are packed in a fixed order, and they are restored in the same order. So each source can refer to the objects
that earlier sources have packed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, TypeAlias

from ...attach.rank_stderr import say

Theirs: TypeAlias = tuple[str, int]
"""The name of a source, and the number that an object has in that source."""
Before: TypeAlias = tuple[Mapping[str, Sequence[Any]], set[int], set[int]]
"""The objects that sources have restored, by source; the ids of all objects in use so far; and the addresses of their memory."""


class Together:
    def __init__(self) -> None:
        self._given: dict[str, Any] = {}
        """The objects that the script has given to the Session, by source, in the order of the passes."""
        self._packed: dict[str, Sequence[Any]] = {}
        """The objects of each source that was packed in this round. The last source's packing clears the table."""
        self._numbers: dict[int, Theirs] = {}
        """The source and number of each packed object, by the object's id."""
        self._made: dict[str, Sequence[Any]] = {}
        self._taken: set[int] = set()
        self._lain_in: set[int] = set()

    def add(self, source: str, thing: Any) -> None:
        self._given[source] = thing

    def others(self, source: str) -> dict[str, Any]:
        """Return the objects that the script has given under other names. Each is saved under its own name, and the source only refers to
        it. If an object has two names, the first one saves it."""
        found: dict[str, Any] = {}
        if source in self._given:
            met = {id(self._given[source])} - {id(each) for each in self._given_before(source).values()}
            for name, each in self._given.items():
                if id(each) not in met:
                    met.add(id(each))
                    found[name] = each
        return found

    def met_before(self, source: str) -> Mapping[int, Theirs]:
        """Return the objects that earlier sources have packed in this round, by id."""
        if source not in self._given:
            return {}
        earlier = self._before(source)
        if len(self._packed) > len(earlier) or not self._packed.keys() <= {*earlier}:
            self._packed = {name: self._packed[name] for name in earlier if name in self._packed}
            self._numbers = {}
            for name, met in self._packed.items():
                self._number(name, met)
        return self._numbers

    def packed(self, source: str, met: Sequence[Any]) -> None:
        """Record that the source was packed, and which objects it contained."""
        if source not in self._given:
            return
        if source == [*self._given][-1]:
            self.forget()
        else:
            self._packed[source] = met
            self._number(source, met)

    def forget(self) -> None:
        """Clear the record of the objects that were packed in this round."""
        self._packed, self._numbers = {}, {}

    def made_before(self, source: str) -> Before:
        """Return what earlier sources have restored in this round."""
        if source not in self._given:
            return {}, set(), set()
        earlier = self._before(source)
        if not self._made.keys() <= {*earlier} or not self._made:
            self._made = {name: self._made[name] for name in earlier if name in self._made}
            self._taken = {id(each) for made in self._made.values() for each in made}
            self._lain_in = set()
        return self._made, self._taken, self._lain_in

    def put_back(self, source: str, made: Sequence[Any]) -> None:
        """Record that the source was restored, and which objects it uses."""
        if source in [*self._given][:-1]:
            self._made[source] = made
        elif source in self._given:
            self._made, self._taken, self._lain_in = {}, set(), set()

    def _before(self, source: str) -> list[str]:
        return [*self._given_before(source)]

    def _given_before(self, source: str) -> dict[str, Any]:
        return dict(takewhile(lambda pair: pair[0] != source, self._given.items()))

    def _number(self, source: str, met: Sequence[Any]) -> None:
        for number, each in enumerate(met):
            self._numbers.setdefault(id(each), (source, number))


class Sharing:
    """Finds objects that the training has put into both a model's attribute and another source. The model and the source each save a copy
    of such an object, so a restart creates two objects. An object that both contained at the beginning is one object after a restart,
    too."""

    def __init__(self) -> None:
        self._now: dict[str, dict[int, str]] = {}
        """The names of each source's objects in this round, by the object's id."""
        self._began: dict[str, frozenset[int]] = {}
        """The ids of the objects that each source contained at first."""
        self._models: set[str] = set()
        self._said = False

    def note(self, source: str, held: Mapping[int, str], model: bool = False) -> None:
        """Record the objects that the source contains in this round, by id. The first time a model (`model`) and another source share an
        object that they did not share at first, the rank reports it."""
        if model:
            self._models.add(source)
        if source in self._now:  # a new round begins
            self._now.clear()
        began = self._began.setdefault(source, frozenset(held))
        for other, theirs in self._now.items():
            if self._models.isdisjoint((source, other)):
                continue
            for each in held.keys() & theirs.keys():
                if not (each in began and each in self._began[other]) and not self._said:
                    self._said = True
                    say(
                        f"{theirs[each]} and {held[each]} have become one object. After a restart they are two objects. Create the "
                        "object before the Session, and put it into both places there"
                    )
        self._now[source] = dict(held)
