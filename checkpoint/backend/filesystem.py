"""Files in a directory. After a crash, a written file is complete and durable, or it does not exist."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import stat
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path

from ...resilience.errors import MachineError, SnapshotError, UsageError

MOST_BYTES = 16 << 20
"""The most bytes to read from a file of unknown size. A COMMIT of 100,000 ranks is smaller."""


@dataclass(frozen=True)
class Files:
    """A directory that stores snapshots (it implements `place.Place`)."""

    path: Path

    def __truediv__(self, name: str) -> Files:
        return Files(self.path / name)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def address(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    def there(self, name: str) -> bool:
        with _told(self.path / name):
            return _there(self.path / name)

    def read(self, name: str, most: int = MOST_BYTES) -> bytes:
        path = self.path / name
        try:
            return read_file(path, most)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise SnapshotError(f"{path}: {error.strerror}") from error
        except OSError as error:
            raise MachineError(f"{path} cannot be read: {error.strerror}") from error

    def write(self, name: str, data: bytes, *, first: bool = False) -> None:
        path = self.path / name
        temporary = path.with_name(f".{path.name}.{own_name()}")
        with _told(path):
            make_directory(path.parent)
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if not (first and _linked(temporary, path)):
                temporary.rename(path)
            sync_directory(path.parent)

    def rename(self, name: str, new: str) -> None:
        with _told(self.path / name):
            (self.path / name).rename(self.path / new)
            sync_directory(self.path)

    def delete(self, name: str) -> None:
        with _told(self.path / name):
            (self.path / name).unlink()
            sync_directory(self.path)

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        with ExitStack() as stack:
            # It is missing or not a file (reading will report that), is being deleted, or the file system has no locks.
            with suppress(OSError, SnapshotError):
                file = stack.enter_context(os.fdopen(open_file(self.path / name), "rb"))
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            yield

    def retract(self, name: str) -> bool:
        with ExitStack() as stack:
            with _told(self.path / name), suppress(SnapshotError):  # if it is not a file, no process reads it
                file = stack.enter_context(os.fdopen(open_file(self.path / name, os.O_RDWR), "r+b"))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
                except OSError:  # the file system has no locks: a reader will find the file missing
                    pass
            self.delete(name)
        return True

    def clear(self) -> None:
        with suppress(OSError):  # another node may be deleting it too
            for file in [child for child in self.path.iterdir() if not child.is_dir()]:
                file.unlink(missing_ok=True)  # files first: a manifest without its slab would look like a complete part
            shutil.rmtree(self.path, ignore_errors=True)

    def holding(self, names: Collection[str], series: Collection[str] = ()) -> dict[str, set[str] | str]:
        def of(child: str) -> set[str] | str:
            try:
                # On NFS, names that another client has just written may stay invisible for a minute. Opening the directory reveals them.
                descriptor = os.open(self.path / child, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                return set()
            except OSError as error:
                return f"{self.path / child}: {error.strerror}"
            try:
                there = partial(_there, within=descriptor)
                return {*filter(there, names), *takewhile(there, series)}
            except OSError as error:
                return f"{self.path / child}: {error.strerror}"
            finally:
                os.close(descriptor)

        with _told(self.path):
            children = os.listdir(self.path) if self.path.is_dir() else []
        return {child: of(child) if names or series else set() for child in children}

    def lacking(self, names: Collection[str]) -> list[str]:
        with _told(self.path):
            there = {*os.listdir(self.path)} if self.path.is_dir() else set()
        return [name for name in names if name not in there]

    @contextmanager
    def renewed(self) -> Iterator[None]:
        with _told(self.path):
            make_directory(self.path.parent)
            # The process that made the directory may have been killed before its name was durable.
            sync_directory(self.path.parent.parent)
            self.clear()
            if _there(self.path):
                raise MachineError(f"{self.path} is in the way, and cannot be deleted")
        try:
            yield
        except BaseException:
            self.clear()
            raise

    def sync(self) -> None:
        with _told(self.path):
            for directory, _, _ in os.walk(self.path, topdown=False, onerror=_raise):
                sync_directory(Path(directory))
            sync_directory(self.path.parent)


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """Run a block that fills a new directory. After the block, the directory is at `target`, complete and durable. After a failure or a
    crash, it is not there.

    Raises UsageError if `target` exists already, MachineError if it cannot be written.
    """
    with _told(target):
        if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
            raise UsageError(f"{target} is there already; nothing was written over it. Name a new directory")
        make_directory(target.parent)
        part = own_directory(target.parent, f".{target.name}.part-")
        part.mkdir()
    try:
        yield part
        for directory, _, names in os.walk(part, onerror=_raise):
            for name in names:
                _sync(Path(directory) / name)
            _sync(Path(directory))
        part.rename(target)
        sync_directory(target.parent)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, OSError):
            raise MachineError(
                f"{target} cannot be written ({error.strerror or error}). Nothing of it is left"
            ) from error
        raise


def own_directory(parent: Path, mark: str) -> Path:
    """Return a path for a directory that only this process uses: `mark`, host and process. Deletes directories that ended processes of this
    host have left. Directories of other hosts, on a shared file system, may be in use and stay."""
    mine = f"{mark}{socket.gethostname()}-"
    for left in parent.iterdir() if parent.is_dir() else ():
        host, _, pid = left.name.rpartition("-")
        if f"{host}-" == mine and pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(left, ignore_errors=True)
    return parent / f"{mark}{own_name()}"


def own_name() -> str:
    """Return a name that identifies this process in storage that several hosts share. The process number alone may be the same in all
    containers of one image."""
    return f"{socket.gethostname()}-{os.getpid()}"


def open_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of an existing file. Raises SnapshotError for anything but a regular file: opening a pipe would block, and a
    device may yield bytes without end. Raises OSError."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ENXIO:  # a socket, or a device without a driver
            raise
        raise SnapshotError(f"{path} is no regular file; it was not read") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise SnapshotError(f"{path} is no regular file; it was not read")
    return descriptor


def read_file(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the file's bytes, at most `most`. Raises SnapshotError if the file has more, and otherwise raises as `open_file` does."""
    with os.fdopen(open_file(path), "rb") as file:
        found = file.read(most + 1)
    if len(found) > most:
        raise larger(path, most)
    return found


def larger(where: object, most: int) -> SnapshotError:
    return SnapshotError(
        f"{where} has more than {most} bytes; it is damaged, or from another attempt, and was not read"
    )


def sync_directory(path: Path) -> None:
    """Make the names in `path` durable. Syncing a file does not make its name durable."""
    _sync(path, os.O_DIRECTORY)


def _sync(path: Path, flags: int = 0) -> None:
    fd = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """Create the directory like `mkdir -p`, and make each new name durable."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def _linked(temporary: Path, path: Path) -> bool:
    """Give the file the name `path`, unless that name exists, and take its temporary name away. Return False, and do nothing, if the file
    system has no hard links."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError:
        return False
    temporary.unlink()
    return True


def _raise(error: OSError) -> None:
    """Raise `error`. Without this, `os.walk` skips directories that it cannot list."""
    raise error


def _there(path: Path | str, within: int | None = None) -> bool:
    """Return whether `path` exists. Raises OSError if the storage does not answer. (`Path.exists` in newer Pythons returns False then.)
    within: descriptor of the directory that a relative `path` starts from."""
    try:
        os.stat(path, dir_fd=within)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno != errno.ELOOP:  # a link that leads to itself
            raise
        return False
    return True


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MachineError(f"{error.filename or path}: {error.strerror}") from error
