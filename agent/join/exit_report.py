"""An agent's last sentence: how the job has ended, and what the same command will do next."""

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
"""How long storage may take to list its snapshots at the end of a training. A stale list would make the last state look unwritten. That is
two requests to an object store, each within its deadline."""

LEAVE_S = 30.0
"""How long an agent may take to exit after its last sentence. It writes to etcd within 2 s, and kills processes within 5 s."""

_TELL_S = 5.0
"""How long writing `log` may take: storage may be what hangs."""


def leave_soon(code: int, log: Path, within_s: float = LEAVE_S) -> None:
    """Make sure that this process exits. If something hangs, write the stacks of all threads to `log` and exit with `code` after
    `within_s`. A scheduler or an operator may be waiting for it, and has read that the job is over. (One agent of hundreds of tests did not
    end.)"""

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
    """Exit at once. Nothing is left to do, and threads of libraries can block an interpreter's teardown."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            (stream.finish if isinstance(stream, Printing) else stream.flush)()
    os._exit(code)


def through(pages: Sequence[Page]) -> bool:
    """Return whether this node's ranks have reached the end of the training."""
    return any(page.phase == RankPhase.FINISHED for page in pages)


def unwritten(pages: Sequence[Page], durable_steps: Sequence[int], lost: str, asked: bool) -> str:
    """Return why the last state of the ranks' loop is not on disk; empty: it is. Also empty: the script has no loop of ours, or has left
    its loop without a snapshot. Also empty: memory for the last one was lacking (already reported), and all others are on disk. lost: why
    the drain process could not write its snapshots. asked: a last snapshot is wanted, of whatever step the ranks have reached."""
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
    """Print the last sentence, and mark a finished job. lost: why the training's last state is not on disk. newest: the newest step on
    disk. drained: the job goes on without this node. through: this node's ranks have reached the end of the training."""
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
        run.finished.touch()  # the same command must not repeat the whole training
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
        # Other nodes have not said whether they could write their last state.
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
