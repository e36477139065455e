"""A small file system for the snapshots, which can be filled or made read-only. Only this process and what it starts see it, so the kernel
takes it away when the last of them ends."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

from ...resilience.errors import MachineError

_CLONE_NEWNS = 0x20000  # of sched.h; Python 3.12 has os.unshare
_LEAST_BYTES = 64 << 20
_SNAPSHOTS = 12
"""How many snapshots it holds."""


def mounted(path: Path, snapshot_bytes: int) -> Path:
    """Mount it at `path`. snapshot_bytes: size of one snapshot. Raises MachineError."""
    path.mkdir(parents=True)
    size = max(_LEAST_BYTES, _SNAPSHOTS * snapshot_bytes)
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.unshare(_CLONE_NEWNS) and os.strerror(ctypes.get_errno())
    for command in (
        ["mount", "--make-rprivate", "/"],
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)],
    ):
        if not failed:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            failed = done.returncode and done.stderr.strip()
    if failed:
        raise MachineError(
            f"a small file system for the snapshots cannot be mounted at {path} ({failed}); no fault was injected. Leave disk_full and "
            "disk_read_only out of the plan"
        )
    return path
