"""Short tests of this node before it joins: its devices, memory and storage → readings for `rules`. `link_test.py` tests the links."""

from __future__ import annotations

import json
import mmap
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import crc32c

from ...checkpoint.backend.filesystem import Files, own_name
from ...checkpoint.backend.place import Place
from ...resilience.clock import monotonic_s
from ...resilience.errors import ResilientError
from ..launch.python_check import last_line, run
from .rules import MIB, DeviceReading, DiskReading

_STARTS_S = 120.0
"""Seconds that the device check may take to start. Importing torch and creating a device context takes seconds, or minutes on a shared file
system. A driver whose device is gone never answers."""
_OBJECT_BYTES = 4 * MIB
_NAME = ".preflight"


def devices(python: str, seconds: float, environment: Mapping[str, str]) -> tuple[DeviceReading, ...]:
    """Return the readings of this node's devices. The interpreter `python` runs the program `training.device_check`, which checks the
    devices one after the other, for `seconds` each."""
    command = [python, "-P", "-m", "mt_resilient.training.device_check", str(seconds)]
    limit_s = _STARTS_S + 64 * seconds
    done = run(command, environment, limit_s)
    if done is None:
        return (DeviceReading(device="a device", error=f"it has not answered within {limit_s:.0f} s"),)
    found = [DeviceReading(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith(b"{")]
    if done.returncode:
        found.append(DeviceReading(device="the check of the devices", error=last_line(done)))
    return tuple(found)


def storage(place: Place, mib: int) -> DiskReading:
    """Return the free space and the result of a test write. The test writes and syncs `mib` MiB, reads them back, and compares. The read
    bypasses the page cache if the file system allows it. In an object store, the test writes only 4 MiB."""
    if not isinstance(place, Files):
        return _objects(place, bool(mib))
    try:
        place.path.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(place.path).free
        if not mib or free < mib * MIB:
            return DiskReading(place=str(place), free_bytes=free)
        return _file(place.path, free, mib)
    except OSError as error:
        return DiskReading(place=str(place), error=error.strerror or str(error))


def _file(folder: Path, free: int, mib: int) -> DiskReading:
    path = folder / f"{_NAME}-{own_name()}"
    with mmap.mmap(-1, MIB) as block:  # page-aligned, as direct I/O needs
        block.write(os.urandom(MIB))
        crc = crc32c.crc32c(block)
        try:
            began = monotonic_s()
            _through(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, lambda fd: _whole(os.write(fd, block)), mib)
            wrote = monotonic_s()
            wrong: list[int] = []

            def back(fd: int) -> None:
                _whole(os.readv(fd, [block]))
                if crc32c.crc32c(block) != crc:
                    wrong.append(1)

            _through(path, os.O_RDONLY, back, mib)
            slowest_s = max(wrote - began, monotonic_s() - wrote)
        finally:
            with suppress(OSError):
                path.unlink()
    if wrong:
        return DiskReading(
            place=str(folder), error=f"{len(wrong)} of {mib} MiB came back with other bits than were written"
        )
    return DiskReading(place=str(folder), free_bytes=free, mb_per_s=mib * MIB / 1e6 / max(slowest_s, 1e-6))


def _through(path: Path, flags: int, act: Any, times: int) -> None:
    """Open `path`, bypassing the page cache if possible (tmpfs and some network file systems refuse). Call `act` `times` times, then sync
    and close."""
    try:
        fd = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:
        fd = os.open(path, flags, 0o600)
    try:
        for _ in range(times):
            act(fd)
        os.fsync(fd)
    finally:
        os.close(fd)


def _whole(count: int) -> None:
    if count != MIB:
        raise OSError(5, f"only {count} of {MIB} bytes were read or written")


def _objects(place: Place, write: bool) -> DiskReading:
    if not write:
        return DiskReading(place=str(place))
    name, data = f"{_NAME}-{os.urandom(8).hex()}", os.urandom(_OBJECT_BYTES)
    try:
        began = monotonic_s()
        place.write(name, data)
        wrote = monotonic_s()
        same = place.read(name) == data
        slowest_s = max(wrote - began, monotonic_s() - wrote)
        place.delete(name)
    except ResilientError as error:
        return DiskReading(place=str(place), error=str(error))
    if not same:
        return DiskReading(place=str(place), error="an object came back with other bytes than were written")
    return DiskReading(place=str(place), mb_per_s=_OBJECT_BYTES / 1e6 / max(slowest_s, 1e-6))
