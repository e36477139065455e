"""Injects the faults of a plan, each at its moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import psutil

from ...resilience.model.incident import PHASES
from ..judgement.checker import phase
from ..judgement.history import Seen, Struck
from ..judgement.plan import Injection
from ..live.job import Job, NotThere
from .registry import Entry

_PATIENCE_S, _TARGET_S = 120.0, 60.0
"""For how long a fault waits for a recovery to begin, and for its target to be there."""


class Nemesis:
    def __init__(
        self, job: Job, injections: Sequence[Injection], faults: Mapping[str, Entry], say: Callable[[str], None]
    ) -> None:
        self._job, self._faults, self._say = job, faults, say
        self._todo = list(injections)
        self.struck: list[Struck] = []
        self._ends: list[tuple[float, int, Callable[[], object]]] = []
        """When a fault that lasts is over, its place in `struck`, and what ends it."""
        self._due_s = 0.0
        """Since when the next fault has waited for its target; 0: its moment has not come."""
        self._since_s = 0.0
        """Since when it is the next one."""

    @property
    def over(self) -> bool:
        return not self._todo and not self._ends

    def tick(self, seen: Seen) -> None:
        """Do what is due now."""
        now_s = self._job.now_s()
        for due in [due for due in self._ends if due[0] <= now_s]:
            self._end(due)
        if not self._todo:
            return
        injection = self._todo[0]
        amid = self._moment(injection, seen, now_s)
        if amid is None:
            return
        self._due_s = self._due_s or now_s
        try:
            self._strike(injection, seen, amid, now_s)
        except (NotThere, psutil.Error) as error:
            if now_s - self._due_s > _TARGET_S:
                self._next(Struck(injection=injection, at_s=now_s, seen=seen, why_not=str(error)))

    def give_up(self, why: str) -> None:
        """End what lasts, and note each fault that did not come as not injected."""
        for due in list(self._ends):
            self._end(due)
        seen = self._job.seen[-1] if self._job.seen else Seen(at_s=self._job.now_s())
        while self._todo:
            self._next(Struck(injection=self._todo[0], at_s=self._job.now_s(), seen=seen, why_not=why))

    def _moment(self, injection: Injection, seen: Seen, now_s: float) -> str | None:
        """Return the phase of a recovery in which to strike now, empty for none; None: the moment has not come."""
        last = self.struck[-1] if self.struck else None
        if injection.after_s is not None and last:
            return "" if now_s >= last.at_s + injection.after_s else None
        if injection.phase and last:
            found = phase(self._job.record, last.seen.generation, seen, self._job.marks())
            if now_s - self._since_s > _PATIENCE_S:
                self._next(
                    Struck(
                        injection=injection, at_s=now_s, seen=seen, why_not="no recovery began after the fault before"
                    )
                )
                return None
            order = (*PHASES, "")  # a phase that was too short to be seen: the fault strikes right after it
            return found if order.index(found) >= order.index(injection.phase) else None
        return "" if seen.step >= max(1, injection.step) else None

    def _strike(self, injection: Injection, seen: Seen, amid: str, now_s: float) -> None:
        done = self._faults[injection.fault].strike(self._job, injection)
        struck = Struck(
            injection=injection,
            at_s=now_s,
            did=done.did,
            seen=seen,
            phase=amid,
            ended_s=now_s,
            needs_disk=done.needs_disk,
            damaged=done.damaged,
        )
        self._say(f"{now_s:.1f} s, step {max(0, seen.step)}: {done.did}")
        self._next(struck)
        if done.end:
            self._ends.append((now_s + injection.for_s, len(self.struck) - 1, done.end))

    def _next(self, struck: Struck) -> None:
        self.struck.append(struck)
        self._todo.pop(0)
        self._due_s, self._since_s = 0.0, self._job.now_s()

    def _end(self, due: tuple[float, int, Callable[[], object]]) -> None:
        self._ends.remove(due)
        _, at, end = due
        end()
        self.struck[at] = replace(self.struck[at], ended_s=self._job.now_s())
        self._say(f"{self._job.now_s():.1f} s: {self.struck[at].injection.fault} is over")
