"""The ranks' answers to a step with wrong figures, from first to last. The controller takes no part in them. Pure.

    fault                        answer                                              cause, if the fault does not recur
    the first time               replay the same data from the newest state before   unknown, perhaps a transient hardware fault
    again                        replay it from an older state                       unknown, perhaps the newer state was damaged
    again                        skip the data around the onset                      the data
    again                        skip more data, from further back; with a           the data; in a rescue: the data, or how
                                 rescue if one is configured (`rescue`)              those steps were computed
    again, or no way to skip     NaN: give up. A diverged loss: continue from     unknown
                                 the newest state before, and judge no loss for
                                 a while (`end_job`: give up)

Once skipped data has cured a NaN of this job, the ranks skip the data of a later NaN after only one replay. One bad sample may come in each
epoch, and a replay from an older state would cost `distance_steps` each time.

A NaN that recurs in a replay does no harm if the next step, the parameters, the gradients and the optimizers' state are finite. After such
a NaN, the ranks train on (`tally.left_alone`). An example is a batch without labels: its loss is 0/0, and its gradients are 0.

A spike of loss or gradient is no fault yet: the ranks wait (`loss_level`).

If the script fetches its batches without our help, the ranks do not know the data of a step. A fault that does not recur then proves
nothing: the batch may have been a different one. The ranks rewind `max_replays` times, and no hardware is blamed.

Two faults are the same fault if their onsets are at most `same_fault_steps` apart. If the rewind skipped more batches than that, that
number is the limit. If the ranks have done `cured_steps` steps between two NaNs, a rewind has cured the first, and the second is a new
fault. The past rewinds are a list of `Turn`, which is equal on all ranks. Incidents keep this list after the ranks have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ..errors import UsageError
from ..model.cause import Kind
from ..model.data_windows import Window, batch
from ..model.rewind import EARLIER, SKIPS, Origin, Remedy, Turn
from ..model.types import Step
from .loss_spike import Finding


@dataclass(frozen=True, kw_only=True)
class LadderPolicy:
    """What the ranks try after a NaN or a spike, in this order: replay, replay from an older state, skip data, stop."""

    max_replays: int = 2
    """How often the ranks replay the same data before they skip it. The first replay starts from the newest state
    before the fault, further ones from an older state."""
    distance_steps: int = 100
    """The older state from which further replays start lies this many steps before the onset of a spike. If no snapshot is that old, the
    ranks use the oldest one.

    PaLM (arXiv:2204.02311, 5.1) went back about 100 steps."""
    skip_steps: int = 200
    """How many batches around the onset of a spike the ranks skip. Each further time that the ranks skip because of this spike, they skip
    twice as many. After a NaN they first skip only the batch that gave it.

    PaLM: 200 to 500."""
    max_skips: int = 3
    """How often the ranks skip data because of one fault. After the last skip, no remedy is left: a NaN ends the job, and after a diverged
    loss the ranks continue (`ladder.end_job`)."""
    same_fault_steps: int = 200
    """Two faults count as the same fault if their onsets are at most this many steps apart."""
    cured_steps: int = 10
    """A rewind has cured a NaN if the next NaN comes at least this many steps later. A NaN so much later counts as a new fault.

    The default is smaller than the number of batches in a short epoch, because a bad sample may come once in each epoch."""
    end_job: bool = False
    """Whether the job ends if no remedy helps against a loss that has diverged. If false, the ranks train on from the
    newest state before it, and the event log says so. If no remedy helps against NaN or Inf, the job always ends."""
    settled_steps: int = 3
    """A fault counts as cured once the ranks are this many steps past the step at which they found it.

    The ranks find a spike within three steps (`loss_spike`)."""

    def __post_init__(self) -> None:
        for name in ("max_replays", "skip_steps"):
            if getattr(self, name) < 1:
                raise UsageError(f"ladder.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("distance_steps", "max_skips", "same_fault_steps", "cured_steps", "settled_steps"):
            if getattr(self, name) < 0:
                raise UsageError(f"ladder.{name} is {getattr(self, name)}; it cannot be negative")


WATCHED = Kind.LOSS_SPIKE, Kind.GRADIENT_SPIKE
"""Findings after which the ranks wait for the loss to come back."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    remedy: Remedy
    at_most: Step = Step(-1)
    """The ranks rewind to the newest state of this step or before. If no state is that old, a replay from an older state uses the oldest
    state. Any other remedy then uses the newest state before the onset. (A skip does not use the oldest state: few steps lie before it, so
    a spike's baseline would consist of steps after the skipped data.)"""
    before: int = 0
    """Number of batches to skip before the onset's batch."""
    after: int = 0
    """Number of batches to skip from the onset's batch on."""

    def window(self, onset: Step, to: Step, windows: Iterable[Window]) -> Window | None:
        """Return the batches to skip in addition to `windows` when the ranks rewind to step `to`. None: no batches."""
        if self.remedy not in SKIPS:
            return None
        known = tuple(windows)
        first = max(
            to, onset - 1
        )  # index of the step that led to the state after `onset` steps, unless that step is kept
        return Window(batch(max(to, first - self.before), known), batch(first, known) + self.after)


def same(kind: str, onset: int, later: int, policy: LadderPolicy, window: Window | None = None) -> bool:
    """Whether the fault with the onset `later` is the same as an earlier fault with this `kind` and `onset`, which a rewind answered. A NaN
    is a new fault if the ranks have done enough steps since. window: the data that this rewind skipped. Later data comes as many steps
    sooner."""
    cured = kind == Kind.NON_FINITE and later >= onset + policy.cured_steps
    return not cured and abs(later - onset) <= max(policy.same_fault_steps, window.stop - window.start if window else 0)


def goes_on(kind: Kind, last: int, finding: Finding, policy: LadderPolicy) -> bool:
    """Whether `finding` continues an unanswered fault of `kind` that was last seen at step `last`. A NaN is found again at each
    further step."""
    return kind is finding.kind and finding.seen - last <= policy.same_fault_steps


def same_fault(finding: Finding, turns: Sequence[Turn], policy: LadderPolicy) -> list[Turn]:
    """Return the most recent rewinds that answered the same fault as `finding`, oldest first."""
    found: list[Turn] = []
    onset = finding.onset
    for turn in reversed([turn for turn in turns if turn.kind in tuple(Kind)]):
        if not same(turn.kind, turn.onset, onset, policy, turn.window):
            break
        found.insert(0, turn)
        onset = turn.onset
    return found


def answer(
    finding: Finding, turns: Sequence[Turn], policy: LadderPolicy, *, skippable: bool, rescue: bool = False
) -> Answer:
    """Return the answer to `finding`, given all earlier rewinds (`turns`). skippable: the data of each step is known, so the ranks can
    replay or skip it. rescue: a rescue is configured."""
    if finding.kind in WATCHED:
        return Answer(remedy=Remedy.WAIT, at_most=Step(finding.onset - 1))
    past = same_fault(finding, turns, policy)
    skips = sum(turn.remedy in SKIPS for turn in past)
    certain = finding.kind is Kind.NON_FINITE
    earlier_turns = turns[: len(turns) - len(past)]
    bad_data = certain and any(turn.kind == finding.kind and turn.remedy in SKIPS for turn in earlier_turns)
    if not skips and len(past) < (1 if bad_data and skippable else policy.max_replays):
        if not past:
            return Answer(remedy=Remedy.REPLAY if skippable else Remedy.REWIND, at_most=Step(finding.onset - 1))
        back = len(past) * policy.distance_steps
        earlier = Remedy.REPLAY_EARLIER if skippable else Remedy.REWIND_EARLIER
        return Answer(remedy=earlier, at_most=Step(max(0, finding.onset - 1 - back)))
    if not skippable or skips == policy.max_skips:
        if certain or policy.end_job:
            return Answer(remedy=Remedy.GIVE_UP)
        return Answer(remedy=Remedy.CONTINUE, at_most=Step(finding.onset - 1))
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


def replay_at_once(finding: Finding, turns: Sequence[Turn], policy: LadderPolicy, *, skippable: bool) -> Answer | None:
    """Return the answer to a spike that hardware has likely caused: a replay from the newest state before it costs few steps, and shows
    whether hardware caused it. None: the ranks have answered this fault before."""
    if same_fault(finding, turns, policy):
        return None
    return Answer(remedy=Remedy.REPLAY if skippable else Remedy.REWIND, at_most=Step(finding.onset - 1))


def done(answer: Answer, past: Sequence[Turn], to: Step) -> Remedy:
    """Return what the ranks did when `answer` led them back to step `to`. If an earlier rewind went back at least as far, a replay from an
    older state counts as a plain replay."""
    if answer.remedy in EARLIER and any(turn.to <= to for turn in past):
        return Remedy.REPLAY if answer.remedy is Remedy.REPLAY_EARLIER else Remedy.REWIND
    return answer.remedy


def origin(remedy: Remedy) -> Origin:
    """Return the origin of a fault that did not recur after `remedy`."""
    return {
        Remedy.REPLAY: Origin.TRANSIENT,
        Remedy.REPLAY_EARLIER: Origin.STATE,
        Remedy.REWIND: Origin.UNDECIDED,
        Remedy.REWIND_EARLIER: Origin.UNDECIDED,
        Remedy.SKIP: Origin.DATA,
        Remedy.RESCUE: Origin.RESCUED,
        Remedy.GIVE_UP: Origin.UNKNOWN,
        Remedy.WAIT: Origin.UNKNOWN,
        Remedy.LEAVE_ALONE: Origin.UNKNOWN,
        Remedy.CONTINUE: Origin.UNKNOWN,
    }[remedy]


def goes_to(
    answer: Answer, finding: Finding, newest: Callable[[int], int], oldest: Callable[[], float]
) -> tuple[Answer, int]:
    """Return the answer that the kept states allow, and the step to rewind to; -1: there is none. If no state is from before a diverged
    loss, nothing can be undone: the ranks continue from the newest state. If no state is from before the onset of a NaN, the ranks use the
    newest state before the step at which they found the NaN. newest: returns the newest kept state of a given step or before; oldest:
    returns the oldest kept state."""
    if answer.remedy is Remedy.GIVE_UP:
        return answer, -1
    to = newest(answer.at_most)
    if to < 0 and answer.remedy in EARLIER and (kept := oldest()) < finding.onset:
        return answer, int(kept)
    to = to if to >= 0 else newest(finding.onset - 1)
    if to < 0 and finding.kind is Kind.LOSS_DIVERGENCE:
        return replace(answer, remedy=Remedy.CONTINUE), newest(finding.seen)
    return answer, to if to >= 0 or finding.kind is not Kind.NON_FINITE else newest(finding.seen - 1)
