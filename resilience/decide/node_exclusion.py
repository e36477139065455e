"""Which nodes are to train no more for a while: World → those that their own faults speak against. Pure.

A fault is a node's own where its hardware is blamed (a replica that computed wrongly), or where it has struck there before anywhere else
(its rank died or hung, its agent was lost). Where the job has trained before, and ranks end before their first step, a node is to blame on
which the last fault was too, or which has never trained: on another one they may work. Nobody is shut out whom the job cannot do without.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from ..diagnose.root_cause import Verdict
from ..incidents.lifecycle import bare_incident
from ..membership import rank_assignment
from ..membership.quarantine import QuarantinePolicy
from ..model.cause import Cause
from ..model.cluster_state import World, once
from ..model.generation import Quarantine
from ..model.incident import Incident
from ..model.node import AckKind
from ..model.state_machine import Phase
from ..model.types import NodeId
from ..plan import recoverable_state
from ..plan.escalation import RESTART_GROUP, RESTARTS
from ..plan.restart_history import RANKS_ENDED
from ..text import formatting

_STRUCK = (Cause.RANK_KILLED, Cause.RANK_HUNG, Cause.AGENT_LOST)


def due(world: World, now: float, policy: QuarantinePolicy, verdict: Verdict | None = None) -> dict[NodeId, Quarantine]:
    """Those that are to be shut out now. now: wall-clock seconds; verdict: what is about to be answered."""
    if verdict:
        world = world.with_incidents(
            (bare_incident(world, verdict, RESTART_GROUP, recoverable_state.step_reached(world)),)
        )
    recent = [i for i in world.incidents if i.would is None and i.at_s >= now - policy.within_h * 3600]
    held = [(node, i) for i in recent for node in i.nodes if not _forgiven(world, node, i)]
    hardware = Counter(node for node, incident in held if _hardware(incident))
    struck = Counter(node for node, incident in held if _counts(world, incident))
    fails = _fail_at_start(world, [*{incident.id: incident for _, incident in held}.values()])
    found: dict[NodeId, Quarantine] = {}
    blamed = (n for n in {*struck, *fails} if n in world.nodes and not rank_assignment.unusable(world, n, now))
    for node in sorted(blamed, key=rank_assignment.natural):
        last_s = max((i.at_s for i in recent if node in i.nodes and i.rung), default=0.0)
        last_s = min(now, last_s)  # its clock may be ahead
        known = world.quarantine.get(node)
        if known and known.until_s - policy.lasts_h * 3600 >= last_s:
            continue  # it was shut out for these
        if hardware[node] >= policy.hardware_faults:
            why = f"its hardware is blamed for {formatting.count(hardware[node], 'fault')} within {policy.within_h:g} h"
        elif node in fails:
            why = fails[node]
        elif struck[node] >= policy.faults:
            have = "has" if struck[node] == 1 else "have"
            why = f"{formatting.count(struck[node], 'fault')} {have} struck it within {policy.within_h:g} h"
        else:
            continue
        entry = Quarantine(reason=why, until_s=now + policy.lasts_h * 3600)
        if _dispensable(world, node, entry, now):
            found[node] = entry
            world = replace(world, quarantine={**world.quarantine, node: entry})
    return found


def _fail_at_start(world: World, held: Sequence[Incident]) -> dict[NodeId, str]:
    """The nodes on which the last ranks have ended before their first step, and which that speaks against: why."""
    last = [incident for incident in held if incident.rung in RESTARTS and incident.cause != Cause.MOVED][-2:]
    if not last or any(status.stepped_s for status in world.statuses()):
        return {}
    newest = last[-1]
    early = newest.cause in RANKS_ENDED and not newest.started and newest.step_at_fault >= 0
    if not early or _too_few(world, newest) or any(i.started for i in world.incidents[world.incidents.index(newest) :]):
        return {}
    everywhere = 1 < newest.size == len(newest.nodes)
    if everywhere or len(_in_turn(held) - {*newest.nodes}) > 1:
        return {}
    # Where a host dies as it starts, others' ranks may raise before that is known: by the time that all are ready, it is.
    ready = world.record and world.record.phase is Phase.GATHER and world.all_acked(AckKind.READY)
    if ready and all(_new(world, node) for node in newest.nodes):
        why = "ranks end there before their first step, and the job has trained without it"
        return {node: why for node in newest.nodes if not _forgiven(world, node, newest)}
    again = len(newest.nodes) == 1 and last[0] is not newest and last[0].nodes == newest.nodes
    if not again or _too_few(world, last[0]) or last[0].cause not in (*RANKS_ENDED, Cause.AGENT_LOST):
        return {}
    return {newest.nodes[0]: "after a fault there ranks end before their first step, and the job has trained before"}


def _in_turn(held: Sequence[Incident]) -> set[NodeId]:
    """Nodes on which the last ranks, one after the other, have ended before their first step. That three are broken, each as it takes the
    place of the last, is less likely than that all miss the same thing."""
    early = takewhile(lambda i: not i.started, (i for i in reversed(held) if i.rung in RESTARTS))
    return {i.nodes[0] for i in early if i.cause in RANKS_ENDED and len(i.nodes) == 1}


def _too_few(world: World, incident: Incident) -> bool:
    """Whether it struck on fewer nodes than the job has trained on, and it has not trained on so few: it may be that the script does not
    start on them, whichever they are."""
    known = _trained_on(world)
    return 0 < incident.size < max(known) and incident.size not in known


@once
def _trained_on(world: World) -> set[int]:
    """The numbers of nodes on which steps are known to have been made; 0 among them."""
    return {0, world.record.trained if world.record else 0, *(i.size for i in world.incidents if i.started)}


def _new(world: World, node: NodeId) -> bool:
    """Whether it has come into a job that trained, and has not made a step in it, as far as is known."""
    record, spec = world.record, world.spec
    since = record.joined.get(node) if record else None
    if since is None or spec is None or since <= spec.given_up + 1:  # where all had died, all are
        return False
    lives = (i for i in world.incidents if i.generation >= since)
    return not any(i.started or i.cause in (Cause.AGENT_LOST, Cause.AGENT_RESTARTED) for i in lives)


def _forgiven(world: World, node: NodeId, incident: Incident) -> bool:
    return node in world.quarantine and incident.at_s <= world.quarantine[node].readmitted_s


def unforgiven(world: World) -> tuple[Incident, ...]:
    """What budgets count: all but what has struck only nodes that somebody has had back since."""
    return tuple(i for i in world.incidents if not i.nodes or not all(_forgiven(world, node, i) for node in i.nodes))


def _hardware(incident: Incident) -> bool:
    """Replicas prove it. A step that goes wrong once does not: a race in the script, or a draw that is not repeated, looks the same."""
    return incident.cause == Cause.FINGERPRINT_MISMATCH and len(incident.nodes) == 1  # of several, nobody knows which


def _counts(world: World, incident: Incident) -> bool:
    if len(incident.nodes) != 1:
        return False  # what strikes several at once is of none of them: etcd was away, a switch
    if incident.cause in RANKS_ENDED and not incident.started and _too_few(world, incident):
        return False
    return incident.cause in _STRUCK or _hardware(incident)


def _dispensable(world: World, node: NodeId, entry: Quarantine, now: float) -> bool:
    if world.record is None or world.spec is None:
        return False
    judged = replace(world, quarantine={**world.quarantine, node: entry})
    return not rank_assignment.without(judged, now).missed
