"""What a node holds on disk, and what of that its ranks may go back to."""

import os
import time
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from mt_resilient.agent.run_directory import MARK
from mt_resilient.agent.snapshots import inventory
from mt_resilient.agent.snapshots.inventory import FRESH_S, Holdings
from mt_resilient.agent.snapshots.replica_check import Replicas
from mt_resilient.checkpoint.arena import arena
from mt_resilient.checkpoint.arena.arena import Header, RankArena
from mt_resilient.checkpoint.arena.slot_header import Stamp
from mt_resilient.checkpoint.backend import paths
from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.checkpoint.backend.paths import Attempt
from mt_resilient.checkpoint.durable import catalog
from mt_resilient.checkpoint.format.tensor_table import plan
from mt_resilient.resilience.errors import MachineError
from mt_resilient.resilience.model.cause import Kind
from mt_resilient.resilience.model.generation import GenerationRecord, RewindOrder
from mt_resilient.resilience.model.rewind import Remedy
from mt_resilient.resilience.model.signals import InPlaceRewind
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import Generation, OrderedBy, Step
from mt_resilient.resilience.plan.resume_point import StabilityPolicy

RUN = "5f0c91aa"


def written(root: Files, name: str) -> Files:
    snapshot = root / paths.SNAPSHOTS / name
    snapshot.write(paths.COMMIT, b"")
    return snapshot


def back(generation: int, ordinal: int, to: int, cause: str = OrderedBy.OPERATOR, order: int = 0) -> InPlaceRewind:
    return InPlaceRewind(
        ordinal=ordinal,
        generation=Generation(generation),
        cause=cause,
        onset=Step(to + 1),
        to=Step(to),
        reached=Step(to + 30),
        remedy=Remedy.SKIP,
        at_s=0.0,
        restore_s=0.0,
        order=order,
    )


def comes_back(held: Holdings, generation: int, name: str) -> None:
    """An order comes back to that snapshot: a generation begins there, and its ranks say so."""
    attempt = Attempt.parse(name)
    assert attempt
    order = RewindOrder(number=generation, to=Step(attempt.stamp.step), left=name)
    number = Generation(generation)
    record = GenerationRecord(number=number, phase=Phase.LAUNCH, members={}, resume_step=order.to, begins=order)
    held.settle(record, 0)
    held.went_back([back(generation, 1, order.to, order=generation)])


def holdings(path: Path) -> tuple[Files, Holdings]:
    root = Files(path)
    (root / paths.SNAPSHOTS).write(MARK, b"ours")
    return root, Holdings((), root, RUN, StabilityPolicy(), None)


def marks(root: Files) -> dict[str, str]:
    """By step, generation and count of rewinds: in use, left or rejected."""
    said = {**dict.fromkeys(catalog.look(root).durable, "used"), **dict.fromkeys(catalog.look(root).left, "left")}
    said |= dict.fromkeys(catalog.look(root).rejected, "rejected")
    return {
        f"{at.stamp.step} of {at.stamp.generation}.{at.stamp.rewinds}": word
        for at, word in sorted(said.items(), key=str)
    }


@pytest.mark.parametrize(
    ("cause", "word"),
    [(OrderedBy.OPERATOR, "left"), (OrderedBy.COMPARISON, "rejected"), *((kind, "rejected") for kind in Kind)],
)
def test_only_what_a_person_has_left_is_good(tmp_path: Path, cause: str, word: str) -> None:
    root, held = holdings(tmp_path)
    written(root, f"0000000010-g1-{RUN}0000")
    written(root, f"0000000020-g1-{RUN}0000")
    held.went_back([back(1, 1, to=10, cause=cause)])
    assert marks(root) == {"10 of 1.0": "used", "20 of 1.0": word}
    assert held.sees(f"0000000020-g1-{RUN}0000") is (word == "left")
    assert held.durable_steps() == [10]


def test_coming_back_takes_one_lineage_and_mixes_in_no_other(tmp_path: Path) -> None:
    root, held = holdings(tmp_path)
    for step in (10, 20, 30):
        written(root, f"00000000{step}-g1-{RUN}0000")
    held.went_back([back(1, 1, to=10)])
    for step in (20, 40):  # one of them is of the same step
        written(root, f"00000000{step}-g1-{RUN}0001")
    held.shelf.fresh(FRESH_S)
    comes_back(held, 2, f"0000000030-g1-{RUN}0000")
    of_first = {"10 of 1.0": "used", "20 of 1.0": "used", "30 of 1.0": "used"}
    assert marks(root) == {**of_first, "20 of 1.1": "left", "40 of 1.1": "left"}
    assert held.durable_steps() == [10, 20, 30]
    written(root, f"0000000015-g1-{RUN}0001")  # by a node that was stopped meanwhile
    written(root, f"0000000050-g2-{RUN}0001")
    held.shelf.fresh(FRESH_S)
    assert held.durable_steps() == [10, 20, 30, 50]
    # Back to the other one: what an order has taken back since is not of its lineage.
    comes_back(held, 3, f"0000000040-g1-{RUN}0001")
    used = {name for name, word in marks(root).items() if word == "used"}
    assert used == {"10 of 1.0", "15 of 1.1", "20 of 1.1", "40 of 1.1"}
    assert held.durable_steps() == [10, 15, 20, 40]
    # An agent that starts now knows only the marks.
    assert (
        Holdings((), root, RUN, StabilityPolicy(), None).shelf.fresh(5.0).durable == held.shelf.fresh(FRESH_S).durable
    )


def test_of_several_snapshots_of_one_step_the_newest_lineage_s_counts(tmp_path: Path) -> None:
    root, held = holdings(tmp_path)
    for generation, rewinds, step in ((9, 0, 20), (10, 1, 20), (10, 0, 20), (9, 0, 10)):
        written(root, str(Attempt(run=RUN, stamp=Stamp(generation, rewinds, step))))
    held.shelf.fresh(FRESH_S)
    assert held.durable() == [Stamp(9, 0, 10), Stamp(10, 1, 20)]
    held.went_back([back(10, 2, to=10)])
    assert held.durable() == [Stamp(9, 0, 10)]


def test_after_coming_back_a_rewind_leaves_it_again(tmp_path: Path) -> None:
    root, held = holdings(tmp_path)
    name = f"0000000030-g1-{RUN}0000"
    written(root, f"0000000010-g1-{RUN}0000")
    written(root, name)
    held.went_back([back(1, 1, to=10)])
    comes_back(held, 2, name)
    held.went_back([back(2, 2, to=10, cause=Kind.NON_FINITE)])
    assert marks(root) == {"10 of 1.0": "used", "30 of 1.0": "rejected"}
    assert not held.sees(name), "it is known to be wrong now"


def test_a_snapshot_that_cannot_be_restored_is_not_offered_again(tmp_path: Path) -> None:
    root, held = holdings(tmp_path)
    name = f"0000000030-g1-{RUN}0000"
    written(root, f"0000000010-g1-{RUN}0000")
    written(root, name)
    held.went_back([back(1, 1, to=10)])
    written(root, f"0000000020-g1-{RUN}0001")
    order = RewindOrder(number=2, to=Step(30), left=name)
    held.settle(
        GenerationRecord(number=Generation(2), phase=Phase.LAUNCH, members={}, resume_step=Step(30), begins=order), 0
    )
    held.reject(name, "its checksum does not match")
    assert marks(root) == {"10 of 1.0": "used", "20 of 1.1": "used", "30 of 1.0": "rejected"}
    assert not held.sees(name)
    assert held.durable_steps() == [10, 20], "the lineage that was to be left is gone on with"


def test_agents_of_several_nodes_come_back_to_the_same(tmp_path: Path) -> None:
    """One after the other, each with what it has seen."""
    root, held = holdings(tmp_path)
    other = Holdings((), root, RUN, StabilityPolicy(), None)
    for step in (10, 20, 30):
        written(root, f"00000000{step}-g1-{RUN}0000")
    for each in (held, other):
        each.went_back([back(1, 1, to=10)])
    written(root, f"0000000020-g1-{RUN}0001")
    for each in (held, other):
        comes_back(each, 2, f"0000000030-g1-{RUN}0000")
    expected = {"10 of 1.0": "used", "20 of 1.0": "used", "20 of 1.1": "left", "30 of 1.0": "used"}
    assert marks(root) == expected
    for each in (held, other):
        each.look(30)
        each.shelf.fresh(FRESH_S)
        assert each.durable_steps() == [10, 20, 30]
    assert marks(root) == expected


def test_an_agent_that_only_looks_on_does_not_undo_a_come_back(tmp_path: Path) -> None:
    """A spare, or a node whose rank has died before it reported: it knows the first order, and not that another one has come back."""
    root, held = holdings(tmp_path)
    other = Holdings((), root, RUN, StabilityPolicy(), None)
    name = f"0000000030-g1-{RUN}0000"
    for step in (10, 20, 30):
        written(root, f"00000000{step}-g1-{RUN}0000")
    for each in (held, other):
        each.went_back([back(1, 1, to=10)])
    for generation in (2, 4):
        comes_back(held, generation, name)
        other.shelf.fresh(FRESH_S)
        assert other.sees(name), "it is committed again, and the others may wait for this agent"
        other.look(30)
        assert marks(root) == {"10 of 1.0": "used", "20 of 1.0": "used", "30 of 1.0": "used"}
        assert other.durable_steps() == [10, 20, 30]
        for each in (held, other):
            each.went_back([back(generation + 1, 1, to=10)])
        assert marks(root) == {"10 of 1.0": "used", "20 of 1.0": "left", "30 of 1.0": "left"}


class Refusing:
    """Storage that refuses to write below some directories."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.places: set[str] = set()
        self.tries = 0
        write = Files.write

        def refuse(place: Files, name: str, data: bytes) -> None:
            if place.name in self.places:
                self.tries += 1
                raise MachineError(f"{place}: HTTP 503")
            write(place, name, data)

        monkeypatch.setattr(Files, "write", refuse)
        monkeypatch.setattr(inventory, "RETRY_S", 0.0)


def test_a_mark_that_storage_refuses_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, held = holdings(tmp_path)
    names = [f"00000000{step}-g1-{RUN}0000" for step in (10, 20, 30)]
    for name in names:
        written(root, name)
    refusing = Refusing(monkeypatch)
    refusing.places = {names[2]}
    held.went_back([back(1, 1, to=10)])
    assert marks(root) == {"10 of 1.0": "used", "20 of 1.0": "left", "30 of 1.0": "used"}
    assert (held.durable_steps(), held.unusable()) == ([10], (names[2],)), "the ranks are told"
    held.look(10)
    assert refusing.tries > 1
    assert len(held.sound.sentences) == 1, "it is said once"
    refusing.places = set()
    held.look(10)
    assert marks(root) == {"10 of 1.0": "used", "20 of 1.0": "left", "30 of 1.0": "left"}


def test_one_snapshot_that_storage_does_not_show_hides_no_other(tmp_path: Path) -> None:
    root, held = holdings(tmp_path)
    written(root, f"0000000010-g1-{RUN}0000")
    hidden = root.path / paths.SNAPSHOTS / f"0000000020-g1-{RUN}0000"
    hidden.symlink_to("x" * 300)
    (root.path / paths.SNAPSHOTS / "lost+found").symlink_to("x" * 300)
    for _ in range(2):
        held.shelf.fresh(FRESH_S)
        held.look(10)
    assert held.durable_steps() == [10]
    assert [said.split(":")[0] for said, _ in held.sound.sentences] == [str(hidden)], "it is said once"
    catalog.sweep(root, Attempt(run=RUN, stamp=Stamp(2, 0, 30)), set())
    assert hidden.is_symlink()


def test_many_marks_are_written_in_one_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's loop waits for the task, and meanwhile its lease is not renewed."""
    root, held = holdings(tmp_path)
    for step in range(10, 90, 10):
        written(root, f"00000000{step}-g1-{RUN}0000")
    tasks, do = [], held._urgent.do
    monkeypatch.setattr(held._urgent, "do", lambda act, deadline_s: (tasks.append(act), do(act, deadline_s)))
    held.went_back([back(1, 1, to=10)])
    assert set(marks(root).values()) == {"used", "left"}
    assert held.durable_steps() == [10]
    assert len(tasks) == 1


def test_coming_back_first_sets_aside_the_rest_and_each_snapshot_counts_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, held = holdings(tmp_path)
    names = [f"00000000{step}-g1-{RUN}0000" for step in (10, 20, 30)]
    for name in names:
        written(root, name)
    held.went_back([back(1, 1, to=10)])
    other = written(root, f"0000000020-g1-{RUN}0001")
    held.shelf.fresh(FRESH_S)
    refusing = Refusing(monkeypatch)
    refusing.places = {other.name, names[1]}
    comes_back(held, 2, names[2])
    left = {"10 of 1.0": "used", "20 of 1.0": "left", "30 of 1.0": "left"}
    assert marks(root) == {**left, "20 of 1.1": "used"}, "no two lineages are mixed"
    refusing.places = {names[1]}
    held.look(30)
    assert marks(root) == {**left, "20 of 1.1": "left", "30 of 1.0": "used"}
    refusing.places = set()
    held.look(30)
    assert marks(root) == {**left, "20 of 1.0": "used", "20 of 1.1": "left", "30 of 1.0": "used"}


def test_nothing_is_left_before_the_ordered_state_is_on_disk(tmp_path: Path) -> None:
    root, held = holdings(tmp_path)
    for step in (10, 30):
        written(root, f"00000000{step}-g1-{RUN}0000")
    held.went_back([back(1, 1, to=20)])
    assert marks(root) == {"10 of 1.0": "used", "30 of 1.0": "used"}
    assert (held.durable_steps(), held.rejected_steps()) == ([10], (30,))
    written(root, f"0000000020-g1-{RUN}0000")
    held.finish_marks()  # the agent leaves, and the next one has only the marks
    assert marks(root) == {"10 of 1.0": "used", "20 of 1.0": "used", "30 of 1.0": "left"}


def test_no_order_comes_back_to_what_replicas_have_made_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, held = holdings(tmp_path)
    name = f"0000000030-g1-{RUN}0000"
    for step in (10, 30):
        written(root, f"00000000{step}-g1-{RUN}0000")
    held.went_back([back(1, 1, to=10)])
    assert held.sees(name)
    monkeypatch.setattr(Replicas, "fit", lambda _, stamp: stamp.step < 30)  # a comparison that ended later
    assert not held.sees(name)
    held.look(10)
    end = time.monotonic() + 60
    while marks(root)["30 of 1.0"] != "rejected":
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_is_committed_late_of_a_course_that_was_left_is_refused(tmp_path: Path) -> None:
    """By a node that was stopped while it wrote its part; meanwhile the others have gone back and left data out."""
    root = Files(tmp_path)
    (root / paths.SNAPSHOTS).write(MARK, b"ours")
    held = Holdings((), root, RUN, StabilityPolicy(), None)
    kept = written(root, f"0000000015-g1-{RUN}0000")
    before = written(root, f"0000000045-g2-{RUN}0000")
    held.went_back([back(2, 1, to=15)])
    late = written(root, f"0000000030-g1-{RUN}0000")
    newer = written(root, f"0000000020-g2-{RUN}0001")
    held.shelf.fresh(FRESH_S)
    assert held.durable_steps() == [15, 20], "also before it is marked"
    held.look(20)
    assert [each.there(paths.TURNS[0]) for each in (kept, before, late, newer)] == [False, True, True, False]


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
