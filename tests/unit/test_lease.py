"""An agent stays registered although etcd answers late, not at all, or restores old data."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from mt_resilient.agent.peers.lease import Heartbeat
from mt_resilient.resilience.errors import StoreUnavailable, UsageError
from mt_resilient.resilience.model.node import Death, NodeRecord
from mt_resilient.resilience.model.types import NodeId
from mt_resilient.resilience.store.codec import dumps, loads
from mt_resilient.resilience.store.keys import Keys
from mt_resilient.resilience.store.protocol import Entry
from mt_resilient.resilience.store.seat import Seat

from ..memory_store import MemoryStore
from ..scenarios.etcd import NEVER, Client, Etcd

KEYS, NODE, TTL_S = Keys("job"), NodeId("a"), 10


class Clock:
    """A store, and its time."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.store = MemoryStore(lambda: self.now_s)

    def there(self) -> Entry:
        """Return the node's record in the store."""
        entry = self.store.get(KEYS.node(NODE))
        assert entry is not None
        return entry

    @property
    def registered(self) -> str:
        return loads(NodeRecord, self.there().value).instance


def record(instance: str) -> NodeRecord:
    return NodeRecord(instance=instance, host=instance, pid=4, ranks=2, home=instance)


def heartbeat(store: Any, instance: str, home: str | None = None) -> Heartbeat:
    return Heartbeat(Seat(store, KEYS, NODE), replace(record(instance), home=home or instance), TTL_S)


def together(etcd: Clock, *beating: Heartbeat) -> None:
    """For two lives of a lease."""
    for _ in range(2 * TTL_S):
        for each in beating:
            try:
                each.beat(etcd.now_s)
            except StoreUnavailable:
                each.lost()
        etcd.now_s += 1.0


@pytest.mark.parametrize("made_after_s", [0.0, NEVER, 1.0, 5.0])
def test_a_registration_without_an_answer_is_repeated(made_after_s: float) -> None:
    clock = Clock()
    etcd = Etcd(clock.store, KEYS, lambda write: None)
    etcd.unanswered.append(made_after_s)
    mine = heartbeat(Client(etcd, "one", lambda: clock.now_s, lambda: False), "one")
    for _ in range(4 * TTL_S):
        etcd.settle(clock.now_s)
        with suppress(StoreUnavailable):
            mine.beat(clock.now_s)
        clock.now_s += 1.0
    assert clock.there().lease == mine.lease


@pytest.mark.parametrize("late", [False, True])
def test_a_late_write_of_an_earlier_agent_is_replaced(late: bool) -> None:
    clock = Clock()
    mine = heartbeat(clock.store, "two", "here")
    mine.beat(clock.now_s)
    if late:
        clock.store.put(KEYS.node(NODE), dumps(replace(record("one"), home="here")), clock.store.grant(TTL_S))
    before = mine.lease
    mine.confirm()
    mine.beat(clock.now_s)
    assert clock.there().lease == mine.lease
    assert (mine.lease == before) is not late


def test_of_two_machines_with_one_name_the_second_exits() -> None:
    """Both start at once and do not see each other, or the first was cut off, and another machine with its name has replaced it."""
    etcd = Clock()
    one, two = (heartbeat(etcd.store, home) for home in ("this", "that"))
    one.beat(etcd.now_s)
    with pytest.raises(UsageError, match="an agent on this has the same name, a; this agent ends its ranks and exits"):
        together(etcd, two, one)
    etcd.now_s += 2 * TTL_S
    two.beat(etcd.now_s)
    with pytest.raises(UsageError, match="an agent on that has the same name, a"):
        together(etcd, one, two)
    assert etcd.registered == "that"


def test_a_record_from_a_backup_of_etcd_expires_with_its_lease() -> None:
    """It is of another machine with this name. After the restore, leases begin anew."""
    etcd = Clock()
    heartbeat(etcd.store, "before").beat(etcd.now_s)
    together(etcd, heartbeat(etcd.store, "this"))
    assert etcd.registered == "this"


def test_a_record_without_a_lease_is_replaced() -> None:
    """It is in a copy of etcd's data."""
    etcd = Clock()
    etcd.store.put(KEYS.node(NODE), dumps(replace(record("copied"), home="this")))
    heartbeat(etcd.store, "this").beat(etcd.now_s)
    assert etcd.registered == "this"


def test_a_registration_deletes_the_report_that_the_agent_is_dead() -> None:
    """Its neighbour was misled: something between them reset the connection, and refused the next one."""
    etcd = Clock()
    etcd.store.put(KEYS.death("one"), dumps(Death(at_s=99.0)), etcd.store.grant(TTL_S))
    heartbeat(etcd.store, "one").beat(etcd.now_s)
    assert etcd.store.get(KEYS.death("one")) is None


def test_the_lease_lasts_while_the_agent_s_loop_waits_for_something_else() -> None:
    etcd = Clock()
    mine = heartbeat(etcd.store, "one")
    mine.beat(etcd.now_s)
    for _ in range(3 * TTL_S):
        etcd.now_s += 1.0
        mine.keep(etcd.now_s)
        assert etcd.there().lease == mine.lease
        assert mine.until_s > etcd.now_s


@pytest.mark.parametrize("silent", [False, True])
def test_while_the_loop_waits_the_agent_neither_registers_anew_nor_fails(
    silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unanswered(lease: int) -> float:
        raise StoreUnavailable("no answer")

    etcd = Clock()
    mine = heartbeat(etcd.store, "one")
    mine.keep(etcd.now_s)
    assert not mine.lease
    mine.beat(etcd.now_s)
    valid_s = mine.until_s
    etcd.now_s += 2 * TTL_S
    if silent:
        monkeypatch.setattr(etcd.store, "keepalive", unanswered)
    mine.keep(etcd.now_s)
    assert mine.until_s == valid_s
