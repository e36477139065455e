"""Simulates faults of the computation (a slow node, a wrong replica, a loss spike): how late ranks and agents find them, and how the ranks
rewind in place."""

from __future__ import annotations

from ...resilience.inprocess import rewind_ladder
from ...resilience.inprocess.loss_spike import Finding
from ...resilience.model.cause import Kind
from ...resilience.model.rewind import EARLIER, SKIPS, Turn
from ...resilience.model.signals import InPlaceRewind, Lost, Mismatch, Straggler
from ...resilience.model.types import Generation, NodeId, Rank, Step
from ..scenario.faults import Fault
from .accounting import TRAINING
from .engine import Play, Spike

BEFORE_S = 1e-3
"""Snapshots are looked up this many seconds before a step boundary. At the boundary, ranks rewind before they take a new snapshot, which
may overwrite the snapshot that they need."""


def slows(play: Play, fault: Fault, name: NodeId) -> None:
    play.slow[fault.machine] = fault.source.factor
    play.repace()
    play.later(play.costs.straggler_s, _told_slow, play, fault.machine)
    play.later(fault.lasts_s, _fast_again, play, fault.machine)


def _told_slow(play: Play, machine: int) -> None:
    cluster, group, track = play.cluster, play.cluster.group, play.training.track
    name = cluster.names[machine]
    if (
        group is None
        or track is None
        or name not in cluster.place
        or machine not in play.slow
        or name in group.stragglers
    ):
        return
    slow = Straggler(
        rank=cluster.rank(name),
        at_s=play.now_s,
        step=Step(track.finished(play.now_s)),
        own_s=play.costs.step_s * play.slow[machine],
        peers_s=play.costs.step_s,
        usual=1.0,
        lost=Lost.COMPUTING,
    )
    group.stragglers[name] = (slow,)
    play.news()


def _fast_again(play: Play, machine: int) -> None:
    if play.slow.pop(machine, None) is None:
        return
    play.repace()
    group = play.cluster.group
    if group and group.stragglers.pop(play.cluster.names[machine], None):
        play.news()


def corrupts(play: Play, name: NodeId) -> None:
    """Make a replica wrong. The fault is found once the next snapshot has been compared. (If the ranks restart before that, the fault is
    lost.)"""
    group, track = play.cluster.group, play.training.track
    if group is None or track is None:
        return
    onset = track.finished(play.now_s) + 1
    seen_s = track.when(play.training.next_sealed(onset)) - play.now_s + play.costs.compare_s
    play.later(seen_s, _compared, play, group.generation, name, onset)


def _compared(play: Play, generation: Generation, name: NodeId, onset: int) -> None:
    cluster, group, track = play.cluster, play.cluster.group, play.training.track
    if group is None or group.generation != generation or track is None or track.begun >= onset:
        return
    cluster.bad_from = onset
    rank = cluster.rank(name)
    mismatch = Mismatch(
        generation=generation,
        onset=Step(onset),
        agreed=Step(onset - 1),
        tensors=("model/simulated",),
        count=1,
        ranks=(rank, Rank(rank + 1), Rank(rank + 2)),
        wrong=(rank,),
        at_s=play.now_s,
    )
    group.mismatches[name] = (mismatch,)
    play.news()


def spikes(play: Play, fault: Fault) -> None:
    """Start a loss spike. Ranks find it by themselves, some steps after its onset, and rewind as `rewind_ladder` decides."""
    track = play.training.track
    if track is None or play.spike is not None:
        play.outcome.idle += 1
        return
    play.outcome.struck[fault.source.name] += 1
    play.spike = Spike(onset=track.finished(play.now_s) + 1, again=fault.again)
    resumed(play)


def resumed(play: Play) -> None:
    """Schedule the detection of slow nodes and of a spike that still last, now that the ranks train again."""
    group, track, spike = play.cluster.group, play.training.track, play.spike
    assert group
    assert track
    for machine in sorted(play.slow):
        play.later(play.costs.straggler_s, _told_slow, play, machine)
    if spike is None:
        return
    if track.begun >= spike.onset:
        play.spike = None
        return
    found_at = spike.onset + play.setting.spikes.patience_steps // 2
    play.later(track.when(found_at) - play.now_s, _found, play, group.generation, len(group.rewinds), spike)


def _found(play: Play, generation: Generation, rewinds: int, spike: Spike) -> None:
    group, track = play.cluster.group, play.training.track
    stale = group is None or group.generation != generation or len(group.rewinds) != rewinds
    if stale or group is None or track is None or play.spike is not spike:
        return
    reached = track.finished(play.now_s)
    if reached < spike.onset + play.setting.spikes.patience_steps // 2:  # steps have become slower
        resumed(play)
        return
    policy = play.setting.policy.ladder
    finding = Finding(kind=Kind.LOSS_DIVERGENCE, onset=Step(spike.onset), seen=Step(reached), value=4.0, expected=2.0)
    answer = rewind_ladder.answer(finding, spike.turns, policy, skippable=True)
    held = [step for step in play.training.held(play.now_s) if step < spike.onset]
    other = min if answer.remedy in EARLIER else max
    to = Step(max((step for step in held if step <= answer.at_most), default=other(held, default=0)))
    remedy = rewind_ladder.done(answer, spike.turns, to)
    windows = [turn.window for turn in spike.turns if turn.window]
    window = answer.window(Step(spike.onset), to, windows)
    spike.turns.append(Turn(kind=Kind.LOSS_DIVERGENCE, onset=Step(spike.onset), to=to, remedy=remedy, window=window))
    if remedy in SKIPS or not spike.again:
        play.spike = None
    told = InPlaceRewind(
        ordinal=len(group.rewinds) + 1,
        generation=generation,
        cause=Kind.LOSS_DIVERGENCE,
        onset=Step(spike.onset),
        to=to,
        reached=Step(reached),
        remedy=remedy,
        window=window,
        value=finding.value,
        expected=finding.expected,
        at_s=play.now_s,
        restore_s=play.costs.rewind_s,
    )
    go_back(play, told)


# -- rewinds in place -------------------------------------------------------------------------------------------------


def go_back(play: Play, told: InPlaceRewind) -> None:
    """Let the ranks rewind in place, from memory or from disk."""
    group = play.cluster.group
    assert group
    in_memory = told.to in play.training.memory(play.now_s - BEFORE_S)
    takes_s = play.costs.rewind_s if in_memory else play.costs.read_s
    group.reached = play.training.halt(play.now_s)
    play.books.enter(play.now_s, "restore")
    group.rewinds.append(told)
    play.later(takes_s, _on_again, play, group.generation, told)


def _on_again(play: Play, number: Generation, told: InPlaceRewind) -> None:
    group = play.cluster.group
    if group is None or group.generation != number or group.broken_s <= play.now_s:
        return
    play.books.enter(play.now_s, TRAINING)
    play.training.go_back(play.now_s, int(told.to))
    settled = int(told.reached) + play.setting.policy.ladder.settled_steps
    track = play.training.track
    assert track
    play.later(track.when(settled) - play.now_s, back_at, play, number, settled)
    play.news()
    resumed(play)


def back_at(play: Play, number: Generation, step: int) -> None:
    """Let the controller close open incidents once the ranks have reached `step`, where the fault struck or later."""
    group, track = play.cluster.group, play.training.track
    if group is None or group.generation != number or track is None:
        return
    if track.finished(play.now_s) < step:  # steps have become slower, or the ranks have rewound
        play.later(max(0.0, track.when(step) - play.now_s) + 1e-3, back_at, play, number, step)
        return
    if play.training.all_sealed(play.now_s):
        play.cluster.newcomers = {}
    play.outcome.wave(play.setting.nodes)
    play.tick()
