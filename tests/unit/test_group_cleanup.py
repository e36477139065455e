"""What a worker group has left when it ended: the next one's ranks find the same snapshots, and room."""

import os
from collections.abc import Iterator

import pytest

from mt_resilient.checkpoint.arena import arena
from mt_resilient.checkpoint.arena.arena import Header, RankArena, State, settle

from .test_arena import stage, steps


@pytest.fixture
def ranks() -> Iterator[list[RankArena]]:
    fds = arena.create(ranks=2, slots=3)
    yield [RankArena(row) for row in arena.paths(fds, os.getpid())]
    for row in fds:
        for fd in row:
            os.close(fd)


def stage_all(ranks: list[RankArena], *steps: int, **how) -> None:
    for step in steps:
        for slots in ranks:
            stage(slots, step, **how)


def end(ranks: list[RankArena], step: int) -> list[list[int]]:
    settle([slots.slots for slots in ranks], step)
    assert {slot.header().state for slots in ranks for slot in slots.slots} <= {State.FREE, State.SEALED}
    return [steps(slots) for slots in ranks]


def test_a_rank_killed_before_it_sealed_its_peers_step_finds_a_free_slot_again(ranks):
    """Found by `test_save_kills.py` on a loaded machine: from here on the rank missed every snapshot, and nothing went to disk any more."""
    mine, others = ranks
    for step in (40, 41, 42):
        drained = step in (41, 42)
        for slots in ranks:
            slot = stage(slots, step, durable=True, seal=step < 42)
            if drained:
                slot.mark_drained()
    assert mine.seal(42)
    assert end(ranks, 42) == [[40, 41, 42]] * 2
    stage_all(ranks, *range(43, 50), generation=2, durable=True)
    assert steps(others) == [47, 48, 49]


def test_a_snapshot_that_not_all_ranks_hold_is_freed(ranks):
    mine, others = ranks
    stage_all(ranks, 1)
    stage(mine, 2)
    stage(others, 3)
    assert end(ranks, 3) == [[1], [1]]


@pytest.mark.parametrize(("step", "kept"), [(2, [1, 2]), (1, [1]), (0, [])])
def test_snapshots_that_are_later_or_never_sealed_are_freed(ranks, step, kept):
    stage_all(ranks, 1, 2)
    stage_all(ranks, 3, seal=False)
    assert end(ranks, step) == [kept, kept]


@pytest.mark.parametrize(("torn", "kept"), [(False, [1, 2, 3]), (True, [1, 3])])
def test_a_snapshot_whose_part_another_node_has_lost_is_freed(ranks, torn, kept):
    """Step 1 is on disk; step 2 is not, and never will be; of step 3 whoever takes the lost node's place has its part."""
    for slots in ranks:
        stage(slots, 1, durable=True).mark_drained()
    stage_all(ranks, 2, 3, durable=True)
    settle([slots.slots for slots in ranks], 3, torn=torn)
    assert [steps(slots) for slots in ranks] == [kept, kept]


@pytest.mark.parametrize(("course", "kept"), [((), [1, 2, 3]), ((2, 0), [1, 2, 3]), ((1, 0), [1])])
def test_snapshots_of_a_later_lineage_than_the_next_ranks_are_freed(ranks, course, kept):
    """Ranks that begin from step 3 of generation 1, which is on disk, have never computed those of generation 2."""
    stage_all(ranks, 1)
    stage_all(ranks, 2, 3, generation=2)
    settle([slots.slots for slots in ranks], 3, course)
    assert [steps(slots) for slots in ranks] == [kept, kept]


def test_a_torn_slot_is_freed(ranks):
    stage_all(ranks, 1)
    torn = ranks[0].slots[1]
    torn.begin(Header(generation=1, step=2, payload_bytes=8188), b"")
    torn.release()
    assert torn.header().state is State.STAGING
    assert end(ranks, 1) == [[1], [1]]
