"""Where the job's time goes: every second that an agent leads is booked once, as training or as what it was lost to. Pure.

While a recovery is under way, its seconds wait; when its incident closes, they are booked by phase. A fault is detected after it struck, so
seconds may have been booked as training that were lost. They become a debt, which the training pays with its next seconds: so no sum ever
falls, as a counter's must not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..model.incident import PHASES, Incident
from ..plan.escalation import OBSERVE
from . import explain
from .overview import State

TRAINING, FIRST_START, STALL = "training", "first start", "stall"
WHERE = (TRAINING, FIRST_START, *PHASES, STALL, str(State.WAITING), str(State.PAUSED))
"""What a second can be booked as. The phases are those of recoveries; `stall`: the slowest rank was in our code between two steps."""

NO_AGENT = "no agent ran"


class Ledger:
    def __init__(self) -> None:
        self.spent = dict.fromkeys(WHERE, 0.0)
        """Seconds booked, by `WHERE`."""
        self._unbooked = self._waited = self._debt = 0.0
        """Seconds of a recovery that is under way, and those of it in which the job waited for nodes; and the training's debt."""
        self._stall_s = 0.0

    def passed(self, seconds: float, state: State, stall_s: float) -> None:
        """Book `seconds` that have passed. stall_s: the sum of stalls in this generation, as the ranks' pages have it."""
        stalled = min(seconds, max(0.0, stall_s - self._stall_s if stall_s >= self._stall_s else stall_s))
        self._stall_s = stall_s
        match state:
            case State.TRAINING:
                self.spent[STALL] += stalled
                paid = min(self._debt, seconds - stalled)
                self._debt -= paid
                self.spent[TRAINING] += seconds - stalled - paid
                self._waited = 0.0
            case State.STARTING:
                self.spent[FIRST_START] += seconds
            case State.RECOVERING:
                self._unbooked += seconds
            case State.WAITING | State.PAUSED:
                self.spent[state] += seconds
                self._waited += seconds * (state is State.WAITING)

    def recovered(self, phases_s: Mapping[str, float]) -> None:
        """Book a recovery that is over. phases_s: its seconds, by phase."""
        took = {name: phases_s.get(name, 0.0) for name in PHASES}
        took["stop"] = max(0.0, took["stop"] - self._waited)  # the old ranks are gone, and a node is missing
        for name, seconds in took.items():
            self.spent[name] += seconds
        self._debt += sum(took.values()) - self._unbooked
        if self._debt < 0:
            self.spent[TRAINING] -= self._debt
            self._debt = 0.0
        self._unbooked = self._waited = 0.0


def effective(spent: Mapping[str, float]) -> float:
    """Return the share of the time, without pauses, that was spent on steps that count; 0 if no time has passed."""
    total = sum(seconds for where, seconds in spent.items() if where != State.PAUSED)
    return spent.get(TRAINING, 0.0) / total if total else 0.0


def costs(
    lives: Sequence[Mapping[str, Any]],
    incidents: Mapping[str, Incident],
    now: float = 0.0,
    down_s: float = 0.0,
    step_s: float = 0.0,
) -> dict[str, Any]:
    """Return where the time went, in seconds, over all starts of agents (lives, in order of time); what became of the incidents, and
    what they cost until now. down_s: seconds for which the job has been stopped by a fault. step_s: of a step, for rewinds in place: they time no replay."""
    spent = dict.fromkeys((*WHERE, NO_AGENT), 0.0)
    reached_s = lives[0]["from_s"] if lives else 0.0
    for life in lives:
        for where, seconds in life["spent"].items():
            spent[where] = spent.get(where, 0.0) + seconds
        spent[NO_AGENT] += max(0.0, life["from_s"] - reached_s)
        reached_s = max(reached_s, life["until_s"])
    known = [*incidents.values()]
    took = [
        max(0.0, now - i.at_s)
        if i.open and i.rung != OBSERVE
        else sum({"replay": i.lost_steps * step_s, **i.phases_s}.values())
        for i in known
    ]
    return {
        "effective": effective(spent),
        "spent": {where: round(seconds, 3) for where, seconds in spent.items() if seconds},
        "trained_s": spent[TRAINING],
        "counted_s": sum(spent.values()) - spent[State.PAUSED],
        "incidents": len(incidents),
        "results": Counter(_became(i, known[at:]) for at, i in enumerate(known, 1)),
        "lost_steps": sum(i.lost_steps for i in known),
        "lost_s": round(sum(took) + down_s, 3),
    }


def _became(incident: Incident, later: Sequence[Incident]) -> str:
    """Return what became of an incident, for the count. later: the incidents after it."""
    if incident.rung == OBSERVE:
        return "only reported"
    result = "open" if incident.open else explain.result(incident)
    alike = (incident.cause, incident.step_at_fault)
    if result == "recovered" and any((i.cause, i.step_at_fault) == alike for i in later):
        return "came back"
    return {"recovered": "repaired", "in vain": "not cured", "stopped": "stopped the job"}.get(result, result)
