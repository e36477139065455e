"""What a node holds on disk, and what of that its ranks may go back to."""

import os
from dataclasses import replace
from itertools import chain
from pathlib import Path

from mt_resilient.agent.run_directory import MARK
from mt_resilient.agent.snapshots.inventory import FRESH_S, Holdings
from mt_resilient.checkpoint.arena import arena
from mt_resilient.checkpoint.arena.arena import Header, RankArena
from mt_resilient.checkpoint.arena.slot_header import Stamp
from mt_resilient.checkpoint.backend import paths
from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.checkpoint.format.tensor_table import plan
from mt_resilient.resilience.model.rewind import Remedy
from mt_resilient.resilience.model.signals import InPlaceRewind
from mt_resilient.resilience.model.types import Generation, Step
from mt_resilient.resilience.plan.resume_point import StabilityPolicy

RUN = "5f0c91aa"


def written(root: Files, name: str) -> Files:
    snapshot = root / paths.SNAPSHOTS / name
    snapshot.write(paths.COMMIT, b"")
    return snapshot


def test_what_is_committed_late_of_a_course_that_was_left_is_refused(tmp_path: Path) -> None:
    """By a node that was stopped while it wrote its part; meanwhile the others have gone back and left data out."""
    root = Files(tmp_path)
    (root / paths.SNAPSHOTS).write(MARK, b"ours")
    held = Holdings((), root, RUN, StabilityPolicy(), None)
    kept = written(root, f"0000000015-g1-{RUN}0000")
    before = written(root, f"0000000045-g2-{RUN}0000")
    back = InPlaceRewind(
        ordinal=1,
        generation=Generation(2),
        cause="ordered",
        onset=Step(16),
        to=Step(15),
        reached=Step(46),
        remedy=Remedy.SKIP,
        at_s=0.0,
        restore_s=0.0,
    )
    held.went_back([back])
    late = written(root, f"0000000030-g1-{RUN}0000")
    newer = written(root, f"0000000020-g2-{RUN}0001")
    held.shelf.fresh(FRESH_S)
    assert held.durable_steps() == [15, 20], "also before it is marked"
    held.look(20)
    assert [each.there(paths.REJECTED) for each in (kept, before, late, newer)] == [False, True, True, False]


def test_what_was_fetched_from_another_node_is_not_of_the_time_before_one_had_a_part(tmp_path: Path) -> None:
    """It was taken in an older generation, by those that were there."""
    fds = arena.create(2, 3)
    rows = [RankArena(row) for row in arena.paths(fds, os.getpid())]
    for generation, step in ((1, 20), (1, 24)):
        for rank, row in enumerate(rows):
            wanted = Header(generation=generation, step=step, rank=rank, world=4, pieces=0, payload_bytes=0)
            table = plan({}, [])
            claimed = row.claim(replace(wanted, payload_bytes=table.payload_bytes), table.to_json())
            assert claimed
            claimed[0].staged()
            claimed[0].seal()
    held = Holdings([row.slots for row in rows], Files(tmp_path), RUN, StabilityPolicy(), None)
    held.fetches(Stamp(1, 0, 24), 2)
    held.clear(3, 30, since=2)
    assert held.memory() == [Stamp(1, 0, 24)]
    held.clear(6, 30, since=5)  # it was away meanwhile, and the others may have gone back
    assert held.memory() == []
    for fd in chain(*fds):
        os.close(fd)
