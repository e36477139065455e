"""Bugs to be planted: each swaps one function of the program, or of its simulated hands, for as long as a `with` block lasts.

This is the one place of the tests that patches our own code: not to decide anything, but to prove that the campaign would notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from mt_resilient.agent.snapshots.replica_check import Replicas
from mt_resilient.resilience import controller
from mt_resilient.resilience.decide import decide
from mt_resilient.resilience.inprocess.tally import Held
from mt_resilient.resilience.membership import rank_assignment, reachability
from mt_resilient.resilience.model.cluster_state import World
from mt_resilient.resilience.model.incident import Incident
from mt_resilient.resilience.model.node import Ack, AckKind
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import NodeId, Step
from mt_resilient.resilience.plan import escalation, recoverable_state, resume_point
from mt_resilient.resilience.store.election import Election
from mt_resilient.resilience.store.protocol import CreatedAt, Entry, KeyAbsent
from mt_resilient.training.boundary.lineage import Course

from ..scenarios import ranks
from ..scenarios.kept import Inner
from ..scenarios.node import Node
from ..scenarios.ranks import Ranks

Plant = Callable[[], Any]


def _swap(owner: object, name: str, made: Callable[[Any], Any]) -> Plant:
    """made: what takes the place of the real one, which it is given."""

    return lambda: patch.object(owner, name, made(getattr(owner, name)))


def _both(one: Plant, other: Plant) -> Plant:
    @contextmanager
    def swapped() -> Iterator[None]:
        with one(), other():
            yield

    return swapped


def _any_ack(real: Any) -> Any:
    def world_of(keys: Any, values: Any) -> Any:
        """Whoever wrote it, and in whichever generation, where there is none of this one."""
        world = real(keys, values)
        told = {NodeId(name.rpartition("/")[2]): ack for name, ack in values.under(keys.acks, Ack).items()}
        return replace(world, acks={node: ack for node, ack in {**told, **world.acks}.items() if node in world.members})

    return world_of


def _any_word(real: Any) -> Any:
    def world_of(keys: Any, values: Any) -> Any:
        """While a generation gathers, what its members have said before counts as said in it."""
        world = real(keys, values)
        gathers = world.record and world.record.phase is Phase.GATHER
        said = {n: replace(s, generation=world.record.number) if gathers else s for n, s in world.status.items()}
        return replace(world, status=said)

    return world_of


def _reopened(real: Any) -> Any:
    def phases_told(world: Any) -> Any:
        closed = [incident for incident in world.incidents if not incident.open][:1]
        return (*real(world), *(replace(incident, open=True) for incident in closed))

    return phases_told


def _without_generator(real: Any) -> Any:
    def load(self: Any, *args: Any, **words: Any) -> bool:
        if not real(self, *args, **words):
            return False
        self.inner = replace(self.inner, generator=Inner().generator)
        return True

    return load


def _frightened(real: Any) -> Any:
    def run(self: Any, now_s: float) -> Any:
        if self.job.store.down:
            self.ranks = None
        return real(self, now_s)

    return run


def _one_further(real: Any) -> Any:
    return lambda self, step: real(self, step) + bool(self.turns)


def _trusting(real: Any) -> Any:
    """What memory holds is taken for good, whoever's ranks have left it there."""
    return lambda world: [world.status[node] for node in world.members if node in world.status]


def _mixed(real: Any) -> Any:
    def again(*said: Any, **words: Any) -> Any:
        """In another order, although nobody is gone."""
        seats = real(*said, **words)
        return replace(seats, members=dict(reversed(seats.members.items())))

    return again


def _hurried(real: Any) -> Any:
    def all_acked(self: Any, *kinds: Any) -> bool:
        """The last of several members does not have to say that it is ready."""
        asked = self.members[: max(1, len(self.members) - 1)] if kinds == (AckKind.READY,) else self.members
        return bool(asked) and all(node in self.acks and self.acks[node].kind in kinds for node in asked)

    return all_acked


def _twice(real: Any) -> Any:
    def again(*said: Any, **words: Any) -> Any:
        """One spare for two places."""
        seats = real(*said, **words)
        spares = {*seats.successors.values()}
        chosen = min(spares, default=None)
        members = {n: seats.members[chosen] if n in spares and chosen else i for n, i in seats.members.items()}
        return replace(seats, members=members)

    return again


def _greedy(real: Any) -> Any:
    def again(world: Any, now: float, settled_s: float | None = None, **words: Any) -> Any:
        """A fault is taken for an opportunity to grow."""
        return real(world, now, settled_s or 0.0, **words)

    return again


def _bare_step(real: Any) -> Any:
    def common(statuses: Any, avoid: Any = ()) -> Any:
        """Whatever each node has of a step that all have."""
        kept = [status.kept(avoid) for status in statuses]
        steps = set.intersection(*({each[-1] for each in found} for found in kept)) if kept else set()
        return {max(each for found in kept for each in found if each[-1] == step) for step in steps}

    return common


def _of_any_lineage(real: Any) -> Any:
    return lambda self, *args, **words: real(self, *args, **{**words, "course": ()})


_UNBOUND = _swap(recoverable_state, "onset", lambda real: lambda world: Step(-1))


def _always_won(real: Any) -> Any:
    def won(self: Election, entry: Entry, lease: int) -> bool:
        self._guard = CreatedAt(self._key, entry.create_revision)
        return True

    return won


BUGS: dict[str, tuple[int, Plant]] = {
    "fencing dropped": (0, _swap(Election, "guard", lambda real: lambda self: KeyAbsent("/nobody"))),
    "leadership not looked at": (1, _swap(Election, "won", _always_won)),
    "stale ack accepted": (
        147,
        _both(_swap(controller, "world_of", _any_ack), _swap(controller, "world_of", _any_word)),
    ),
    "incident reopened": (0, _swap(decide, "phases_told", _reopened)),
    "generator forgotten in the snapshot": (
        0,
        _swap(Ranks, "kept", lambda real: lambda self: replace(real(self), inner=replace(self.inner, generator=1))),
    ),
    "generator forgotten in the restore": (4, _swap(Ranks, "_load", _without_generator)),
    "replay uses another batch": (8, _swap(Course, "batch", _one_further)),
    "skipped window not inherited": (414, _swap(Incident, "turn", lambda real: None)),
    "sealed though one rank has missed it": (
        58,
        _swap(ranks, "row", lambda real: lambda said: real(said._replace(newest=Held.WHOLE))),
    ),
    "the newest instead of the stable": (
        797,
        _both(_UNBOUND, _swap(Replicas, "fit", lambda real: lambda self, stamp: True)),
    ),
    "the oldest instead of the newest": (
        4,
        _swap(
            resume_point,
            "_newest",
            lambda real: lambda said, steps, *words: real(said, {min(steps, default=-1)} - {-1}, *words),
        ),
    ),
    "budget without end": (362, _swap(escalation, "without_progress", lambda real: lambda *args: [])),
    "memory trusted whatever its ranks": (242, _swap(recoverable_state, "said", _trusting)),
    "a dismissed agent is seated": (234, _swap(rank_assignment, "_dismissed", lambda real: lambda world: set())),
    "launched before the last member is ready": (
        619,
        _both(_swap(World, "all_acked", _hurried), _swap(controller, "world_of", _any_word)),
    ),
    "one spare for two places": (172, _swap(rank_assignment, "again", _twice)),
    "places exchanged though all are there": (16, _swap(rank_assignment, "again", _mixed)),
    "who does not reach etcd is replaced": (
        788,
        _swap(reachability, "cut_off", lambda real: lambda world, now, lease_s: ()),
    ),
    "more nodes than are expected begin by themselves": (
        1616,
        _both(
            _swap(rank_assignment, "elders", lambda real: lambda world: set()),
            _swap(reachability, "unseen", lambda real: lambda world, now, lease_s: False),
        ),
    ),
    "grown at a fault": (223, _swap(rank_assignment, "again", _greedy)),
    "the point is a bare step": (
        589,
        _both(_swap(resume_point, "common", _bare_step), _swap(Ranks, "_load", _of_any_lineage)),
    ),
    "ranks ended when etcd is away": (11, _swap(Node, "round", _frightened)),
}
"""By name: a seed that shows it, and the swap. Where seeds draw other episodes than now, `scripts/test --all` finds others."""
