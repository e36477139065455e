"""`mt-resilient status`: shows the job's present state from etcd, or the last message of an agent here if etcd does not answer."""

from __future__ import annotations

from dataclasses import replace

from rich import box
from rich.console import Console
from rich.table import Table

from ...resilience.decide.operator_requests import waiting
from ...resilience.membership import quarantine
from ...resilience.membership.node_roles import leader, roles
from ...resilience.model.cluster_state import World
from ...resilience.report import explain, page_view, status_view
from ...resilience.report.journal import Journal
from ...resilience.report.json_outputs import StatusObject
from ...resilience.store.codec import printed
from ...resilience.text import formatting
from ..run_directory import RunDirectory
from .explain import numbered, time_of
from .job_now import JobNow, look_at
from .run_reader import RunReader

_NEWEST = 5
"""The most incidents that are shown; `explain` shows all."""
_WHOLE = ("node", "role", "started", "said")
"""Columns whose cells are never wrapped."""
_WIDE = 200
"""Width in characters if the output is not a terminal."""


def status(directory: RunDirectory, as_json: bool) -> int:
    """Print the state of the job. Return 0 if an agent runs, here or on another node, or if the job is finished; else 1."""
    now = look_at(directory, RunReader([directory]))
    if as_json:
        print(printed(_object(directory, now)))
    else:
        _show(directory, now)
    return now.code


def heading(directory: RunDirectory, now: JobNow) -> list[str]:
    """Return the job's name and run directory, the sentence of state with what to do, and the figures."""
    words = [formatting.printable(f"{now.job}, in {directory.root}"), page_view.sentence(now.state)]
    figures = page_view.figures(now.line, now.up_s)
    return words + ([", ".join(figures)] if figures else [])


def _show(directory: RunDirectory, now: JobNow) -> None:
    console = Console(highlight=False, soft_wrap=True, markup=False)
    if not console.is_terminal:
        console.width = _WIDE

    def say(line: str) -> None:
        console.print(formatting.printable(line))

    world = now.world
    if world is None or not status_view.headline(world, now.at_s):
        unknown = ", but its etcd does not answer (does it run, and are user and password right?): nothing more is known until it does"
        more = unknown if now.agent and world is None else ""
        say(f"{'An' if now.agent else 'No'} agent is running in {directory.root}{more}.{_last_words(directory)}")
        for line in heading(directory, now)[1:] if now.line else ():
            say(line)
        return
    for line in heading(directory, now):
        say(line)
    if not now.agent:
        here = formatting.listed(sorted(world.nodes))
        say(f"No agent is running in {directory.root}; the job continues on {here}.{_last_words(directory)}")
    for line in status_view.lines(world, now.at_s, time_of):
        say(line)
    table = Table(box=box.SIMPLE_HEAD)
    for heading_ in status_view.COLUMNS:
        table.add_column(heading_, no_wrap=heading_ in _WHOLE, min_width=max(map(len, heading_.split())))
    for row in status_view.rows(world, now.at_s, time_of):
        table.add_row(*map(formatting.printable, row))
    console.print(table)
    for line in incident_lines(now, world):
        say(line)


def incident_lines(now: JobNow, world: World) -> list[str]:
    """Return a line about each of the newest incidents, the newest last."""
    known = [(n, i) for n, i in numbered(now.seen.incidents.values(), world).items() if i in world.incidents]
    return [
        formatting.printable(f"incident {number}, {time_of(i.at_s)}: {i.summary}; {explain.outcome(i)}")
        for number, i in known[-_NEWEST:]
    ]


def _last_words(directory: RunDirectory) -> str:
    """Return a sentence with the last message of the agent here, or of an agent that was started from here and whose journal is here. If
    the agent exited normally, its exit code comes first."""
    ends = [line for line in Journal(directory.journal).read() if line["kind"] in ("start", "end")][-1:]
    code = f" It ended with code {ends[0]['code']}." if ends and ends[0]["kind"] == "end" else ""
    told = [(line, each) for each in directory.below for line in Journal(each.journal).read() if line["kind"] == "said"]
    if not told:
        return code
    line, by = max(told, key=lambda each: each[0]["at_s"])
    where = "" if by is directory else f" on {by.root.name}"
    return f"{code} Its last message{where}, {time_of(line['at_s'])}: {line['sentence']}"


def _object(directory: RunDirectory, now: JobNow) -> StatusObject:
    world, line = now.world, now.line
    known = StatusObject(
        job=now.job,
        directory=str(directory.root),
        running=now.agent or world is not None,
        finished=now.finished,
        mood=now.state["mood"],
        words=now.state["words"],
        urgency=now.state["urgency"],
        act=" ".join(now.state["act"]),
        state=line.get("state"),
        step=line.get("step"),
        total=line.get("total"),
        step_s=line.get("step_s"),
        loss=line.get("loss"),
        up_s=now.up_s,
        snapshots={tier: step for tier, (step, _) in line.get("snapshots", {}).items()},
        at_risk=line.get("at_risk", {}),
    )
    if world is None:
        return known
    return replace(
        known,
        doing=status_view.headline(world, now.at_s),
        generation=world.record,
        leader=leader(world),
        roles={node: str(role) for node, role in roles(world, now.at_s).items()},
        quarantine={**quarantine.in_force(world, now.at_s)},
        orders=tuple(waiting(world)),
        nodes=dict(world.status),
        incidents=world.incidents,
    )
