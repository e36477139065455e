"""Ranks and a drain process share slots, and their steps interleave in any order. Whatever happened, the next snapshot finds a slot on
every rank, and what must go to disk goes there. Real slots and processes are in `test_snapshots.py`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from mt_resilient.checkpoint.arena.slot_header import Header, Stamp, State, complete, due, overwrite_order

RANKS = 2


class Played:
    """The slots' headers and locks. Each generator is one process; a `yield` is a point at which the others may run, or it may be
    killed."""

    def __init__(self, slots: int, chance: random.Random) -> None:
        self.chance = chance
        self.rows = [[Header() for _ in range(slots)] for _ in range(RANKS)]
        self.locked: set[tuple[int, int]] = set()
        self.claimed: dict[int, int | None] = {}
        self.generation, self.step, self.hung = 1, 0, False

    def set(self, rank: int, index: int, **fields: object) -> None:
        self.rows[rank][index] = replace(self.rows[rank][index], **fields)

    def rank(self, rank: int, wanted: Header) -> Iterator[None]:
        self.claimed[rank] = None
        for index in overwrite_order(self.rows[rank], hung=self.hung):
            if (rank, index) not in self.locked:
                self.rows[rank][index], self.claimed[rank] = replace(wanted, state=State.STAGING), index
                yield
                self.set(rank, index, state=State.STAGED)
                break
        yield

    def agree(self, rank: int, whole: bool) -> Iterator[None]:
        index = self.claimed[rank]
        if index is not None:
            self.set(rank, index, state=State.SEALED if whole else State.FREE)
        yield

    def drain(self) -> Iterator[None]:
        while True:
            stamp = due(self.rows, RANKS)
            yield
            held = [] if stamp is None else [self._lock(rank, stamp) for rank in range(RANKS)]
            yield
            if stamp is not None and None not in held:
                yield from iter([None] * self.chance.randrange(3))
                self.locked.clear()
                for rank, row in enumerate(self.rows):
                    for index, header in enumerate(row):
                        if header.stamp == stamp and header.whole:
                            self.locked.add((rank, index))
                            yield
                            self.set(rank, index, drained=True)
                            self.locked.clear()
                            yield
            self.locked.clear()

    def _lock(self, rank: int, stamp: Stamp) -> int | None:
        for index, header in enumerate(self.rows[rank]):
            if header.stamp == stamp and header.whole:
                self.locked.add((rank, index))
                return index
        return None

    def together(self, *processes: Iterator[None], drain: Iterator[None] | None, moves: int | None = None) -> None:
        """Run the processes to their ends, or for some moves, beside the drain process, which has no end."""
        running = [*processes]
        while running and moves != 0:
            moves = None if moves is None else moves - 1
            each = self.chance.choice([*running, drain] if drain else running)
            if next(each, self) is self:
                running.remove(each)

    def snapshot(self, drain: Iterator[None] | None, killed: bool = False) -> bool:
        """Take one snapshot on all ranks. Return whether all have it. killed: the ranks are killed meanwhile, and continue from the newest
        snapshot that all of them have."""
        self.step += 1
        durable = self.chance.random() < 0.6
        wanted = Header(generation=self.generation, step=self.step, world=RANKS, payload_bytes=1, durable=durable)
        moves = self.chance.randrange(2 * RANKS) if killed else None
        self.together(*(self.rank(rank, wanted) for rank in range(RANKS)), drain=drain, moves=moves)
        whole = not killed and all(self.claimed[rank] is not None for rank in range(RANKS))
        if not killed:
            self.together(*(self.agree(rank, whole) for rank in range(RANKS)), drain=drain)
            return whole
        back = max(complete(self.rows, RANKS), default=Stamp(0, 0, 0))
        for rank, row in enumerate(self.rows):
            for index, header in enumerate(row):
                if header.step > back.step:
                    self.set(rank, index, state=State.FREE)
        self.generation, self.step = self.generation + 1, back.step
        return False


@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize("drain_dies", [False, True])
def test_the_next_snapshot_finds_slots_and_goes_to_disk(slots: int, drain_dies: bool) -> None:
    """If the drain process dies between the marks of two ranks' slots, two slots may take `HUNG_S` to come free."""
    for seed in range(150):
        played = Played(slots, random.Random(seed))
        drain = played.drain()
        for _ in range(25):
            played.snapshot(drain, killed=played.chance.random() < 0.1)
            if drain_dies and played.chance.random() < 0.1:
                drain = played.drain()
                played.locked.clear()
        for _ in range(3):
            for _ in range(60):
                next(drain)
            assert due(played.rows, RANKS) is None
            assert not played.locked
            played.hung = drain_dies
            assert played.snapshot(None), f"seed {seed}: {played.rows}"
