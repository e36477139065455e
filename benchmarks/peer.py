"""The interface of the peers of `snapshot.py` and `integrity.py`: ways to write a training's tensors to a local file system and read them.

A peer saves a state durably into a new directory. It fills live tensors from there in place, as a restarted training would.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from states import State


@dataclass(frozen=True)
class Saving:
    """A save under way. Each function may be called more than once; `done` also by another thread than the loop's."""

    staged: Callable[[], object]
    """Returns when the state may be changed without changing what is saved."""
    done: Callable[[], object]
    """Returns when all of it is durable. Raises the error of a failed save."""
    before_update: Callable[[], object] | None = None
    """What a loop has to call before it changes the state; None: `staged`."""
    boundary: Callable[[], object] = lambda: None
    """What a loop has to call after each step."""


class Peer(ABC):
    """One way of saving. An object serves one training: its later saves use the buffers and processes that its first save makes."""

    package = "torch"

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def version(self) -> str:
        return metadata.version(self.package)

    @abstractmethod
    def save(self, state: State, directory: Path) -> None:
        """Save durably. This call makes the directory, which must not exist yet; its parent must."""

    @abstractmethod
    def load(self, state: State, directory: Path) -> None:
        """Fill the tensors of `state` in place."""

    def close(self) -> None:  # noqa: B027  most hold nothing
        """Let go of threads and buffers."""


class AsyncPeer(Peer):
    """A peer that lets the training go on before its data are durable. The next save begins after the last one is done."""

    @abstractmethod
    def save_async(self, state: State, directory: Path) -> Saving: ...

    def save(self, state: State, directory: Path) -> None:
        self.save_async(state, directory).done()


def sync_tree(directory: Path) -> None:
    """fsync every file and directory below, the directory itself, and its parent. A second fsync of a file costs almost nothing."""
    for root, _, files in os.walk(directory, topdown=False):
        for path in (*(Path(root, file) for file in files), Path(root)):
            _fsync(path)
    _fsync(directory.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def drop_cached(directory: Path) -> bool:
    """Make the next read of these files a cold one, by posix_fadvise(DONTNEED). It drops only clean pages, hence the fsync before.

    Returns whether /proc/sys/vm/drop_caches could be written as well: without it names and inodes stay cached. Neither reaches a cache
    below this machine's kernel.
    """
    sync_tree(directory)
    for path in filter(Path.is_file, directory.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    with suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
        return True
    return False
