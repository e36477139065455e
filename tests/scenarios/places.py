"""Whether the members of a generation are those that there should be: the ninth invariant, on each record that is written.

Nobody is taken for lost whose ranks make steps. Who stays keeps its place, for its memory holds the state of the ranks that belong
there; so a place changes hands only when its holder is gone or has been dismissed. Who has been dismissed stays only at a fault. Where the
number changes, places move up, and who stays keeps its turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_resilient.resilience.membership.rank_assignment import proves
from mt_resilient.resilience.model.generation import GenerationRecord, Quarantine
from mt_resilient.resilience.model.node import Ack, AckKind, NodeRecord
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import NodeId, RankPhase
from mt_resilient.resilience.store.codec import loads

from .node import KEYS

if TYPE_CHECKING:
    from .cluster import Job


def wrong(job: Job, before: GenerationRecord | None, after: GenerationRecord, lost: tuple[NodeId, ...] = ()) -> str:
    """A sentence where something is. lost: nodes that the newest incident takes for dead."""
    if after.phase is Phase.LAUNCH:
        return _launched(job, after)
    if after.phase is not Phase.GATHER:
        return ""
    if before and before.phase is Phase.RUN and (training := _training(job, before, lost)):
        return (
            f"generation {after.number} is opened since {', '.join(training)} is taken for dead, whose ranks make steps"
        )
    here, shut_out = _read(job)
    dismissed = before.dismissed if before else ()
    told = f"generation {after.number} is of {', '.join(after.members)}"
    if len(after.members) not in job.sizes:
        return f"{told}, and so many are not allowed"
    if len({*after.members.values()}) < len(after.members):
        return f"{told}: one agent has two places"
    known = before.members if before and after.reason != "started again" else {}
    usable = {n for n, record in here.items() if record.instance not in dismissed and n not in shut_out}
    will_do = {*job.sizes} - job.faults.refused - {incident.unfit for incident in job.watch.incidents.values()}
    may = usable if len(usable) >= min(will_do or job.sizes) else {*here}  # whom the job cannot do without
    if proves(job.sizes, job.spares, len(known)) and usable.isdisjoint(known):
        may = may | known.keys()  # one of them has to end what its ranks are at
    for node, instance in after.members.items():
        if known.get(node) != instance and (node not in may or here[node].instance != instance):
            return f"{told}, and {node} is {'not to train' if node in here else 'not there'}"
    needless = [n for n, instance in after.members.items() if instance in dismissed]
    move = before and before.moving and after.reason.startswith(before.moving)  # else a fault has struck
    if needless and len(usable) >= min(job.sizes) and move:
        return f"{told}, and {', '.join(needless)} has been dismissed"
    grows = before and known and len(after.members) > len(known) and not before.moving
    if grows and len(known) in will_do:
        return f"{told}, and was of {', '.join(known)}: what memory holds of so many is thrown away"
    stay = [node for node in known if node in after.members]
    if stay != [node for node in after.members if node in known]:
        return f"{told}: they have changed places, and were {', '.join(known)}"
    for old, new in zip(known, after.members, strict=False):
        if len(known) == len(after.members) and old != new and old in usable:
            return f"{told}: {new} has the place of {old}, which is there"
    left_out = [node for node in known if node not in after.members and node in usable]
    larger = [size for size in will_do if len(after.members) < size <= len(usable)]
    return f"{told}: {', '.join(left_out)} is left out, and is there" if left_out and larger else ""


def _read(job: Job) -> tuple[dict[NodeId, NodeRecord], set[NodeId]]:
    """Who is there, and who is shut out."""
    nodes, shut, deaths = (job.store.inner.range(prefix) for prefix in (KEYS.nodes, KEYS.quarantines, KEYS.deaths))
    here = {NodeId(key.removeprefix(KEYS.nodes)): loads(NodeRecord, entry.value) for key, entry in nodes.items()}
    here = {node: record for node, record in here.items() if KEYS.death(record.instance) not in deaths}
    out = {NodeId(key.removeprefix(KEYS.quarantines)): loads(Quarantine, entry.value) for key, entry in shut.items()}
    return here, {node for node, what in out.items() if job.wall_s < what.until_s and node in here}


def _training(job: Job, record: GenerationRecord, lost: tuple[NodeId, ...]) -> list[NodeId]:
    """Of the nodes that are taken for lost, those whose ranks have just made a step with all others. Of one alone nobody can tell; nor of
    all together, and where others may begin without them, they end their ranks for it."""
    unheard = {*lost, *job.cut.etcd}
    if not record.members.keys() - unheard and not proves(job.sizes, job.spares, len(record.members)):
        return []
    there = [
        job.nodes[node] for node, i in record.members.items() if node in job.nodes and job.nodes[node].instance == i
    ]
    ranks = [node.ranks for node in there if node.ranks and node.ranks.generation == record.number]
    at_work = len(ranks) == len(record.members) > 1 and ranks[0].whole and ranks[0].life is RankPhase.TRAINING
    quick = at_work and job.now_s - max(node.fencing.steps.stepped_s for node in there if node.fencing) <= 1
    return [node.name for node in there if node.name in lost] if quick else []


def _launched(job: Job, record: GenerationRecord) -> str:
    for node, instance in record.members.items():
        entry = job.store.inner.get(KEYS.ack(record.number, node))
        ack = loads(Ack, entry.value) if entry else None
        if ack is None or ack.instance != instance or ack.kind is not AckKind.READY:
            return f"generation {record.number} was launched, and {node} has not said that it is ready"
    return ""
