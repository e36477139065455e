"""Attaches this process to the agent: reads the handoff, claims the rank's page (its block of shared memory), and writes there why the rank
fails. Also makes the process end when the launcher ends.

A rank may be several processes: a wrapper, its helpers, the workers of a data loader. The process that torchrun started is the rank, until
a training loop begins in another process. Every other process stays unattached, and the code that builds on this module does nothing in it.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from ...resilience.clock import monotonic_ns
from ...resilience.errors import FormatError, InternalError, LayoutError, ResilientError, StateError, UsageError
from ...resilience.ipc.board_layout import Page
from ...resilience.ipc.descriptor_client import opened
from ...resilience.ipc.die_with_parent import die_with, die_with_parent, parent_of
from ...resilience.ipc.handoff import VARIABLE, Handoff, Output, local_rank
from ...resilience.model.types import RankPhase
from .board import claim
from .rank_stderr import say
from .stack_signal import listen


@dataclass(frozen=True)
class Attachment:
    handoff: Handoff
    page: Page
    rank: int
    local_rank: int
    world: int
    environment: Mapping[str, str] = field(default_factory=dict)
    """The environment variables at the time of the attachment."""


_attached: dict[int, Attachment] = {}
"""The attachment by pid: a forked child (a data loader's worker) must not use its parent's attachment."""


def attach(*, trains: bool = True) -> Attachment | None:
    """Return this process's attachment to the agent. Return None outside of `mt-resilient run`, and in a rank's other processes. trains: a
    training loop begins in this process."""
    known = _attached.get(os.getpid())
    if known and known.page.pid == os.getpid():
        return known
    _attached.clear()
    if trains or _started_by_the_launcher():
        found = _attach(trains)
        if found:
            _attached[os.getpid()] = found
    return _attached.get(os.getpid())


def _started_by_the_launcher() -> bool:
    """Whether the launcher started this process. The launcher gives each rank its own session, and variables that the launcher itself does
    not have."""
    if os.getsid(0) != os.getpid():
        return False
    try:
        return b"TORCHELASTIC_RUN_ID=" not in Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return True


def _attach(trains: bool) -> Attachment | None:
    handoff = Handoff.from_environment(os.environ)
    if handoff is None or not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys():
        return None
    try:
        page = claim(handoff, os.environ, monotonic_ns(), trains=trains)
    except OSError as error:
        say(
            f"rank {os.environ['RANK']} does not reach its agent ({error}). It runs as under torchrun alone, without snapshots. "
            "To have it watched, start it where it sees the agent's processes, or the agent's network"
        )
        del os.environ[VARIABLE]  # its child processes cannot reach the agent either, and must not say this again
        return None
    if page is None:
        if trains:
            rank = os.environ["RANK"]
            say(f"another process of rank {rank} trains: this loop runs unwatched")
        return None
    print_through_the_agent(handoff.outputs, local_rank(os.environ))
    # The launcher starts its ranks in their own sessions: without this, they would outlive it. The kernel regards the thread that started
    # a process as its parent. torchrun's thread lives as long as torchrun; a wrapper's thread may end earlier.
    if _started_by_the_launcher():
        die_with_parent(os.getppid())
    elif launcher := parent_of(os.getsid(0)):  # the session's first process is the rank that the launcher started
        die_with(launcher)
    sys.excepthook = _excepthook(page, sys.excepthook)
    if handoff.stacks:
        listen(page, handoff.stacks[local_rank(os.environ)])
    atexit.register(_leave, page)
    return Attachment(
        handoff=handoff,
        page=page,
        rank=int(os.environ["RANK"]),
        local_rank=local_rank(os.environ),
        world=int(os.environ["WORLD_SIZE"]),
        environment=dict(os.environ),
    )


def _excepthook(page: Page, previous: Callable[..., object]) -> Callable[..., None]:
    """Return the function that Python calls for an exception that nothing has caught. Other threads' exceptions do not end the rank."""

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        ends = threading.current_thread() is threading.main_thread()
        if ends and os.getpid() == page.pid:  # not in a child that the script has forked
            farewell(page, error)
        if isinstance(error, ResilientError) and not isinstance(error, UsageError | InternalError):
            say(str(error))  # the script is not at fault: a traceback would not help
        else:
            previous(kind, error, trace)

    return excepthook


_last_words: list[ResilientError] = []
"""Errors of this program that end the rank, although the script may catch them and exit with code 0."""


def ends_the_rank(error: ResilientError, **words: object) -> None:
    """Note that the rank cannot continue after `error`. words: items of the message to the agent (`farewell`)."""
    error.farewell = words  # type: ignore[attr-defined]
    _last_words.append(error)


def _leave(page: Page) -> None:
    """Mark on the page that the script has ended, or that it ended because of an error that it caught. During the teardown that follows,
    gloo's threads sometimes abort the interpreter (torch 2.13: a thread waits for the GIL of an interpreter that is gone). `_leave` is
    registered as the first exit handler and therefore runs last."""
    if os.getpid() != page.pid or page.farewell():
        return
    if _last_words and page.phase < RankPhase.FINISHED:
        _last_words[-1].farewell["caught"] = True  # type: ignore[attr-defined]
        farewell(page, _last_words[-1])
    else:
        page.left = 1


def farewell(page: Page, error: BaseException) -> None:
    """Write on the rank's page why the rank ends. If the error has a dict `farewell`, its items are added."""
    text = "".join(traceback.format_exception(error))
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    said = " ".join(lines[:2]) if lines[0].endswith((":", ": ")) else lines[0]
    words = {"error": said[:300], "traceback": text, **getattr(error, "farewell", {})}
    if isinstance(error, SyntaxError) and error.filename:
        where = f"{error.filename}, line {error.lineno}"
        words |= {"kind": "broken", "error": f"{type(error).__name__} in {where}: {error.msg}"}
    if isinstance(error, LayoutError | FormatError):
        words |= {"kind": "refused", "error": str(error)}
    if isinstance(error, StateError):
        words |= {"kind": "unsavable", "error": str(error)}
    page.say_farewell(**words)


def print_through_the_agent(outputs: Sequence[Output], local_rank: int) -> None:
    """Put the agent's pipes or terminals in place of this rank's stdout and stderr, so that the agent can keep what the rank prints. A
    stream that torchrun redirects stays redirected. outputs: the agent's own streams, with the file for each local rank. If such a file
    cannot be opened, the stream stays as it is."""
    for number in (1, 2):
        with suppress(OSError):
            now = os.fstat(number)
            for output in outputs:
                if (now.st_dev, now.st_ino) == (output.device, output.inode):
                    through = opened(output.paths[local_rank], os.O_WRONLY | os.O_NOCTTY)
                    os.dup2(through, number)
                    os.close(through)
                    break
