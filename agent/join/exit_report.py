"""The last sentence of an agent: how the job has ended, and what the same command will do."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from ...resilience.clock import sleep
from ...resilience.errors import MachineError
from ...resilience.ipc.board_layout import Page
from ...resilience.model.generation import GenerationRecord
from ...resilience.model.types import RankPhase
from ...resilience.text import formatting
from ..output.async_output import Printing
from ..output.event_log import Telling
from ..run_directory import RunDirectory
from ..snapshots.storage_worker import Urgent

AT_THE_END_S = 20.0
"""How long storage may take to say what it holds where a stale answer would call the end of a training unwritten: two requests to an object
store, each within its deadline."""

LEAVE_S = 30.0
"""How long an agent may take to leave once all is said: etcd is told within 2 s, processes are killed within 5."""

_TELL_S = 5.0
"""How long `log` may take: storage may be what hangs."""


def leave_soon(code: int, log: Path, within_s: float = LEAVE_S) -> None:
    """See to it that this process ends, by itself or, where something hangs on the way, after `within_s` with `code`; then `log` has the
    stacks of all threads. Whoever waits for it, a scheduler or somebody at a terminal, has heard that the job is over. (One agent of
    hundreds of tests did not end.)"""

    def told() -> None:
        with log.open("a", encoding="utf-8") as file:
            faulthandler.dump_traceback(file)

    def end() -> None:
        sleep(within_s)
        with suppress(OSError, MachineError):
            Urgent().do(told, _TELL_S)
        os._exit(code)

    threading.Thread(target=end, name="leave", daemon=True).start()


def leave(code: int) -> NoReturn:
    """At once: nothing is left to be done, and threads of libraries can hold up an interpreter that tears itself down."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            (stream.finish if isinstance(stream, Printing) else stream.flush)()
    os._exit(code)


def through(pages: Sequence[Page]) -> bool:
    """Whether this node's ranks have come to the end of the training."""
    return any(page.phase == RankPhase.FINISHED for page in pages)


def unwritten(pages: Sequence[Page], durable_steps: Sequence[int], lost: str, asked: bool) -> str:
    """Why the state that the ranks' loop has ended with is not on disk; empty where it is, where there was no loop of ours, where the
    script has left its loop without a snapshot, and where there was no memory to take it, which has been told, and all that was taken
    is on disk. lost: why the drain process could not write what it had; asked: somebody wants a last snapshot of whatever step the ranks
    have reached."""
    over = (RankPhase.FINISHED, RankPhase.STOPPED)
    reached = max((page.step for page in pages if asked or page.phase in over), default=-1)
    if reached <= max(durable_steps, default=-1):
        return ""
    unsaved = next((page.unsaved for page in pages if page.unsaved), "")
    if unsaved or lost:
        return f"step {reached}: {unsaved}" if unsaved else lost
    taken = asked or (through(pages) and not any(page.starved for page in pages))
    return f"step {reached}: no snapshot of it was taken" if taken else ""


def say_the_end(
    code: int,
    record: GenerationRecord | None,
    lost: str,
    newest: int | None,
    run: RunDirectory,
    telling: Telling,
    drained: bool,
    through: bool,
) -> None:
    """lost: why the state that the training ended with is not on disk; newest: step of the newest one that is; drained: the job goes on
    without this node; through: its own ranks have come to the end of the training."""
    again = "begins anew" if newest is None else f"goes on from step {newest}"
    ended = f"ended, {record.reason}" if record and record.over else "ended as asked"
    if drained and record:
        on = formatting.listed([*record.members])
        telling.say(f"this node is drained; the job goes on on {on}, and the same command here joins it again", "good")
    elif lost and (code > 128 or (record and record.last_snapshot)):
        telling.say(f"{ended}, but without the last snapshot ({lost}); the same command {again}", "bad")
    elif lost and code == 0 and record:
        if record.complete:
            run.finished.touch()
        further = "" if record.complete else f"; the same command {again}"
        only = "only the script's own checkpoints do"
        telling.say(f"{record.reason}. No snapshot has its last state ({lost}): {only}{further}", "warn")
    elif lost and newest is None and record and record.complete:
        run.finished.touch()  # whoever gives the command again does not mean to train all of it again
        telling.say(
            f"the training is over, but no state of it is on disk ({lost}): what the script has saved is all there is",
            "bad",
        )
    elif lost:
        telling.say(
            f"the ranks are through, but their last state is not on disk ({lost}). Mend that, and give the same command once more: "
            f"it {again}",
            "bad",
        )
    elif code == 0 and record and record.complete:
        # Whether others could write their last state they have not told.
        if through or newest is None or newest >= record.replay_until:
            run.finished.touch()
        telling.say(record.reason, "good")
    elif code == 0 and record:
        telling.say(f"{record.reason}; the same command {again}", "good")
    elif code > 128:
        when = ", when its ranks were through" if through else ""
        telling.say(f"{ended}{when}; the same command {again}", "warn")
    else:
        why = record.reason if record else "unknown"
        telling.say(f"stopped: {why}. Everything is kept; see: mt-resilient explain --run-dir {run.root}", "bad")
