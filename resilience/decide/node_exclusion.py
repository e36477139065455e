"""Decides which nodes to quarantine: nodes with too many faults of their own. Pure.

A fault is a node's own if the node's hardware is blamed (a replica that computed wrongly), or if the fault struck this node first (a rank
died or hung, or the agent was lost). Ranks may also end before their first step. If the job has trained before, the node of such ranks is
blamed if the previous fault struck the same node, or if the node has never trained: another node may work. A node that the job needs is not
quarantined.
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
    """Return the nodes to quarantine now. now: wall-clock seconds; verdict: the verdict that is about to be answered."""
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
        last_s = min(now, last_s)  # the node's clock may be ahead
        known = world.quarantine.get(node)
        if known and known.until_s - policy.lasts_h * 3600 >= last_s:
            continue  # the node was already quarantined for these faults
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
    """Return the nodes to blame because ranks have ended there before their first step, with the reason."""
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
    # If a host dies at the start, ranks of other nodes may raise before its loss is known. It is known once all members are ready.
    ready = world.record and world.record.phase is Phase.GATHER and world.all_acked(AckKind.READY)
    if ready and all(_new(world, node) for node in newest.nodes):
        why = "ranks end there before their first step, and the job has trained without this node"
        return {node: why for node in newest.nodes if not _forgiven(world, node, newest)}
    again = len(newest.nodes) == 1 and last[0] is not newest and last[0].nodes == newest.nodes
    if not again or _too_few(world, last[0]) or last[0].cause not in (*RANKS_ENDED, Cause.AGENT_LOST):
        return {}
    return {
        newest.nodes[
            0
        ]: "after a fault on this node, ranks end there before their first step, although the job has trained before"
    }


def _in_turn(held: Sequence[Incident]) -> set[NodeId]:
    """Return the nodes on which the last starts, one after the other, have ended before the first step. If three successive nodes fail, it
    is likelier that all of them lack the same thing than that each is broken."""
    early = takewhile(lambda i: not i.started, (i for i in reversed(held) if i.rung in RESTARTS))
    return {i.nodes[0] for i in early if i.cause in RANKS_ENDED and len(i.nodes) == 1}


def _too_few(world: World, incident: Incident) -> bool:
    """Whether the job ran on fewer nodes than it has trained on, and has never trained on so few. The script may be unable to start on so
    few nodes, whichever nodes these are."""
    known = _trained_on(world)
    return 0 < incident.size < max(known) and incident.size not in known


@once
def _trained_on(world: World) -> set[int]:
    """Return the numbers of nodes on which ranks are known to have finished steps, and 0."""
    return {0, world.record.trained if world.record else 0, *(i.size for i in world.incidents if i.started)}


def _new(world: World, node: NodeId) -> bool:
    """Whether the node has joined a job that had trained, and has not finished a step in it, as far as is known."""
    record, spec = world.record, world.spec
    since = record.joined.get(node) if record else None
    if since is None or spec is None or since <= spec.given_up + 1:  # if all agents had died, all nodes are new
        return False
    lives = (i for i in world.incidents if i.generation >= since)
    return not any(i.started or i.cause in (Cause.AGENT_LOST, Cause.AGENT_RESTARTED) for i in lives)


def _forgiven(world: World, node: NodeId, incident: Incident) -> bool:
    return node in world.quarantine and incident.at_s <= world.quarantine[node].readmitted_s


def unforgiven(world: World) -> tuple[Incident, ...]:
    """Return the incidents that budgets count: all incidents except those that struck only nodes that have been readmitted since."""
    return tuple(i for i in world.incidents if not i.nodes or not all(_forgiven(world, node, i) for node in i.nodes))


def _hardware(incident: Incident) -> bool:
    """Whether the node's hardware is to blame. Diverged replicas prove that. A step that goes wrong once does not prove it: a race in the
    script, or a random draw that is not repeated, looks the same."""
    return incident.cause == Cause.FINGERPRINT_MISMATCH and len(incident.nodes) == 1  # of several, it is unknown which


def _counts(world: World, incident: Incident) -> bool:
    if len(incident.nodes) != 1:
        return False  # a fault of several nodes at once is no node's own: etcd or a network switch was down
    if incident.cause in RANKS_ENDED and not incident.started and _too_few(world, incident):
        return False
    return incident.cause in _STRUCK or _hardware(incident)


def _dispensable(world: World, node: NodeId, entry: Quarantine, now: float) -> bool:
    if world.record is None or world.spec is None:
        return False
    judged = replace(world, quarantine={**world.quarantine, node: entry})
    return not rank_assignment.without(judged, now).missed
