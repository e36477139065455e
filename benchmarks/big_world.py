"""Measure one tick of the controller on a World of thousands of nodes: parse what has changed, then decide. The benchmark uses no etcd and
no network.

    python benchmarks/big_world.py [--nodes N] [--repeats N]

Each node has its record, a status of eight ranks, and an acknowledgement. The benchmark measures the processor time of the thread, for
these ticks:

* at rest, with the statuses that change in one second
* after all statuses have changed at once
* while the nodes gather: half of them are ready, and a twentieth of the acknowledgements is new
* when all nodes are ready, with all acknowledgements new at once; and again with all acknowledgements and all statuses new at once
* when an agent is lost
* when an agent becomes the leader: its first tick, which parses everything
* when all ranks raise exceptions at once

Predicted for 10,000 nodes: 25 ms at rest, 40 while gathering, 60 when all are ready, 0.5 s for the first look. Measured: docs/scaling.md,
"A tick alone".
"""

from __future__ import annotations

import time
from collections.abc import Callable

from crowd import KEYS, instance_of, name_of, status
from measure import Result, arguments, count, median, report, say

from mt_resilient.resilience.decide.decide import decide
from mt_resilient.resilience.decide.policy import Policy
from mt_resilient.resilience.model.generation import Decision, GenerationRecord
from mt_resilient.resilience.model.node import Ack, AckKind, NodeRecord, Spec
from mt_resilient.resilience.model.signals import RankExit
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import Generation, Rank
from mt_resilient.resilience.store.codec import dumps
from mt_resilient.resilience.store.parsed_cache import Values
from mt_resilient.resilience.store.state_reader import world_of

TARGET_S = 0.1


class Job:
    def __init__(self, nodes: int) -> None:
        self.nodes, self.now_s = nodes, time.time()
        self.values = Values()
        self.changed: dict[str, bytes | None] = {KEYS.spec: dumps(Spec(command=("train",), sizes=(nodes,)))}
        for number in range(nodes):
            name = name_of(number)
            known = NodeRecord(instance=instance_of(number), host=name, pid=4321, ranks=8)
            self.changed |= {KEYS.node(name): dumps(known), KEYS.status(name): dumps(status(1, nodes))}
        self.phase(1, Phase.RUN)
        self.ack(1, AckKind.RUNNING, 0, nodes)

    def phase(self, number: int, phase: Phase) -> None:
        self.number = number
        members = {name_of(n): instance_of(n) for n in range(self.nodes)}
        launched_s = 0.0 if phase is Phase.GATHER else self.now_s - 90
        record = GenerationRecord(
            number=Generation(number), phase=phase, members=members, opened_s=self.now_s - 100, launched_s=launched_s
        )
        self.changed[KEYS.generation] = dumps(record)

    def ack(self, generation: int, kind: AckKind, first: int, last: int) -> None:
        for number in range(first, last):
            said = Ack(
                kind=kind, generation=Generation(generation), instance=instance_of(number), at_s=self.now_s, port=29500
            )
            self.changed[KEYS.ack(Generation(generation), name_of(number))] = dumps(said)

    def say_how_they_are(self, count: int) -> None:
        for number in range(count):
            self.changed[KEYS.status(name_of(number))] = dumps(status(self.number, self.nodes, at_s=time.time()))

    def all_say(self, count: int) -> None:
        self.say_how_they_are(count)
        self.ack(2, AckKind.READY, 0, count)

    def all_raise(self, _: int) -> None:
        at_s, words = self.now_s - 2, "RuntimeError: connection closed by a peer"
        for number in range(self.nodes):
            gone = (RankExit(rank=Rank(8 * number + n), at_s=at_s, code=1, error=words, started=True) for n in range(8))
            self.changed[KEYS.status(name_of(number))] = dumps(status(3, self.nodes, exits=tuple(gone)))

    def tick(self) -> tuple[float, Decision]:
        changed, self.changed = self.changed, {}
        began = time.thread_time()
        self.values.update(changed)
        decision = decide(world_of(KEYS, self.values), self.now_s, Policy())
        return time.thread_time() - began, decision


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--nodes", type=count, default=10_000, help="at least 78 (default: 10000)")
    parser.add_argument("--repeats", type=count, default=9, help="number of ticks of each kind (default: 9)")
    options = parser.parse_args()
    if options.nodes < 78:
        parser.error("the agent of node 77 is lost; give at least 78 nodes")
    if options.repeats > 9:
        parser.error("after ten ticks all nodes would be ready; give at most 9 repeats")
    nodes = options.nodes
    job = Job(nodes)
    rows: list[Result] = []

    def row(name: str, before: Callable[[int], None], phase: Phase | None, target: bool = True) -> None:
        took = []
        for turn in range(options.repeats if target else 1):
            before(turn)
            tick_s, decision = job.tick()
            assert (decision.record.phase if decision.record else None) is phase, decision.reason
            took.append(tick_s)
        say(f"  {name}: {1000 * (median(took) or 0):.1f} ms, at the most {1000 * max(took):.1f}")
        limit, words = (TARGET_S, "<= 100 ms") if target else (None, None)
        rows.append(Result(f"{name}, {nodes} nodes", median(took), "s", limit=limit, target=words))

    row("the first look", lambda turn: None, None, target=False)
    row("at rest", lambda turn: job.say_how_they_are(nodes // 10), None)
    row("all statuses at once", lambda turn: job.say_how_they_are(nodes), None)
    job.phase(2, Phase.GATHER)
    job.say_how_they_are(nodes)
    job.ack(2, AckKind.READY, 0, nodes // 2)
    job.tick()
    each = nodes // 20

    def more_are_ready(turn: int) -> None:
        job.ack(2, AckKind.READY, nodes // 2 + turn * each, nodes // 2 + (turn + 1) * each)

    row("gathering", more_are_ready, None)
    job.ack(2, AckKind.READY, nodes // 2, nodes)
    job.tick()
    row("all ready", lambda turn: job.ack(2, AckKind.READY, 0, each), Phase.LAUNCH)
    row("all acknowledgements at once", lambda turn: job.ack(2, AckKind.READY, 0, nodes), Phase.LAUNCH)
    row("all statuses and acknowledgements at once", lambda turn: job.all_say(nodes), Phase.LAUNCH)
    job.phase(2, Phase.RUN)
    job.changed[KEYS.node(name_of(77))] = None
    row("an agent lost", lambda turn: None, Phase.GATHER)
    job.phase(3, Phase.RUN)
    job.changed[KEYS.node(name_of(77))] = dumps(NodeRecord(instance=instance_of(77), host="", pid=1, ranks=8))
    row("all ranks raise", job.all_raise, Phase.GATHER, target=False)
    report("big_world", rows)


if __name__ == "__main__":
    main()
