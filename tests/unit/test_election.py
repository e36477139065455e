"""Which agent leads the job, and which writes the store refuses."""

from collections.abc import Sequence

import pytest

from mt_resilient.resilience.errors import InternalError, StoreUnavailable
from mt_resilient.resilience.store.election import Election
from mt_resilient.resilience.store.protocol import Compare, Operation, Put

from ..memory_store import MemoryStore


def election(store: MemoryStore, agent: str = "a") -> Election:
    return Election(store, "/leader", agent)


def test_the_first_agent_that_campaigns_leads_and_keeps_its_token() -> None:
    store = MemoryStore(lambda: 0.0)
    first, second, lease = election(store), election(store, "b"), store.grant(3)
    token = first.campaign(lease)
    assert token is not None
    assert second.campaign(store.grant(3)) is None
    assert first.campaign(lease) == token


def test_the_store_refuses_the_writes_of_a_deposed_leader() -> None:
    store = MemoryStore(lambda: 0.0)
    first, second, lease = election(store), election(store, "b"), store.grant(3)
    token = first.campaign(lease)
    assert store.transact([first.guard()], [Put("/generation", b"1")])
    store.revoke(lease)
    later = second.campaign(store.grant(3))
    assert token is not None
    assert later is not None
    assert later > token
    for _ in range(2):
        assert not store.transact([first.guard()], [Put("/generation", b"2")])
        assert first.campaign(lease) is None


def test_an_earlier_agent_with_the_same_name_is_another_agent() -> None:
    store = MemoryStore(lambda: 0.0)
    election(store).campaign(store.grant(3))
    assert election(store).campaign(store.grant(3)) is None


def test_an_agent_without_a_lease_is_not_elected() -> None:
    assert election(MemoryStore(lambda: 0.0)).campaign(lease=99) is None


def test_an_agent_that_was_never_elected_has_no_guard() -> None:
    with pytest.raises(InternalError, match="node-a"):
        election(MemoryStore(lambda: 0.0), "node-a").guard()


class LosesAnswers(MemoryStore):
    """Makes each transaction, and says that it does not know."""

    def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> bool:
        super().transact(compares, operations)
        raise StoreUnavailable("no answer")


def test_a_campaign_whose_answer_was_lost_is_won_at_the_next_tick() -> None:
    store = LosesAnswers(lambda: 0.0)
    candidate, lease = election(store), store.grant(3)
    with pytest.raises(StoreUnavailable):
        candidate.campaign(lease)
    assert candidate.campaign(lease) is not None
