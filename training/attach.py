"""Tie this process to the agent: find the handoff, claim the rank's page, die with the launcher, and leave a word when failing.

Done once per process, by the hook before the script starts or by the first `Session`; a process that is no rank of a running
`mt-resilient run` stays unattached, and everything above is inert.
"""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from dataclasses import dataclass
from types import TracebackType

from ..resilience.board import Page
from ..resilience.clock import monotonic_ns
from ..resilience.handoff import VARIABLE, Handoff
from ..resilience.leash import die_with_parent
from .board import claim
from .listening import listen


@dataclass(frozen=True)
class Attachment:
    handoff: Handoff
    page: Page
    rank: int
    local_rank: int
    world: int


_attached: dict[int, Attachment | None] = {}
"""By pid: a forked child (a data loader's worker) must not take its parent's place."""


def attach() -> Attachment | None:
    """This process's tie to the agent; None outside of `mt-resilient run` and in children of a rank."""
    if os.getpid() not in _attached:
        _attached.clear()
        _attached[os.getpid()] = _attach()
    return _attached[os.getpid()]


def _attach() -> Attachment | None:
    handoff = Handoff.from_environment(os.environ)
    if handoff is None or not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys():
        return None
    try:
        page = claim(handoff, os.environ, monotonic_ns())
    except OSError as error:
        _unwatched(error)
        return None
    if page is None:
        return None
    # The launcher starts its ranks in sessions of their own: without this they would outlive it.
    die_with_parent(os.getppid())
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == page.pid:  # not in a child that the script has forked
            farewell(page, error)
        previous(kind, error, trace)

    sys.excepthook = excepthook
    if handoff.stacks:
        listen(page, handoff.stacks[int(os.environ["LOCAL_RANK"])])
    atexit.register(_leave, page)
    return Attachment(
        handoff=handoff,
        page=page,
        rank=int(os.environ["RANK"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        world=int(os.environ["WORLD_SIZE"]),
    )


def _unwatched(error: OSError) -> None:
    """Say so once: children of this process are as far from the agent as itself."""
    print(
        f"mt-resilient: rank {os.environ['RANK']} does not reach its agent ({error}): it runs as under torchrun alone, without snapshots. "
        "To have it watched, start it where the agent's processes or its network are seen",
        file=sys.stderr,
    )
    del os.environ[VARIABLE]


def _leave(page: Page) -> None:
    """The script is over. What comes now is teardown, in which gloo's threads abort the interpreter now and then (torch 2.13: one
    waits for the GIL of an interpreter that is gone); registered first, hence run last."""
    if os.getpid() == page.pid and not page.farewell():
        page.left = 1


def farewell(page: Page, error: BaseException) -> None:
    """Say on the board why this rank ends. An error that knows its `farewell` (a dict) adds it."""
    text = "".join(traceback.format_exception(error))
    last = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    page.say_farewell(error=last[:300], traceback=text, **getattr(error, "farewell", {}))
