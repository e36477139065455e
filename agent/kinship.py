"""Which process below this agent a page means: the one of that number, or, where ranks have a PID namespace of their own, the one that has
it there. A number alone may be anybody's.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import psutil


def process_of(pid: int, local_rank: int, helpers: Collection[int]) -> int | None:
    """The number by which this agent knows the rank that has claimed its page as `pid`; None where no process below it can be that rank.
    helpers: the agent's own children that are no ranks."""
    inner = len(_numbers(os.getpid()))
    with suppress(psutil.NoSuchProcess):
        if pid not in helpers and len(_numbers(pid)) == inner and _is_below(psutil.Process(pid)):
            return pid
    for each in psutil.Process().children(recursive=True):
        numbers = _numbers(each.pid)
        if len(numbers) > inner and numbers[-1] == pid and _local_rank(each) == str(local_rank):
            return each.pid
    return None if psutil.pid_exists(pid) else pid  # it has come and gone


def _is_below(process: psutil.Process) -> bool:
    return any(parent.pid == os.getpid() for parent in process.parents())


def _numbers(pid: int) -> list[int]:
    """Of one process, from this agent's PID namespace inwards."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return [int(number) for number in line.split()[1:]]
    return []


def _local_rank(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return process.environ().get("LOCAL_RANK", "")
    return ""
