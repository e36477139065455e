from collections.abc import Sequence

import pytest

from mt_resilient.resilience.errors import InternalError, StoreUnavailable
from mt_resilient.resilience.store.election import Election
from mt_resilient.resilience.store.memory import MemoryStore
from mt_resilient.resilience.store.protocol import Compare, Operation, Put


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(lambda: 0.0)


def test_the_first_to_campaign_leads_and_keeps_its_token(store: MemoryStore) -> None:
    first, second = Election(store, "/leader", "node-a"), Election(store, "/leader", "node-b")
    lease_a, lease_b = store.grant(3), store.grant(3)
    assert first.leader() is None
    token = first.campaign(lease_a)
    assert token is not None
    assert second.campaign(lease_b) is None
    assert first.campaign(lease_a) == token
    assert second.leader() == "node-a"


def test_a_deposed_leader_learns_of_it_and_its_guarded_writes_are_refused(store: MemoryStore) -> None:
    first, second = Election(store, "/leader", "node-a"), Election(store, "/leader", "node-b")
    lease_a, lease_b = store.grant(3), store.grant(3)
    token_a = first.campaign(lease_a)
    assert store.transact([first.guard()], [Put("/generation", b"1")])
    store.revoke(lease_a)
    token_b = second.campaign(lease_b)
    assert token_a is not None
    assert token_b is not None
    assert token_b > token_a
    assert not store.transact([first.guard()], [Put("/generation", b"2")])
    assert first.campaign(lease_a) is None
    assert not store.transact([first.guard()], [Put("/generation", b"2")])
    first.resign()
    assert second.campaign(lease_b) == token_b


def test_resigning_lets_the_next_one_lead_at_once(store: MemoryStore) -> None:
    first, second = Election(store, "/leader", "node-a"), Election(store, "/leader", "node-b")
    lease_b = store.grant(3)
    first.resign()  # nothing to give up
    first.campaign(store.grant(3))
    first.resign()
    assert second.campaign(lease_b) is not None


def test_an_earlier_life_with_the_same_name_is_somebody_else(store: MemoryStore) -> None:
    Election(store, "/leader", "node-a").campaign(store.grant(3))
    assert Election(store, "/leader", "node-a").campaign(store.grant(3)) is None


def test_without_a_lease_nobody_is_elected(store: MemoryStore) -> None:
    assert Election(store, "/leader", "node-a").campaign(lease=99) is None


def test_writing_as_the_controller_without_having_been_elected_is_our_error(store: MemoryStore) -> None:
    with pytest.raises(InternalError, match="node-a"):
        Election(store, "/leader", "node-a").guard()


class LosesAnswers(MemoryStore):
    """Makes each transaction, and says that it does not know."""

    def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> bool:
        super().transact(compares, operations)
        raise StoreUnavailable("no answer")


def test_a_campaign_whose_answer_was_lost_is_won_on_the_next_tick() -> None:
    store = LosesAnswers(lambda: 0.0)
    election, lease = Election(store, "/leader", "node-a"), store.grant(3)
    with pytest.raises(StoreUnavailable):
        election.campaign(lease)
    assert election.campaign(lease) is not None
