"""A small file system for the snapshots, or for etcd's data, which can be filled or made read-only. On a loop device, it can also fail or
hang. Only this process and what it starts see it, so the kernel takes it away when the last of them ends.

    tmpfs ── outer image ── loop device ── ext4 ── inner image ── loop device ── ext4

While the inner image is immutable (chattr), the inner device reports EIO for each write: ext4 refuses it with EPERM, which tmpfs would not.
So a loss of power is: make it immutable, kill all processes, unmount, and mount again what the image has.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path

from ...resilience.clock import monotonic_s, sleep
from ...resilience.errors import MachineError
from .network import sh

_CLONE_NEWNS = 0x20000  # of sched.h; Python 3.12 has os.unshare
_LEAST_BYTES = 64 << 20
_LOOP = ("-o", "loop,errors=continue")
_TRIES_DEVICE = """
truncate --size=16M image
mkfs.ext4 -q -F image
mkdir disk
mount -o loop image disk
touch disk/file
chattr +i disk/file
"""
_UMOUNT_S = 20.0
_SLOW_S = 0.5
"""How long a write waits on a slow disk, at most."""


@cache
def possible() -> bool:
    """Return whether this process may mount a file system, which in a container even root may not."""
    return _mounts("")


@cache
def device_possible() -> bool:
    """Return whether this machine can have the file system on a loop device."""
    return all(map(shutil.which, ("mkfs.ext4", "e2fsck", "chattr", "fsfreeze"))) and _mounts(_TRIES_DEVICE)


def _mounts(further: str) -> bool:
    """Return whether a child, in a mount namespace of its own, can mount a tmpfs and do what the script `further` does in it."""
    with suppress(OSError), tempfile.TemporaryDirectory(prefix="mt-chaos-") as folder:
        words = ["unshare", "--mount", "sh", "-ec", f'mount -t tmpfs tmpfs "$0"; cd "$0"; {further}', folder]
        return subprocess.run(words, capture_output=True, stdin=subprocess.DEVNULL, check=False).returncode == 0
    return False


def mounted(disk: Path, nbytes: int, device: bool) -> Path:
    """Mount it at `disk`, and return that. nbytes: its size, if it is not too small. device: on a loop device. Raises MachineError."""
    image, outer = _image(disk), _outer(disk)
    size = max(_LEAST_BYTES, nbytes)
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.unshare(_CLONE_NEWNS) and os.strerror(ctypes.get_errno())
    commands = [["mount", "--make-rprivate", "/"]]
    if device:
        commands.append(["mount", "-t", "tmpfs", "-o", f"size={3 * size}", "tmpfs", str(outer.parent)])
        for file, nbytes, folder in ((outer, 2 * size, image.parent), (image, size, disk)):
            commands.append(["truncate", f"--size={nbytes}", str(file)])
            commands.append(["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", str(file)])
            commands.append(["mount", *_LOOP, str(file), str(folder)])
    else:
        commands.append(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)])
    for folder in (disk, image.parent, outer.parent):
        folder.mkdir(parents=True)
    for command in commands:
        if not failed:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            failed = done.returncode and done.stderr.strip()
    if failed:
        raise MachineError(
            f"a small file system cannot be mounted at {disk} ({failed}); no fault was injected. Leave the faults of the disk out of "
            "the plan"
        )
    return disk


def unmount(disk: Path) -> None:
    """Take the file system away, with all that is on it. What still uses it keeps it until it ends."""
    for folder in (disk, _image(disk).parent, _outer(disk).parent):
        subprocess.run(["umount", "--lazy", folder], capture_output=True, check=False)


def fill(folder: Path) -> Callable[[], None]:
    """Fill the file system that holds `folder`. Return what ends that. Another fault may have ended it, or deleted the folder's files."""
    ballast = folder / "ballast"
    with ballast.open("wb") as file:
        for nbytes in (1 << 20, 1 << 12):
            with _until_full():
                while True:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, nbytes)
    return partial(ballast.unlink, missing_ok=True)


@contextmanager
def _until_full() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


def break_device(disk: Path, broken: bool = True) -> None:
    """Let each write fail with EIO, or end that. Raises MachineError."""
    sh("chattr", "+i" if broken else "-i", str(_image(disk)))


def after_power_loss(disk: Path) -> None:
    """Mount it again with what the device has: what was written and not synced is lost. Call `break_device` first, and end all processes
    that use it. Raises MachineError."""
    image, until_s = str(_image(disk)), monotonic_s() + _UMOUNT_S
    while subprocess.run(["mountpoint", "-q", disk], check=False).returncode == 0:
        sh("umount", str(disk), check=monotonic_s() > until_s)  # it fails while a killed process is still ending
        sleep(0.05)
    break_device(disk, broken=False)
    # 1: errors were repaired, as each power loss leaves some
    sh("sh", "-c", 'e2fsck -fy "$0"; [ $? -le 1 ]', image)
    sh("mount", *_LOOP, image, str(disk))


def freeze(disk: Path, seconds: float) -> subprocess.Popen[bytes]:
    """Let all writes wait. Return the process that ends that, even if this one is killed meanwhile. Raises MachineError."""
    sh("fsfreeze", "--freeze", str(disk))
    words = f'sleep {seconds}; fsfreeze --unfreeze "$0"'
    return subprocess.Popen(["sh", "-c", words, str(disk)], stdin=subprocess.DEVNULL, start_new_session=True)


def slow(disk: Path, seconds: float) -> subprocess.Popen[bytes]:
    """Let each write wait for up to 0.5 s, for `seconds`. Return the process that holds the writes up. It exits by itself."""
    words = f'for i in $(seq {round(seconds / _SLOW_S)}); do fsfreeze -f "$0"; sleep {_SLOW_S}; fsfreeze -u "$0"; done'
    return subprocess.Popen(["sh", "-c", words, str(disk)], stdin=subprocess.DEVNULL, start_new_session=True)


def thaw(disk: Path) -> None:
    """Let writes go on, if they wait. Only the file system on a loop device can have been frozen."""
    if _image(disk).exists():
        sh("fsfreeze", "--unfreeze", str(disk), check=False)


def _image(disk: Path) -> Path:
    return disk.with_name(f"{disk.name}-backing") / "image"


def _outer(disk: Path) -> Path:
    return disk.with_name(f"{disk.name}-tmpfs") / "image"
