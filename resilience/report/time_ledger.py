"""Where the job's time goes: every second for which an agent leads is booked once, as training or under the cause of its loss. Pure.

While a recovery is under way, its seconds are not booked. When its incident closes, they are booked by phase. A fault is detected some time
after it struck, so lost seconds may already be booked as training. Such lost seconds become a debt: as many of the next seconds of training
are not booked. So no sum ever falls, which a Prometheus counter requires.
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
"""The accounts on which a second can be booked. The phases are those of recoveries; `stall`: the slowest rank was in our code between two
steps."""

NO_AGENT = "no agent ran"


class Ledger:
    def __init__(self) -> None:
        self.spent = dict.fromkeys(WHERE, 0.0)
        """Seconds booked, by `WHERE`."""
        self._unbooked = self._waited = self._debt = 0.0
        """Seconds of a recovery that is under way; seconds of these in which the job waited for nodes; and the training's debt."""
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
    what they cost. now: when an agent last ran. down_s: seconds for which the job has been stopped by a fault. step_s: seconds of a step,
    for the steps after a rewind in place, whose time is not measured."""
    spent = dict.fromkeys((*WHERE, NO_AGENT), 0.0)
    reached_s = lives[0]["from_s"] if lives else 0.0
    for life in lives:
        for where, seconds in life["spent"].items():
            spent[where] = spent.get(where, 0.0) + seconds
        spent[NO_AGENT] += max(0.0, life["from_s"] - reached_s)
        reached_s = max(reached_s, life["until_s"])
    known, back = [*incidents.values()], came_back(incidents)
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
        "results": Counter(_became(i, number in back) for number, i in incidents.items()),
        "lost_steps": sum(i.lost_steps for i in known),
        "lost_s": round(sum(took) + down_s, 3),
    }


def came_back(incidents: Mapping[str, Incident]) -> set[str]:
    """Return the numbers of the incidents that were recovered but not repaired: the same fault struck again at the same step."""
    found: set[str] = set()
    later: set[tuple[str, int]] = set()
    for number, incident in reversed([*incidents.items()]):
        alike = (incident.cause, incident.step_at_fault)
        if alike in later and not incident.open and explain.result(incident) == "recovered":
            found.add(number)
        later.add(alike)
    return found


def _became(incident: Incident, back: bool) -> str:
    """Return what became of an incident, for the count. back: whether it came back."""
    if incident.open:
        return "only reported" if incident.rung == OBSERVE else "open"
    names = {"recovered": "repaired", "in vain": "not cured", "stopped": "stopped the job", "reported": "only reported"}
    return "came back" if back else names.get(result := explain.result(incident), result)
