"""Injects the faults of a plan, each at its moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import psutil

from ...resilience.errors import MachineError
from ...resilience.model.incident import PHASES
from ..judgement.checker import phase
from ..judgement.history import Seen, Struck
from ..judgement.plan import Injection
from ..live.agent import NotThere
from ..live.job import Job
from .registry import Entry

_PATIENCE_S, _TARGET_S = 120.0, 60.0
"""For how long a fault waits for a recovery to begin, and for its target to be there: longer if the job starts slowly."""


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
        self._lacking = ""
        """What the next fault did not find when its moment came."""
        job.meanwhile = self._end_due

    @property
    def over(self) -> bool:
        return not self._todo and not self._ends

    def tick(self, seen: Seen) -> None:
        """Do what is due now."""
        self._end_due()
        if not self._todo:
            return
        injection, now_s = self._todo[0], self._job.now_s()
        amid = self._moment(injection, seen, now_s)
        if amid is None:
            return
        self._due_s = self._due_s or now_s
        try:
            self._strike(injection, seen, amid, now_s)
        except (NotThere, MachineError, psutil.Error) as error:
            self._lacking = self._lacking or str(error)
            if now_s - self._due_s > self._job.patience_s(_TARGET_S):
                self._missed(seen, str(error))

    def _end_due(self) -> None:
        for due in [due for due in self._ends if due[0] <= self._job.now_s()]:
            self._end(due)

    def give_up(self, why: str) -> None:
        """End what lasts, and note each fault that did not come as not injected."""
        for due in list(self._ends):
            self._end(due)
        seen = self._job.seen[-1] if self._job.seen else Seen(at_s=self._job.now_s())
        while self._todo:
            self._missed(seen, f"{why} ({self._lacking})" if self._lacking else why)

    def _moment(self, injection: Injection, seen: Seen, now_s: float) -> str | None:
        """Return the phase of a recovery in which to strike now, empty for none; None: the moment has not come."""
        last = self.struck[-1] if self.struck else None
        if injection.after_s is not None and last:
            return "" if now_s >= last.at_s + injection.after_s else None
        if injection.phase and last:
            found = phase(self._job.record, last.seen.generation, seen, self._job.marks())
            if now_s - self._since_s > self._job.patience_s(_PATIENCE_S):
                self._missed(seen, "no recovery began after the fault before")
                return None
            order = (*PHASES, "")  # a phase that was too short to be seen: the fault strikes right after it
            return found if order.index(found) >= order.index(injection.phase) else None
        return "" if seen.step >= max(1, injection.step) else None

    def _strike(self, injection: Injection, seen: Seen, amid: str, now_s: float) -> None:
        fault = self._faults[injection.fault]
        done = fault.strike(self._job, injection)
        at_s = done.seen.at_s if done.seen else now_s
        struck = Struck(
            injection=injection,
            kind=fault.kind,
            at_s=at_s,
            did=done.did,
            seen=done.seen or seen,
            phase=amid,
            ended_s=at_s,
            needs_disk=done.needs_disk,
            needs_copy=done.needs_copy,
            damaged=done.damaged,
        )
        self._say(f"{at_s:.1f} s, step {max(0, struck.seen.step)}: {done.did}")
        self._next(struck)
        if done.end:
            self._ends.append((now_s + injection.for_s, len(self.struck) - 1, done.end))

    def _missed(self, seen: Seen, why_not: str) -> None:
        injection = self._todo[0]
        kind = self._faults[injection.fault].kind
        self._next(Struck(injection=injection, kind=kind, at_s=self._job.now_s(), seen=seen, why_not=why_not))

    def _next(self, struck: Struck) -> None:
        self.struck.append(struck)
        self._todo.pop(0)
        self._due_s, self._since_s, self._lacking = 0.0, self._job.now_s(), ""

    def _end(self, due: tuple[float, int, Callable[[], object]]) -> None:
        self._ends.remove(due)
        _, at, end = due
        said, why_not = "is over", ""
        try:
            end()
        except (MachineError, OSError) as error:
            said = why_not = f"could not be ended ({error})"
        self.struck[at] = replace(self.struck[at], ended_s=self._job.now_s(), why_not=why_not)
        self._say(f"{self._job.now_s():.1f} s: {self.struck[at].injection.fault} {said}")
