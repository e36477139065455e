"""What the agent does about ranks that have fallen silent, round by round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from mt_resilient.agent.monitor.hang_monitor import PAUSE_S, Lookout
from mt_resilient.agent.ranks.worker_group import Watched, WorkerGroup
from mt_resilient.resilience.detect.hang_rules import HangPolicy, Look
from mt_resilient.resilience.detect.stack_traces import Spot
from mt_resilient.resilience.ipc.board_events import PAGE_BYTES
from mt_resilient.resilience.ipc.board_layout import Page
from mt_resilient.resilience.model.collectives import GroupCalls
from mt_resilient.resilience.model.signals import Place
from mt_resilient.resilience.model.types import RankPhase

POLICY: dict[str, Any] = {"floor_s": 5, "teardown_s": 5, "confirm_s": 2, "idle_s": 2, "warmup_steps": 1}


class Played:
    """Two ranks that have done a step and say nothing any more, and an agent that looks every second. It is the agent's eyes too."""

    def __init__(self, place: Place = Place.ELSEWHERE, phase: RankPhase = RankPhase.TRAINING, **policy: Any) -> None:
        self.pages = [Page(memoryview(bytearray(PAGE_BYTES))) for _ in range(2)]
        for rank, page in enumerate(self.pages):
            page.clear(1, rank)
            page.pid, page.phase, page.built_ns = 100 + rank, phase, 1
            page.beat(1, 1.0, 1.0, 10)
        ranks = {rank: Watched(page.pid, -1) for rank, page in enumerate(self.pages)}
        self.group = WorkerGroup(1, Watched(99, -1), "warm", ranks)
        self.places, self.busy, self.asked = [Place.COLLECTIVE, place], False, 0
        self.still_since_s = math.inf
        self.lookout, self.now_s = Lookout(HangPolicy(**{**POLICY, **policy}), self), 1000.0

    def ask(self, local_rank: int, page: Page, process: Watched) -> None:
        self.asked += local_rank

    def take(self, local_rank: int, page: Page, process: Watched, now_s: float) -> Look:
        place = self.places[local_rank]
        return Look(
            at_s=now_s,
            state="S",
            cpu_s=now_s * self.busy,
            stack=(),
            spot=Spot(place=place, words=f"at {place}"),
            device_done=7,
            device_waits=now_s > self.still_since_s,
            device_still_s=max(0.0, now_s - self.still_since_s),
            calls=(GroupCalls(group="0", last=1),),
        )

    def keep(self, name: str, looks: Mapping[int, Look]) -> str:
        return name

    def seconds(self, number: int, each_s: float = 1.0) -> list[str]:
        """What is said meanwhile."""
        said = []
        for _ in range(number):
            self.now_s += each_s
            self.lookout.look(self.group, self.pages, self.now_s, self.now_s + 5000)
            said += [sentence for _, sentence in self.lookout.words()]
        return said


def test_a_hang_is_a_fact_for_the_status() -> None:
    played = Played()
    said = played.seconds(12)
    assert len(said) == 1
    assert "looking at the stacks" in said[0]
    assert [(s.rank, s.place, s.moved, s.busy, s.stacks) for s in played.lookout.stalls] == [
        (0, Place.COLLECTIVE, False, False, "g1-step1"),
        (1, Place.ELSEWHERE, False, False, "g1-step1"),
    ]
    played.pages[1].beat(2, 1.0, 1.0, 20)
    assert played.seconds(1) == ["the ranks give signs of life again: it was no hang"]
    assert played.lookout.stalls == ()


def test_who_is_slow_is_told_once_and_looked_at_less_and_less() -> None:
    played = Played(busy_s=10_000)
    played.busy = True
    said = played.seconds(1000)
    assert [sentence.split(":")[0] for sentence in said][1:] == ["slow, and not certain to hang"]
    assert played.asked < 30
    assert all(stall.busy for stall in played.lookout.stalls)
    played.busy = False
    played.seconds(200)
    assert not any(stall.busy for stall in played.lookout.stalls)


def test_a_pause_between_two_looks_begins_them_anew() -> None:
    played = Played()
    while not played.asked:
        played.seconds(1)
    played.seconds(1)
    played.seconds(1, each_s=PAUSE_S + 1)
    asked = played.asked
    played.seconds(2)
    assert not played.lookout.stalls
    played.seconds(8)
    assert played.asked >= asked + 2
    assert played.lookout.stalls


def test_who_may_only_tell_tells() -> None:
    played = Played(act=False)
    said = played.seconds(60)
    assert "hang.act is off, so the agent does nothing" in said[1]
    assert (len(said), played.lookout.stalls) == (2, ())


def test_what_a_script_does_after_its_loop_is_its_own() -> None:
    played = Played(phase=RankPhase.FINISHED)
    said = played.seconds(3600)
    assert len(said) == 2
    assert "the loop is over, and the script takes long" in said[1]
    assert (played.lookout.stalls, played.lookout.teardown) == ((), "")
    assert played.asked < 30


def test_a_teardown_that_hangs_is_over() -> None:
    played = Played(Place.TEARDOWN, RankPhase.FINISHED)
    played.places[0] = Place.TEARDOWN
    played.seconds(12)
    assert "rank 1 is at teardown" in played.lookout.teardown
    exited = Played(Place.TEARDOWN, RankPhase.FINISHED)
    exited.group.ranks[0].ended_s, exited.pages[1].left = 1.0, 1
    exited.places[1] = Place.ELSEWHERE  # no frame tells more than that the interpreter shuts down
    exited.seconds(12)
    assert exited.lookout.teardown


def test_a_launcher_that_outlives_its_ranks_is_over() -> None:
    played = Played(phase=RankPhase.FINISHED)
    for process in played.group.ranks.values():
        process.ended_s = 1.0
    played.seconds(5)
    assert not played.lookout.teardown
    played.seconds(5)
    assert "the launcher (torchrun) still runs" in played.lookout.teardown
    training = Played()
    for process in training.group.ranks.values():
        process.ended_s = 1.0
    training.seconds(60)
    assert not training.lookout.teardown


@pytest.mark.parametrize("killed", [True, False])
@pytest.mark.parametrize("place", [Place.ELSEWHERE, Place.COLLECTIVE])
def test_where_the_script_was_silent_before_it_may_be_silent_for_longer(place: Place, killed: bool) -> None:
    """Whether the first silence ended by itself, or was taken for a hang."""
    played = Played(place)

    def seconds_to_a_hang() -> int:
        for second in range(1, 400):
            played.seconds(1)
            if any(s.rank == 1 and not s.moved and not s.busy for s in played.lookout.stalls):
                return second
        raise AssertionError

    first = seconds_to_a_hang()
    if killed:
        played.lookout.begin(tells=True)
    played.pages[1].beat(2, 1.0, 1.0, 20)
    played.seconds(1)
    played.pages[1].beat(3, 1.0, 1.0, 20)
    second = seconds_to_a_hang()
    assert (second > 2 * first) == (place is Place.ELSEWHERE)


def test_what_is_learned_from_hangs_that_were_ended_does_not_multiply() -> None:
    played, found = Played(), []
    for beat in (2, 3, 4, 5):
        began_s = played.now_s
        while not any(stall.rank == 1 and not stall.moved and not stall.busy for stall in played.lookout.stalls):
            played.seconds(1)
        found.append(played.now_s - began_s)
        played.lookout.begin(tells=True)
        played.pages[1].beat(beat, 1.0, 1.0, 20)
        played.seconds(1)
    assert 2 * found[0] < found[1] == found[2] == found[3]


def test_where_a_device_was_still_before_it_may_be_still_for_longer() -> None:
    """As a kernel that takes long each time: after one restart, the agent waits for it."""
    played, found = Played(Place.PERHAPS), []
    played.places, played.busy = [Place.PERHAPS] * 2, True
    for beat in (1, 2):
        played.still_since_s, began_s = played.now_s, played.now_s
        while not any(stall.device for stall in played.lookout.stalls):
            played.seconds(1)
        found.append(played.now_s - began_s)
        played.lookout.begin(tells=True)
        played.still_since_s = math.inf
        for page in played.pages:
            page.beat(1 + beat, 1.0, 1.0, 10 + beat)
        played.seconds(1)
    assert found[1] > 2 * found[0]


def test_what_the_recorders_show_is_reported_only_if_it_can_count() -> None:
    played = Played(idle_s=60)
    played.seconds(20)
    assert [stall.calls for stall in played.lookout.stalls] == [(), ()], "rank 1 may be working"
    played.places[1] = Place.PERHAPS
    played.seconds(60)
    assert all(stall.calls for stall in played.lookout.stalls)


def test_new_ranks_begin_with_nothing_held_against_them() -> None:
    played = Played()
    played.seconds(12)
    played.lookout.begin(tells=True)
    assert played.lookout.stalls == ()
    assert played.seconds(3) == []
