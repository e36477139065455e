"""This rank's part in one snapshot, from its start until all ranks know its outcome."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...checkpoint.arena.arena import Slot, View
from ...resilience.clock import monotonic_s
from ...resilience.inprocess.tally import Held, Wanted
from .strided_copy import Strip

Copy = tuple[torch.Tensor, Sequence[Strip]]
"""A tensor on the device, and the positions of its bytes in the slot's image (the slot's copy of the state)."""


@dataclass
class Job:
    """One snapshot that is being copied from the device to its slot."""

    slot: Slot
    view: View
    early: list[tuple[int, Copy]]
    """Copies of tensors that the forward pass writes, each with the index of its piece."""
    late: list[tuple[int, Copy]]
    """Copies of tensors that only the optimizer writes."""
    proven: list[tuple[int, Copy]]
    """Those of them for whose fingerprints the loop's stream waits. So they are the fingerprints of the boundary, even if the script writes
    the tensors immediately afterwards."""
    checked: list[torch.Tensor]
    """Tensors that must not contain NaN or Inf: trained parameters."""
    still: list[int] = field(default_factory=list)
    """Indices of the parameters that no optimizer steps."""
    expected: dict[int, int] = field(default_factory=dict)
    """Fingerprints by index, of those of them that have not changed so far and are copied late."""
    found: dict[int, int] = field(default_factory=dict)
    """Fingerprints of `still`, once all copies have arrived."""
    overtaken: set[int] = field(default_factory=set)
    """Indices of the late copies that the script wrote while they were copied, such as in the replay of a graph."""
    begun_s: float = field(default_factory=monotonic_s)
    waits: list[tuple[Any, Any]] = field(default_factory=list)
    """Two events of the loop's stream for each wait for the copies: one before it and one after it. The loop's thread waits until the
    copies are in the device's queues. After that, the loop's stream waits for the copies."""
    stops: list[tuple[Any, Any]] = field(default_factory=list)
    """Two such events of the wait at the boundary: for early copies and for fingerprints."""
    held: Held = Held.UNDER_WAY
    given_up: bool = False
    finite: bool = True
    issued: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    begun: Any = None
    """The event of the loop's stream after which the state is complete."""
    read: Any = None
    """The event of the copying stream after which nothing reads the state any more."""
    took_s: float = 0.0
    """Seconds from the boundary (the moment between two steps) until all copies have arrived."""
    nbytes: int = 0
    """Bytes of the late copies."""
    words: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    """The tensors that the copies read, referenced until the copies have arrived. For a tensor with gaps, it is a separate copy."""
    _turn: threading.Lock = field(default_factory=threading.Lock)

    @property
    def moved(self) -> set[int]:
        """Return the indices of the tensors that were copied late although the script writes them outside its optimizers' steps."""
        changed = {index for index, word in self.expected.items() if self.found.get(index, word) != word}
        return changed | self.overtaken

    @property
    def coming(self) -> bool:
        """Whether the slot holds the snapshot, or will once all copies have arrived."""
        return self.held is not Held.MISSED and not self.given_up

    def waited_s(self) -> float:
        """Return for how many seconds the device idled before optimizers' steps because of the copies. Waits that the loop's stream has not
        completed yet do not count."""
        return _between_s(self.waits)

    def delayed_s(self) -> float:
        """Return `waited_s`, and the seconds for which the device idled at the boundary."""
        return _between_s([*self.waits, *self.stops])

    def give_up(self) -> None:
        """Abandon the snapshot because one rank has missed it. From now on the slot can't become staged. The slot's state tells whether it
        already is."""
        with self._turn:
            self.given_up = True

    def conclude(self) -> None:
        """Once all copies have arrived, mark the slot as staged, or free it."""
        with self._turn:  # if `give_up` ran between check and staging, the slot would stay staged forever
            if self.finite and not self.given_up and not self.moved:
                self.slot.staged()
                self.held = Held.WHOLE
            else:
                self.slot.free()
                self.held = Held.MISSED


def _between_s(events: Iterable[tuple[Any, Any]]) -> float:
    return sum(before.elapsed_time(after) for before, after in events if after.query()) / 1000


@dataclass
class Attempt:
    """This rank's part of one snapshot, which all ranks have started at the same step."""

    step: int
    wanted: Wanted
    job: Job | None = None
    missed: bool = False
    unsavable: bool = False
    bound: str = ""
    """The reason why only this process can restore the snapshot; empty if a new process can restore it too."""
    settled: bool = False
    """Whether all ranks know the snapshot's outcome."""

    @property
    def held(self) -> Held:
        if self.missed:
            return Held.UNSAVABLE if self.unsavable else Held.MISSED
        held = Held.WHOLE if self.job is None else self.job.held
        return Held.IN_PLACE if held is Held.WHOLE and self.bound else held
