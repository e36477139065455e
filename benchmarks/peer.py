"""The interface of the peers in `snapshot.py` and `integrity.py`: ways to write a training's tensors to a local file system and read them.

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
    """A save in progress. Each function may be called more than once. A thread other than the loop's may also call `done`."""

    staged: Callable[[], object]
    """Returns when the loop may change the state without changing the saved data."""
    done: Callable[[], object]
    """Returns when all data are durable. Raises the error of a failed save."""
    before_update: Callable[[], object] | None = None
    """The function that a loop has to call before it changes the state. None: the loop calls `staged`."""
    boundary: Callable[[], object] = lambda: None
    """The function that a loop has to call after each step."""


class Peer(ABC):
    """One way of saving. An object serves one training: its later saves use the buffers and processes that its first save creates."""

    package = "torch"

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def version(self) -> str:
        return metadata.version(self.package)

    @abstractmethod
    def save(self, state: State, directory: Path) -> None:
        """Save durably. This call creates the directory, which must not exist yet. Its parent must exist."""

    @abstractmethod
    def load(self, state: State, directory: Path) -> None:
        """Fill the tensors of `state` in place."""

    def close(self) -> None:  # noqa: B027  most hold nothing
        """Release threads and buffers."""


class AsyncPeer(Peer):
    """A peer that lets the training continue before its data are durable. The next save begins after the previous one is complete."""

    @abstractmethod
    def save_async(self, state: State, directory: Path) -> Saving: ...

    def save(self, state: State, directory: Path) -> None:
        self.save_async(state, directory).done()


def sync_tree(directory: Path) -> None:
    """fsync every file and directory below `directory`, the directory itself, and its parent. A second fsync of a file costs almost
    nothing."""
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
    """Drop these files from the page cache by posix_fadvise(DONTNEED), so that the next read is cold. The call drops only clean pages,
    hence the fsync before.

    Returns whether /proc/sys/vm/drop_caches could be written as well. Otherwise names and inodes stay cached. Neither affects a cache
    outside this machine's kernel.
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
