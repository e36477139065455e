"""How far a training is, as a function of time, and which of its states are kept where. Nothing is computed while nothing happens. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ...checkpoint.durable.save_interval import durable_interval_s, stride
from ..scenario.costs import Costs

_A_HAIR = 1e-9
"""Of a step: what floating-point sums may lack at a boundary."""


@dataclass(frozen=True, kw_only=True)
class Track:
    """A stretch of training at one pace: at `at_s`, `done` steps are done, of which the last one may be half done."""

    at_s: float
    done: float
    period_s: float
    """From step to step, with all that is added to a step."""
    begun: int
    """The step that this life of the ranks, or their last rewind, has begun with."""

    def at(self, now_s: float) -> float:
        """Steps done, with the part of the one that is being computed."""
        return max(self.begun, self.done + (now_s - self.at_s) / self.period_s)

    def finished(self, now_s: float) -> int:
        return math.floor(self.at(now_s) + _A_HAIR)

    def when(self, step: float) -> float:
        """At what time `step` steps are done."""
        return self.at_s + (step - self.done) * self.period_s

    def paced(self, now_s: float, period_s: float) -> Track:
        """From now on at another pace."""
        return replace(self, at_s=now_s, done=self.at(now_s), period_s=period_s)


@dataclass(frozen=True, kw_only=True)
class Rhythm:
    """How often snapshots are taken, and what all of ours adds to a step."""

    every_steps: int
    """In memory."""
    durable_s: float
    """From one on disk to the next."""
    costs: Costs
    slow: float = 1.0
    """So many times as long does a step take, since some node is slow,"""
    fewer: float = 1.0
    """and since fewer nodes than all share the same batch."""
    copies_s: float = 0.0
    """From one snapshot that is asked for another node's memory to the next; 0: none is."""

    @property
    def added_s(self) -> float:
        """To each step, in the mean."""
        costs = self.costs
        durable = (
            costs.durable_stall_s * costs.step_s * self.slow * self.fewer / self.durable_s if self.durable_s else 0.0
        )
        return costs.boundary_s + costs.stall_s / self.every_steps + durable

    @property
    def period_s(self) -> float:
        return self.costs.step_s * self.slow * self.fewer + self.added_s

    def sealed(self, track: Track, now_s: float) -> int:
        """Newest step that memory can give back; where it is no newer than the track's beginning, it is none."""
        newest = track.finished(now_s) - self.costs.seal_steps
        return newest - newest % self.every_steps

    def copied(self, track: Track, now_s: float) -> int:
        """Newest step of this track whose copy the buddies have; -1: none. One is asked for as the track begins, and then each `copies_s`;
        the next boundary says so to all ranks, and the first snapshot after that one is it."""
        if not self.copies_s:
            return -1
        newest = self.sealed(track, now_s - self.costs.copy_s)
        asked = math.ceil((track.when(newest - 1) - track.at_s) / self.copies_s - _A_HAIR) - 1
        if asked < 0:
            return -1
        first = track.finished(track.at_s + asked * self.copies_s) + 2
        return -(-first // self.every_steps) * self.every_steps


def rhythm(costs: Costs, devices: int, failures: int, uptime_s: float, every: int, durable_every: int) -> Rhythm:
    """By the rules of the program itself. every, durable_every: steps, as configured; 0: by what they cost."""
    steps = every or stride(costs.stall_s, costs.step_s)
    durable_s = durable_interval_s(max(costs.write_s, 1e-3), devices, failures, uptime_s)
    return Rhythm(
        every_steps=steps, durable_s=durable_every * costs.step_s if durable_every else durable_s, costs=costs
    )
