"""The agent is known to the others whatever becomes of the writes that say so."""

from contextlib import suppress

import pytest

from mt_resilient.agent.heartbeat import Heartbeat
from mt_resilient.resilience.errors import StoreUnavailable
from mt_resilient.resilience.keys import Keys
from mt_resilient.resilience.memory_store import MemoryStore
from mt_resilient.resilience.reports import NodeRecord
from mt_resilient.resilience.terms import NodeId

from ..scenarios.etcd import NEVER, Client, Etcd

KEYS, NODE, TTL_S = Keys("job"), NodeId("a"), 10


@pytest.mark.parametrize("made_after_s", [0.0, NEVER, 1.0, 5.0])
def test_a_registration_that_gets_no_answer_is_made_again(made_after_s: float) -> None:
    now_s = 100.0
    etcd = Etcd(MemoryStore(lambda: now_s), KEYS, lambda write: None)
    etcd.unanswered.append(made_after_s)
    store = Client(etcd, "life-1", lambda: now_s, lambda: False)
    heartbeat = Heartbeat(store, KEYS, NODE, NodeRecord(instance="life-1", host="a", pid=4, ranks=2), TTL_S)  # type: ignore[arg-type]
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
    heartbeat = Heartbeat(store, KEYS, NODE, NodeRecord(instance="life-2", host="a", pid=4, ranks=2), TTL_S)
    heartbeat.beat(now_s)
    if late:
        store.put(KEYS.node(NODE), b"life-1's", store.grant(TTL_S))
    mine = heartbeat.lease
    heartbeat.confirm()
    heartbeat.beat(now_s)
    entry = store.get(KEYS.node(NODE))
    assert entry is not None
    assert entry.lease == heartbeat.lease
    assert (heartbeat.lease == mine) is not late
