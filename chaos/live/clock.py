"""The clock of the day that a node's processes see, set ahead or back while they run, by a library before theirs (`clock.c`). The monotonic
clock stays as it is, as it does when somebody sets a machine's clock.

libfaketime is no choice: its 0.9.10 takes the deadline of a sleep by the monotonic clock for one by the clock of the day, so Python's
`time.sleep` raises EINVAL.
"""

from __future__ import annotations

import os
import platform
import shutil
import struct
from pathlib import Path

from .network import sh


def possible() -> bool:
    return platform.machine() == "x86_64" and shutil.which("cc") is not None


def built(folder: Path) -> Path:
    """Compile the library into `folder`. Raises MachineError."""
    library, source = folder / "clock.so", Path(__file__).with_name("clock.c")
    sh("cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-lm", "-ldl")
    return library


def variables(library: Path, file: Path) -> dict[str, str]:
    """Return the environment of processes whose clock `file` sets. These processes also load the libraries of this process's LD_PRELOAD."""
    put(file, 0.0)
    libraries = filter(None, (str(library), os.environ.get("LD_PRELOAD")))
    return {"LD_PRELOAD": ":".join(libraries), "CLOCK_OFFSET": str(file)}


def put(file: Path, ahead_s: float) -> None:
    """Set the clock ahead of the machine's by that much. The processes have the file mapped, so it must stay the same."""
    with file.open("r+b" if file.exists() else "wb") as opened:
        opened.write(struct.pack("d", ahead_s))
