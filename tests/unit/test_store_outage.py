"""What an agent does about an etcd that does not answer, or has lost what it knew."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mt_resilient.agent.join.static_nodes import WAIT_S
from mt_resilient.agent.loop.store_outage import EMPTIED_S, Outage
from mt_resilient.resilience.errors import MachineError, StoreUnavailable
from mt_resilient.resilience.ipc.board_layout import PAGE_BYTES, Page
from mt_resilient.resilience.model.generation import GenerationRecord
from mt_resilient.resilience.model.node import Spec
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import Generation, NodeId, RankPhase
from mt_resilient.resilience.store.codec import dumps, loads
from mt_resilient.resilience.store.keys import Keys
from mt_resilient.resilience.store.seat import Seat

from ..memory_store import MemoryStore
from .worlds import record

KEYS, SPEC = Keys("job"), Spec(command=("torchrun", "train.py"), sizes=(2,), run="aaaaaaaa")


class Seen:
    """The outage, what was said, and what etcd knows."""

    def __init__(self, group: Any = None, spec: Spec = SPEC, hosted: bool = False) -> None:
        self.said: list[str] = []
        self.mended = 0
        self.store = MemoryStore(lambda: 0.0)
        self.latencies: list[float | None] = []
        telling: Any = SimpleNamespace(
            say=lambda words, mood="info": self.said.append(words),
            progress=SimpleNamespace(stored=self.latencies.append),
        )
        self.node: Any = SimpleNamespace(
            group=group, board=SimpleNamespace(pages=[Page(memoryview(bytearray(PAGE_BYTES)))])
        )
        self.full = ""
        self.outage = Outage(
            self.node,
            telling,
            self.mend,
            lambda: self.full,
            Seat(self.store, KEYS, NodeId("a")),
            spec,
            "secret",
            hosted,
        )

    def mend(self) -> None:
        self.mended += 1

    def knows(self) -> tuple[GenerationRecord | None, Spec | None]:
        read = self.store.get(KEYS.generation), self.store.get(KEYS.spec)
        return (
            loads(GenerationRecord, read[0].value) if read[0] else None,
            loads(Spec, read[1].value) if read[1] else None,
        )


def group(generation: int, fenced: bool = False, pids: tuple[int, ...] = (7,)) -> Any:
    return SimpleNamespace(generation=generation, fenced=fenced, living=lambda: set(pids))


@pytest.mark.parametrize(
    ("ranks", "hosted", "exits"),
    [(None, True, True), (group(1, pids=()), True, True), (group(1), True, False), (None, False, False)],
)
def test_an_agent_without_ranks_does_not_wait_for_ever_for_another_node_s_etcd(
    ranks: Any, hosted: bool, exits: bool
) -> None:
    seen = Seen(ranks, hosted=hosted)
    for now_s in (1000.0, 1000.0 + WAIT_S):
        seen.outage.lasts(StoreUnavailable("etcd did not answer"), now_s)
    with pytest.raises(StoreUnavailable, match="again on all nodes") if exits else nullcontext():
        seen.outage.lasts(StoreUnavailable("etcd did not answer"), 1001.0 + WAIT_S)


FIFTH, SIXTH = record(number=5), record(number=6)


@pytest.mark.parametrize(("found", "known"), [(None, None), (FIFTH, None), (FIFTH, FIFTH), (SIXTH, FIFTH)])
def test_nothing_is_lost(found: GenerationRecord | None, known: GenerationRecord | None) -> None:
    seen = Seen(group(5))
    assert seen.outage.looked(found, known, 1.0) is found
    assert (seen.said, seen.knows()) == ([], (None, None))


ENDS, ALONE = record(Phase.ENDING, number=5), replace(SPEC, sizes=(1,))


@pytest.mark.parametrize(
    ("ours", "known", "spec", "writes"),
    [
        (group(5), FIFTH, SPEC, True),
        (group(5, fenced=True), FIFTH, SPEC, False),
        (group(4), FIFTH, SPEC, False),
        (None, FIFTH, SPEC, False),
        (None, FIFTH, ALONE, True),  # the ranks of the only node have died, and it gathers
        (None, ENDS, SPEC, True),  # no generation can have begun after the end
    ],
)
def test_which_agents_write_the_job_into_an_emptied_etcd(
    ours: Any, known: GenerationRecord, spec: Spec, writes: bool
) -> None:
    seen = Seen(ours, spec)
    for now_s in (1.0, 2.0):
        assert seen.outage.looked(None, known, now_s) is known
    assert seen.knows() == ((known, spec) if writes else (None, None))
    assert len(seen.said) == 1
    if writes:
        assert seen.outage.looked(None, known, EMPTIED_S + 2) is known
    else:
        with pytest.raises(MachineError, match="etcd has lost its data about this job, and no agent has ranks"):
            seen.outage.looked(None, known, EMPTIED_S + 2)


def test_who_knows_of_a_later_one_does_not_obey_an_older_one() -> None:
    """It was told again by those who had not heard of the next one yet."""
    seen = Seen()
    assert seen.outage.looked(FIFTH, SIXTH, 1.0) is SIXTH
    with pytest.raises(MachineError):
        seen.outage.looked(FIFTH, SIXTH, EMPTIED_S + 2)


def test_once_it_knows_again_the_time_begins_anew() -> None:
    seen = Seen()
    for turn in range(3):
        seen.outage.looked(None, FIFTH, 1.0 + turn * EMPTIED_S)
        seen.outage.looked(FIFTH, FIFTH, 2.0 + turn * EMPTIED_S)
    assert len(seen.said) == 3


@pytest.mark.parametrize(
    ("fenced_soon", "expected"),
    [
        (False, "training continues, but no dead or hung rank is restarted until etcd is back"),
        (True, "training continues until this agent's lease expires. Then the agent ends its ranks"),
    ],
)
def test_an_outage_is_reported_once_and_mended_in_each_round(fenced_soon: bool, expected: str) -> None:
    seen, away = Seen(), StoreUnavailable("etcd did not answer")
    for now_s in (1.0, 100.0, 101.0):
        seen.outage.lasts(away, now_s, fenced_soon=fenced_soon)
    seen.outage.over(103.0)
    began, ended = seen.said
    assert began.startswith(f"etcd did not answer; {expected}")
    assert (ended.partition(",")[0], seen.mended) == ("etcd answers again", 3)
    assert seen.latencies == [None] * 3, "the metrics say that etcd does not answer"


@pytest.mark.parametrize(
    ("has", "knew", "tells"),
    [
        (FIFTH, SIXTH, True),
        (record(Phase.GATHER, number=6), SIXTH, True),
        (record(Phase.LAUNCH, number=6), SIXTH, True),
        (SIXTH, record(Phase.ENDING, number=6), True),
        (record(Phase.GATHER, number=6), record(Phase.LAUNCH, number=6), True),
        (record(Phase.ENDED, number=6), record(Phase.ENDING, number=6), False),
        (record(Phase.GATHER, number=7), SIXTH, False),
    ],
)
def test_what_a_backup_lacks_it_is_told(has: GenerationRecord, knew: GenerationRecord, tells: bool) -> None:
    seen = Seen(group(6))
    seen.store.put(KEYS.generation, dumps(has))
    assert seen.outage.looked(has, knew, 1.0) == (knew if tells else has)
    assert seen.knows()[0] == (knew if tells else has)


def test_who_has_not_started_its_ranks_may_gather_once_more() -> None:
    gathers, launches = record(Phase.GATHER, number=6), record(Phase.LAUNCH, number=6)
    seen = Seen(group(5))
    assert seen.outage.looked(gathers, launches, 1.0) is gathers


def test_before_the_job_begins_each_that_waits_tells_what_it_is() -> None:
    seen = Seen()
    seen.store.put(KEYS.spec, dumps(SPEC))
    seen.outage.held(1, None)
    seen.store.lose()
    seen.outage.held(1, None)
    assert seen.knows() == (None, None), "its lease has gone with the data, and it has not found out"
    seen.outage.held(2, None)
    assert seen.knows() == (None, SPEC)


def test_who_started_before_an_emptied_etcd_was_told_again_does_not_go_by_a_run_of_its_own() -> None:
    """What it writes would be of another attempt than the others'."""
    seen = Seen(spec=replace(SPEC, run="cccccccc"))
    seen.store.put(KEYS.spec, dumps(SPEC))
    with pytest.raises(MachineError, match="Give the same command again"):
        seen.outage.looked(FIFTH, None, 1.0)


@pytest.mark.parametrize("known", [None, record(Phase.ENDED, number=6)])
def test_who_goes_on_after_an_end_that_a_backup_lacks_leaves(known: GenerationRecord | None) -> None:
    """It would not see that generation's end when it comes again: it takes it for the one that it has come after."""
    seen = Seen(spec=replace(SPEC, first_generation=Generation(7)))
    seen.store.put(KEYS.spec, dumps(seen.outage._spec))
    seen.outage.held(1, known)
    seen.store.put(KEYS.spec, dumps(SPEC))
    with pytest.raises(MachineError, match="an older backup, from a run of this job that was over"):
        seen.outage.held(2, known)


def test_what_was_said_is_said_again_once_etcd_knows_again() -> None:
    """Generations may be counted anew: what was said may have been for another one of the same number."""
    seen, gathers = Seen(), record(Phase.GATHER, number=6)
    seen.outage.held(1, FIFTH)
    seen.outage.looked(FIFTH, gathers, 1.0)
    assert not seen.outage.held(1, gathers)
    seen.outage.looked(replace(gathers, opened_s=9.0), gathers, 2.0)
    assert [seen.outage.held(1, gathers) for _ in range(2)] == [True, False]


def test_a_full_disk_is_named_and_that_the_training_is_through_is_told_once() -> None:
    seen = Seen(group(5))
    seen.full = "the disk of /run/etcd is full (0.1 MB are left): make room there"
    for now_s in (1.0, 2.0):
        seen.outage.lasts(StoreUnavailable("no answer"), now_s)
    seen.node.board.pages[0].phase = RankPhase.FINISHED
    for now_s in (3.0, 4.0):
        seen.outage.lasts(StoreUnavailable("no answer"), now_s)
    seen.outage.over(5.0)
    full = f"etcd does not answer, and {seen.full}"
    assert seen.said == [
        f"{full}; training continues, but no dead or hung rank is restarted until etcd is back",
        f"{full}; the training has reached its end, and the job ends once etcd is back",
        "etcd answers again, after 4.00 s",
    ]
    assert seen.mended == 4
