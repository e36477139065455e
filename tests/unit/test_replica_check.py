"""What the agent makes of fingerprints in its arena: when it compares, what it tells, and what is fit to go on from."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mt_resilient.agent.run_directory import MARK
from mt_resilient.agent.snapshots.durable_index import Shelf
from mt_resilient.agent.snapshots.fingerprint_source import seen
from mt_resilient.agent.snapshots.frozen_check import STILL_SNAPSHOTS, STILL_STEPS
from mt_resilient.agent.snapshots.independence import Early, Independence
from mt_resilient.agent.snapshots.replica_check import LOOK_S, Replicas
from mt_resilient.agent.snapshots.trust import Soundness
from mt_resilient.checkpoint.arena import arena
from mt_resilient.checkpoint.arena.arena import RankArena, Slot
from mt_resilient.checkpoint.arena.slot_header import Header, Stamp
from mt_resilient.checkpoint.backend import paths
from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.checkpoint.backend.paths import Attempt
from mt_resilient.checkpoint.durable import catalog
from mt_resilient.checkpoint.durable.retention import RetentionPolicy
from mt_resilient.checkpoint.format.pytree_walk import flatten
from mt_resilient.checkpoint.format.replica_ledger import TRUSTED, Apart
from mt_resilient.checkpoint.format.sharding import Part
from mt_resilient.checkpoint.format.tensor_table import Table, plan
from mt_resilient.resilience.detect.node_divergence import KEPT
from mt_resilient.resilience.model.node import NodeStatus
from mt_resilient.resilience.model.signals import Held
from mt_resilient.resilience.model.types import Step
from mt_resilient.resilience.plan.resume_point import StabilityPolicy

RUN = "5eed5eed"
POLICY = StabilityPolicy(certify_after_steps=5)


class Ranks:
    """Data-parallel ranks with one parameter and one moment of it, of which nothing but the fingerprints is ever looked at."""

    def __init__(self, ranks: int, slots: int = 4) -> None:
        self.fds = arena.create(ranks, slots)
        paths = arena.paths(self.fds, os.getpid())
        self.arenas = [RankArena(row) for row in paths]
        self.slots = [[Slot(path) for path in row] for row in paths]
        self.replicas, self.now_s, self.wall_s = Replicas(self.slots, POLICY), 100.0, 1000.0

    def table(self, rank: int, lr: float) -> Table:
        skeleton, _ = flatten({"opt": {"0": {"groups": [{"lr": lr}]}}}, lambda value: False)
        names = {"model/w": "model/w", "opt/0/state/0.0/exp_avg": "opt/exp_avg/model/w"}
        parts = {
            name: [Part(name=whole, shape=(2,), offset=(0,), box=(2,), replica=(rank,))]
            for name, whole in names.items()
        }
        return plan(skeleton, [(name, "float32", (2,)) for name in names], parts)

    def snapshot(
        self,
        step: int,
        value: int | None = None,
        *,
        odd: Mapping[int, int] | None = None,
        moments: Mapping[int, int] | None = None,
        generation: int = 1,
        rewinds: int = 0,
        durable: bool = False,
        marked: bool = False,
        lr: float = 0.1,
    ) -> None:
        """Its parameter has the fingerprint `value` (the step's number), but on the `odd` ranks; its moment that of the step, but where
        `moments` says another one."""
        for rank, row in enumerate(self.arenas):
            table = self.table(rank, lr)
            header = Header(
                generation=generation,
                rewinds=rewinds,
                step=step,
                rank=rank,
                world=len(self.arenas),
                durable=durable,
                marked=marked,
                pieces=2,
                payload_bytes=table.payload_bytes,
            )
            claimed = row.claim(header, table.to_json())
            assert claimed
            slot, view = claimed
            view.fingerprints[:] = (
                (odd or {}).get(rank, step if value is None else value),
                (moments or {}).get(rank, step),
            )
            slot.staged()
            slot.seal()

    def trusted(self) -> None:
        """Seen often enough, the last time at step 10."""
        for step in range(11 - TRUSTED, 11):
            assert not self.compare(step)

    def look(self, *, every: bool = False, generation: int = 1) -> bool:
        return self.replicas.look(self.now_s, self.wall_s, generation, every=every)

    def compare(self, step: int, value: int | None = None, *, generation: int = 1, **how: Any) -> bool:
        """Take a snapshot, and compare all that are in memory. Return whether that has found a mismatch."""
        self.snapshot(step, value, generation=generation, **how)
        return self.look(every=True, generation=generation)

    def close(self) -> None:
        for each in self.arenas:
            each.close()
        for fd in [fd for row in self.fds for fd in row]:
            os.close(fd)


@pytest.fixture(params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    played = Ranks(request.param)
    yield played
    played.close()


@pytest.fixture
def replicas(ranks: Ranks) -> Replicas:
    return ranks.replicas


def stamp(step: int, generation: int = 1, rewinds: int = 0) -> Stamp:
    return Stamp(generation, rewinds, step)


def test_in_calm_times_the_newest_is_compared_once_in_a_while(ranks: Ranks, replicas: Replicas) -> None:
    ranks.trusted()
    ranks.now_s += LOOK_S
    ranks.snapshot(11)
    ranks.snapshot(12)
    ranks.look()
    assert (replicas.compared(stamp(11)), replicas.compared(stamp(12))) == (False, True)
    ranks.now_s += LOOK_S / 2
    ranks.snapshot(13)
    ranks.look()
    assert not replicas.compared(stamp(13))
    ranks.look(every=True)
    assert replicas.compared(stamp(11))
    assert replicas.compared(stamp(13))


def test_what_goes_to_disk_is_always_compared(ranks: Ranks, replicas: Replicas) -> None:
    ranks.trusted()
    ranks.look()
    ranks.snapshot(11, durable=True)
    ranks.look()
    assert replicas.agreed(stamp(11))


def test_a_mismatch_is_told_once_from_its_first_step_on(ranks: Ranks, replicas: Replicas) -> None:
    ranks.trusted()
    ranks.snapshot(11, odd={1: 99})
    ranks.snapshot(12, odd={1: 98})
    ranks.now_s += LOOK_S
    assert ranks.look(generation=4)
    (found,) = replicas.mismatches
    assert (found.generation, found.onset, found.agreed) == (4, 11, 10)
    assert (found.tensors, found.count, found.at_s) == (("model/w",), 1, 1000.0)
    assert found.ranks == tuple(range(len(ranks.arenas)))
    assert found.wrong == ((1,) if len(ranks.arenas) == 3 else ())
    assert not ranks.compare(13, odd={1: 97})
    assert len(replicas.mismatches) == 1


def test_what_follows_is_unfit_although_it_agrees(ranks: Ranks, replicas: Replicas) -> None:
    """A bit that is rounded away has been multiplied into everybody's gradients before."""
    ranks.trusted()
    ranks.snapshot(11, odd={0: 99})
    ranks.compare(12)
    assert [replicas.fit(stamp(step)) for step in (10, 11, 12)] == [True, False, False]
    assert not replicas.agreed(stamp(12))
    assert replicas.fit(stamp(11, generation=2))
    assert not replicas.fit(stamp(12, rewinds=1))


def test_the_same_ranks_behind_a_way_back_in_place_are_fit_again(ranks: Ranks, replicas: Replicas) -> None:
    ranks.trusted()
    ranks.compare(11, odd={0: 99})
    replicas.went_back(11, 1, 1)  # not far enough
    assert not replicas.fit(stamp(12, rewinds=1))
    replicas.went_back(10, 1, 2)
    assert [replicas.fit(stamp(12, rewinds=n)) for n in (0, 1, 2, 3)] == [False, False, True, True]
    assert ranks.compare(12, odd={0: 98}, rewinds=2)
    assert len(replicas.mismatches) == 2, "a further fault is one of its own"
    assert [replicas.fit(stamp(12, rewinds=n)) for n in (0, 2, 3)] == [False, False, False]


def test_an_earlier_sign_found_later_is_no_second_mismatch(ranks: Ranks, replicas: Replicas) -> None:
    ranks.trusted()
    assert ranks.compare(12, odd={0: 99})
    assert not ranks.compare(11, odd={0: 99}, rewinds=0)
    assert len(replicas.mismatches) == 1
    assert not replicas.fit(stamp(11))


def test_each_life_of_the_ranks_has_its_own(ranks: Ranks, replicas: Replicas) -> None:
    ranks.trusted()
    assert ranks.compare(11, odd={0: 99})
    ranks.snapshot(11, generation=2)
    assert ranks.compare(12, odd={1: 98}, generation=2)
    assert [found.onset for found in replicas.mismatches] == [11, 12]


@pytest.mark.parametrize(("again", "who"), [(11, (1,)), (99, (0,)), (55, ())])
def test_of_two_copies_the_replay_tells(again: int, who: tuple[int, ...]) -> None:
    ranks = Ranks(2)
    replicas = ranks.replicas
    ranks.trusted()
    ranks.compare(11, odd={1: 99})
    (found,) = replicas.mismatches
    assert (found.wrong, found.replayed) == ((), False)
    ranks.snapshot(11, again, generation=2)
    ranks.look()  # although it has just looked
    (found,) = replicas.mismatches
    assert (found.wrong, found.replayed) == (who, bool(who))
    ranks.close()


APART = {0: 90, 1: 91, 2: 92}


def test_ranks_that_train_each_by_themselves_are_left_alone(ranks: Ranks, replicas: Replicas) -> None:
    """Local SGD behind its warm-up: at first it is a mismatch like any other."""
    ranks.trusted()
    assert ranks.compare(14, moments=APART)
    ranks.snapshot(11, generation=2)
    assert not ranks.compare(12, moments=APART, generation=2)
    assert (replicas.left, len(replicas.mismatches), replicas.agreed(stamp(12, 2))) == (12, 1, True)
    assert not ranks.compare(13, odd=APART, moments=APART, generation=2)


def test_moments_that_all_differ_now_and_then_are_no_third_fault(ranks: Ranks, replicas: Replicas) -> None:
    """Kernels that seldom give other last bits: a replay mostly agrees. The third finding would end the job."""
    ranks.trusted()
    for generation, step in enumerate((14, 24, 34), 1):
        assert ranks.compare(step, moments=APART, generation=generation) == (generation < 3)
        assert not ranks.compare(step, generation=generation + 1)
    assert (replicas.left, len(replicas.mismatches)) == (34, 2)


def test_moments_that_all_differ_once_a_day_are_each_a_mismatch(ranks: Ranks, replicas: Replicas) -> None:
    """So it is with memory that fails now and then. A third one counts only within the hours in which it would end the job."""
    ranks.trusted()
    for generation, step in enumerate((14, 24, 34, 44), 1):
        assert ranks.compare(step, moments=APART, generation=generation)
        assert not ranks.compare(step, generation=generation + 1)
        ranks.wall_s += 13 * 3600
    assert (replicas.left, len(replicas.mismatches)) == (-1, 4)


def test_what_is_not_compared_although_it_could_be_is_told_and_not_certified(
    ranks: Ranks, replicas: Replicas, tmp_path: Path
) -> None:
    sound = Soundness(ranks.slots, Shelf(Files(tmp_path)), Files(tmp_path), RUN, POLICY)
    for step in range(1, 9):
        ranks.compare(step, moments=APART)
        sound.look(1, step, every=True)
    assert replicas.certified([stamp(step) for step in range(1, 9)], 99) == set()
    assert replicas.early == sound._replicas.early == Early(Step(1), ("opt/0/state/0.0/exp_avg",), blind=True)
    ((said, mood),) = sound.sentences
    assert mood == "warn"
    assert said.startswith(
        "the data-parallel replicas are not compared, because opt/0/state/0.0/exp_avg differed between the ranks at step 1,"
    )


@pytest.mark.parametrize(
    ("first", "again", "agreed"),
    [
        ({"odd": APART}, {"odd": APART}, None),  # one tensor of two
        ({"odd": APART}, {"moments": APART}, None),
        ({"moments": APART}, {"moments": APART}, 14),  # what was computed again was alike
        ({"moments": {1: 99}}, {"moments": {1: 99}}, None),  # of three, one is in a minority
    ],
)
def test_moments_that_go_apart_otherwise_are_mismatches(
    first: dict[str, dict[int, int]], again: dict[str, dict[int, int]], agreed: int | None
) -> None:
    ranks = Ranks(3)
    replicas = ranks.replicas
    ranks.trusted()
    assert ranks.compare(14, **first)  # type: ignore[arg-type]
    if agreed:
        assert not ranks.compare(agreed, generation=2)
    assert ranks.compare(15, **again, generation=2)  # type: ignore[arg-type]
    assert replicas.left == -1
    ranks.close()


def parted(*names: str, **words: int) -> list[Apart]:
    return [Apart(name=name, words={int(rank[1:]): word for rank, word in words.items()}) for name in names]


@pytest.mark.parametrize(
    ("step", "found", "left"),
    [
        (14, parted("w", "m", r0=1, r1=2), ("w", "m")),
        (14, parted("w", "m", "v", r0=1, r1=2), ("w", "m")),
        (14, parted("w", "m", r0=1, r1=3), ()),  # other bits: an error, or chance
        (14, parted("w", r0=1, r1=2), ()),  # a bit that is stuck in memory affects one tensor
        (15, parted("w", "m", r0=1, r1=2), ()),  # not the same step
    ],
)
def test_tensors_with_the_same_different_bits_after_a_replay_are_left_alone(
    step: int, found: list[Apart], left: tuple[str, ...]
) -> None:
    independence = Independence(24)
    assert independence.again(stamp(14), parted("w", "m", r0=1, r1=2)) == ()
    assert independence.again(stamp(step, rewinds=1), found) == left


def test_of_three_ranks_one_that_differs_again_and_again_is_not_left_alone() -> None:
    independence = Independence(24)
    odd = parted("w", "m", r0=1, r1=1, r2=2)
    assert independence.again(stamp(14), odd) == independence.again(stamp(14, rewinds=1), odd) == ()


def test_of_each_life_only_the_first_diverged_snapshots_are_remembered() -> None:
    independence = Independence(24)
    for life in range(9):
        for step in range(14, 99):
            independence.again(stamp(step, rewinds=life), parted("w", "m", r0=life, r1=step))
    assert [at.step for at in independence._bits] == [14, 15, 16, 17] * 4
    assert independence.again(stamp(14, rewinds=9), parted("w", "m", r0=8, r1=14)) == ("w", "m")


def test_once_tensors_are_left_alone_nothing_is_certified_and_other_nodes_are_told_nothing() -> None:
    ranks = Ranks(2)
    replicas = ranks.replicas
    ranks.trusted()
    replicas.again = Early(Step(14), ("model/w",), blind=False)
    for step in (11, 20, 30):
        ranks.compare(step, marked=True)
    assert replicas.agreed(stamp(30))
    held = [stamp(step) for step in (10, 11, 20, 30)]
    assert replicas.certified(held, 99) == {stamp(10)}
    assert told(replicas) == []
    ranks.close()


def test_a_ledger_leaves_only_the_tensors_that_are_named(ranks: Ranks, replicas: Replicas) -> None:
    ranks.trusted()
    for _, layout in replicas._layouts:
        layout.result().ledger.leave(["model/w"])
    assert not ranks.compare(11, odd=APART)
    assert ranks.compare(12, moments=APART)


def test_weights_that_stand_still_are_told(ranks: Ranks, replicas: Replicas) -> None:
    for step in range(STILL_STEPS + 20):
        ranks.compare(step, value=7)
        assert replicas.frozen == (0 if step >= STILL_STEPS else -1)
    ranks.compare(STILL_STEPS + 20, value=8)
    assert replicas.frozen == -1


@pytest.mark.parametrize(("every", "lr"), [(STILL_STEPS // (STILL_SNAPSHOTS - 2), 0.1), (1, 0.0)])
def test_few_snapshots_and_a_learning_rate_of_0_say_nothing(
    ranks: Ranks, replicas: Replicas, every: int, lr: float
) -> None:
    for step in range(0, STILL_STEPS + 1, every):
        ranks.compare(step, value=7, lr=lr)
    assert replicas.frozen == -1


def test_what_many_steps_have_followed_is_certified(ranks: Ranks, replicas: Replicas) -> None:
    ranks.trusted()
    held = [stamp(9), stamp(10), stamp(77)]
    assert replicas.certified(held, 14) == {stamp(9)}
    assert replicas.certified(held, 15) == {stamp(9), stamp(10)}
    assert replicas.certified(held, -1) == {stamp(9), stamp(10)}, "it stays so when the ranks start anew"


def test_steps_of_another_line_certify_nothing(ranks: Ranks, replicas: Replicas) -> None:
    ranks.trusted()
    replicas.went_back(9)
    assert replicas.certified([stamp(9), stamp(10)], 99) == {stamp(9)}


def told(replicas: Replicas) -> list[tuple[int, ...]]:
    return [*Held.parse(replicas.held).words] if replicas.held else []


def test_what_all_nodes_look_at_is_told_to_them(ranks: Ranks, replicas: Replicas) -> None:
    for step in range(1, 8):
        ranks.snapshot(step, durable=step == 3, marked=step == 5)
        ranks.look(every=step == 1)
    assert told(replicas) == [(1, 0, 3), (1, 0, 5)]
    for step in range(8, 8 + KEPT):
        ranks.snapshot(step, marked=True)
        ranks.look()
    assert told(replicas) == [(1, 0, step) for step in range(8, 8 + KEPT)]
    replicas.went_back(9)
    assert told(replicas) == [(1, 0, 8), (1, 0, 9)]


def test_what_is_read_late_of_a_course_that_was_left_is_not_told(ranks: Ranks, replicas: Replicas) -> None:
    ranks.compare(1, marked=True)
    ranks.snapshot(2, marked=True)
    late = seen(ranks.slots, stamp(2))
    assert late
    replicas.went_back(1, 1, 1)
    replicas.judge([late], 1000.0, 1)
    assert told(replicas) == [(1, 0, 1)]
    ranks.compare(2, rewinds=1, marked=True)
    assert told(replicas) == [(1, 0, 1), (1, 1, 2)]


def test_nodes_that_are_not_to_be_compared_tell_nothing(ranks: Ranks) -> None:
    replicas = ranks.replicas = Replicas(ranks.slots, replace(POLICY, compare_nodes=False))
    ranks.compare(1, marked=True)
    assert (replicas.compared(stamp(1)), replicas.held) == (True, "")


def test_ranks_that_are_apart_tell_other_nodes_nothing_of_it(ranks: Ranks, replicas: Replicas) -> None:
    for step in range(1, 7):
        ranks.compare(step, odd={1: 99} if step == 6 else None, marked=True)
    assert told(replicas) == [(1, 0, step) for step in range(1, 6)]


def test_equal_bits_are_told_alike_by_two_nodes_and_others_are_not(ranks: Ranks, replicas: Replicas) -> None:
    there = Ranks(len(ranks.arenas))
    for step in range(1, 4):
        ranks.compare(step, marked=True)
        there.compare(step, step + 7 * (step == 3), marked=True)
    here, their = Held.parse(replicas.held), Held.parse(there.replicas.held)
    assert here.model == their.model
    assert [here.words[1, 0, step] == their.words[1, 0, step] for step in (1, 2, 3)] == [True, True, False]
    there.close()


def test_words_are_read_without_a_lock_and_never_torn(ranks: Ranks) -> None:
    """A rank that begins anew finds its slot free, whoever reads."""
    ranks.snapshot(3)
    slot = next(slot for slot in ranks.slots[0] if slot.header().step == 3)
    header, table, words = slot.words() or pytest.fail("it is there")
    assert (header.stamp, words.tolist()) == (stamp(3), [3, 3])
    assert table == ranks.table(0, 0.1).to_json()
    view = slot.begin(header, table)
    assert view is not None
    assert slot.words() is None
    slot.release()
    assert all(slot.words() is None for slot in ranks.slots[0] if slot.header().step != 3)


class Disk:
    """Committed snapshots of this run, as far as marks go."""

    def __init__(self, path: Path) -> None:
        self.root = Files(path)
        (path / paths.SNAPSHOTS).mkdir()
        (path / paths.SNAPSHOTS / MARK).touch()

    def commit(self, step: int) -> None:
        place = Attempt(run=RUN, stamp=stamp(step)).under(self.root)
        place.path.mkdir()
        (place.path / paths.COMMIT).touch()

    def marks(self, step: int) -> set[str]:
        return {path.name for path in Attempt(run=RUN, stamp=stamp(step)).under(self.root).path.iterdir()}


def until_marked(disk: Disk, sound: Soundness, shelf: Shelf, step: int, marks: set[str], finished: int) -> None:
    end = time.monotonic() + 60
    while disk.marks(step) != marks:
        assert time.monotonic() < end, disk.marks(step)
        shelf.fresh(1.0)
        sound.look(1, finished)
        time.sleep(0.01)


def test_certificates_and_rejections_are_written_down(ranks: Ranks, tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    shelf = Shelf(disk.root)
    sound = Soundness(ranks.slots, shelf, disk.root, RUN, POLICY)
    for step in range(1, 8):
        ranks.snapshot(step)
        sound.look(1, step, every=True)
    disk.commit(6)
    disk.commit(7)
    until_marked(disk, sound, shelf, 6, {paths.COMMIT, paths.CERTIFIED}, finished=11)
    assert disk.marks(7) == {paths.COMMIT}
    ranks.snapshot(8, odd={0: 99})
    assert sound.look(1, 11, every=True)
    disk.commit(8)
    until_marked(disk, sound, shelf, 8, {paths.REJECTED, paths.REASON}, finished=11)
    assert [step.step for step in sound.memory()][-1] == 7
    sound.free_unfit()
    assert all(slot.header().step != 8 or not slot.header().whole for row in ranks.slots for slot in row)
    shelf.fresh(1.0)
    told = sound.told(NodeStatus(generation=1, at_s=0.0, memory_steps=(6, 7), durable_steps=(6, 7)))  # type: ignore[arg-type]
    assert (told["agreed_steps"], told["certified_steps"]) == ((6, 7), (6,))
    assert any("is set aside" in sentence for sentence, _ in sound.sentences)
    assert any("that data-parallel ranks hold alike" in sentence for sentence, _ in sound.sentences)


def test_the_newest_certified_one_is_never_retired(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    for step in range(1, 10):
        disk.commit(step)
    for step in (2, 4):
        (Attempt(run=RUN, stamp=stamp(step)).under(disk.root).path / paths.CERTIFIED).touch()
    seen = catalog.look(disk.root)
    assert {attempt.stamp.step for attempt in seen.certified} == {2, 4}
    assert not seen.remains
    catalog.retire(disk.root, RetentionPolicy(keep=2), now_s=0.0)
    assert [attempt.stamp.step for attempt in catalog.look(disk.root).durable] == [9, 8, 4]


def test_a_certificate_alone_is_a_remain(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.commit(3)
    place = Attempt(run=RUN, stamp=stamp(3)).under(disk.root).path
    (place / paths.COMMIT).rename(place / paths.CERTIFIED)
    seen = catalog.look(disk.root)
    assert (seen.durable, seen.certified, [each.stamp.step for each in seen.remains]) == ((), frozenset(), [3])
    (place / paths.REJECTED).touch()
    (place / paths.COMMIT).touch()
    seen = catalog.look(disk.root)
    assert (seen.durable, seen.certified, len(seen.rejected)) == ((), frozenset(), 1)
