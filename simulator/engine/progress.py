"""The progress of a training as a function of time, and which of its states are kept where. Nothing is computed between events. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ...checkpoint.durable.save_interval import durable_interval_s, stride
from ..scenario.costs import Costs

_A_HAIR = 1e-9
"""Tolerance, as a share of a step: by so little, floating-point sums may be too small at a step boundary."""


@dataclass(frozen=True, kw_only=True)
class Track:
    """A period of training at one pace. At time `at_s`, `done` steps are done, including the fraction of the step under way."""

    at_s: float
    done: float
    period_s: float
    """Seconds from step to step, including all overhead."""
    begun: int
    """The step at which these ranks have begun, or to which they have last rewound."""

    def at(self, now_s: float) -> float:
        """Return the steps done, including the fraction of the step under way."""
        return max(self.begun, self.done + (now_s - self.at_s) / self.period_s)

    def finished(self, now_s: float) -> int:
        return math.floor(self.at(now_s) + _A_HAIR)

    def when(self, step: float) -> float:
        """Return the time at which `step` steps are done."""
        return self.at_s + (step - self.done) * self.period_s

    def paced(self, now_s: float, period_s: float) -> Track:
        """Return the track that continues at another pace from `now_s` on."""
        return replace(self, at_s=now_s, done=self.at(now_s), period_s=period_s)


@dataclass(frozen=True, kw_only=True)
class Rhythm:
    """How often snapshots are taken, and what our overhead adds to a step."""

    every_steps: int
    """Steps between snapshots in memory."""
    durable_s: float
    """Seconds between snapshots on disk."""
    costs: Costs
    slow: float = 1.0
    """Factor on the time of a step, because some node is slow."""
    fewer: float = 1.0
    """Factor on the time of a step, because fewer nodes than all share the same batch."""
    copies_s: float = 0.0
    """Seconds between requests for a copy in another node's memory; 0: no copies."""

    @property
    def added_s(self) -> float:
        """Mean seconds added to each step."""
        costs = self.costs
        durable = (
            costs.durable_stall_s * costs.step_s * self.slow * self.fewer / self.durable_s if self.durable_s else 0.0
        )
        return costs.boundary_s + costs.stall_s / self.every_steps + durable

    @property
    def period_s(self) -> float:
        return self.costs.step_s * self.slow * self.fewer + self.added_s

    def sealed(self, track: Track, now_s: float) -> int:
        """Return the newest step that memory can restore. If the result is no newer than `track.begun`, there is no such step."""
        newest = track.finished(now_s) - self.costs.seal_steps
        return newest - newest % self.every_steps

    def copied(self, track: Track, now_s: float) -> int:
        """Return the newest step of this track whose copy the buddies have; -1: none. A copy is requested when the track begins, and then
        every `copies_s`. All ranks learn of the request at the next step boundary, and copy the first snapshot after it."""
        if not self.copies_s:
            return -1
        newest = self.sealed(track, now_s - self.costs.copy_s)
        asked = math.ceil((track.when(newest - 1) - track.at_s) / self.copies_s - _A_HAIR) - 1
        if asked < 0:
            return -1
        first = track.finished(track.at_s + asked * self.copies_s) + 2
        return -(-first // self.every_steps) * self.every_steps


def rhythm(costs: Costs, devices: int, failures: int, uptime_s: float, every: int, durable_every: int) -> Rhythm:
    """Return the rhythm by the program's own rules. every, durable_every: steps between snapshots in memory and on disk, as configured; 0:
    the interval is chosen by the cost."""
    steps = every or stride(costs.stall_s, costs.step_s)
    durable_s = durable_interval_s(max(costs.write_s, 1e-3), devices, failures, uptime_s)
    return Rhythm(
        every_steps=steps, durable_s=durable_every * costs.step_s if durable_every else durable_s, costs=costs
    )
