"""Looks at a job: its journals, and etcd while an agent runs. `status` and `status --watch` show what it finds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...resilience.clock import monotonic_s, wall_s
from ...resilience.model.cluster_state import World
from ...resilience.report import page_view
from ...resilience.report.overview import overview
from ...resilience.report.page_view import Seen
from ..run_directory import RunDirectory
from .explain import look
from .run_reader import RunReader


@dataclass(frozen=True, kw_only=True)
class JobNow:
    job: str
    world: World | None
    """None: no agent runs, or etcd does not answer."""
    agent: bool
    """Whether an agent runs in the run directory."""
    finished: bool
    over: bool
    """Whether the job has ended, as far as this machine knows: it is finished, or no agent runs here and etcd shows none elsewhere."""
    seen: Seen
    line: Mapping[str, Any]
    """The figures, in the form of a journal's `progress` line."""
    state: Mapping[str, Any]
    """What the job does now, as a sentence and its mood (`page_view.state`)."""
    up_s: float | None
    at_s: float

    @property
    def code(self) -> int:
        """The exit code of `status`."""
        return 0 if self.agent or self.world or self.finished else 1


def look_at(directory: RunDirectory, reader: RunReader) -> JobNow:
    """Return the job as it is now. reader: reads only what is new in this directory."""
    reader.look()
    began_s = monotonic_s()
    world, took_s = look(directory), monotonic_s() - began_s
    agent, now = directory.agent() is not None, wall_s()
    if world and not world.nodes and not agent:  # etcd has outlived the job
        world = None
    seen = reader.seen()
    line = seen.last.get("progress", {})
    if world and (world.record or world.spec):
        told = page_view.present_line(line, overview(world, now), now) | {"etcd_s": took_s}
        moved = (told["state"], told["step"]) != (line.get("state"), line.get("step"))
        stepped_s = now if moved else seen.stepped_s
        # On a node that does not lead, no journal says when the ranks made a step.
        seen = replace(
            seen, alive=True, stepped_s=stepped_s if line else math.inf, last={**seen.last, "progress": told}
        )
        line = told
    started = seen.last.get("start", {}).get("at_s")
    return JobNow(
        job=reader.job,
        world=world,
        agent=agent,
        finished=seen.finished,
        over=seen.finished or not (agent or world),
        seen=seen,
        line=line,
        state=page_view.state(seen, now),
        up_s=max(0.0, now - started) if agent and started is not None else None,
        at_s=now,
    )
