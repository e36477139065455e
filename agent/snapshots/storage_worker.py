"""Runs small storage tasks one after another in a separate thread, so that hanging storage delays nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue

from ...resilience.clock import sleep
from ...resilience.errors import MachineError, ResilientError

PAUSE_S = 5.0
"""Seconds to wait after a task has failed."""


def each(acts: Iterable[Callable[[], None]]) -> None:
    """Carry out all of `acts`, and then raise the first error."""
    failed = None
    for act in acts:
        try:
            act()
        except ResilientError as error:
            failed = failed or error
    if failed:
        raise failed


class Errands:
    def __init__(self) -> None:
        self._wanted: SimpleQueue[tuple[str, Callable[[], object]]] = SimpleQueue()
        self._done: SimpleQueue[tuple[str, object]] = SimpleQueue()
        self._known: set[str] = set()
        threading.Thread(target=self._run, name="errands", daemon=True).start()

    def ask(self, name: str, act: Callable[[], object]) -> None:
        """Queue a task, unless a task of that name is queued, running or done. A failed task may be queued again."""
        if name not in self._known:
            self._known.add(name)
            self._wanted.put((name, act))

    def results(self) -> list[tuple[str, object]]:
        """Return the results since the last call: each task's name, and its return value or error."""
        return [self._done.get() for _ in range(self._done.qsize())]

    def _run(self) -> None:
        while True:
            name, act = self._wanted.get()
            try:
                self._done.put((name, act()))
            except (ResilientError, OSError) as error:
                self._done.put((name, error))
                sleep(PAUSE_S)
                self._known.discard(name)


class Urgent:
    """Runs tasks immediately, each in its own thread."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def busy(self) -> bool:
        """Whether an earlier task hangs."""
        return any(thread.is_alive() for thread in self._threads)

    def do(self, act: Callable[[], object], deadline_s: float) -> None:
        """Run a task and wait for it, at most `deadline_s` seconds. Do not wait at all while an earlier task hangs. Raises the task's
        error, or MachineError if the task is not done yet."""
        outcome: SimpleQueue[Exception | None] = SimpleQueue()
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        patience_s = 0.0 if self._threads else deadline_s
        self._threads.append(threading.Thread(target=_told, args=(act, outcome), name="urgent", daemon=True))
        self._threads[-1].start()
        try:
            error = outcome.get(timeout=patience_s)
        except Empty:
            raise MachineError("storage does not answer; the agent does this once storage answers again") from None
        if error:
            raise error


def _told(act: Callable[[], object], outcome: SimpleQueue[Exception | None]) -> None:
    try:
        act()
    except (ResilientError, OSError) as error:
        outcome.put(error)
    else:
        outcome.put(None)
