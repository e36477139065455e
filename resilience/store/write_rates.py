"""How often each agent talks to the store, by the job's number of nodes, so that one etcd can serve them all. Pure; the table is the rule.

One etcd does 3,000 to 5,000 operations a second before watchers lag by seconds (measured on two cores, with 120 µs of etcd's time a
keepalive and 190 to 340 µs a put). A lag of seconds looks like the death of many nodes. So keepalives and statuses together stay below
3,500 a second:

    nodes      keepalive   status     operations a second, at most
      300        1 s         1 s         632
    1,000        1.6 s       4 s         921
    7,500        3 s        10 s       3,421
   11,000        5 s        10 s       3,474
   24,000       10 s        30 s       3,368   more nodes need relays, or several etcds

A lease lasts for three keepalives. An agent reports news immediately, whatever the table says.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Pace:
    lease_ttl_s: int
    """Seconds for which an agent may be silent before the others treat its node as lost."""
    keepalive_s: float
    status_s: float
    """The most seconds between two statuses of a node without news."""

    def operations_per_s(self, nodes: int) -> float:
        """Return the operations per second of `nodes` agents without news."""
        return (nodes / self.keepalive_s + nodes / self.status_s) / jittered(1.0, 0.5)


_TABLE = (
    (300, Pace(lease_ttl_s=3, keepalive_s=1.0, status_s=1.0)),
    (1_000, Pace(lease_ttl_s=5, keepalive_s=1.6, status_s=4.0)),
    (7_500, Pace(lease_ttl_s=10, keepalive_s=3.0, status_s=10.0)),
    (11_000, Pace(lease_ttl_s=15, keepalive_s=5.0, status_s=10.0)),
)
_BEYOND = Pace(lease_ttl_s=30, keepalive_s=10.0, status_s=30.0)

MOST_PER_S = 3_500
"""The most operations a second that all agents together make on one etcd."""
_AT_ONCE = 20
"""Number of agents that campaign at the same time when there is no leader, with two operations each."""


def pace(nodes: int) -> Pace:
    """Return the pace of a job with this number of nodes, spares included."""
    return next((found for most, found in _TABLE if nodes <= most), _BEYOND)


def paced(nodes: int, lease_ttl_s: int) -> Pace:
    """Return the pace for this lease lifetime instead of the table's."""
    usual = pace(nodes)
    return Pace(lease_ttl_s=lease_ttl_s, keepalive_s=lease_ttl_s / 3, status_s=min(usual.status_s, lease_ttl_s))


def jittered(period_s: float, share: float) -> float:
    """Return the period, shortened by up to a tenth. share: a new random number in [0, 1) each time. With equal periods, agents that one
    command started, or that waited for the same pause of etcd, would all talk at the same moments."""
    return period_s * (1.0 - 0.1 * share)


def campaign_after_s(place: int) -> float:
    """Return how many seconds an agent waits before it campaigns when there is no leader. place: its index among the members, from 0. If
    thousands campaigned at the same time, no agent would be elected for seconds."""
    return float(place // _AT_ONCE)
