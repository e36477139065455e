"""Verdict → plan: the cheapest rung of the ladder that can help, and when to stop climbing.

Rung 1, the rewind in place, is decided by the ranks themselves (`boundary`) and only reported here. What reaches this module needs
the gang to be restarted (rung 2), or the job to stop (rung 6). Rungs 3 to 5 want more than one node or older certified snapshots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .detectors import Cause
from .errors import BudgetSpent, ResilientError, ScriptError, UsageError
from .machine import Event
from .orders import Incident
from .verdict import Verdict

REWIND_IN_PLACE, RESTART_GANG, STOP = 1, 2, 6


@dataclass(frozen=True, kw_only=True)
class RecoveryPolicy:
    max_without_progress: int = 3
    """Restarts in a row that never get past the step where the last one failed, before the job stops (NVRx stops after three)."""
    same_failure_at_start: int = 2
    """How often the script may fail in the same way before its first step until that counts as an error in the script."""
    max_replays: int = 2
    """How often the ranks replay one step that gave NaN or Inf, before the job stops."""

    def __post_init__(self) -> None:
        for name in ("max_without_progress", "same_failure_at_start", "max_replays"):
            if getattr(self, name) < 1:
                raise UsageError(f"recovery.{name} is {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Plan:
    event: Event
    rung: int
    reason: str
    exit_code: int = 0


def plan(verdict: Verdict, step_reached: int, past: Sequence[Incident], policy: RecoveryPolicy) -> Plan:
    """What to do about `verdict`, given the newest finished step and all earlier incidents of the job."""
    restarts = [incident for incident in past if incident.rung == RESTART_GANG]
    if verdict.cause is Cause.NON_FINITE:
        return _give_up(
            BudgetSpent,
            f"replayed {policy.max_replays} times without a finite result: the data or the model do it, not the hardware",
        )
    if verdict.cause is Cause.SCRIPT_RAISED and not verdict.started:
        alike = 1
        for incident in reversed(restarts):
            if incident.started or incident.signature != verdict.signature:
                break
            alike += 1
        if alike >= policy.same_failure_at_start:
            return _give_up(
                ScriptError,
                f"the script failed {alike} times in the same way before its first step: an error of its own",
            )
    best = max((i.step_at_fault for i in restarts), default=-1)
    stuck = 1 + _trailing_without_progress(restarts) if restarts and step_reached <= best else 0
    if stuck >= policy.max_without_progress:
        return _give_up(BudgetSpent, f"{stuck} restarts in a row did not get past step {max(best, 0)}")
    return Plan(event=Event.FAULT, rung=RESTART_GANG, reason="end what is left of the gang, start it again, restore")


def _give_up(error: type[ResilientError], reason: str) -> Plan:
    return Plan(event=Event.GIVE_UP, rung=STOP, exit_code=error.exit_code, reason=reason)


def _trailing_without_progress(restarts: Sequence[Incident]) -> int:
    """How many of the last restarts did not get past the best step before them."""
    count = 0
    for position in range(len(restarts) - 1, 0, -1):
        if restarts[position].step_at_fault > max(i.step_at_fault for i in restarts[:position]):
            break
        count += 1
    return count
