"""How often agents speak with the store."""

from contextlib import nullcontext
from itertools import pairwise

import pytest

from mt_resilient.agent.config import AgentPolicy
from mt_resilient.resilience.errors import UsageError
from mt_resilient.resilience.store import write_rates


@pytest.mark.parametrize("nodes", [1, 100, 300, 301, 1_000, 1_001, 5_000, 7_500, 7_501, 10_000, 11_000, 11_001, 24_000])
def test_one_etcd_carries_them(nodes: int) -> None:
    assert write_rates.pace(nodes).operations_per_s(nodes) <= write_rates.MOST_PER_S


@pytest.mark.parametrize("nodes", [1, 300, 1_000, 7_500, 11_000, 50_000])
def test_a_lease_outlives_two_keepalives_that_are_lost(nodes: int) -> None:
    pace = write_rates.pace(nodes)
    assert 2.9 * pace.keepalive_s <= pace.lease_ttl_s


def test_the_more_there_are_the_less_each_says() -> None:
    paces = [write_rates.pace(nodes) for nodes in (1, 301, 1_001, 7_501, 11_001)]
    for few, many in pairwise(paces):
        assert (few.lease_ttl_s, few.keepalive_s) < (many.lease_ttl_s, many.keepalive_s)
        assert few.status_s <= many.status_s


def test_the_paces_that_were_measured() -> None:
    few, many = write_rates.pace(8), write_rates.pace(1_500)
    assert (few.lease_ttl_s, few.keepalive_s, few.status_s) == (3, 1.0, 1.0)
    assert (many.lease_ttl_s, many.keepalive_s, many.status_s) == (10, 3.0, 10.0)


def test_jitter_only_shortens() -> None:
    assert write_rates.jittered(3.0, 0.0) == 3.0
    assert 2.7 < write_rates.jittered(3.0, 0.999) < 3.0


def test_a_vacant_leadership_is_asked_for_by_few_at_a_time() -> None:
    assert [write_rates.campaign_after_s(place) for place in (0, 19, 20, 39, 10_000)] == [0, 0, 1, 1, 500]


@pytest.mark.parametrize(
    ("nodes", "lease_ttl_s", "bearable"), [(10_000, 3, False), (10_000, 15, True), (10_000, 0, True), (800, 3, True)]
)
def test_a_lease_that_is_too_short_for_so_many_nodes_is_refused(nodes: int, lease_ttl_s: int, bearable: bool) -> None:
    with nullcontext() if bearable else pytest.raises(UsageError, match="nodes would ask 14035 operations a second"):
        AgentPolicy(lease_ttl_s=lease_ttl_s).bearable(nodes)
