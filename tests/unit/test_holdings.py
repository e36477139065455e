"""What a node holds on disk, and what of that its ranks may go back to."""

from pathlib import Path

from mt_resilient.agent.holdings import FRESH_S, Holdings
from mt_resilient.agent.run_directory import MARK
from mt_resilient.checkpoint import layout
from mt_resilient.checkpoint.files import Files
from mt_resilient.resilience.findings import InPlaceRewind
from mt_resilient.resilience.ladder import Remedy
from mt_resilient.resilience.stability import StabilityPolicy
from mt_resilient.resilience.terms import Generation, Step

RUN = "5f0c91aa"


def written(root: Files, name: str) -> Files:
    snapshot = root / layout.SNAPSHOTS / name
    snapshot.write(layout.COMMIT, b"")
    return snapshot


def test_what_is_committed_late_of_a_course_that_was_left_is_refused(tmp_path: Path) -> None:
    """By a node that was stopped while it wrote its part; meanwhile the others have gone back and left data out."""
    root = Files(tmp_path)
    (root / layout.SNAPSHOTS).write(MARK, b"ours")
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
    assert [each.there(layout.REJECTED) for each in (kept, before, late, newer)] == [False, True, True, False]
