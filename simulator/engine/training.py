"""The training of the simulated cluster: how far it has come, how fast it is, and which of its states memory, buddies and disk hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .accounting import Books
from .progress import Rhythm, Track

KEPT_ON_DISK = 3
"""Number of snapshots that are kept on disk (`snapshots.keep`)."""


@dataclass
class Shelf:
    """Snapshots on disk: pairs of the time from which a snapshot exists and its step, oldest first."""

    next_s: float
    kept: list[tuple[float, int]] = field(default_factory=list)

    def went_on(self, track: Track, pace: Rhythm, now_s: float) -> None:
        """Add the snapshots that have become due on this track until now."""
        self.next_s = max(self.next_s, track.at_s)
        while self.next_s <= now_s:
            step = track.finished(self.next_s)
            if step > 0 and (not self.kept or step > self.kept[-1][1]):
                self.kept = [*self.kept, (self.next_s + pace.costs.write_s, step)][-2 * KEPT_ON_DISK :]
            self.next_s += pace.durable_s

    def steps(self, now_s: float) -> tuple[int, ...]:
        return tuple(step for there_s, step in self.kept if there_s <= now_s)[-KEPT_ON_DISK:]

    def without(self, onset: int) -> None:
        """Set aside the snapshots from `onset` on."""
        self.kept = [(there_s, step) for there_s, step in self.kept if step < onset]


class Training:
    def __init__(self, rhythm: Rhythm, books: Books, now_s: float) -> None:
        self.track: Track | None = None
        """None: no step is being computed."""
        self.shelf = Shelf(next_s=now_s + rhythm.durable_s)
        self._rhythm, self._books = rhythm, books
        self._memory: tuple[int, ...] = ()
        self._copied = -1
        self._seen_s = now_s

    def begin(self, now_s: float, resume: int, rhythm: Rhythm) -> None:
        """Let the ranks compute their first step after `resume` (-1: from the start of the script)."""
        done = max(0, resume)
        if resume not in self._memory:
            self._memory, self._copied = (
                (),
                -1,
            )  # the state came from disk, and the snapshots in memory can no longer be used
        else:
            self._memory = tuple(step for step in self._memory if step <= resume)
        self._go(now_s, rhythm, Track(at_s=now_s, done=done, period_s=rhythm.period_s, begun=done))

    def go_back(self, now_s: float, to: int) -> None:
        """Rewind halted ranks in place: the ranks continue from step `to` immediately."""
        self._memory = (*(step for step in self._memory if step < to), to)
        self._copied = min(self._copied, to)
        period_s = self._rhythm.period_s
        self._go(now_s, self._rhythm, Track(at_s=now_s, done=to, period_s=period_s, begun=to))

    def go_on(self, now_s: float, done: int) -> None:
        """Let ranks that have only waited continue."""
        self._go(now_s, self._rhythm, Track(at_s=now_s, done=done, period_s=self._rhythm.period_s, begun=done))

    def save(self, now_s: float, step: int) -> None:
        """Write the state of `step`, at which the ranks wait, to disk."""
        self.shelf.kept.append((now_s + self._rhythm.costs.write_s, step))

    def pace(self, now_s: float, slow: float) -> None:
        """Let a step take `slow` times as long as usual from now on."""
        self._rhythm = replace(self._rhythm, slow=slow)
        if self.track:
            self.account(now_s)
            self._copied = self.copied(now_s)
            self.track = self.track.paced(now_s, self._rhythm.period_s)

    def halt(self, now_s: float) -> float:
        """Stop all ranks. Returns the steps done, including the fraction of a step that is lost."""
        assert self.track
        self.account(now_s)
        self._memory, self._copied, done = self.memory(now_s), self.copied(now_s), self.track.at(now_s)
        self.track = None
        return done

    def account(self, now_s: float) -> None:
        """Add the steps since the last call to the books (the accounts of time), and their snapshots to the shelf."""
        if self.track and now_s > self._seen_s:
            pace, track = self._rhythm, self.track
            shared_s = pace.costs.step_s * (pace.fewer - 1)
            self._books.trained(now_s, track.at(self._seen_s), track.at(now_s), pace.added_s, shared_s)
            self.shelf.went_on(self.track, self._rhythm, now_s)
            self._seen_s = now_s

    def memory(self, now_s: float) -> tuple[int, ...]:
        """Return the steps that every node except newcomers can restore from memory."""
        if self.track is None:
            return self._memory
        newest, every = self._rhythm.sealed(self.track, now_s), self._rhythm.every_steps
        sealed = [step for step in (newest - every, newest) if step > self.track.begun]
        if not sealed:
            return self._memory
        return tuple(sorted({*sealed, *(step for step in [self.copied(now_s)] if step >= 0)}))

    def copied(self, now_s: float) -> int:
        """Return the newest step that buddies hold for each other; -1: none."""
        if self.track is None:
            return self._copied
        newest = self._rhythm.copied(self.track, now_s)
        return newest if newest > self.track.begun else self._copied

    def durable(self, now_s: float) -> tuple[int, ...]:
        self.account(now_s)
        return self.shelf.steps(now_s)

    def forget(self) -> None:
        """Drop what memory holds: the agents have ended, or the number of nodes has changed."""
        self._memory, self._copied = (), -1

    def next_sealed(self, step: int) -> float:
        """Return the step at whose end the first snapshot of `step` or a later step is sealed."""
        every = self._rhythm.every_steps
        return -(-step // every) * every + self._rhythm.costs.seal_steps

    def all_sealed(self, now_s: float) -> bool:
        """Whether the memory of all nodes, newcomers included, holds a state that these ranks have computed since they began or rewound."""
        return self.track is not None and max(self.memory(now_s), default=-1) > self.track.begun

    def held(self, now_s: float) -> Sequence[int]:
        """Return the steps to which ranks can rewind in place, in ascending order."""
        return sorted({*self.memory(now_s), *self.durable(now_s)})

    def _go(self, now_s: float, rhythm: Rhythm, track: Track) -> None:
        self._rhythm, self.track, self._seen_s = rhythm, track, now_s
