"""Sentences about an incident, for the terminal and the commands `status` and `explain`. No program parses them."""

from __future__ import annotations

from ..model.cause import Cause, Kind
from ..model.incident import PHASES, Because, Incident, Weighed
from ..model.rewind import AGAIN, Remedy
from ..model.signals import Repeated
from ..model.types import OrderedBy
from ..plan.escalation import OBSERVE, RESTARTS, STOP
from ..text import formatting, verdicts

_RUNGS = {
    0: "observation",
    1: "rewind in place",
    2: "restart of the worker group",
    3: "replacement of a node",
    4: "another number of nodes",
    6: "stop",
}


def rung(number: int) -> str:
    return f"rung {number}, {_RUNGS.get(number, 'unknown')}"


def phases(incident: Incident) -> str:
    return " · ".join(
        f"{name} {formatting.seconds(incident.phases_s[name])}" for name in PHASES if name in incident.phases_s
    )


_COMPUTED_AGAIN = {
    Repeated.UNKNOWN: "computed again",
    Repeated.SAME: "computed again, with the same loss as before",
    Repeated.OTHER: "computed again, with another loss than before",
}
_OTHER = (
    "either this training is not reproducible, or its state was damaged before the fault (as by a flipped bit), "
    "or its snapshots lack a part of its state (docs/state.md lists what they hold)"
)
_OTHER_DATA = (
    "the data of this loop could not be put back, unless it comes from something that a snapshot holds: "
    "from there on the loop may use other data than it would have used without the fault"
)


def _computed_again(incident: Incident) -> str:
    # No agent knows how many steps a node's ranks did after the last report of its lost agent.
    least = "at least " if incident.cause in (Cause.AGENT_RESTARTED, Cause.AGENT_LOST) else ""
    return f"{least}{formatting.steps(incident.lost_steps)} {_COMPUTED_AGAIN[incident.repeated]}"


def recovered(incident: Incident) -> str:
    """Return one line about an incident that was answered, and is over."""
    start = f", started {launched(incident.launch)}" if incident.launch else ""
    why = f"; {verdicts.concluded(incident)}" if incident.origin else ""
    other = f"; {_OTHER}" if incident.repeated is Repeated.OTHER else ""
    other += f"; {_OTHER_DATA}" if incident.other_data else ""
    return f"{result(incident)} ({rung(incident.rung)}{start}): {_computed_again(incident)}; {phases(incident)}{why}{other}"


_LASTING = (Cause.CUT_OFF, Cause.STRAGGLER, Cause.MEMORY_SHORT, Cause.RANK_HUNG)
"""Causes of incidents that are over when the program no longer sees the cause."""


def outcome(incident: Incident) -> str:
    """Return the incident's outcome, as `status` shows it."""
    if incident.rung == OBSERVE and incident.open:
        return f"it still lasts; {incident.plan}"
    if incident.rung in (OBSERVE, STOP):
        return "it is over" if incident.cause in _LASTING and incident.rung == OBSERVE else incident.plan
    if incident.open:
        return "the recovery is under way"
    if result(incident) == "interrupted" and incident.rung in RESTARTS:
        return "the ranks did not reach a step: another fault or the end of the job came first"
    if incident.remedy == Remedy.CONTINUE:
        return f"not cured: the training continues from step {incident.resume_step}; {_computed_again(incident)}"
    return recovered(incident)


def result(incident: Incident) -> str:
    """Return in a word or two what became of an incident that is over, as the metrics count it."""
    if incident.rung in (OBSERVE, STOP):
        return "reported" if incident.rung == OBSERVE else "stopped"
    if incident.remedy == Remedy.CONTINUE:
        return "not cured"
    if incident.origin == AGAIN:
        return "in vain"
    if incident.rung in RESTARTS:  # did another fault, or the end of the job, come before the first step?
        return "recovered" if "step" in incident.phases_s or incident.remedy else "interrupted"
    # A rewind that no person ordered has an origin once the ranks are well past the fault.
    return "interrupted" if incident.cause in tuple(Kind) and not incident.origin else "recovered"


def struck(incident: Incident) -> str:
    """Return the step after which the incident struck."""
    return "before the first reported step" if incident.step_at_fault < 0 else f"after step {incident.step_at_fault}"


def launched(how: str) -> str:
    """Return `warm` or `cold`, without the reason that may follow."""
    return how.partition(":")[0]


def resumed(step: int, beginning: str = "the job's beginning") -> str:
    """Return a text on the state from which the ranks resumed. beginning: words for the script's own start, or for another job's
    snapshot."""
    return f"from {beginning}" if step < 0 else f"from step {step}"


def lines(incident: Incident, when: str, number: str) -> list[str]:
    """Return the lines that `explain` shows for an incident. when: the time at which it struck; number: the number to show for it."""
    lines = [f"incident {number}, {when}, generation {incident.generation}: {incident.summary}"]
    if len(incident.evidence) > 1 or incident.evidence[:1] != (incident.summary,):
        lines += [f"  seen       {text}" for text in _flat(incident.evidence) if text != incident.summary]
    answered = f"answered by {rung(incident.rung)}"
    if incident.would is not None:
        answered = f"which {rung(incident.would)} would answer"
    lines.append(f"  concluded  {incident.cause.replace('_', ' ')}, {answered}")
    lines += [f"  and not    {weighed(each)}" for each in incident.weighed]
    lines.append(f"  done       {incident.plan}")
    if incident.rung == OBSERVE and incident.cause in _LASTING:
        lines.append(f"  now        {'it still lasts' if incident.open else 'it is over'}")
    if incident.origin:
        lines.append(f"  learned    {verdicts.concluded(incident)}")
    if 1 <= incident.rung <= 4:
        start = f", ranks started {incident.launch}" if incident.launch else ""
        not_yet = "not yet" if incident.open else "no: the job ended first"
        lines.append(
            f"  went on    {not_yet if incident.resume_step is None else resumed(incident.resume_step) + start}"
        )
        took = phases(incident)
        if took:
            lines.append(f"  took       {took}")
        what = "it was ordered" if incident.cause == OrderedBy.OPERATOR else "the fault struck"
        lines.append(f"  cost       {_computed_again(incident)} ({what} {struck(incident)})")
    if incident.repeated is Repeated.OTHER:
        lines.append(f"  beware     {_OTHER}")
    return lines


_RIVALS = {
    "rank_killed": "the death",
    "script_raised": "the exception",
    "rank_hung": "the hang",
    "agent_restarted": "the agent's new start",
    "agent_lost": "the loss of the agent",
}


def weighed(rival: Weighed) -> str:
    """Return a sentence on a rejected explanation, and why it was rejected."""
    what = _RIVALS.get(rival.cause, rival.cause.replace("_", " "))
    what = f"{what} of {formatting.ranks(rival.ranks)}" if rival.ranks else what
    when = f"{formatting.seconds(abs(rival.by_s))} {'later' if rival.by_s >= 0 else 'earlier'}"
    match rival.because:
        case Because.FOLLOWS:
            return f"{what}: seen {when}; it is an effect of such a fault, never its cause"
        case Because.LATER:
            return f"{what}: it came {when}"
        case Because.WAITS:
            return f"{what}: a rank that waits for a lost rank hangs too"
        case Because.AGREED:
            return f"a flipped bit in a replica: the replicas were equal at step {rival.step}"
        case Because.NOT_COUNTED:
            return "lack of memory: the kernel counted no OOM kill"


def _flat(texts: tuple[str, ...]) -> list[str]:
    return [line for text in texts for line in text.rstrip().splitlines()]
