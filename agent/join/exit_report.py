"""An agent's final message: how the job has ended, and what the same command will do next."""

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
"""Seconds that storage may take to list its snapshots at the end of a training. With an outdated list, the last state would seem not to be
on disk. The time suffices for two requests to an object store, each within its deadline."""

LEAVE_S = 30.0
"""Seconds that an agent may take to exit after its final message. An exiting agent writes to etcd within 2 s. Killing processes takes it up
to 5 s."""

_TELL_S = 5.0
"""Seconds that writing `log` may take: storage that hangs may be the reason why the agent does not exit."""


def leave_soon(code: int, log: Path, within_s: float = LEAVE_S) -> None:
    """Make sure that this process exits, because a scheduler or an operator may be waiting for that. If it still runs after `within_s`
    seconds, write the stacks of all threads to `log` and exit with `code`. (In hundreds of tests, one agent did not exit.)"""

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
    """Exit immediately. Nothing is left to do, and threads of libraries can block an interpreter's teardown."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            (stream.finish if isinstance(stream, Printing) else stream.flush)()
    os._exit(code)


def through(pages: Sequence[Page]) -> bool:
    """Return whether this node's ranks have reached the end of the training."""
    return any(page.phase == RankPhase.FINISHED for page in pages)


def unwritten(pages: Sequence[Page], durable_steps: Sequence[int], lost: str, asked: bool) -> str:
    """Return why the last state of the ranks' training loop is not on disk. Empty: it is on disk, or no snapshot of it was due. None was
    due if the script has no loop that this program watches, or has left its loop early. The result is also empty if memory for the last
    snapshot was lacking (already reported). lost: why the drain process could not write its snapshots. asked: a last snapshot is required,
    of whatever step the ranks have reached."""
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
    """Print the final message, and mark a finished job. lost: why the training's last state is not on disk. newest: the newest step on
    disk. drained: the job continues without this node. through: this node's ranks have reached the end of the training."""
    again = "begins anew" if newest is None else f"continues from step {newest}"
    ended = f"ended, {record.reason}" if record and record.over else "ended as asked"
    if drained and record:
        on = formatting.listed([*record.members])
        telling.say(
            f"this node is drained; the job continues on {on}, and the same command here joins it again", "good"
        )
    elif lost and (code > 128 or (record and record.last_snapshot)):
        telling.say(f"{ended}, but without the last snapshot ({lost}); the same command {again}", "bad")
    elif lost and code == 0 and record:
        if record.complete:
            run.finished.touch()
        further = "" if record.complete else f"; the same command {again}"
        only = "only the script's own checkpoints do"
        telling.say(f"{record.reason}. No snapshot contains the last state ({lost}): {only}{further}", "warn")
    elif lost and newest is None and record and record.complete:
        run.finished.touch()  # the same command must not repeat the whole training
        telling.say(
            f"the training is over, but no snapshot is on disk ({lost}); only the script's own checkpoints exist",
            "bad",
        )
    elif lost:
        telling.say(
            f"the ranks have finished, but their last state is not on disk ({lost}). Fix that, and give the same command again: "
            f"it {again}",
            "bad",
        )
    elif code == 0 and record and record.complete:
        # Other nodes have not reported whether they could write their last state.
        if through or newest is None or newest >= record.replay_until:
            run.finished.touch()
        telling.say(record.reason, "good")
    elif code == 0 and record:
        telling.say(f"{record.reason}; the same command {again}", "good")
    elif code > 128:
        when = ", after its ranks had finished" if through else ""
        telling.say(f"{ended}{when}; the same command {again}", "warn")
    else:
        why = record.reason if record else "unknown"
        telling.say(f"stopped: {why}. Everything is kept; see: mt-resilient explain --run-dir {run.root}", "bad")
