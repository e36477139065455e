"""Measure the time from a fault to the controller's decision: a rank is killed, an agent is killed, a host loses its power.

    python benchmarks/detection.py [--faults N] [rank] [agent] [leader] [node]

Needs root. Four hosts and a spare are network namespaces (`chaos/live/network.py`), with three members of etcd and one rank each. Faults
strike one at a time in a job that continues. The measured time runs from the kill to the time in the record of the next generation. All
nodes share this machine's clock. The kinds of fault:

    rank     a rank on a node that does not lead
    agent    the agent of a node that does not lead
    leader   the agent that leads: its successor must be elected first
    node     a host is cut off, and all its processes are killed; this strikes one member after the other, the leader included

Predicted: 20 ms for a rank, 30 ms for an agent, 3 s for a node. Measured: docs/scaling.md, "How soon a fault is decided on".
"""

from __future__ import annotations

import itertools
import os
import signal
import time

from jobs import workplace
from measure import Result, arguments, count, median, report, say

from mt_resilient.resilience.model.types import NodeId
from mt_resilient.tests.nodes.hosts import Cluster, train

LEASE_S = 3.0
LIMITS = {
    "rank": (0.05, "<= 50 ms"),
    "agent": (0.1, "<= 100 ms, by the neighbour"),
    "leader": (0.1, "<= 100 ms, by the neighbour"),
    "node": (LEASE_S + 1.0, "<= lease + 1 s"),
}
"""Seconds, and the target in words, by kind of fault."""
OPTIONS = ("--spares", "1", "--durable-every", "20", "--set", "quarantine.faults=1000000")


def victim(job: Cluster, kind: str, turn: int) -> str:
    job.until(lambda: job.at_work() and NodeId(job.leader()) in job.there(), 60, "all are at work")
    members, leader = job.members(), job.leader()
    if kind == "node":
        return members[turn % len(members)]
    if kind == "leader":
        return leader
    others = [name for name in members if name != leader]
    return others[turn % len(others)]


def strike(job: Cluster, kind: str, name: str) -> float:
    """Cause one fault on this node. Return the seconds until the controller decided on the next generation."""
    world = job.world()
    assert world
    before = job.number()
    rank = next(s for n, s in world.status.items() if n == name).pids[0]
    agent = world.nodes[NodeId(name)].pid
    since_s = time.time()
    if kind == "node":
        job.net.off(name)
    else:
        os.kill(rank if kind == "rank" else agent, signal.SIGKILL)
    job.until(lambda: job.number() > before, 30, "the next generation")
    world = job.world()
    assert world
    assert world.record
    told = [each for each in world.incidents if each.generation == before]
    for each in told:  # the time when any agent first saw the fault
        say(f"    {each.cause}, seen after {1000 * (each.at_s - since_s):.0f} ms; {each.evidence[0]}")
    return world.record.opened_s - since_s


def mend(job: Cluster, kind: str, name: str) -> None:
    """Wait until all nodes train again, and a spare stands by."""
    if kind != "rank":
        job.net.kill(name)
        job.until(lambda: name not in job.members(), 30, "a spare takes the place")
        job.start(name)
        job.until(lambda: len(job.there()) == len(job.hosts), 60, "it is back")
    job.goes_on(10, 90)
    time.sleep(1.0)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("kinds", nargs="*", metavar="kind", help=f"kinds of fault (default: {' '.join(LIMITS)})")
    parser.add_argument("--faults", type=count, default=10, help="number of faults of each kind (default: 10)")
    options = parser.parse_args()
    kinds = options.kinds or [*LIMITS]
    if unknown := [kind for kind in kinds if kind not in LIMITS]:
        parser.error(f"there is no kind of fault {unknown[0]!r}; choose from {', '.join(LIMITS)}")
    seen_s: dict[str, list[float]] = {kind: [] for kind in kinds}
    with workplace() as place:
        job = Cluster(place, "4", *OPTIONS, hosts=5, script=train(1_000_000, 0.05))
        try:
            job.start()
            job.until_step(40)
            turn = itertools.count()
            for kind in kinds:
                for _ in range(options.faults):
                    name = victim(job, kind, next(turn))
                    seen_s[kind].append(strike(job, kind, name))
                    say(f"  {kind}, {name}: {1000 * seen_s[kind][-1]:.0f} ms; load {os.getloadavg()[0]:.1f}")
                    mend(job, kind, name)
            overlaps = job.overlaps()
        finally:
            job.close()
    rows = []
    for kind, times_s in seen_s.items():
        (limit_s, target), name = LIMITS[kind], f"{kind} dies, to the controller's decision"
        rows.append(Result(f"{name}, median", median(times_s), "s", limit=limit_s, target=target))
        rows.append(Result(f"{name}, longest of {len(times_s)}", max(times_s), "s"))
    rows.append(Result("two generations at once", len(overlaps), "times", limit=0, target="never"))
    report("detection", rows)


if __name__ == "__main__":
    main()
