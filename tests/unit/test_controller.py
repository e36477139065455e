"""One tick: read the whole World, decide, write under the fencing token. Over a real MemoryStore."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from mt_resilient.resilience.controller import Controller
from mt_resilient.resilience.decide.policy import Policy
from mt_resilient.resilience.errors import InternalError, StoreUnavailable
from mt_resilient.resilience.model.generation import Decision, GenerationRecord
from mt_resilient.resilience.model.incident import Incident
from mt_resilient.resilience.model.node import AckKind, Spec
from mt_resilient.resilience.model.request import Request
from mt_resilient.resilience.model.signals import Complaint
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import Generation
from mt_resilient.resilience.store.codec import dumps, loads
from mt_resilient.resilience.store.election import Election
from mt_resilient.resilience.store.keys import Keys
from mt_resilient.resilience.store.parsed_cache import Values
from mt_resilient.resilience.store.protocol import Compare, Listing, Operation
from mt_resilient.resilience.store.state_reader import world_of

from ..memory_store import MemoryStore
from .worlds import NOW, A, B, ack, gone, node, record, status

KEYS = Keys("job")


class Scene:
    """A store with a job in it, and controllers that could lead it."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        self.store = store or MemoryStore(lambda: NOW)
        self.told: list[tuple[str, Decision]] = []
        self.say(
            spec=Spec(command=("torchrun", "train.py")), node=node(), status=status(memory_steps=(9,), max_step=10)
        )

    def say(self, generation: int = 1, **what: Any) -> None:
        """Put records where agents and people put them."""
        keys = {
            "spec": KEYS.spec,
            "node": KEYS.node(A),
            "status": KEYS.status(A),
            "ack": KEYS.ack(Generation(generation), A),
            "record": KEYS.generation,
            "request": KEYS.request("stop-a"),
        }
        for name, value in what.items():
            self.store.put(keys[name], dumps(value))

    def controller(self, identity: str, lease_s: float = 0.0) -> tuple[Controller, int]:
        election = Election(self.store, KEYS.leader, identity)
        told = lambda decision: self.told.append((identity, decision))  # noqa: E731
        return Controller(self.store, KEYS, election, Policy(lease_s=lease_s), told), self.store.grant(10)

    def record(self) -> GenerationRecord:
        entry = self.store.get(KEYS.generation)
        assert entry
        return loads(GenerationRecord, entry.value)

    def incidents(self) -> list[Incident]:
        return [loads(Incident, entry.value) for entry in self.store.range(KEYS.incidents).values()]


def test_it_writes_what_is_decided_and_says_so() -> None:
    scene = Scene()
    controller, lease = scene.controller("one")
    assert controller.tick(lease, NOW)
    assert scene.record().phase is Phase.GATHER
    ((_, decision),) = scene.told
    assert decision.record == scene.record()


class Unanswering(MemoryStore):
    """Makes the first transaction, or loses it, and does not answer."""

    loses = silent = False

    def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> bool:
        if not self.silent:
            return super().transact(compares, operations)
        self.silent = False
        if not self.loses:
            super().transact(compares, operations)
        raise StoreUnavailable("no answer")


@pytest.mark.parametrize("loses", [False, True])
def test_a_decision_without_an_answer_is_told_once_and_only_if_it_was_made(loses: bool) -> None:
    store = Unanswering(lambda: NOW)
    store.loses = loses
    scene = Scene(store)
    controller, lease = scene.controller("one")
    controller.tick(lease, NOW)  # it leads, and has begun to gather
    scene.told.clear()
    scene.say(record=record(), ack=ack(AckKind.RUNNING), status=status(exits=(gone(),)))
    store.silent = True
    with pytest.raises(StoreUnavailable):
        controller.tick(lease, NOW)
    assert not scene.told
    assert controller.tick(lease, NOW) is loses
    controller.tick(lease, NOW)
    ((_, decision),) = scene.told
    assert decision.incidents == tuple(scene.incidents())


def test_incidents_are_in_order_after_number_9999() -> None:
    incidents = {
        number: Incident(id=f"{number:04d}", generation=Generation(1), cause="exit", rung=2, summary="")
        for number in (9999, 10000)
    }
    values = Values({KEYS.incident(each.id): dumps(each) for each in incidents.values()})
    assert world_of(KEYS, values).incidents == (incidents[9999], incidents[10000])


def test_a_second_tick_without_change_writes_nothing() -> None:
    scene = Scene()
    controller, lease = scene.controller("one")
    scene.say(record=record(), ack=ack(AckKind.RUNNING), status=status(exits=(gone(),)))
    assert controller.tick(lease, NOW)
    before = scene.store.range("")
    assert not controller.tick(lease, NOW + 1)
    assert scene.store.range("") == before
    assert len(scene.told) == 1


def test_what_was_heard_ahead_counts_at_the_next_tick() -> None:
    scene = Scene()
    (first, lease), (second, _) = scene.controller("one"), scene.controller("two")
    assert not first.hear(NOW)
    assert first.tick(lease, NOW)
    first.hear(NOW)
    scene.say(ack=ack(AckKind.READY))
    assert first.hear(NOW)
    assert not first.hear(NOW)
    assert not second.hear(NOW), "who does not lead looks at nothing"
    assert scene.record().phase is Phase.GATHER
    assert first.tick(lease, NOW)
    assert scene.record().phase is Phase.LAUNCH


def test_how_long_a_node_is_silent_is_measured_by_the_clock_of_who_leads() -> None:
    """The lease of `b` is over. What `a` has said before this one led is as old as `a` says; from then on its clock is not asked."""
    scene = Scene()
    lost = replace(status(max_step=5), at_s=NOW - 9.0)
    scene.store.put(KEYS.status(B), dumps(lost))
    scene.say(spec=Spec(command=("torchrun",), sizes=(2,), spares=1), status=lost)
    controller, lease = scene.controller("one", lease_s=10.0)
    controller.tick(lease, NOW)
    scene.say(record=record(members=("a", "b")))
    controller.tick(lease, NOW)
    assert scene.record().number == 1
    assert [each.cause for each in scene.incidents()] == ["cut_off"]
    scene.say(status=replace(lost, often_s=1.0))
    assert controller.hear(NOW + 5.0)
    controller.tick(lease, NOW + 9.0)
    assert scene.record().number == 2


@pytest.mark.parametrize(("lease_s", "wait_s"), [(2.0, 3.0), (10.0, 10.0)])
def test_who_has_lost_its_lease_gives_the_others_time_to_be_back(lease_s: float, wait_s: float) -> None:
    """Who has not found out yet takes its own for alive."""
    scene = Scene()
    scene.say(spec=Spec(command=("torchrun",), sizes=(2,)), record=record(members=("a", "b")), node=node())
    scene.store.put(KEYS.node(B), dumps(node("b")))
    controller, lease = scene.controller("one", lease_s)
    controller.tick(lease, NOW)
    scene.store.revoke(lease)
    scene.store.delete(KEYS.node(B))
    lease = scene.store.grant(10)
    controller.tick(lease, NOW + 1.0)
    assert not controller.tick(lease, NOW + 1.0 + wait_s - 0.1)
    assert controller.tick(lease, NOW + 1.0 + wait_s)


def test_record_and_incident_are_written_in_one_revision() -> None:
    scene = Scene()
    controller, lease = scene.controller("one")
    scene.say(record=record(), status=status(max_step=10, exits=(gone(),)))
    assert controller.tick(lease, NOW)
    entries = scene.store.range(KEYS.root)
    assert entries[KEYS.generation].mod_revision == entries[KEYS.incident("0001")].mod_revision


def test_who_does_not_lead_writes_nothing() -> None:
    scene = Scene()
    (first, lease), (second, other) = scene.controller("one"), scene.controller("two")
    assert first.tick(lease, NOW)
    scene.say(ack=ack(AckKind.READY))
    assert not second.tick(other, NOW)
    assert scene.record().phase is Phase.GATHER
    assert [who for who, _ in scene.told] == ["one"]


class Interrupted(MemoryStore):
    """Calls `between` once, before the next decision is written: what happens between a controller's read and its write."""

    def __init__(self) -> None:
        super().__init__(lambda: NOW)
        self.between = lambda: None

    def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> bool:
        if len(compares) > 1:  # no campaign
            between, self.between = self.between, lambda: None
            between()
        return super().transact(compares, operations)


def test_a_record_that_changed_meanwhile_is_not_overwritten() -> None:
    store = Interrupted()
    scene = Scene(store)
    controller, lease = scene.controller("one")
    scene.say(record=record(Phase.GATHER), ack=ack(AckKind.READY))
    theirs = replace(record(Phase.GATHER), reason="written by somebody else")
    store.between = lambda: scene.say(record=theirs)
    assert not controller.tick(lease, NOW)
    assert scene.record() == theirs
    assert scene.told == []
    assert controller.tick(lease, NOW)  # the next tick starts from what is there
    assert (scene.record().phase, scene.record().reason) == (Phase.LAUNCH, theirs.reason)


def test_a_first_record_that_somebody_else_wrote_is_not_overwritten() -> None:
    store = Interrupted()
    scene = Scene(store)
    controller, lease = scene.controller("one")
    store.between = lambda: scene.say(record=record(number=7))
    assert not controller.tick(lease, NOW)
    assert scene.record().number == 7


def test_a_leader_deposed_between_reading_and_writing_is_refused() -> None:
    store = Interrupted()
    scene = Scene(store)
    (old, lease), (new, other) = scene.controller("old"), scene.controller("new")
    scene.say(record=record(), status=status(max_step=10, exits=(gone(),)))

    def depose() -> None:
        store.revoke(lease)
        assert new.tick(other, NOW)

    store.between = depose
    assert not old.tick(lease, NOW)
    assert [who for who, _ in scene.told] == ["new"]
    assert (scene.record().number, len(scene.incidents())) == (2, 1)


def test_the_fence_holds_though_the_record_has_not_changed() -> None:
    store = Interrupted()
    scene = Scene(store)
    (old, lease), (_, other) = scene.controller("old"), scene.controller("new")
    successor = Election(store, KEYS.leader, "new")
    scene.say(record=record(Phase.GATHER), ack=ack(AckKind.READY))

    def depose() -> None:
        store.revoke(lease)
        assert successor.campaign(other) is not None

    store.between = depose
    assert not old.tick(lease, NOW)
    assert scene.record().phase is Phase.GATHER


NEXT = [
    (Phase.GATHER, {"ack": ack(AckKind.READY, port=29500)}, Phase.LAUNCH),
    (Phase.LAUNCH, {"ack": ack(AckKind.RUNNING)}, Phase.RUN),
    (Phase.RUN, {"status": status(finished=True)}, Phase.ENDING),
    (Phase.RUN, {"request": Request(kind="stop", exit_code=130, by="SIGTERM")}, Phase.ENDING),
    (Phase.RUN, {"status": status(max_step=10, exits=(gone(),))}, Phase.GATHER),
    (Phase.ENDING, {"ack": ack(AckKind.ENDED)}, Phase.ENDED),
]


@pytest.mark.parametrize(("phase", "news", "then"), NEXT)
def test_a_new_leader_goes_on_in_the_middle_of_each_phase(phase: Phase, news: dict[str, Any], then: Phase) -> None:
    scene = Scene()
    (old, lease), (new, other) = scene.controller("old"), scene.controller("new")
    scene.say(record=record(phase), ack=ack(AckKind.RUNNING if phase is Phase.RUN else AckKind.READY))
    if phase is not Phase.GATHER:
        assert not old.tick(lease, NOW)  # it leads, and finds nothing to do
    else:
        scene.store.delete(KEYS.ack(Generation(1), A))
        assert not old.tick(lease, NOW)
    scene.store.revoke(lease)
    scene.say(**news)
    assert new.tick(other, NOW)
    assert scene.record().phase is then
    assert not old.tick(lease, NOW)
    assert not new.tick(other, NOW)


def test_the_store_s_silence_is_the_caller_s_to_hear() -> None:
    class Silent(MemoryStore):
        def listing(self, prefix: str) -> Listing:
            raise StoreUnavailable("no answer")

    controller, lease = Scene(Silent(lambda: NOW)).controller("one")
    with pytest.raises(StoreUnavailable):
        controller.tick(lease, NOW)


def test_a_record_that_cannot_be_read_is_our_error_and_not_a_new_beginning() -> None:
    scene = Scene()
    controller, lease = scene.controller("one")
    scene.store.put(KEYS.generation, b"{}")
    with pytest.raises(InternalError, match="GenerationRecord"):
        controller.tick(lease, NOW)


def test_of_many_members_only_the_first_ask_for_a_vacant_leadership_at_once() -> None:
    scene = Scene()
    scene.say(spec=Spec(command=("torchrun",), sizes=(30,)))
    scene.say(record=record(members=tuple(f"n{number:02d}" for number in range(30))))
    (first, lease), (last, other) = scene.controller("agent-n05"), scene.controller("agent-n25")
    assert not last.tick(other, NOW)
    assert scene.store.get(KEYS.leader) is None
    assert not last.tick(other, NOW + 0.9)
    first.tick(lease, NOW + 0.9)
    assert (found := scene.store.get(KEYS.leader)) is not None
    assert found.value == b"agent-n05"
    assert not last.tick(other, NOW + 2)
    scene.store.revoke(lease)
    last.tick(other, NOW + 5)
    assert scene.store.get(KEYS.leader) is None
    last.tick(other, NOW + 6)
    assert scene.store.get(KEYS.leader) is not None


def test_more_than_one_transaction_holds_is_written_in_parts_and_the_record_last() -> None:
    scene = Scene()
    controller, lease = scene.controller("one")
    sick = tuple(Complaint(device=f"gpu {n}", words="ecc", at_s=NOW, step=1) for n in range(120))
    scene.say(record=record(), ack=ack(AckKind.RUNNING), status=status(max_step=10, complaints=sick, exits=(gone(),)))
    for told, number in ((50, 1), (121, 2)):
        assert controller.tick(lease, NOW)
        assert (len(scene.incidents()), scene.record().number) == (told, number)
    assert len({i.signature for i in scene.incidents()}) == 121
    assert not controller.tick(lease, NOW)


def test_a_leader_that_cannot_judge_does_not_count_as_one() -> None:
    scene = Scene()
    controller, lease = scene.controller("one")
    controller.tick(lease, NOW)
    scene.store.put(KEYS.request("1"), b"garbage")
    with pytest.raises(InternalError):
        controller.tick(lease, NOW)
    controller.forget()
    assert controller.world is None
    scene.store.delete(KEYS.request("1"))
    controller.tick(lease, NOW)
    assert controller.world is not None
