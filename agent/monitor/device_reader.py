"""Reads the health of this machine's devices from a process of its own: a broken driver may never answer, or end the process that asks it.

    agent ── DeviceReader.news ◀── DeviceNews as lines of JSON ── nvidia.py or mthreads.py ── the driver's library

`nvidia.py` lives on, because NVML reports an Xid only to a process that waits for it. `mthreads.py` ends after one look. The agent never
waits for the process. If the process has ended, the agent starts it again at the next look.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ...resilience.detect.device_health import LOOK_S, DeviceNews
from ...resilience.errors import InternalError
from ...resilience.ipc import die_with_parent
from ...resilience.store.codec import loads
from ...resilience.text.formatting import printable

LATE_S = 20.0
"""Seconds by which a line may be late. After that the agent kills the process: a driver whose device is gone may never answer."""
_GIVEN_UP = 3
"""After so many processes in a row without news, the health of the devices is not observed. Further ones are started nevertheless."""
_LAST_BYTES = 4096
_DRIVERS = (("nvidia[0-9]*", "pynvml", "nvidia"), ("mtgpu*", "pymtml", "mthreads"))
"""The driver's device files, the Python package that asks it, and our module that does so."""


def command(devices: Path = Path("/dev")) -> tuple[str, ...]:
    """Return the command that reads the devices' health; empty: this machine has no device, or Python lacks the driver's package. devices:
    where the device files are."""
    for files, package, module in _DRIVERS:
        if any(devices.glob(files)) and importlib.util.find_spec(package):
            return (sys.executable, "-P", "-m", f"{__package__}.{module}")
    return ()


class DeviceReader:
    def __init__(self, words: Sequence[str]) -> None:
        """words: the command; empty: there is nothing to read."""
        self.words = words
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self._next_s = self._heard_s = 0.0
        """From when on the process may be started again, and when it was started or has printed last."""
        self._works, self._failed, self._stderr = False, 0, b""
        """Whether the process has printed news, how many processes in a row have printed none, and the end of what it wrote to stderr."""
        self.problem = ""
        """Why no process can read the devices' health; empty: one can, or it is not known yet."""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def news(self, now_s: float) -> list[DeviceNews]:
        """Return what the process has printed since the last call. Start the process if it does not run, at most once in LOOK_S seconds.
        Kill it if it is silent. now_s: monotonic."""
        if self._process is None or self._process.stdout is None or self._process.stderr is None:
            if self.words and now_s >= self._next_s:
                self._next_s, self._heard_s = now_s + LOOK_S, now_s
                self._works, self._stderr = False, b""
                with suppress(OSError):  # no process can be started now
                    self._process = self._start()
            return []
        data = self._process.stdout.read()
        self._stderr = (self._stderr + (self._process.stderr.read() or b""))[-_LAST_BYTES:]
        *lines, self._rest = (self._rest + (data or b"")).split(b"\n")
        if lines:
            self._heard_s = now_s
        elif now_s - self._heard_s > LOOK_S + LATE_S:
            self._process.kill()  # as long as the driver holds it, no other is started
        found = [news for line in lines if (news := _heard(line))]
        self._works = self._works or bool(found)
        if data == b"" and self._process.poll() is not None:
            for pipe in (self._process.stdout, self._process.stderr):
                pipe.close()
            self._process, self._rest = None, b""
            self._failed = 0 if self._works else self._failed + 1
            if self._failed == _GIVEN_UP:
                *_, last = b"the driver does not answer", *self._stderr.strip().splitlines()
                self.problem = printable(last.decode(errors="replace"))
        return found

    def _start(self) -> subprocess.Popen[bytes]:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = die_with_parent.spawn(self.words, start_new_session=True, **pipes)
        for pipe in (process.stdout, process.stderr):
            os.set_blocking(pipe.fileno(), False)  # type: ignore[union-attr]
        return process


def _heard(line: bytes) -> DeviceNews | None:
    """Return what a line says; None: a library has printed it."""
    with suppress(InternalError):
        return loads(DeviceNews, line)
    return None
