"""Where snapshots are stored: in a directory, or under a prefix in an object store. Maps an address to a place.

Both kinds of place have the same methods, with the same guarantees:

    place / name                the place below this one
    there(name)                 whether a file or object of that name exists
    read(name, most)            its bytes; SnapshotError if it does not exist, or has more than `most` bytes
    write(name, data, first)    writes durably; the file appears complete or not at all. first: if several processes write the file at the
                                same time, `read` returns the same content to all of them afterwards
    rename(name, new)           in an object store, both names exist for a moment: the new one is written before the old is deleted
    delete(name)                deletes durably
    reading(name)               a block during which `retract` does not delete the file. The lock ends with its process; an object
                                store has no locks
    retract(name)               `delete`, unless a process is reading the file; returns whether it was deleted
    clear()                     deletes everything in this place; a kill may leave some of it
    holding(names, series)      for each child, which of `names` it contains, and how much of `series`, which is read up to the first name
                                that is missing; or, as a text, why the storage does not show this child. An object store needs one
                                listing for all children
    lacking(names)              those of `names` that are missing. On NFS, `there` may take a minute to see what another client wrote;
                                this method and `holding` see it at once
    renewed()                   a block that writes this place again. The block first deletes what a killed writer left. If the block
                                fails, nothing stays, because the disk may be full. An object store deletes nothing: objects are replaced
                                whole
    sync()                      makes the names of everything in this place durable

A name may contain "/". All methods raise MachineError if the storage does not answer. A MachineError says nothing about whether the stored
data is sound.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote, urlencode, urlsplit

from ...resilience.errors import UsageError
from .filesystem import Files
from .object_store import Objects

Place: TypeAlias = Files | Objects


def address(given: str, endpoint: str = "", region: str = "") -> str:
    """Return the address of the place that a person names. Any process can pass it to `at`. Raises UsageError.

    given: a path, file:///path, s3://bucket/prefix or gs://bucket/prefix; endpoint: http://host:port of an S3 server that is not AWS.
    """
    scheme = urlsplit(given).scheme if "://" in given else "file"
    if scheme not in ("file", "s3", "gs"):
        raise UsageError(f"snapshots cannot go to {given}: name a directory, s3://bucket/prefix or gs://bucket/prefix")
    if scheme != "s3" and (endpoint or region):
        raise UsageError(f"snapshots.endpoint and snapshots.region are for s3:// URLs; {given} is none")
    if "?" in given and scheme != "file":
        raise UsageError(f"{given}: the endpoint and the region of a store are given by --set snapshots.endpoint=…")
    beside = urlencode({name: value for name, value in (("endpoint", endpoint), ("region", region)) if value})
    found = f"{given}?{beside}" if beside else given
    at(found)
    return found


def at(address: str) -> Place:
    """Return the place at `address`. Sends no request to the store. Raises UsageError."""
    if "://" not in address:
        return Files(Path(address).absolute())
    if address.startswith("file://"):
        host, path = urlsplit(address)[1:3]
        if host or not path:
            raise UsageError(f"{address} is no file:///path")
        return Files(Path(unquote(path)))
    return Objects.at(address)
