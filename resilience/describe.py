"""Typed things → the sentences that the terminal, `status` and `explain` show. Nobody parses them."""

from __future__ import annotations

from .orders import PHASES, Incident
from .recovery import RESTART_GANG, REWIND_IN_PLACE

_RUNGS = {REWIND_IN_PLACE: "rewind in place", RESTART_GANG: "restart of the gang", 6: "stop"}


def rung(number: int) -> str:
    return f"rung {number}, {_RUNGS.get(number, 'unknown')}"


def seconds(value: float) -> str:
    """A duration as people read it."""
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' if number != 1 else ''}"


def steps(number: int) -> str:
    return count(number, "step")


def size(number_bytes: int) -> str:
    """A size as people read it."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if number_bytes >= scale:
            return f"{number_bytes / scale:.1f} {unit}"
    return f"{number_bytes / 1e3:.0f} kB"


def phases(incident: Incident) -> str:
    return " · ".join(f"{name} {seconds(incident.phases_s[name])}" for name in PHASES if name in incident.phases_s)


def recovered(incident: Incident) -> str:
    """One line for an incident that is over."""
    start = f", started {launched(incident.launch)}" if incident.launch else ""
    return f"recovered ({rung(incident.rung)}{start}): {steps(incident.lost_steps)} computed again; {phases(incident)}"


def struck(incident: Incident) -> str:
    """When in the training it struck."""
    return "before the first step" if incident.step_at_fault < 0 else f"after step {incident.step_at_fault}"


def launched(how: str) -> str:
    """`warm` or `cold`, without the reason."""
    return how.partition(":")[0]


def resumed(step: int, beginning: str = "the job's beginning") -> str:
    """beginning: the script's own start, or the snapshot of another job; where it matters which, it is said."""
    return f"from {beginning}" if step < 0 else f"from step {step}"


def story(incident: Incident, when: str, number: str) -> list[str]:
    """An incident as `explain` tells it, line by line. when: the time it struck; number: what to call it."""
    lines = [f"incident {number}, {when}, generation {incident.generation}: {incident.summary}"]
    if len(incident.evidence) > 1 or incident.evidence[:1] != (incident.summary,):
        lines += [f"  seen       {text}" for text in _flat(incident.evidence) if text != incident.summary]
    lines.append(f"  concluded  {incident.cause.replace('_', ' ')}, answered by {rung(incident.rung)}")
    lines.append(f"  done       {incident.plan}")
    if incident.rung in (REWIND_IN_PLACE, RESTART_GANG):
        start = f", ranks started {incident.launch}" if incident.launch else ""
        not_yet = "not yet" if incident.open else "no: the job ended first"
        lines.append(
            f"  went on    {not_yet if incident.resume_step is None else resumed(incident.resume_step) + start}"
        )
        took = phases(incident)
        if took:
            lines.append(f"  took       {took}")
        lines.append(f"  cost       {steps(incident.lost_steps)} computed again (the fault struck {struck(incident)})")
    return lines


def _flat(texts: tuple[str, ...]) -> list[str]:
    return [line for text in texts for line in text.rstrip().splitlines()]
