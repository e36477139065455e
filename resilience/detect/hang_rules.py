"""Judge whether ranks hang: two signals, and three answers.

    silent for longer than a budget ──▶ two looks, some seconds apart: has it moved? ──▶ no · suspected · certain, and which ranks

The first signal (`overdue`) comes from what ranks report by themselves. The second (`compare`) comes from two looks at each rank (readings
of its stack, processor time and I/O). Neither signal is enough: a rank in a slow step is silent, and a rank that waits for a slow rank does
not move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from statistics import median

from ..errors import UsageError
from ..model.signals import OWN_WORK, Place, RankStall
from ..model.types import Doing, Rank, RankPhase
from .stack_traces import Frame, Spot


@dataclass(frozen=True, kw_only=True)
class HangPolicy:
    """How many seconds ranks may be silent before the agents suspect a hang and look at their stacks."""

    act: bool = True
    """Whether a hang restarts the ranks. False: the agent only reports it, with the stacks."""
    factor: float = 5.0
    """A step is overdue after this many times the usual step time (the median of the last 64 steps). Raise it if
    single steps take much longer than most.

    5 is HyperPod's and DLRover's order of magnitude; a step with a snapshot or a validation in it stays below."""
    warmup_steps: int = 5
    """Number of steps after each start that may take longer, because they compile and fill caches. Their budget is
    `start_s`; in later starts it is `factor` times the slowest of these steps so far.

    These steps compile and fill caches."""
    floor_s: float = 60.0
    """No step is overdue before this many seconds, however short steps usually are. A garbage collection or a short
    outage of the storage is then no hang.

    A garbage collection, or storage that is away for half a minute, is no hang of a 10 ms step."""
    start_s: float = 1800.0
    """Seconds of silence allowed while ranks start, between two of these marks: attached, built, restored, first
    step. Raise it if building or loading the model takes longer.

    torch lets a rendezvous wait as long."""
    evaluation_s: float = 1800.0
    """Seconds of silence allowed in an evaluation: Megatron's, or `session.pausing("evaluation")`. Raise it if an
    evaluation takes longer."""
    checkpoint_s: float = 1800.0
    """Seconds of silence allowed while the script writes its own checkpoint: Megatron's, or
    `session.pausing("checkpoint")`. Raise it if that takes longer."""
    teardown_s: float = 120.0
    """Seconds of silence allowed after all loops have ended, while the ranks destroy their process groups.

    gloo hangs there now and then (torch 2.13)."""
    confirm_s: float = 10.0
    """Seconds between two looks at the stacks, which must agree before a hang is certain. The time doubles after each
    disagreement, up to a minute."""
    busy_s: float = 1800.0
    """For how many seconds a rank that uses the processor may stay at one place of its stack. It may be waiting for a
    device.

    A rank that waits for a device may spin."""
    idle_s: float = 600.0
    """For how many seconds a rank that uses no processor may stay at one place of the script's code or of its data loader,
    while the other ranks wait for it. It may upload a file, or wait for a lock or for storage. If ranks have been silent there
    before, `factor` times that silence is allowed, if that is more.

    By default, NCCL also lets the other ranks wait for 600 s."""

    def __post_init__(self) -> None:
        if self.factor <= 1:
            raise UsageError(f"hang.factor is {self.factor}; it must be more than 1")
        if self.warmup_steps < 1:
            raise UsageError(f"hang.warmup_steps is {self.warmup_steps}; it must be at least 1")
        for name in (
            "floor_s",
            "start_s",
            "evaluation_s",
            "checkpoint_s",
            "teardown_s",
            "confirm_s",
            "busy_s",
            "idle_s",
        ):
            if getattr(self, name) <= 0:
                raise UsageError(f"hang.{name} is {getattr(self, name)}; it must be more than 0")


class Stage(StrEnum):
    """What a rank is doing. Each stage has its own budget (the time that the rank may be silent)."""

    START = "start"
    STEP = "step"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    TAIL = "tail"
    """The script after its training loop. Only the teardown in this stage (the end of the process groups) is judged."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a living rank has reported by itself."""

    rank: Rank
    phase: RankPhase
    silent_s: float
    """Seconds since the rank's last sign of life, not counting those in which the agent itself slept."""
    doing: Doing = Doing.STEP
    done: int = 0
    """Steps done in this generation, replayed steps included."""
    steps_s: Sequence[float] = ()
    """Seconds that each of the last steps took, from one step boundary to the next."""
    warmup_s: float = 0.0
    """Seconds of the longest silence in the first steps of an earlier generation; 0: no such silence is known."""
    tells: bool = True
    """Whether the script is known to report its steps."""
    turning: bool = False
    """Whether the rank has rewound in place and has not finished a step since."""


def stage(rank: Progress, policy: HangPolicy) -> Stage | None:
    """Return the stage that gives the rank its budget. None: the rank has no budget, because its script may report nothing."""
    if rank.phase in (RankPhase.FINISHED, RankPhase.STOPPED) or rank.doing is Doing.LEFT:
        return Stage.TAIL
    if rank.phase in (RankPhase.ABSENT, RankPhase.ATTACHED):
        return Stage.START if rank.tells else None
    if rank.doing in (Doing.EVALUATION, Doing.CHECKPOINT):
        return Stage.EVALUATION if rank.doing is Doing.EVALUATION else Stage.CHECKPOINT
    young = rank.phase is RankPhase.RESTORING or rank.done < policy.warmup_steps
    return Stage.START if young or rank.turning else Stage.STEP


def budget_s(rank: Progress, policy: HangPolicy) -> float:
    """Return how many seconds the rank may be silent in its stage; infinite if it has no stage."""
    match stage(rank, policy):
        case Stage.START if rank.phase is RankPhase.TRAINING and rank.warmup_s and not rank.turning:
            return min(policy.start_s, max(policy.floor_s, policy.factor * rank.warmup_s))
        case Stage.START:
            return policy.start_s
        case Stage.STEP:
            return max(policy.floor_s, policy.factor * (median(rank.steps_s) if rank.steps_s else 0.0))
        case Stage.EVALUATION:
            return policy.evaluation_s
        case Stage.CHECKPOINT:
            return policy.checkpoint_s
        case Stage.TAIL:
            return policy.teardown_s
    return float("inf")


def overdue(ranks: Sequence[Progress], policy: HangPolicy) -> bool:
    """Whether every living rank has been silent for longer than its budget: the first signal. The others may wait for a rank that is within
    its budget, for example in an evaluation of its own."""
    return bool(ranks) and all(rank.silent_s > budget_s(rank, policy) for rank in ranks)


BUSY_SHARE = 0.05
"""A rank that uses more than this share of a core is busy. The background threads of a waiting process use less (NCCL's and gloo's: well
below 1 %)."""
BUSY_BYTES = 1 << 20
"""A rank that reads and writes more bytes than this between two looks is busy."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """What one look at a rank showed."""

    at_s: float
    state: str
    """The kernel's state of the rank's main thread (before the rank exists: of the launcher's): `R`, `S`, `D`, `T`, `t`; empty: it is
    gone."""
    cpu_s: float = 0.0
    """Seconds of processor time that the process and its children have used so far."""
    io_bytes: int = 0
    """Bytes that the process and its children have read and written so far."""
    stack: tuple[Frame, ...] | None = None
    """Stack of the rank's main thread; None: the rank has not answered."""
    spot: Spot
    person: str = ""
    """What the rank waits for, if it waits for a person at a terminal or for the reader of a pipe; otherwise empty. A terminal may be
    stopped by Ctrl-S, and a debugger may wait for a command."""


_WAITING = (Place.COLLECTIVE, Place.EXCHANGE, Place.BOUNDARY)


def same_place(first: Look, second: Look) -> bool:
    """Whether the rank has not moved between the two looks. While it waits for other ranks, only the spots are compared: in a polling wait,
    the innermost frames change."""
    if first.spot.place in _WAITING:
        return first.spot == second.spot
    return (first.spot, first.stack) == (second.spot, second.stack)


def patient(policy: HangPolicy, before_s: float) -> HangPolicy:
    """Return the policy for a place of the script at which ranks have been silent for `before_s` seconds before. Perhaps the script always
    takes so long there."""
    longer_s = policy.factor * before_s
    return replace(policy, idle_s=max(policy.idle_s, longer_s), busy_s=max(policy.busy_s, longer_s))


def compare(first: Look, second: Look, unmoved_s: float, policy: HangPolicy) -> tuple[bool, bool, str]:
    """Return the second signal: whether the rank has moved, whether it is busy, and the evidence in words. unmoved_s: for how many seconds
    the rank has been seen at the same place."""
    if not same_place(first, second):
        return True, False, "it moves"
    if "t" in (first.state, second.state):
        return True, False, "a debugger has stopped it"
    if first.person and second.person:
        return True, False, second.person
    if not second.state:
        return True, False, "it has just ended"
    if second.spot.place is Place.HALTED and second.state == "T":
        return False, False, "it cannot move"
    share = (second.cpu_s - first.cpu_s) / max(1e-9, second.at_s - first.at_s)
    at_work = [f"uses {share:.0%} of a processor"] if share > BUSY_SHARE else []
    at_work += ["reads or writes"] if abs(second.io_bytes - first.io_bytes) > BUSY_BYTES else []
    at_work += ["is ready to run"] if not at_work and "R" in (first.state, second.state) else []
    waits = second.stack is not None and second.spot.place in OWN_WORK
    if not at_work and waits and unmoved_s < policy.idle_s:
        return False, True, f"it waits, but for no other rank; this is allowed for {policy.idle_s:.0f} s (hang.idle_s)"
    if not at_work:
        return False, False, "it does not move and uses no processor"
    words = "it " + " and ".join(at_work)
    if unmoved_s < policy.busy_s:
        return False, True, words
    return False, False, f"{words}, but has not moved for {unmoved_s:.0f} s"


class Answer(Enum):
    NO = "no"
    SUSPECTED = "suspected"
    CERTAIN = "certain"


@dataclass(frozen=True, kw_only=True)
class Judgement:
    answer: Answer
    blamed: tuple[RankStall, ...] = ()
    """The ranks that hold up the others; empty: it is not known which ranks do."""
    reason: str = ""


def judge(stalls: Sequence[RankStall]) -> Judgement:
    """Return the judgement from the looks at all living ranks of the job."""
    if not stalls:
        return Judgement(answer=Answer.NO)
    blamed = blame(stalls)
    lively = [s for s in stalls if s.moved] or [s for s in blamed or stalls if s.busy]
    if lively:
        reason = "; ".join(f"rank {s.rank} is {s.words}: {s.why}" for s in lively[:3])
        return Judgement(answer=Answer.SUSPECTED, blamed=blamed, reason=reason)
    return Judgement(answer=Answer.CERTAIN, blamed=blamed, reason=_sentence(blamed, stalls))


def blame(stalls: Sequence[RankStall]) -> tuple[RankStall, ...]:
    """Return the ranks that hold up the others; empty: it is not known which ranks do. The suspects are the ranks at the lowest step. The
    first of these groups that is not empty is blamed: suspects that cannot run; suspects that do not wait for other ranks; all suspects, if
    other ranks are ahead; the few ranks in another collective than most."""
    last = min(s.step for s in stalls)
    behind = [s for s in stalls if s.step == last]
    for places in ((Place.HALTED,), (*OWN_WORK, Place.TEARDOWN)):
        if found := tuple(s for s in behind if s.place in places):
            return found
    if len(behind) < len(stalls):
        return tuple(behind)
    sites = [s.site for s in stalls if s.place is Place.COLLECTIVE]
    most = max(sites, key=sites.count, default="")
    if len(sites) == len(stalls) and 2 * sites.count(most) > len(sites):
        return tuple(s for s in stalls if s.site != most)
    return ()


def _sentence(blamed: Sequence[RankStall], stalls: Sequence[RankStall]) -> str:
    if not blamed:
        return (
            f"all {len(stalls)} ranks wait, and none stands out: the cause may be the network, a device, or a rank whose stack "
            "does not show it"
        )
    who = ", ".join(str(s.rank) for s in blamed)
    return f"rank{'s' if len(blamed) > 1 else ''} {who} hang{'s' if len(blamed) == 1 else ''}"
