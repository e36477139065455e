"""Simulates what a fault does to the cluster, which report of an agent or rank shows the fault, and how late."""

from __future__ import annotations

from ...resilience.detect.hang_rules import Progress, budget_s
from ...resilience.diagnose.root_cause import HEARD_S
from ...resilience.model.signals import Place, RankExit, RankStall
from ...resilience.model.types import Generation, NodeId, Rank, RankPhase, Step
from ..scenario.faults import Fault, Shows
from . import compute_faults
from .engine import Play


def strike(play: Play, fault: Fault) -> None:
    """Let the fault strike now."""
    if fault.source.shows is Shows.SPIKES:
        compute_faults.spikes(play, fault)
        return
    cluster, machine = play.cluster, fault.machine
    name = cluster.names[machine]
    if name not in cluster.nodes or machine in play.repairs_s:
        play.outcome.idle += 1  # the node is away, or known to be broken
        return
    lost = fault.source.shows is Shows.LOST
    if name not in cluster.place:
        play.outcome.idle += 1
        if (lost or fault.lasting) and fault.one_in(play.setting.stands_for):
            _breaks(play, fault)
            if lost:
                play.later(play.setting.lease_s, _gone, play, name)
        return
    play.outcome.struck[fault.source.name] += 1
    if lost or fault.lasting:
        _breaks(play, fault)
    match fault.source.shows:
        case Shows.LOST:
            play.broken()
            play.later(play.setting.lease_s, _gone, play, name)
        case Shows.SLOWS:
            compute_faults.slows(play, fault, name)
        case Shows.CORRUPTS:
            compute_faults.corrupts(play, name)
        case shows:
            (_hangs if shows is Shows.HANGS else _dies)(play, name, fault.source.name)


def _breaks(play: Play, fault: Fault) -> None:
    """Mark the machine for repair. A broken device shows only when ranks start there, so it stays unknown on a spare."""
    play.repairs_s[fault.machine] = fault.repair_s
    if fault.source.shows is not Shows.LOST:
        play.sick.add(fault.machine)


# -- ranks ------------------------------------------------------------------------------------------------------------------


def _dies(play: Play, name: NodeId, why: str) -> None:
    """End a rank. Its agent sees that immediately."""
    group, record = play.cluster.group, play.cluster.record
    if group is None or record is None or group.generation != record.number:
        return  # no ranks of this generation run
    play.broken()
    gone = RankExit(
        rank=play.cluster.rank(name),
        at_s=play.now_s,
        code=1,
        error=f"RuntimeError: {why}",
        started=group.stepped_s <= play.now_s,
    )
    group.exits[name] = (gone,)
    play.news()
    play.news(HEARD_S)  # the answer to an exception waits this long for other nodes' reports


def start_of_the_sick(play: Play) -> None:
    """End the ranks that start on a broken machine. The first rank to raise ends all ranks."""
    for machine in sorted(play.sick):
        if (name := play.cluster.names[machine]) in play.cluster.place:
            _dies(play, name, "device error")
            return


def _hangs(play: Play, name: NodeId, why: str) -> None:
    """Let a rank hang. No agent reports it before all ranks have been silent for their budget (`resilience/detect/hang_rules.py`), and
    agents have looked at them twice."""
    group, track = play.cluster.group, play.training.track
    if group is None or group.broken_s <= play.now_s:
        return
    phase = RankPhase.TRAINING if track else RankPhase.RESTORING
    rank = Progress(
        rank=play.cluster.rank(name),
        phase=phase,
        silent_s=0.0,
        done=track.finished(play.now_s) - track.begun if track else 0,
        steps_s=(track.period_s,) if track else (),
        warmup_s=track.period_s if track and group.generation > 1 else 0.0,
    )
    play.broken()
    allowed_s = budget_s(rank, play.setting.hang)
    play.later(allowed_s + play.setting.hang.confirm_s, _silent, play, group.generation, name, allowed_s)


def _silent(play: Play, generation: Generation, missing: NodeId, allowed_s: float) -> None:
    """Report the stalls of all ranks, at which the agents have looked twice."""
    cluster, group = play.cluster, play.cluster.group
    if group is None or group.generation != generation or missing not in cluster.nodes:
        return
    for name in cluster.place:
        where = (Place.ELSEWHERE, "in the device's driver") if name == missing else (Place.COLLECTIVE, "in all_reduce")
        first = cluster.rank(name)
        group.stalls[name] = tuple(
            RankStall(
                rank=Rank(rank),
                at_s=group.broken_s,
                silent_s=play.now_s - group.broken_s,
                budget_s=allowed_s,
                stage="step",
                step=Step(int(group.reached)),
                place=where[0],
                words=where[1],
                started=group.stepped_s <= group.broken_s,
            )
            for rank in range(first, first + cluster.per_node)
        )
    play.outcome.wave(play.setting.nodes)
    play.news()


# -- nodes ------------------------------------------------------------------------------------------------------------------


def _gone(play: Play, name: NodeId) -> None:
    """Take the node out: its agent's lease has expired, or its agent has left for a repair."""
    cluster, machine = play.cluster, play.cluster.machine[name]
    if name not in cluster.nodes:
        return
    cluster.leave(name)
    play.sick.discard(machine)
    if play.slow.pop(machine, None):
        play.repace()
    play.outcome.away(play.since_s, +1)
    play.later(play.repairs_s.pop(machine), _repaired, play, name)
    play.news()


def taken_away(play: Play, name: NodeId) -> None:
    """Take the node away for repair, if it is broken. Its agent exits cleanly."""
    if play.cluster.machine[name] in play.sick:
        _gone(play, name)


def _repaired(play: Play, name: NodeId) -> None:
    play.outcome.away(play.since_s, -1)
    play.cluster.register(name, play.now_s)
    play.cluster.readmit(name, play.now_s)
    play.news()
    if play.setting.sizes:  # the job grows by the node, once it has been there for some time
        play.later(play.setting.policy.nodes.grow_after_s + 1.0, play.tick)
