"""Judge whether ranks hang: two signals, and three answers.

    silent for longer than a budget ──▶ two looks, some seconds apart: has it moved? ──▶ no · suspected · certain, and which ranks

The first signal (`overdue`) comes from what ranks report by themselves. The second (`compare`) comes from two looks at each rank (readings
of its stack, processor time and I/O). Neither signal is enough: a rank in a slow step is silent, and a rank that waits for a slow rank does
not move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median

from ..errors import UsageError
from ..model.collectives import GroupCalls
from ..model.signals import OWN_WORK, DeviceState, Place
from ..model.types import Doing, Rank, RankPhase
from .stack_traces import Frame, Spot


@dataclass(frozen=True, kw_only=True)
class HangPolicy:
    """How many seconds ranks may be silent before the agents suspect a hang and look at their stacks."""

    act: bool = True
    """Whether a hang restarts the ranks. False: the agent only reports it, with the stacks."""
    factor: float = 5.0
    """A step is overdue after this many times the usual step time (the median of the last 64 steps). Raise
    `hang.factor` if single steps take much longer than most.

    5 is HyperPod's and DLRover's order of magnitude; a step with a snapshot or a validation in it stays below."""
    warmup_steps: int = 5
    """Number of steps after each start that may take longer, because they compile and fill caches. The budget of such a step is `start_s`;
    in later starts, `factor` times the slowest of these steps in this agent's start before. A new agent takes those of any start of the
    job."""
    floor_s: float = 60.0
    """No step is overdue before this many seconds, however short steps usually are. A garbage collection or a short outage of the storage
    is then no hang. A device counts as stuck only after it has finished nothing for as long. Raise `hang.floor_s` if a single kernel takes
    longer."""
    start_s: float = 1800.0
    """Seconds of silence allowed while ranks start, between two of these marks: attached, built, restored, first step.
    Raise `hang.start_s` if building or loading the model takes longer.

    torch lets a rendezvous wait as long."""
    evaluation_s: float = 1800.0
    """Seconds of silence allowed in an evaluation: Megatron's, or `session.pausing("evaluation")`. Raise
    `hang.evaluation_s` if an evaluation takes longer."""
    checkpoint_s: float = 1800.0
    """Seconds of silence allowed while the script writes its own checkpoint: Megatron's, or
    `session.pausing("checkpoint")`. Raise `hang.checkpoint_s` if writing it takes longer."""
    teardown_s: float = 120.0
    """Seconds of silence allowed after all loops have ended, while the ranks destroy their process groups.

    gloo hangs there now and then (torch 2.13)."""
    confirm_s: float = 10.0
    """Seconds between two looks at the stacks, which must agree before a hang is certain. The time doubles after each
    disagreement, up to a minute."""
    busy_s: float = 1800.0
    """For how many seconds a rank that uses the processor may stay at one place of its stack: the rank may be waiting
    for a device.

    A rank that waits for a device may poll it without a pause."""
    idle_s: float = 600.0
    """For how many seconds a rank that uses no processor may stay at one place of the script's code or of its data loader, while the other
    ranks wait for it. The rank may upload a file, or wait for a lock or for storage. If ranks have been silent at that place before,
    `factor` times that silence is allowed, if that is more.

    torch's default timeout for NCCL collectives, in which the other ranks wait, is also 600 s."""

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
    """Whether every living rank has been silent for longer than its budget: the first signal. If one rank is within its budget, for example
    in an evaluation of its own, the other ranks may be waiting for it."""
    return bool(ranks) and all(rank.silent_s > budget_s(rank, policy) for rank in ranks)


BUSY_SHARE = 0.05
"""A rank that uses more than this share of a core is busy. The background threads of a waiting process use less (NCCL's and gloo's: well
below 1 %)."""
BUSY_BYTES = 1 << 20
"""A rank that reads and writes more bytes than this between two looks is busy."""
BACKLOG_S = 1.0
"""A device that takes longer than this to finish what is queued has work."""


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
    device_done: int | None = None
    """Number of the last mark in its queue that the rank's device has reached; None: the device is not followed."""
    device_waits: bool = False
    """Whether the rank has queued work that the device has not finished."""
    device_still_s: float = 0.0
    """For how many seconds the device has finished nothing of that work."""
    device_answers: bool = True
    """Whether the device works on a stream that waits for no other work."""
    calls: tuple[GroupCalls, ...] = ()
    """The rank's collectives, if it has a flight recorder of torch."""


_MAY_WAIT = frozenset(Place) - {Place.DATA, Place.HALTED, Place.TEARDOWN}
"""Places at which a rank may wait for its device. If the device's queue is full, any operation waits, whether a library or the script's own
code calls it."""
WAITING = (Place.COLLECTIVE, Place.EXCHANGE, Place.BOUNDARY)


def same_place(first: Look, second: Look) -> bool:
    """Whether the rank has not moved between the two looks. While a rank waits for other ranks, only the spots are compared: in a polling
    wait, the innermost frames change."""
    if first.spot.place in WAITING:
        return first.spot == second.spot
    return (first.spot, first.stack) == (second.spot, second.stack)


def patient(policy: HangPolicy, before_s: float) -> HangPolicy:
    """Return the policy for a place of the script at which ranks have been silent for `before_s` seconds before. Perhaps the script always
    takes so long there. The device may then also finish nothing for that long, but for at most `busy_s`."""
    longer_s = policy.factor * before_s
    floor_s = max(policy.floor_s, min(policy.busy_s, longer_s))
    return replace(policy, floor_s=floor_s, idle_s=max(policy.idle_s, longer_s), busy_s=max(policy.busy_s, longer_s))


def device_state(first: Look, second: Look, policy: HangPolicy) -> DeviceState:
    """Return what the rank's device did between the two looks.

    A device that waits in a collective of NCCL finishes nothing while another rank works, for up to 600 s (torch's default timeout for NCCL
    collectives). A rank that works moves, uses a processor, or has a device that finishes work: the agents see it, and leave all ranks
    alone. If each rank waits for its device, and no device finishes anything, the only healthy explanation is a single piece of work: one
    kernel, or the thousand operations that a queue takes, all put there at once. One kernel or a full queue takes milliseconds to seconds,
    so `floor_s` (60 s) is much longer. Marks in a queue do not distinguish a kernel that takes 70 s from a kernel that never ends. So a job
    with kernels that take more than 60 s needs a larger `hang.floor_s`."""
    if first.device_done is None or first.device_done != second.device_done:
        return DeviceState.UNKNOWN
    if not (first.device_waits and second.device_waits) or second.device_still_s < policy.floor_s:
        return DeviceState.UNKNOWN
    return DeviceState.STUCK if first.device_answers or second.device_answers else DeviceState.DEAD


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
    at_work += ["is ready to run"] if not at_work and "R" in (first.state, second.state) else []
    elsewhere = second.stack is not None and second.spot.place in OWN_WORK
    device = device_state(first, second, policy)
    stuck = device and second.spot.place in _MAY_WAIT and bool(at_work or not elsewhere)
    at_work = [] if stuck else at_work  # a rank that waits for its device may poll it
    at_work += ["reads or writes"] if abs(second.io_bytes - first.io_bytes) > BUSY_BYTES else []
    if first.device_still_s > BACKLOG_S and first.device_done != second.device_done:
        at_work += ["waits for its device, which finishes work"]
    # A rank whose stack is not known may do its own work too: its script has replaced our handler, or the kernel waits for storage (or for
    # a device, if that is dead).
    kernel = second.state == "D" and not device
    own = elsewhere or (second.stack is None and (second.spot.place is Place.PERHAPS or kernel))
    if not at_work and own and not stuck and unmoved_s < policy.idle_s:
        waits = "it waits outside of collectives" if elsewhere else "for what it waits is not known"
        return False, True, f"{waits}; this is allowed for {policy.idle_s:.0f} s (hang.idle_s)"
    if not at_work:
        why = f"its device has finished nothing for {second.device_still_s:.0f} s" if stuck else "uses no processor"
        return False, False, f"it does not move and {why}"
    words = "it " + " and ".join(at_work)
    if unmoved_s < policy.busy_s:
        return False, True, words
    return False, False, f"{words}, but has not moved for {unmoved_s:.0f} s"
