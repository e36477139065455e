"""`--observe`: the program judges and reports faults as usual, but does not act on them. Pure.

    ranks      `tally.judge` lets the ranks continue; they report each fault once to the agent → `incidents/sightings.py`
    verdict    → an incident with the plan that would have been followed (`verdict_told`), once per cause and generation
    death      the launcher ends as it would without us, and the job ends with the launcher's exit code (`ended`)
    start      the script's own start: the ranks restore no state (`beginning`)

Two things stay as usual. First, the ranks take snapshots, which does not change the training, and a snapshot of a wrong state is not
certified. (After replicas diverged, such a snapshot is set aside, and a message says so.) Second, a new agent starts the ranks.
"""

from __future__ import annotations

from dataclasses import replace

from ..diagnose.root_cause import Verdict
from ..incidents import lifecycle
from ..model.cause import Cause
from ..model.cluster_state import World
from ..model.incident import Incident
from ..model.state_machine import Event
from ..model.types import Step
from ..plan.escalation import OBSERVE, STOP, Plan
from ..plan.resume_point import ResumePoint
from ..text import sentences

INTRODUCTION = "observing: the program reports faults and does nothing about them. It takes snapshots and restores none"

_STARTS = (Cause.AGENT_RESTARTED, Cause.AGENT_LOST)
"""Causes that are answered even while observing: an operator who gives the command again wants the ranks to run."""


def only_told(verdict: Verdict) -> bool:
    """Whether the verdict is only reported while observing."""
    return verdict.cause not in _STARTS


def beginning() -> ResumePoint:
    return ResumePoint(step=Step(-1), reason="the job's beginning: while observing, the ranks restore nothing")


def ended(world: World) -> Plan | None:
    """Return the plan that ends the job if a launcher has failed, with the exit code that the command would have had without us; else
    None."""
    codes = [status.launcher_code for status in world.statuses() if status.launcher_code]
    if not codes:
        return None
    code = codes[0] if codes[0] > 0 else 128 - codes[0]
    reason = f"the launcher exited with code {code}; while observing, the program starts nothing again"
    return Plan(event=Event.GIVE_UP, rung=STOP, exit_code=code, reason=reason)


def verdict_told(world: World, verdict: Verdict, answer: Plan, reached: Step) -> tuple[Incident, ...]:
    """Return the incident of a verdict that is only reported; empty if it has been reported."""
    number = world.present.number
    known = [i for i in world.incidents if i.would is not None and i.generation == number and i.cause == verdict.cause]
    if any(incident.open or verdict.cause is not Cause.RANK_HUNG for incident in known):
        return ()
    incident = lifecycle.open_incident(world, verdict, answer, reached)
    return (replace(incident, rung=OBSERVE, would=answer.rung, plan=sentences.would(answer.reason)),)


def hangs_over(world: World) -> tuple[Incident, ...]:
    """Return the incidents of hangs, now closed, if no rank is reported as silent any more; otherwise nothing."""
    if any(status.stalls for status in world.uncalm_statuses()):
        return ()
    hung = [i for i in world.incidents if i.open and i.would is not None and i.cause == Cause.RANK_HUNG]
    return tuple(replace(i, open=False, evidence=(*i.evidence, "the ranks continued by themselves")) for i in hung)
