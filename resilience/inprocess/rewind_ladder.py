"""The lower rungs of the ladder, which the ranks climb among themselves: what to do about a step whose figures are wrong. Pure.

    finding                      answer                                              and if it is gone then
    the first time               replay the same data from the newest state before   unknown: the hardware, perhaps, for a moment
    again                        replay it from an older state                       unknown: the newer state was damaged, perhaps
    again                        leave the data around the onset out                 it was the data
    again                        leave more of it out, from further back; where      it was the data; or the data, or how
                                 a rescue is set (`rescue`), with its care           those steps were computed
    again, or no way to skip     give up

Where the data of a step is not known (the script takes its batches by itself), nothing can be concluded from a fault that does not come
again: it was another batch, perhaps. The ranks go back as often, and nobody's hardware is blamed.

The same fault is one whose onset lies within `same_fault_steps` of the last one's. What was done is a list of turns, the same on all ranks;
it outlives them as incidents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..errors import UsageError
from ..model.cause import Kind
from ..model.data_windows import Window, batch
from ..model.rewind import EARLIER, SKIPS, Origin, Remedy, Turn
from ..model.types import Step
from .loss_spike import Finding


@dataclass(frozen=True, kw_only=True)
class LadderPolicy:
    """What the ranks try, in this order, after a NaN or a spike: replay, replay from an older state, skip data,
    stop."""

    max_replays: int = 2
    """How often the ranks replay the same data before they skip it. The first replay starts from the newest state,
    the next ones from an older state."""
    distance_steps: int = 100
    """How many steps before the onset of a spike that older state lies. If no state is that old, the ranks take the
    oldest one.

    PaLM (arXiv:2204.02311, 5.1) went back about 100 steps."""
    skip_steps: int = 200
    """How many batches around the onset of a spike the ranks skip; each further time twice as many. Of a NaN they
    skip the one batch that gave it.

    PaLM: 200 to 500."""
    max_skips: int = 3
    """How often the ranks skip data because of one fault before the job stops."""
    same_fault_steps: int = 200
    """A fault counts as the same fault if its onset is at most this many steps from the previous onset."""
    settled_steps: int = 3
    """A fault counts as gone this many steps after the step at which the ranks found it.

    A spike is found within three steps (`loss_spike`)."""

    def __post_init__(self) -> None:
        for name in ("max_replays", "skip_steps"):
            if getattr(self, name) < 1:
                raise UsageError(f"ladder.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("distance_steps", "max_skips", "same_fault_steps", "settled_steps"):
            if getattr(self, name) < 0:
                raise UsageError(f"ladder.{name} is {getattr(self, name)}; it cannot be negative")


@dataclass(frozen=True, kw_only=True)
class Answer:
    remedy: Remedy
    at_most: Step = Step(-1)
    """Go back to the newest state that is no newer than this; where there is none, to the newest before the onset, or, for what is replayed
    from an older state, to the oldest. (Whoever leaves data out does not go back as far as that: with few steps behind, a spike's baseline
    would be made of what comes after the data.)"""
    before: int = 0
    """Batches before that of the onset, to be left out,"""
    after: int = 0
    """and from it on."""

    def window(self, onset: Step, to: Step, windows: Iterable[Window]) -> Window | None:
        """What is left out, besides `windows`, when the ranks go back `to` there."""
        if self.remedy not in SKIPS:
            return None
        known = tuple(windows)
        first = max(0, onset - 1)  # the step that has given the state after `onset` steps
        return Window(batch(max(to, first - self.before), known), batch(first, known) + self.after)


def near(onset: int, other: int, policy: LadderPolicy) -> bool:
    """Whether faults with these onsets are taken to be the same."""
    return abs(other - onset) <= policy.same_fault_steps


def goes_on(kind: Kind, last: int, finding: Finding, policy: LadderPolicy) -> bool:
    """Whether `finding` is a fault of that kind that was last seen at step `last`, where nothing is done about it: of NaN, each further
    step finds it again."""
    return kind is finding.kind and finding.seen - last <= policy.same_fault_steps


def same_fault(finding: Finding, turns: Sequence[Turn], policy: LadderPolicy) -> list[Turn]:
    """The last of `turns` that were about what is found now, in order."""
    found: list[Turn] = []
    onset = finding.onset
    for turn in reversed([turn for turn in turns if turn.kind in tuple(Kind)]):
        if not near(turn.onset, onset, policy):
            break
        found.insert(0, turn)
        onset = turn.onset
    return found


def answer(
    finding: Finding, turns: Sequence[Turn], policy: LadderPolicy, *, skippable: bool, rescue: bool = False
) -> Answer:
    """What to do about `finding` after all that was done before. skippable: the data of each step is known, so it can be used again, or
    left out; rescue: there is a care to compute with, where that did not help."""
    past = same_fault(finding, turns, policy)
    skips = sum(turn.remedy in SKIPS for turn in past)
    certain = finding.kind is Kind.NON_FINITE
    if not skips and len(past) < policy.max_replays:
        if not past:
            return Answer(remedy=Remedy.REPLAY if skippable else Remedy.REWIND, at_most=Step(finding.onset - 1))
        back = len(past) * policy.distance_steps
        earlier = Remedy.REPLAY_EARLIER if skippable else Remedy.REWIND_EARLIER
        return Answer(remedy=earlier, at_most=Step(max(0, finding.onset - 1 - back)))
    if not skippable or skips == policy.max_skips:
        return Answer(remedy=Remedy.GIVE_UP)
    wider = 2**skips
    remedy = Remedy.RESCUE if skips and rescue else Remedy.SKIP
    if certain:
        return Answer(remedy=remedy, at_most=Step(finding.onset - 1), after=wider)
    half = policy.skip_steps * wider // 2
    back = policy.distance_steps * wider
    return Answer(
        remedy=remedy,
        at_most=Step(max(0, finding.onset - 1 - back)),
        before=min(half, back),
        after=policy.skip_steps * wider - half,
    )


def done(answer: Answer, past: Sequence[Turn], to: Step) -> Remedy:
    """What has been done when `answer` led back `to` there: where nothing older is kept, an earlier replay is a replay."""
    if answer.remedy in EARLIER and any(turn.to <= to for turn in past):
        return Remedy.REPLAY if answer.remedy is Remedy.REPLAY_EARLIER else Remedy.REWIND
    return answer.remedy


def origin(remedy: Remedy) -> Origin:
    """What it tells that the fault was gone after `remedy`."""
    return {
        Remedy.REPLAY: Origin.TRANSIENT,
        Remedy.REPLAY_EARLIER: Origin.STATE,
        Remedy.REWIND: Origin.UNDECIDED,
        Remedy.REWIND_EARLIER: Origin.UNDECIDED,
        Remedy.SKIP: Origin.DATA,
        Remedy.RESCUE: Origin.RESCUED,
        Remedy.GIVE_UP: Origin.UNKNOWN,
    }[remedy]


def goes_to(answer: Answer, onset: Step, newest: Callable[[int], int], oldest: Callable[[], float]) -> int:
    """The state to go back to for a fault from step `onset` on; -1: none. newest: up to a step; both of what is kept."""
    if answer.remedy is Remedy.GIVE_UP:
        return -1
    to = newest(answer.at_most)
    if to < 0 and answer.remedy in EARLIER and (kept := oldest()) < onset:
        return int(kept)
    return to if to >= 0 else newest(onset - 1)
