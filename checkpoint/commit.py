"""The commit protocol, as steps on a file system: parts → fsync → manifests → fsync → COMMIT; and undone.

A snapshot exists from the rename that makes COMMIT to the unlink or rename that takes it away; nothing else counts, so
a kill or a power cut at any moment leaves it whole or not there.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from ..resilience.errors import MachineError, SnapshotError
from . import layout
from .layout import Attempt
from .manifest import Commit, Entry, RankManifest


def sync_directory(path: Path) -> None:
    """Make the names in `path` durable. Writing a file durably does not make its name so."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """`mkdir -p`, each new name durable."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def write_whole(path: Path, data: bytes) -> None:
    """`data` at `path` durably: all of it or, after a crash, nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_directory(path.parent)


def missing_ranks(directory: Path, world: int) -> list[int]:
    """The global ranks whose manifests are not there yet."""
    return [rank for rank in range(world) if not there(directory / layout.manifest_name(rank))]


def commit(directory: Path, world: int) -> None:
    """Make the snapshot in `directory` exist. Raises SnapshotError unless all `world` manifests belong to it."""
    entries = []
    for rank in range(world):
        data = read(directory / layout.manifest_name(rank))
        check(RankManifest.from_json(data), directory, rank, world)
        entries.append(Entry(bytes=len(data), sha256=sha256(data).hexdigest()))
    write_whole(directory / layout.COMMIT, Commit(attempt=directory.name, ranks=tuple(entries)).to_json())


def there(path: Path) -> bool:
    """Whether there is such a file. Raises OSError where storage does not say: `Path.exists` of newer Pythons says no then."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def committed(directory: Path) -> bool:
    return there(directory / layout.COMMIT)


def read_commit(directory: Path) -> Commit:
    """What COMMIT says. Raises SnapshotError when there is none, or one that does not belong here."""
    if not committed(directory):
        rejected = there(directory / layout.REJECTED)
        why = (
            f"it was rejected: {read(directory / layout.REASON).decode(errors='replace')}"
            if rejected
            else "it has no COMMIT"
        )
        raise SnapshotError(f"{directory} is not a snapshot: {why}")
    found = Commit.from_json(read(directory / layout.COMMIT))
    if found.attempt != directory.name:
        raise SnapshotError(f"COMMIT in {directory} belongs to the attempt {found.attempt}")
    return found


def read_manifest(directory: Path, rank: int, entry: Entry) -> RankManifest:
    """The manifest of `rank`, if it is the one that COMMIT names. Raises SnapshotError."""
    path = directory / layout.manifest_name(rank)
    data = read(path)
    if (len(data), sha256(data).hexdigest()) != (entry.bytes, entry.sha256):
        raise SnapshotError(f"{path} is not the manifest that COMMIT names: it is damaged, or from another attempt")
    return RankManifest.from_json(data)


def reject(directory: Path, reason: str) -> None:
    """Take a snapshot that failed to restore out of the world; its bytes stay for whoever wants to know why."""
    with suppress(OSError, MachineError):  # a full disk: the reason is lost, the verdict stands
        write_whole(directory / layout.REASON, reason.encode())
    (directory / layout.COMMIT).rename(directory / layout.REJECTED)
    sync_directory(directory)


def delete(directory: Path) -> None:
    """Delete a snapshot or an attempt. COMMIT goes first and durably; a kill may leave the rest to be swept."""
    if committed(directory):
        (directory / layout.COMMIT).unlink()
        sync_directory(directory)
    shutil.rmtree(directory, ignore_errors=True)  # another node may be at the same


def read(path: Path) -> bytes:
    """The file's bytes. Raises SnapshotError when there is no such file, MachineError when storage does not give it."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise SnapshotError(f"{path}: {error.strerror}") from error
    except OSError as error:
        raise MachineError(f"{path} cannot be read: {error.strerror}") from error


def check(manifest: RankManifest, directory: Path, rank: int, world: int) -> None:
    """Raises SnapshotError unless `manifest` is that of `rank` of `world` in this very attempt."""
    expected, found = (directory.name, rank, world), (manifest.attempt, manifest.rank, manifest.world)
    if found != expected or Attempt.parse(directory.name) is None:
        raise SnapshotError(f"{directory / layout.manifest_name(rank)} belongs to {found}, and should to {expected}")
