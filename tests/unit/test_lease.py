"""The agent is known to the others whatever becomes of the writes that say so."""

from contextlib import suppress

import pytest

from mt_resilient.agent.peers.lease import Heartbeat
from mt_resilient.resilience.errors import StoreUnavailable, UsageError
from mt_resilient.resilience.model.node import Death, NodeRecord
from mt_resilient.resilience.model.types import NodeId
from mt_resilient.resilience.store.codec import dumps, loads
from mt_resilient.resilience.store.keys import Keys
from mt_resilient.resilience.store.memory import MemoryStore
from mt_resilient.resilience.store.seat import Seat

from ..scenarios.etcd import NEVER, Client, Etcd

KEYS, NODE, TTL_S = Keys("job"), NodeId("a"), 10


@pytest.mark.parametrize("made_after_s", [0.0, NEVER, 1.0, 5.0])
def test_a_registration_that_gets_no_answer_is_made_again(made_after_s: float) -> None:
    now_s = 100.0
    etcd = Etcd(MemoryStore(lambda: now_s), KEYS, lambda write: None)
    etcd.unanswered.append(made_after_s)
    store = Client(etcd, "life-1", lambda: now_s, lambda: False)
    heartbeat = Heartbeat(Seat(store, KEYS, NODE), NodeRecord(instance="life-1", host="a", pid=4, ranks=2), TTL_S)  # type: ignore[arg-type]
    for _ in range(4 * TTL_S):
        etcd.settle(now_s)
        with suppress(StoreUnavailable):
            heartbeat.beat(now_s)
        now_s += 1.0
    entry = etcd.inner.get(KEYS.node(NODE))
    assert entry is not None
    assert entry.lease == heartbeat.lease


@pytest.mark.parametrize("late", [False, True])
def test_a_record_of_a_life_before_that_comes_to_pass_late_does_not_stay(late: bool) -> None:
    now_s = 100.0
    store = MemoryStore(lambda: now_s)
    heartbeat = Heartbeat(Seat(store, KEYS, NODE), NodeRecord(instance="life-2", host="a", pid=4, ranks=2), TTL_S)
    heartbeat.beat(now_s)
    if late:
        life_1 = NodeRecord(instance="life-1", host="a", pid=3, ranks=2)
        store.put(KEYS.node(NODE), dumps(life_1), store.grant(TTL_S))
    mine = heartbeat.lease
    heartbeat.confirm()
    heartbeat.beat(now_s)
    entry = store.get(KEYS.node(NODE))
    assert entry is not None
    assert entry.lease == heartbeat.lease
    assert (heartbeat.lease == mine) is not late


class Clock:
    """A store, and its time."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.store = MemoryStore(lambda: self.now_s)

    def there(self) -> NodeRecord:
        entry = self.store.get(KEYS.node(NODE))
        assert entry is not None
        return loads(NodeRecord, entry.value)


def heartbeat(etcd: Clock, home: str) -> Heartbeat:
    return Heartbeat(
        Seat(etcd.store, KEYS, NODE), NodeRecord(instance=home, host=home, pid=4, ranks=2, home=home), TTL_S
    )


def together(etcd: Clock, *beating: Heartbeat) -> None:
    """For two lives of a lease."""
    for _ in range(2 * TTL_S):
        for each in beating:
            try:
                each.beat(etcd.now_s)
            except StoreUnavailable:
                each.lost()
        etcd.now_s += 1.0


def test_of_two_machines_that_go_by_one_name_the_second_leaves() -> None:
    """Started together, neither has seen the other; or the first was cut off, and replaced by another machine of its name."""
    etcd = Clock()
    one, two = (heartbeat(etcd, home) for home in ("this", "that"))
    one.beat(etcd.now_s)
    with pytest.raises(UsageError, match="an agent on this has the same name, a; this agent ends its ranks and exits"):
        together(etcd, two, one)
    etcd.now_s += 2 * TTL_S
    two.beat(etcd.now_s)
    with pytest.raises(UsageError, match="an agent on that has the same name, a"):
        together(etcd, one, two)
    assert etcd.there().instance == "that"


def test_what_an_etcd_has_from_a_backup_of_another_machine_of_this_name_runs_out() -> None:
    """It keeps leases, and they begin to live anew."""
    etcd = Clock()
    mine = heartbeat(etcd, "this")
    heartbeat(etcd, "before").beat(etcd.now_s)
    together(etcd, mine)
    assert etcd.there().instance == "this"


def test_a_record_without_a_lease_is_written_over() -> None:
    """Somebody has copied etcd's data to another one."""
    etcd = Clock()
    etcd.store.put(KEYS.node(NODE), dumps(NodeRecord(instance="copied", host="a", pid=4, ranks=2, home="this")))
    heartbeat(etcd, "this").beat(etcd.now_s)
    assert etcd.there().instance == "this"


def test_who_registers_is_not_dead() -> None:
    """A neighbour was misled: its connection was reset, and the next one refused, by something in between."""
    store = MemoryStore(lambda: 100.0)
    heartbeat = Heartbeat(Seat(store, KEYS, NODE), NodeRecord(instance="life-1", host="a", pid=4, ranks=2), TTL_S)
    store.put(KEYS.death("life-1"), dumps(Death(at_s=99.0)), store.grant(TTL_S))
    heartbeat.beat(100.0)
    assert store.get(KEYS.death("life-1")) is None
