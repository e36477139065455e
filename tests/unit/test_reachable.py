"""Which steps all ranks can go back to in place: never different states of one step."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from mt_resilient.checkpoint.arena.arena import State
from mt_resilient.checkpoint.arena.slot_header import Header, Stamp
from mt_resilient.checkpoint.backend import paths
from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.checkpoint.backend.paths import Attempt
from mt_resilient.training.snapshot.reachable import Common, Reachable

FIRST, AGAIN = (1, 0), (2, 0)
"""Generation and rewinds of a lineage, and of one that has computed some of its steps again."""


class Memory:
    """The slots of a rank, as values."""

    def __init__(self, *held: Stamp) -> None:
        self.slots = [
            type(
                "Slot",
                (),
                {"header": lambda self, s=s: Header(state=State.SEALED, generation=s[0], rewinds=s[1], step=s[2])},
            )()
            for s in held
        ]


def rank(where: Path, memory: tuple[Stamp, ...], disk: tuple[Stamp, ...] = ()) -> Reachable:
    for stamp in disk:
        (Files(where) / paths.SNAPSHOTS / str(Attempt(run="5f0c91aa", stamp=stamp))).write(paths.COMMIT, b"")
    held: Any = Memory(*memory)
    return Reachable(held, str(where), ())


def together(ranks: list[Reachable], ask: Callable[[Common], float]) -> tuple[set[float], list[Common]]:
    """What each rank answers if all ask at once."""
    said: list[tuple[float, ...]] = [()] * len(ranks)
    barrier = Barrier(len(ranks))

    def common(at: int) -> Common:
        def greatest(*values: float) -> tuple[float, ...]:
            said[at] = values
            barrier.wait(10)
            found = tuple(map(max, *said))
            barrier.wait(10)
            return found

        return Common(ranks[at], greatest)

    each = [common(at) for at in range(len(ranks))]
    with ThreadPoolExecutor(len(ranks)) as threads:
        return {*threads.map(ask, each)}, each


@pytest.mark.parametrize(
    ("memory", "disk", "newest", "oldest"),
    [
        ([{20: FIRST, 30: FIRST}, {30: FIRST}], [{}, {}], 30, 30),
        (
            [{30: FIRST, 40: AGAIN}, {30: FIRST}],
            [{}, {40: FIRST}],
            30,
            30,
        ),  # what it would read is not what the other has
        ([{40: AGAIN}, {}], [{30: FIRST}, {30: FIRST, 40: FIRST}], 30, 30),  # each looks into its memory first
        ([{}, {}], [{30: FIRST, 40: AGAIN}, {30: FIRST, 40: FIRST}], 30, 30),  # a listing is old
        ([{40: AGAIN}, {40: FIRST}], [{}, {}], -1, math.inf),
        ([{40: AGAIN}, {}], [{40: FIRST}, {40: AGAIN}], 40, 40),
        ([{}, {}], [{}, {}], -1, math.inf),
    ],
)
def test_all_ranks_go_back_to_one_state(
    tmp_path: Path, memory: list[dict], disk: list[dict], newest: float, oldest: float
) -> None:
    ranks = [
        rank(
            tmp_path / str(at),
            tuple(Stamp(*course, step) for step, course in memory[at].items()),
            tuple(Stamp(*course, step) for step, course in disk[at].items()),
        )
        for at in range(2)
    ]
    found, each = together(ranks, lambda common: common.newest(50))
    assert found == {newest}
    if newest >= 0:
        assert len({common.courses[int(newest)] for common in each}) == 1
    assert together(ranks, lambda common: common.oldest())[0] == {oldest}
    for step in (30, 40):
        kept, _ = together(ranks, lambda common, step=step: common.keeps(step))  # type: ignore[misc]
        assert kept == {step in (newest, oldest)}


def test_a_restored_state_that_a_rank_takes_again_is_the_same_state(tmp_path: Path) -> None:
    """One rank has restored step 30 from memory, and the other from disk: only that one takes it again, with newer numbers."""
    ranks = [rank(tmp_path / "a", (Stamp(1, 0, 30),)), rank(tmp_path / "b", (Stamp(2, 0, 30),))]
    assert together(ranks, lambda common: common.newest(50))[0] == {-1}
    for each in ranks:
        each.went_back(30, AGAIN, FIRST)
    found, common = together(ranks, lambda common: common.newest(50))
    assert found == {30}
    assert [each.courses[30] for each in common] == [FIRST, AGAIN], "each restores its own"
