"""What a fault does to the simulated cluster, and how it comes to be seen: by which word of an agent or rank, and how late."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..resilience import ladder
from ..resilience.hang import Progress, budget_s
from ..resilience.signals import (
    Generation,
    InPlaceRewind,
    Mismatch,
    NodeId,
    Place,
    Rank,
    RankExit,
    RankPhase,
    RankStall,
    Step,
    Straggler,
)
from ..resilience.spikes import Finding, Kind
from ..resilience.straggler import Lost
from ..resilience.verdict import HEARD_S
from .faults import Fault, Shows

if TYPE_CHECKING:
    from .play import Play


@dataclass
class Spike:
    """One that is not over."""

    onset: int
    again: bool
    turns: list[ladder.Turn] = field(default_factory=list)


def strike(play: Play, fault: Fault) -> None:
    """It happens now."""
    if fault.source.shows is Shows.SPIKES:
        _spikes(play, fault)
        return
    cluster, machine = play.cluster, fault.machine
    name = cluster.names[machine]
    if name not in cluster.nodes or machine in play.repairs_s:
        play.outcome.idle += 1  # it is away, or known to be broken
        return
    lost = fault.source.shows is Shows.LOST
    if name not in cluster.place:
        play.outcome.idle += 1
        if lost or fault.lasting:
            play.repairs_s[machine] = fault.repair_s
            play.later(play.lease_s, _gone, play, name)
        return
    play.outcome.struck[fault.source.name] += 1
    if lost or fault.lasting:
        play.repairs_s[machine] = fault.repair_s
    match fault.source.shows:
        case Shows.LOST:
            broken(play)
            play.later(play.lease_s, _gone, play, name)
        case Shows.SLOWS:
            _slows(play, fault, name)
        case Shows.CORRUPTS:
            _corrupts(play, name)
        case shows:
            if fault.lasting:
                play.sick.add(machine)
            (_hangs if shows is Shows.HANGS else _dies)(play, name, fault.source.name)


def broken(play: Play) -> None:
    """No rank goes on, whether it knows it or not."""
    gang = play.cluster.gang
    if gang is None or gang.broken_s <= play.now_s:
        return
    if play.training.track:
        if play.training.all_copied(play.now_s):
            play.cluster.newcomers = {}
        gang.reached = play.training.halt(play.now_s)
    gang.broken_s = play.now_s
    play.news(HEARD_S)  # an exception waits so long for what others have to say
    play.books.enter(play.now_s, "detect")


# -- ranks ------------------------------------------------------------------------------------------------------------------


def _dies(play: Play, name: NodeId, why: str) -> None:
    """Its agent sees the end of a rank at once."""
    gang, record = play.cluster.gang, play.cluster.record
    if gang is None or record is None or gang.generation != record.number:
        return  # there are no ranks of this generation
    broken(play)
    gang.exits[name] = RankExit(
        rank=play.cluster.rank(name),
        at_s=play.now_s,
        code=1,
        error=f"RuntimeError: {why} on {name}",
        started=gang.stepped_s <= play.now_s,
    )
    play.news()


def start_of_the_sick(play: Play) -> None:
    """Ranks that start on a machine which nobody knows to be broken end there."""
    for machine in sorted(play.sick):
        if (name := play.cluster.names[machine]) in play.cluster.place:
            _dies(play, name, "device error")


def _hangs(play: Play, name: NodeId, why: str) -> None:
    """Nobody is told: all ranks have to be silent for long first (`hang.py`), and then are looked at twice."""
    gang, track = play.cluster.gang, play.training.track
    if gang is None or gang.broken_s <= play.now_s:
        return
    phase = RankPhase.TRAINING if track else RankPhase.RESTORING
    rank = Progress(
        rank=play.cluster.rank(name),
        phase=phase,
        silent_s=0.0,
        done=track.finished(play.now_s) - track.begun if track else 0,
        steps_s=(track.period_s,) if track else (),
        warmup_s=track.period_s if track and gang.generation > 1 else 0.0,
    )
    broken(play)
    allowed_s = budget_s(rank, play.setting.hang)
    play.later(allowed_s + play.setting.hang.confirm_s, _silent, play, gang.generation, name, allowed_s)


def _silent(play: Play, generation: Generation, missing: NodeId, allowed_s: float) -> None:
    """All agents have looked at their ranks twice."""
    cluster, gang = play.cluster, play.cluster.gang
    if gang is None or gang.generation != generation or missing not in cluster.nodes:
        return
    for name in cluster.place:
        where = (Place.ELSEWHERE, "in the device's driver") if name == missing else (Place.COLLECTIVE, "in all_reduce")
        first = cluster.rank(name)
        gang.stalls[name] = tuple(
            RankStall(
                rank=Rank(rank),
                at_s=gang.broken_s,
                silent_s=play.now_s - gang.broken_s,
                budget_s=allowed_s,
                stage="step",
                step=Step(int(gang.reached)),
                place=where[0],
                words=where[1],
                started=gang.stepped_s <= gang.broken_s,
            )
            for rank in range(first, first + cluster.per_node)
        )
    play.outcome.wave(play.setting.nodes)
    play.news()


# -- nodes ------------------------------------------------------------------------------------------------------------------


def _gone(play: Play, name: NodeId) -> None:
    """The lease of its agent is over."""
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


def found_sick(play: Play, name: NodeId) -> None:
    """A node's own check says that it is not fit; its agent leaves in order."""
    if play.cluster.machine[name] in play.sick:
        _gone(play, name)


def _repaired(play: Play, name: NodeId) -> None:
    play.outcome.away(play.since_s, -1)
    play.cluster.register(name, play.now_s)
    play.news()


# -- figures ----------------------------------------------------------------------------------------------------------------


def _slows(play: Play, fault: Fault, name: NodeId) -> None:
    play.slow[fault.machine] = fault.source.factor
    play.repace()
    play.later(play.costs.straggler_s, _told_slow, play, fault.machine)
    play.later(fault.lasts_s, _fast_again, play, fault.machine)


def _told_slow(play: Play, machine: int) -> None:
    cluster, gang, track = play.cluster, play.cluster.gang, play.training.track
    name = cluster.names[machine]
    if (
        gang is None
        or track is None
        or name not in cluster.place
        or machine not in play.slow
        or name in gang.stragglers
    ):
        return
    own_s = play.costs.step_s * play.slow[machine]
    gang.stragglers[name] = Straggler(
        rank=cluster.rank(name),
        at_s=play.now_s,
        step=Step(track.finished(play.now_s)),
        own_s=own_s,
        peers_s=play.costs.step_s,
        usual=1.0,
        lost=Lost.COMPUTING,
    )
    play.news()


def _fast_again(play: Play, machine: int) -> None:
    if play.slow.pop(machine, None) is None:
        return
    play.repace()
    gang = play.cluster.gang
    if gang and gang.stragglers.pop(play.cluster.names[machine], None):
        play.news()


def _corrupts(play: Play, name: NodeId) -> None:
    """The next snapshot shows it, once it has been compared. (Where the ranks are started again before that, it is forgotten here.)"""
    gang, track = play.cluster.gang, play.training.track
    if gang is None or track is None:
        return
    onset = track.finished(play.now_s) + 1
    seen_s = track.when(play.training.next_sealed(onset)) - play.now_s + play.costs.compare_s
    play.later(seen_s, _compared, play, gang.generation, name, onset)


def _compared(play: Play, generation: Generation, name: NodeId, onset: int) -> None:
    cluster, gang, track = play.cluster, play.cluster.gang, play.training.track
    if gang is None or gang.generation != generation or track is None or track.begun >= onset:
        return
    cluster.bad_from = onset
    rank = cluster.rank(name)
    gang.mismatches[name] = Mismatch(
        generation=generation,
        onset=Step(onset),
        agreed=Step(onset - 1),
        tensors=("model/simulated",),
        count=1,
        ranks=(rank, Rank(rank + 1), Rank(rank + 2)),
        wrong=(rank,),
        at_s=play.now_s,
    )
    play.news()


def _spikes(play: Play, fault: Fault) -> None:
    """Ranks find it by themselves, some steps after its onset, and go back by their own ladder."""
    track = play.training.track
    if track is None or play.spike is not None:
        play.outcome.idle += 1
        return
    play.outcome.struck[fault.source.name] += 1
    play.spike = Spike(onset=track.finished(play.now_s) + 1, again=fault.again)
    resumed(play)


def resumed(play: Play) -> None:
    """The ranks train (again): what is not over comes again."""
    gang, track, spike = play.cluster.gang, play.training.track, play.spike
    assert gang
    assert track
    for machine in sorted(play.slow):
        play.later(play.costs.straggler_s, _told_slow, play, machine)
    if spike is None:
        return
    if track.begun >= spike.onset:
        play.spike = None
        return
    found_at = spike.onset + play.setting.spikes.run_steps
    play.later(track.when(found_at) - play.now_s, _found, play, gang.generation, len(gang.rewinds), spike)


def _found(play: Play, generation: Generation, rewinds: int, spike: Spike) -> None:
    gang, track = play.cluster.gang, play.training.track
    stale = gang is None or gang.generation != generation or len(gang.rewinds) != rewinds
    if stale or gang is None or track is None or play.spike is not spike:
        return
    reached = track.finished(play.now_s)
    if reached < spike.onset + play.setting.spikes.run_steps:  # steps have become slower
        resumed(play)
        return
    policy = play.setting.policy.ladder
    finding = Finding(kind=Kind.LOSS_SPIKE, onset=Step(spike.onset), seen=Step(reached), value=4.0, expected=2.0)
    answer = ladder.answer(finding, spike.turns, policy, skippable=True)
    held = [step for step in play.training.held(play.now_s) if step < spike.onset]
    to = Step(max([step for step in held if step <= answer.at_most] or held, default=0))
    remedy = ladder.done(answer, spike.turns, to)
    windows = [turn.window for turn in spike.turns if turn.window]
    window = answer.window(Step(spike.onset), to, windows)
    spike.turns.append(ladder.Turn(kind=Kind.LOSS_SPIKE, onset=Step(spike.onset), to=to, remedy=remedy, window=window))
    if remedy in ladder.SKIPS or not spike.again:
        play.spike = None
    told = InPlaceRewind(
        ordinal=len(gang.rewinds) + 1,
        generation=generation,
        cause=Kind.LOSS_SPIKE,
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
    play.go_back(told)
