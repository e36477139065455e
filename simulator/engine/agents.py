"""Simulates how agents and ranks obey the record. Agents and ranks clear, launch, rewind or wait, and each action takes the time that it
costs."""

from __future__ import annotations

from collections.abc import Sequence

from ...agent.loop.next_action import Action, Begun, LocalState, Patience, step
from ...resilience.model.generation import GenerationRecord
from ...resilience.model.node import AckKind
from ...resilience.model.signals import InPlaceRewind
from ...resilience.model.state_machine import Phase
from ...resilience.model.types import Generation, NodeId, Step
from . import compute_faults, fault_effects
from .accounting import TRAINING
from .cluster import WorkerGroup
from .compute_faults import BEFORE_S
from .engine import Play

_PATIENCE = Patience(warm_s=0.0, leave_s=0.0)
"""No simulated start waits for a warm process, and no job is drained."""

# -- the agents -------------------------------------------------------------------------------------------------------


def heard(play: Play, number: Generation) -> None:
    """Let all agents obey the record of that generation, which they have now read. Agents in the same state are handled as one
    group."""
    cluster = play.cluster
    record = cluster.record
    if record is None or record.number != number:
        return
    groups: dict[tuple[AckKind | None, bool], list[NodeId]] = {}
    for name in cluster.present():
        acked = cluster.acks[name].kind if name in cluster.acks else None
        groups.setdefault((acked, name in cluster.newcomers), []).append(name)
    for (acked, _), names in groups.items():
        begun, actions = step(record, _local(play, names[0], acked), Begun(), play.now_s, _PATIENCE)
        if actions == (Action.FETCH,):  # the time of a fetch is part of the costs of a launch
            begun, actions = step(record, _local(play, names[0], acked), begun, play.now_s, _PATIENCE)
        for action in actions:
            match action:
                case Action.CLEAR:  # `_cleared` then acknowledges READY
                    _clear(play, number, names)
                case Action.LAUNCH:
                    _launch(play, record)
                case Action.SAY_RUNNING:
                    cluster.acknowledge(names, AckKind.RUNNING, play.now_s)
                    _answered(play, len(names))
                case Action.ORDER_REWIND:
                    _turn_back(play, record)
                case Action.ORDER_PAUSE:
                    _order_wait(play, record)


def _local(play: Play, name: NodeId, acked: AckKind | None) -> LocalState:
    group, record = play.cluster.group, play.cluster.record
    assert record
    return LocalState(
        instance=play.cluster.nodes[name].instance,
        group=group.generation if group else 0,
        group_over=False,
        attached=group is not None and group.attached_s <= play.now_s < group.broken_s,
        training=group is not None and group.training(play.now_s),
        acked=(record.number if acked else 0, acked),
        rewind=group.rewind if group else 0,
        paused=group is not None and group.told_to_wait,
        waiting=group is not None and group.waits,
        snapshot=group.saves if group else "",
    )


def _answered(play: Play, names: int) -> None:
    """Count one write by each of `names` agents; the controller then decides."""
    play.outcome.wave(names)
    play.news(play.costs.answered_s(names))


def _clear(play: Play, number: Generation, names: list[NodeId]) -> None:
    """Let agents end their remaining ranks. A new agent has no ranks."""
    group, takes_s = play.cluster.group, 0.0
    if group and names[0] not in play.cluster.newcomers:
        if play.training.track:
            play.broken()
            play.books.enter(play.now_s, "stop")
        if group.gone_s > play.end_s:
            stop_s = play.costs.slowest_s(play.costs.stop_s, len(names), play.chance)
            group.gone_s = play.now_s + stop_s
        takes_s = group.gone_s - play.now_s
    play.later(takes_s, _cleared, play, number, tuple(names))


def _cleared(play: Play, number: Generation, names: Sequence[NodeId]) -> None:
    cluster = play.cluster
    if cluster.group and cluster.group.gone_s <= play.now_s:
        cluster.group = None
    record = cluster.record
    if record is None or record.number != number or record.phase is not Phase.GATHER:
        return
    present = set(cluster.present())
    ready = [name for name in names if name in present]
    cluster.acknowledge(ready, AckKind.READY, play.now_s)
    play.books.enter(play.now_s, "nodes" if len(cluster.acks) < len(record.members) else "start")
    _answered(play, len(ready))


# -- the ranks --------------------------------------------------------------------------------------------------------


def _launch(play: Play, record: GenerationRecord) -> None:
    """Start the ranks. Each phase of the start lasts until its slowest node is done. A node fetches its state from its buddy while its
    ranks build the model."""
    costs, resume, nodes = play.costs, int(record.resume_step), play.setting.nodes
    from_memory = resume in play.training.memory(play.now_s)
    newcomers = play.cluster.newcomers.values()
    fetched = from_memory and all(resume in kept for kept in newcomers)
    fetch_s = costs.slowest_s(costs.fetch_s, len(newcomers), play.chance) if fetched and newcomers else 0.0
    restore_s = costs.restore_s if fetched else costs.read_s if resume >= 0 else 0.0
    marks, at_s = [], play.now_s
    for takes_s in (costs.start_s, costs.build_all_s(play.setting.per_node * len(record.members))):
        at_s += costs.slowest_s(takes_s, nodes, play.chance)
        marks.append(at_s)
    at_s = max(at_s, play.now_s + fetch_s) + costs.slowest_s(restore_s, nodes, play.chance)
    marks.append(at_s)
    play.cluster.group = WorkerGroup(
        generation=record.number,
        resume=resume,
        attached_s=marks[0],
        built_s=marks[1],
        restored_s=marks[2],
        begins_s=at_s + costs.first_step_s,
    )
    for mark_s, account in zip(marks, ("build", "restore", "step"), strict=True):
        play.later(mark_s - play.now_s, _reached, play, record.number, account)
    play.later(play.cluster.group.begins_s - play.now_s, _begins, play, record.number)


def _reached(play: Play, number: Generation, account: str) -> None:
    group = play.cluster.group
    if group is None or group.generation != number or group.broken_s <= play.now_s:
        return
    play.books.enter(play.now_s, account)
    play.outcome.wave(play.setting.nodes)  # each node reports the mark in its status
    if account == "build":
        heard(play, number)
        fault_effects.start_of_the_sick(play)


def _begins(play: Play, number: Generation) -> None:
    """Let the ranks compute their first step."""
    cluster, group = play.cluster, play.cluster.group
    if group is None or group.generation != number or group.broken_s <= play.now_s:
        return
    assert cluster.record
    play.books.enter(play.now_s, TRAINING)
    play.training.begin(play.now_s, group.resume, play.rhythm())
    cluster.bad_from = -1
    track = play.training.track
    assert track
    group.stepped_s = track.when(track.begun + 1)
    back = max(track.begun + 1, int(cluster.record.replay_until))
    play.later(track.when(back) - play.now_s, compute_faults.back_at, play, number, back)
    compute_faults.resumed(play)


def _order_wait(play: Play, record: GenerationRecord) -> None:
    """Let all ranks wait at their next step boundary and write their state to disk; or let waiting ranks continue."""
    group, track = play.cluster.group, play.training.track
    assert group
    group.told_to_wait, group.saves = record.waits, record.saves
    if group.told_to_wait and track:
        play.later(track.when(track.finished(play.now_s) + 1) - play.now_s, _wait, play, record.number)
    elif group.waits:
        group.waits = False
        play.books.enter(play.now_s, TRAINING)
        play.training.go_on(play.now_s, round(group.reached))
        compute_faults.resumed(play)


def _wait(play: Play, number: Generation) -> None:
    group = play.cluster.group
    if group is None or group.generation != number or play.training.track is None or not group.told_to_wait:
        return
    group.waits, group.reached = True, round(play.training.halt(play.now_s))
    play.books.enter(play.now_s, "nodes")
    play.training.save(play.now_s, round(group.reached))
    play.news(play.costs.write_s)


def _turn_back(play: Play, record: GenerationRecord) -> None:
    """Let all ranks rewind as ordered, at their next step boundary."""
    group, track = play.cluster.group, play.training.track
    assert group
    assert record.rewind
    group.rewind = record.rewind.number
    if track is None:  # they are rewinding already, and get the order again at the next tick
        return
    boundary_s = track.when(track.finished(play.now_s) + 1) - play.now_s
    play.later(boundary_s, _turn, play, record.number, record.rewind.number, int(record.rewind.to))


def _turn(play: Play, number: Generation, order: int, to: int) -> None:
    group, cluster = play.cluster.group, play.cluster
    if group is None or group.generation != number or play.training.track is None or group.broken_s <= play.now_s:
        return
    if to not in play.training.held(play.now_s - BEFORE_S):
        group.declined = order
        play.news()
        return
    told = InPlaceRewind(
        ordinal=len(group.rewinds) + 1,
        generation=number,
        cause="fingerprint_mismatch",
        onset=Step(cluster.bad_from),
        to=Step(to),
        reached=Step(play.training.track.finished(play.now_s)),
        remedy="replay",
        order=order,
        at_s=play.now_s,
        restore_s=play.costs.rewind_s,
    )
    play.training.shelf.without(max(0, cluster.bad_from))
    cluster.bad_from = -1
    compute_faults.go_back(play, told)
