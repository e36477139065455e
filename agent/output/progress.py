"""Reports the training's progress: to /metrics at every look, to the journal less often. Only the leader writes the journal's `progress`
lines. So the journals of all nodes together contain the job's progress once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from ...resilience.clock import monotonic_s, wall_s
from ...resilience.ipc.board_layout import Page
from ...resilience.model.cluster_state import World
from ...resilience.model.incident import Incident
from ...resilience.plan.escalation import REWIND_IN_PLACE
from ...resilience.report.journal import Journal
from ...resilience.report.metrics import Metrics
from ...resilience.report.overview import Overview, overview
from ...resilience.report.time_ledger import Ledger

_PACE_S, _DEAR = 1.0, 100.0
"""The time between two looks at the whole job is at least `_PACE_S` seconds, and at least `_DEAR` times as long as a look takes."""
_WINDOW_S = 5.0
"""The least time in seconds over which the time of a step is averaged."""
_LINE_S, _SHARE = 60.0, 200.0
"""The time between two lines is 1/`_SHARE` of this agent's age, at most `_LINE_S` seconds: a minute is short for a job of a week, and long
for one that has just begun. A job of 54 days writes some 80,000 lines, of 0.5 kB each."""

_SNAPSHOTS = 1000
"""Number of snapshots whose age is remembered, until they are certified or on disk."""


class Progress:
    def __init__(self, journal: Journal, metrics: Metrics) -> None:
        self._journal, self._metrics = journal, metrics
        self._ledger = Ledger()
        self._began_s = self._looked_s = monotonic_s()
        self._next_s = self._line_s = 0.0
        self._counted: dict[str, float] = {}
        """For each entry of `time_ledger.WHERE`, the seconds that the metrics contain so far."""
        self._said: Overview | None = None
        self._newest: dict[str, tuple[int, float]] = {}
        """For each tier: the newest snapshot's step, and the wall-clock time at which it was first seen in any tier."""
        self._seen_s: dict[int, float] = {}
        """For each of the newest snapshots' steps: when a snapshot of it was first seen."""
        self._last = (-1, 0, 0.0)
        """Step, generation and time at the beginning of the window over which the time of a step is averaged."""
        self._step_s = math.nan
        self._etcd_s = 0.0

    def stored(self, seconds: float | None) -> None:
        """Note how long a write to etcd took. None: etcd does not answer."""
        self._metrics.etcd(seconds)
        self._etcd_s = math.nan if seconds is None else seconds

    def recovered(self, incidents: Sequence[Incident]) -> None:
        """Add the time of incidents that one decision has closed to the ledger. Several incidents had one recovery in common, so only the
        longest time counts. Steps that are repeated after a rewind in place are not timed: each repeated step counts with the present time
        of a step."""
        step_s = self._step_s if math.isfinite(self._step_s) else 0.0
        each = [
            {**i.phases_s, "replay": i.lost_steps * step_s} if i.rung == REWIND_IN_PLACE else i.phases_s
            for i in incidents
        ]
        if took := max(each, key=lambda phases: sum(phases.values()), default=None):
            self._ledger.recovered(took)

    def look(self, world: World | None, pages: Sequence[Page]) -> None:
        """Update the metrics, and write a `progress` line if it is due. world: None: this agent does not lead. pages: those of this node's
        ranks."""
        now, wall = monotonic_s(), wall_s()  # the wall clock may jump
        if now < self._next_s:
            return
        told = overview(world, wall) if world and (world.record or world.spec) else None
        if told:  # a spare has no ranks in the job: its pages are empty, or from an earlier generation
            pages = [page for page in pages if page.generation == told.generation]
        passed_s, self._looked_s = now - self._looked_s, now
        loss = next((page.loss for page in pages if page.stepped_ns and math.isfinite(page.loss)), math.nan)
        step = max((page.step for page in pages), default=told.step if told else -1)
        self._pace(step, told.generation if told else 0, now)
        self._metrics.progress(loss, self._step_s)
        if told:
            self._snapshots(told.snapshots, step, wall)
            self._ledger.passed(passed_s, told.state, max((page.stall_ns for page in pages), default=0) / 1e9)
            for where, seconds in self._ledger.spent.items():
                self._metrics.spend(where, seconds - self._counted.get(where, 0.0))
            self._counted = dict(self._ledger.spent)
            self._write(replace(told, step=step), max((page.total for page in pages), default=0), loss, now, wall)
        newest_s = {tier: at_s for tier, (_, at_s) in self._newest.items()}
        self._metrics.leads(told, newest_s, world.incidents if world else ())
        self._said = told
        self._next_s = now + max(_PACE_S, _DEAR * (monotonic_s() - now))

    def _snapshots(self, newest: Mapping[str, int], step: int, wall: float) -> None:
        """Note the newest snapshots, by tier. step: the newest step; -1: the ranks have not finished a step yet."""
        last = {at: seen_s for at, seen_s in self._newest.values() if at >= 0}
        known = [
            (at, seen_s) for at, seen_s in self._seen_s.items() if at <= step or step < 0
        ]  # ranks that rewind take later snapshots again
        self._seen_s = dict(known[-_SNAPSHOTS:])
        for tier, at in newest.items():
            self._newest[tier] = (at, last.get(at) or self._seen_s.setdefault(at, wall)) if at >= 0 else (-1, 0.0)

    def _pace(self, step: int, generation: int, now: float) -> None:
        last, then, at_s = self._last
        if step < last or last < 0 or generation != then:
            self._last = (step, generation, now)
        elif step > last and now - at_s >= _WINDOW_S:
            self._step_s = (now - at_s) / (step - last)
            self._last = (step, generation, now)

    def _write(self, told: Overview, total: int, loss: float, now: float, wall: float) -> None:
        """Write a `progress` line: at once if the state, the nodes or the quarantine have changed; otherwise when the next line is due."""
        changed = self._said is None or (told.state, told.nodes, told.quarantined) != (
            *(self._said.state, self._said.nodes, self._said.quarantined),
        )
        if not changed and now < self._line_s:
            return
        self._line_s = now + min(_LINE_S, max(_PACE_S, (now - self._began_s) / _SHARE))
        figures = {"loss": loss, "step_s": self._step_s, "etcd_s": self._etcd_s}
        known = {name: float(f"{value:.6g}") for name, value in figures.items() if math.isfinite(value)}
        spent = {where: round(seconds, 2) for where, seconds in self._ledger.spent.items() if seconds}
        fields = {
            **asdict(told),
            "snapshots": self._newest,
            "spent": spent,
            **({"total": total} if total else {}),
            **known,
        }
        self._journal.write("progress", wall, **fields)
