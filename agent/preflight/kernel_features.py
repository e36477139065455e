"""Checks, before the start, which kernel features are available: those that the agent needs, and those that it can replace."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress

from ...resilience.errors import MachineError
from ...resilience.ipc.die_with_parent import adopt_orphans, may_die_with_parent


def check() -> list[str]:
    """Make this process the parent of its orphaned descendants. Return a sentence for each refused feature that the agent replaces. Raises
    MachineError for a refused feature that it cannot replace."""
    if not _proc_is_ours():
        raise MachineError(
            "/proc is not mounted, or belongs to another PID namespace: ranks could not be watched; nothing was started. Mount it "
            "(mount -t proc proc /proc, or unshare --mount-proc)"
        )
    for what, allowed in (("PR_SET_CHILD_SUBREAPER", adopt_orphans), ("PR_SET_PDEATHSIG", may_die_with_parent)):
        if not allowed():
            raise MachineError(
                f"the kernel refuses prctl({what}): processes of ranks could outlive the agent; nothing was started. Allow it in the "
                "container's seccomp filter"
            )
    found = []
    if not _allowed(lambda: os.pidfd_open(os.getpid())):
        found.append("the kernel refuses pidfd_open here: the agent looks for ended ranks in /proc, 50 times a second")
    if not _allowed(lambda: os.memfd_create("mt-resilient-trial", os.MFD_CLOEXEC)):
        where = "lie in files that have no name"
        with suppress(OSError):
            if free := shutil.disk_usage("/dev/shm").free:
                where = f"lie in /dev/shm, where {free / 2**30:.1f} GiB are free"
        found.append(f"the kernel refuses memfd_create here: snapshots in memory {where}")
    return found


def _proc_is_ours() -> bool:
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def _allowed(opened: Callable[[], int]) -> bool:
    try:
        os.close(opened())
    except (OSError, AttributeError):
        return False
    return True
