"""`mt-resilient status`: shows the job's present state from etcd, or the last sentence of an agent here if etcd does not answer."""

from __future__ import annotations

import json
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ...resilience.clock import wall_s
from ...resilience.decide.operator_requests import waiting
from ...resilience.membership import quarantine
from ...resilience.membership.node_roles import leader, roles
from ...resilience.model.cluster_state import World
from ...resilience.report import explain, status_view
from ...resilience.report.journal import Journal
from ...resilience.store.codec import dumps
from ...resilience.text import formatting
from ..run_directory import RunDirectory
from .explain import incidents, look, time_of

_NEWEST = 5
"""The most incidents that are shown; `explain` shows all."""
_WHOLE = ("node", "role", "started", "said")
"""Columns whose cells are never wrapped."""
_WIDE = 200
"""Width in characters if the output is not a terminal."""


def status(directory: RunDirectory, as_json: bool) -> int:
    """Print the state of the job. Return 0 if an agent runs, here or on another node, or if the job is finished; else 1."""
    world = look(directory)
    agent, finished = directory.agent() is not None, directory.finished.exists()
    if world and not world.nodes and not agent:  # etcd has outlived the job
        world = None
    if as_json:
        print(json.dumps(_object(world, finished, agent)))
    else:
        _show(directory, world, agent)
    return 0 if agent or world or finished else 1


def _show(directory: RunDirectory, world: World | None, agent: bool) -> None:
    console = Console(highlight=False, soft_wrap=True, markup=False)
    if not console.is_terminal:
        console.width = _WIDE
    if world is None or not status_view.headline(world, wall_s()):
        unknown = ", but its etcd does not answer (does it run, and are user and password right?): nothing more is known until it does"
        more = unknown if agent and world is None else ""
        console.print(f"{'An' if agent else 'No'} agent is running in {directory.root}{more}.{_last_words(directory)}")
        return
    if not agent:
        here = formatting.listed(sorted(world.nodes))
        console.print(f"No agent is running in {directory.root}; the job continues on {here}.{_last_words(directory)}")
    now = wall_s()
    for line in status_view.lines(world, now, time_of):
        console.print(line)
    table = Table(box=box.SIMPLE_HEAD)
    for heading in status_view.COLUMNS:
        table.add_column(heading, no_wrap=heading in _WHOLE, min_width=max(map(len, heading.split())))
    for row in status_view.rows(world, now, time_of):
        table.add_row(*row)
    console.print(table)
    known = [(n, i) for n, i in incidents(directory, world).items() if i in world.incidents]
    for number, incident in known[-_NEWEST:]:
        console.print(f"incident {number}, {time_of(incident.at_s)}: {incident.summary}; {explain.outcome(incident)}")


def _last_words(directory: RunDirectory) -> str:
    """Return the last sentence of the agent here, or of agents that were started from here and whose journals are here. If the agent exited
    normally, its exit code comes first."""
    ends = [line for line in Journal(directory.journal).read() if line["kind"] in ("start", "end")][-1:]
    code = f" It ended with code {ends[0]['code']}." if ends and ends[0]["kind"] == "end" else ""
    told = [(line, path) for path in directory.journals for line in Journal(path).read() if line["kind"] == "said"]
    if not told:
        return code
    line, path = max(told, key=lambda each: each[0]["at_s"])
    where = "" if path == directory.journal else f" on {path.parent.name}"
    return f"{code} Its last message{where}, {time_of(line['at_s'])}: {line['sentence']}"


def _object(world: World | None, finished: bool, agent: bool) -> dict[str, Any]:
    if world is None:
        return {"running": agent, "finished": finished}
    now = wall_s()
    return {
        "running": True,
        "doing": status_view.headline(world, wall_s()),
        "generation": json.loads(dumps(world.record)) if world.record else None,
        "leader": leader(world),
        "roles": roles(world, now),
        "quarantine": {node: json.loads(dumps(entry)) for node, entry in quarantine.in_force(world, now).items()},
        "orders": [json.loads(dumps(request)) for request in waiting(world)],
        "nodes": {node: json.loads(dumps(said)) for node, said in world.status.items()},
        "incidents": [json.loads(dumps(i)) for i in world.incidents],
    }
